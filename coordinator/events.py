"""What happened: everything that the protocol core can be told. One frozen class per outcome; nothing in here decides.

An outcome that is not known (a call that timed out) is a class of its own or a *Failed that is simply asked again:
never a guess. Times are not in the events; `Protocol.handle(event, now_s)` is given the coordinator's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..storage.manifest import ShardRecord
from .messages import (
    AttemptHead,
    Blame,
    Inventory,
    MemberId,
    MemberInfo,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SaveRequest,
)
from .policies import Decision


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


# ---- about the run


@dataclass(frozen=True, slots=True)
class Declared(Event):
    """A role was declared by add_members; it replaces an earlier declaration of that role."""

    declaration: RoleDeclaration


@dataclass(frozen=True, slots=True)
class NodeHeard(Event):
    """A stager answered hello: from now on it refuses lower epochs, so what it told cannot be outdated by them.

    Hellos to one node must arrive here in the order in which they were sent (drop the answers of older ones).
    `asked_s`: when the hello was sent, on the coordinator's clock; what the node said of an attempt after that is not
    contradicted by an inventory that does not list it.
    """

    inventory: Inventory
    asked_s: float = math.inf


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """A stager is dead or out of reach; until it is heard again its answers are not waited for."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class MembersChanged(Event):
    """All members that are registered on a node now."""

    node: str
    members: tuple[MemberInfo, ...]


@dataclass(frozen=True, slots=True)
class MemberDropped(Event):
    """A member's process died or gave up its place."""

    member: MemberId
    reason: str


@dataclass(frozen=True, slots=True)
class StoreSurveyed(Event):
    """What the store knows: attempts whose COMPLETED stands there, ledger entries, and the highest sequence."""

    completed: tuple[AttemptHead, ...] = ()
    ledger: tuple[AttemptHead, ...] = ()  # each proves a commit


@dataclass(frozen=True, slots=True)
class RecoveryBegun(Event):
    """The first round of hellos is over: found attempts are decided from here on. `expected`: nodes known of. `wall_s`:
    seconds since 1970 as it came, for requests that were asked of an earlier coordinator; 0: not known."""

    expected: frozenset[str] = frozenset()
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The live state came from this checkpoint (None: from scratch); it is the parent of the next one."""

    head: AttemptHead | None


@dataclass(frozen=True, slots=True)
class ServedBefore(Event):
    """An attempt of an earlier incarnation was made for these requests; sent again, they join it."""

    attempt: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryDropped(Event):
    """The snapshot in memory is of no use any more: the run ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class WindowOpened(Event):
    """An update ended everywhere and `step` may be saved. `due` and `memory` are the policies' words on this step:
    whether it is to be saved, and whether a snapshot of it is to be kept in memory."""

    step: int
    reports: Mapping[str, NodeSnapshot]  # node -> its answer to mark
    failures: Mapping[str, Blame] = field(default_factory=dict)  # node -> why its mark failed
    due: Decision | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: Decision | None = None
    ends_waiting: bool = False  # if it does not open, requests that wait for a window end with the same blame
    again: bool = False  # it did not open before for the same reason: no further failure


@dataclass(frozen=True, slots=True)
class WindowClosed(Event):
    """The next update begins; no save may start before the next WindowOpened."""


@dataclass(frozen=True, slots=True)
class Asked(Event):
    """Somebody wants a checkpoint. `wall_s`: seconds since 1970 as it came; 0: not known."""

    request: SaveRequest
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed; deadlines and retries are looked at."""


@dataclass(frozen=True, slots=True)
class Fenced(Event):
    """A participant or the store has seen a newer coordinator: this one stops for good."""

    reason: str


# ---- about one attempt


@dataclass(frozen=True, slots=True)
class AttemptEvent(Event):
    """Base: the outcome of a command that named an attempt."""

    attempt: str


@dataclass(frozen=True, slots=True)
class NodeEvent(AttemptEvent):
    """Base: the outcome of a command to one participant."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeFailure(NodeEvent):
    """Base: a call failed or its outcome is unknown. `reason` is a sentence; `member` is who is to blame, if known."""

    reason: str
    member: MemberId | None = None


@dataclass(frozen=True, slots=True)
class Paused(NodeEvent):
    """Everything pausable on the node stands still."""


@dataclass(frozen=True, slots=True)
class PauseFailed(NodeFailure):
    """A component did not stand still."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken(NodeEvent):
    """The node's members lie in sealed images: its vote."""

    snapshot: NodeSnapshot


@dataclass(frozen=True, slots=True)
class SnapshotFailed(NodeFailure):
    """A member could not copy its state."""


@dataclass(frozen=True, slots=True)
class SnapshotWindowClosed(NodeFailure):
    """A member had begun its next update: nothing was copied; the request waits for the next window."""


@dataclass(frozen=True, slots=True)
class Released(NodeEvent):
    """What was paused on the node runs again."""


@dataclass(frozen=True, slots=True)
class ReleaseFailed(NodeFailure):
    """Unknown whether it runs again; asked again."""


@dataclass(frozen=True, slots=True)
class Staged(NodeEvent):
    """The node's shards are on its disk, hashed and fsynced: its second vote."""

    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True)
class StageFailed(NodeFailure):
    """The node's staging directory did not take the bytes."""


@dataclass(frozen=True, slots=True)
class ManifestBuilt(AttemptEvent):
    """The manifest's bytes, as they will lie on every disk."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class ManifestFailed(AttemptEvent):
    """The votes do not make a manifest."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted(NodeEvent):
    """accept was answered with the record that stands: ACCEPT, REFUSE, or UNKNOWN (never staged there)."""

    record: RecordState


@dataclass(frozen=True, slots=True)
class AcceptFailed(NodeFailure):
    """Unknown whether the record was made; asked again, unless the node's own disk said why it cannot be (`known`)."""

    known: bool = False


@dataclass(frozen=True, slots=True)
class Refused(NodeEvent):
    """refuse was answered with the record that stands: REFUSE, or an ACCEPT that was there before."""

    record: RecordState


@dataclass(frozen=True, slots=True)
class RefuseFailed(NodeFailure):
    """Unknown whether the record was made; asked again."""


@dataclass(frozen=True, slots=True)
class Published(NodeEvent):
    """COMPLETED stands at the node."""


@dataclass(frozen=True, slots=True)
class PublishFailed(NodeFailure):
    """Unknown whether COMPLETED stands there; asked again."""


@dataclass(frozen=True, slots=True)
class LedgerWritten(AttemptEvent):
    """The ledger entry stands in the store."""


@dataclass(frozen=True, slots=True)
class LedgerFailed(AttemptEvent):
    """The store did not take the entry; asked again, and nothing waits for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Uploaded(NodeEvent):
    """The node's shards are in the store and verified by it."""


@dataclass(frozen=True, slots=True)
class UploadFailed(NodeFailure):
    """Not all of them; asked again."""


@dataclass(frozen=True, slots=True)
class CompletedRemotely(AttemptEvent):
    """Every object was found in the store and the attempt's COMPLETED stands there."""


@dataclass(frozen=True, slots=True)
class RemoteFailed(AttemptEvent):
    """Unknown, or an object is missing; all is asked again. `missing`: nodes whose objects were not whole."""

    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteRefused(AttemptEvent):
    """A tombstone stands in COMPLETED's place: the attempt was collected; it will not be uploaded."""

    reason: str


@dataclass(frozen=True, slots=True)
class DurableNoted(NodeEvent):
    """The node knows that the attempt is durable."""


@dataclass(frozen=True, slots=True)
class NoteFailed(NodeFailure):
    """Unknown; asked again."""


@dataclass(frozen=True, slots=True)
class Discarded(NodeEvent):
    """Images and files of the aborted attempt are gone from the node; its record stays."""


@dataclass(frozen=True, slots=True)
class DiscardFailed(NodeFailure):
    """Unknown; asked again."""
