"""What to do: everything that the protocol core can ask for. One frozen class each; the driver runs them.

Each command that acts is answered by exactly one event (named in its docstring), or by Fenced. Where an effect must
come after another, the class says so: the core emits it only when the event of the earlier one has been handled.
`deadline_s` are remaining seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..storage.manifest import ShardRecord
from .messages import (
    AttemptHead,
    Blame,
    MemberId,
    RoleDeclaration,
    SaveKind,
    SaveState,
    SnapshotOrder,
)


@dataclass(frozen=True, slots=True)
class Command:
    """Base of all commands."""


@dataclass(frozen=True, slots=True)
class AttemptCommand(Command):
    """Base: names the attempt."""

    head: AttemptHead


@dataclass(frozen=True, slots=True)
class NodeCommand(AttemptCommand):
    """Base: a call to one participant."""

    node: str


@dataclass(frozen=True, slots=True)
class Pause(NodeCommand):
    """Before any Snapshot of the attempt. Paused or PauseFailed."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Snapshot(NodeCommand):
    """SnapshotTaken, SnapshotFailed or SnapshotWindowClosed."""

    order: SnapshotOrder


@dataclass(frozen=True, slots=True)
class Release(NodeCommand):
    """After every Snapshot of the attempt was answered, or it was given up. Released or ReleaseFailed."""


@dataclass(frozen=True, slots=True)
class Stage(NodeCommand):
    """After every node's snapshot vote. Staged or StageFailed."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class MemberWord:
    """A member's place in the manifest."""

    member: MemberId
    node: str
    updates: int | None


@dataclass(frozen=True, slots=True)
class Draft:
    """All that the manifest says, but times and versions."""

    run: str
    head: AttemptHead
    kind: SaveKind
    tag: str | None
    reason: str
    requested_by: str
    request_ids: tuple[str, ...]
    parent: AttemptHead | None
    roles: tuple[RoleDeclaration, ...]
    members: tuple[MemberWord, ...]
    participants: tuple[str, ...]
    shards: tuple[ShardRecord, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildManifest(AttemptCommand):
    """After every node's staging vote. ManifestBuilt or ManifestFailed."""

    draft: Draft


@dataclass(frozen=True, slots=True)
class Accept(NodeCommand):
    """The commit is the last of these to become durable. Accepted or AcceptFailed."""

    manifest: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Refuse(NodeCommand):
    """Refused (which may tell of an accept that stands) or RefuseFailed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Publish(NodeCommand):
    """Only after every participant's record says accept. Published or PublishFailed."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class WriteLedger(AttemptCommand):
    """After the first round of Publish; the announcement does not wait for its success. LedgerWritten, LedgerFailed."""

    participants: tuple[str, ...]
    manifest: bytes


@dataclass(frozen=True, slots=True)
class Upload(NodeCommand):
    """Only after COMPLETED stands at every participant. Uploaded or UploadFailed."""


@dataclass(frozen=True, slots=True)
class CompleteRemotely(AttemptCommand):
    """After every node's Uploaded: verify every object, then COMPLETED by exclusive create, then the pointer, then
    latest.json. CompletedRemotely, RemoteFailed or RemoteRefused."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class NoteDurable(NodeCommand):
    """Only after the store's COMPLETED stands. DurableNoted or NoteFailed."""


@dataclass(frozen=True, slots=True)
class Discard(NodeCommand):
    """Deletes. Only when no participant can hold an accept that counts: see Attempt.may_delete. Discarded or
    DiscardFailed."""


@dataclass(frozen=True, slots=True)
class Announce(Command):
    """To whoever waits: how far these requests have come. Nothing answers it.

    COMMITTED is announced only after the first round of Publish; ABORTED only when no commit can come of it any more;
    `in_doubt` says that time is up and a participant that might have refused has not been heard.
    """

    state: SaveState
    request_ids: tuple[str, ...]
    head: AttemptHead | None = None
    kind: SaveKind = SaveKind.MANUAL
    tag: str | None = None
    blame: Blame | None = None
    waits_for: str | None = None
    in_doubt: bool = False
    stop: bool = False
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Alarm(Command):
    """To people: something is wrong with the run though its saves succeed. Nothing answers it."""

    head: AttemptHead
    sentence: str


@dataclass(frozen=True, slots=True)
class WindowVerdict(Command):
    """Answers WindowOpened: whether the window is open, and the requests that are served in it."""

    step: int
    opened: bool
    blame: Blame | None = None
    request_ids: tuple[str, ...] = ()
    stop: bool = False
