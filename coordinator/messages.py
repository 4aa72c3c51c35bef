"""What coordinator, stagers, agents and clients say to each other.

Plain frozen dataclasses: they cross Ray actors, they never reach a disk (what lies at rest is in storage/manifest.py).
Nothing in here waits, reads a clock or knows Ray.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, order=True)
class MemberId:
    """One (role, rank) that owns part of the state; printed as `actor:3`."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role}:{self.rank}"


@dataclass(frozen=True)
class MemberInfo:
    """A member as its process describes it when its agent registers with the node's stager."""

    member: MemberId
    world_size: int  # members of this role
    components: tuple[str, ...]  # names of the parts of its state, sorted
    membership: str  # id of the add_members call that made it; a later call for the role replaces all earlier ones
    process: str  # id of the agent's process, unique over restarts
    pid: int
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # JSON values compared at resume
    pausable: bool = False  # some component asks for pause()/release() around the snapshot
    weights: tuple[str, ...] = ()  # the components that its optimizers change
    granted: Grant | None = None  # of a member-led run: the highest that it has heard of


@dataclass(frozen=True)
class RoleDeclaration:
    """What a run must consist of: one role, as the last add_members call declared it."""

    role: str
    world_size: int
    components: tuple[str, ...]
    membership: str
    driver: str = ""  # id of the attach that declared it; another driver's first role drops all of this one's


@dataclass(frozen=True)
class MemberReport:
    """A member's own word on where it stands: the step that ended, and its count of optimizer updates."""

    member: MemberId
    step: int
    updates: int | None  # None when the member has no optimizer
    components: tuple[str, ...]
    nbytes: int = 0  # bytes of its images; 0 in the answer to a mark


class RecordState(enum.Enum):
    """The write-once record of one attempt at one participant. UNKNOWN: the stager never heard of the attempt."""

    NONE = "none"
    ACCEPT = "accept"
    REFUSE = "refuse"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Keepsake:
    """What every node is told with a snapshot, so that a later coordinator can save what lies in memory."""

    roles: tuple[RoleDeclaration, ...]
    metrics: Mapping[str, float]
    requests: tuple[SaveRequest, ...]  # that it serves; they give its kind, tag and reason


@dataclass(frozen=True)
class HeldSnapshot:
    """One node's part of a snapshot that lies whole in its memory, staged or not."""

    keepsake: Keepsake
    vote: NodeSnapshot
    members: tuple[MemberInfo, ...]  # as they were when they were copied
    origin: str  # the attempt that it was copied for


@dataclass(frozen=True)
class AttemptInventory:
    """One attempt as it lies on one node's staging disk, or in its memory."""

    attempt: str
    step: int
    epoch: int
    sequence: int
    record: RecordState
    staged: bool  # this node's shards are written, hashed and fsynced, and their list is durable
    completed: bool  # the attempt's COMPLETED stands here
    durable: bool  # the node knows that the store's COMPLETED for it was seen
    participants: tuple[str, ...]  # from the record or the manifest; empty when neither is here
    manifest: bytes | None = None  # the manifest's bytes, when an accept record or COMPLETED is here
    held: HeldSnapshot | None = None  # its images are here, whole and untouched

    @property
    def head(self) -> AttemptHead:
        return AttemptHead(self.attempt, self.step, self.epoch, self.sequence)


@dataclass(frozen=True)
class Inventory:
    """A stager's answer to hello: who it is, what it holds, who registered with it."""

    node: str  # durable identity of the staging directory
    incarnation: str  # of the stager process; a new one has lost every image
    highest_epoch: int
    members: tuple[MemberInfo, ...]
    attempts: tuple[AttemptInventory, ...]
    declarations: tuple[RoleDeclaration, ...] = ()
    address: str = ""  # for people: host name, staging directory
    marked_step: int | None = None  # the step that ended last, as its members here were told
    granted: Grant | None = None  # of a member-led run: the highest that was passed on here
    processes: int = 0  # live processes that are registered, the driver's counted even before it has members
    requests: tuple[SaveRequest, ...] = ()  # saves that were asked for and were not over when it last heard of them


class SaveKind(enum.Enum):
    """Why an attempt was made."""

    MEMORY = "memory"  # a snapshot that is kept in memory; staged only when it is needed
    SCHEDULED = "scheduled"  # the save policy said so
    MANUAL = "manual"  # somebody asked
    FINAL = "final"  # close() saves the last step


class SaveState(enum.Enum):
    """How far a save has come, in this order; or aborted. An upload that is held up and tried again is `uploading`."""

    REQUESTED = "requested"
    SNAPSHOT = "snapshot"
    STAGED = "staged"
    COMMITTED = "committed"
    UPLOADING = "uploading"
    DURABLE = "durable"
    ABORTED = "aborted"


@dataclass(frozen=True)
class SaveRequest:
    """A wish for one checkpoint. Sent again with the same id after a coordinator restart; it is served once."""

    request_id: str
    kind: SaveKind
    reason: str  # a sentence
    tag: str | None = None
    requested_by: str = ""
    deadline_s: float | None = None  # seconds until it must be committed; None: the run's default
    from_memory: bool = False  # commit the newest snapshot that lies in memory, whatever the members do now
    asked_at: float = 0.0  # seconds since 1970 by the asker's clock, from which deadline_s counts; 0: since it arrived


@dataclass(frozen=True)
class Blame:
    """Why an attempt failed: what a person needs at three in the morning."""

    phase: str
    reason: str  # a sentence
    node: str | None = None
    member: MemberId | None = None
    waited_s: float | None = None

    def __str__(self) -> str:
        who = f"member {self.member}" if self.member else None
        where = f"node {self.node}" if self.node else None
        parts = [f"phase {self.phase}", *(part for part in (who, where) if part)]
        if self.waited_s is not None:
            parts.append(f"after {self.waited_s:.1f} s")
        return f"{self.reason} ({', '.join(parts)})"


@dataclass(frozen=True)
class AttemptHead:
    """What names an attempt everywhere: its id and its place in the order of checkpoints."""

    attempt: str
    step: int
    epoch: int
    sequence: int


@dataclass(frozen=True)
class SnapshotOrder:
    """The order to copy the state of `head.step` into images."""

    head: AttemptHead
    members: tuple[MemberId, ...]  # those this node must answer for
    deadline_s: float  # remaining seconds for the copy
    overlapped: bool = False  # the coordinator wants to know when it has begun (ParticipantPort.copying)
    keepsake: Keepsake | None = None  # what a later coordinator is told of it
    origin: str | None = None  # copy nothing: take what lies in memory since that attempt


@dataclass(frozen=True)
class NodeSnapshot:
    """A node's vote that all its members' state lies in sealed images."""

    node: str
    members: tuple[MemberReport, ...]
    stall_s: float = 0.0  # seconds from the order to the last member's release, for the report


@dataclass(frozen=True)
class LoadRequest:
    """What every member process needs to read a checkpoint for its members."""

    manifest: bytes
    on_reshard: Mapping[str, str] = field(default_factory=dict)  # component -> error, fresh or rank0
    source: str | None = None  # a directory outside staging and store that holds the attempt (resume from a path)
    allow_changes: tuple[str, ...] = ()  # fingerprint names that may differ


@dataclass(frozen=True)
class Progress:
    """What the driver knows of its run. Told with its calls, so that a restarted coordinator need not remember it."""

    last_step: int | None = None  # the last that ended
    saved: str | None = None  # the attempt that saves it, if one does
    resumed: AttemptHead | None = None  # what the run continued from
    resumed_after: tuple[int, int] = (0, 0)  # (epoch, sequence) of the newest checkpoint of any line, at the resume
    newest: tuple[int, int] = (0, 0)  # the same, when the last step ended
    roles: tuple[RoleDeclaration, ...] = ()  # that the driver has declared, each by its newest add_members call

    @property
    def memberships(self) -> dict[str, str]:
        """Role -> the driver's newest add_members call for it."""
        return {role.role: role.membership for role in self.roles}


# Member-led runs: the loop runs inside every rank, and the ranks call end_step (coordinator/grants.py).


@dataclass(frozen=True)
class RankClaim:
    """A rank of a member-led run wants its place among the members of its role."""

    claim_id: str  # of one call of lastgood.member
    role: str
    rank: int
    world_size: int
    components: tuple[str, ...]
    process: str  # id of the agent's process
    who: str  # for people: pid and host


@dataclass(frozen=True)
class Line:
    """One stretch of a member-led run, from a resume on. Every member was told the same one."""

    epoch: int
    number: int  # of the resume within the epoch
    crew: tuple[str, ...]  # membership ids of the roles that take part, sorted
    step: int  # the step that it continues after
    newest: tuple[int, int] = (0, 0)  # (epoch, sequence) of the newest checkpoint of any line, at the resume
    restored: Any = None  # restore.Restored, or None from scratch
    asked: Any = None  # (mode, restore.ResumeTermsOrder) of the resume that began it

    @property
    def key(self) -> tuple[int, int]:
        """What orders lines: a later resume has a higher one."""
        return (self.epoch, self.number)

    @property
    def after(self) -> tuple[int, int]:
        """Every checkpoint of this line has a higher (epoch, sequence); also than those that nobody had heard of."""
        return max(self.newest, (self.epoch, 0))


@dataclass(frozen=True)
class Grant:
    """Permission for every rank of a line to go on until it has ended step `step` + 1."""

    line: Line
    step: int
    tell_at: int  # the rank reports when it has ended this step
    outcome: Any = None  # service.StepOutcome of the newest cut, and what failed since
    outcome_number: int = 0  # tells outcomes apart
    stop_at: int | None = None  # once training must stop: the outcome is for the end of this step; none has passed it

    @property
    def order(self) -> tuple[int, int, int]:
        """What orders grants."""
        return (*self.line.key, self.step)


@dataclass(frozen=True)
class RankReport:
    """A rank's word, on its own account, that it has ended a step."""

    member: MemberId
    line: tuple[int, int]  # key of its line
    step: int
    step_s: float | None = None  # seconds that one step takes it, without waiting for us
    metrics: Mapping[str, float] = field(default_factory=dict)  # of that step
