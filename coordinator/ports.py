"""What the coordinator needs from the world: one participant per node. This is the whole surface.

`workers/stager.py` answers it for real, the simulation answers it with simulated disks. Every call carries the
caller's epoch; a participant that has durably seen a higher one raises FencedError. A call that raises anything else
has an unknown outcome unless its docstring says otherwise: ask again, everything here may be repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..storage.manifest import Completed, ShardRecord
from .messages import (
    AttemptHead,
    Grant,
    Inventory,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SaveRequest,
    SnapshotOrder,
)
from .restore import RestorePort

WAITED_FOR = ("mark", "reopen", "close_window", "pause", "release", "snapshot", "copying")  # by training: it stands


class ParticipantPort(Protocol):
    """One node's stager, as the coordinator sees it."""

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        """Durably notes `epoch` as the highest seen, then tells what lies here. `declarations` are kept in memory.

        With a higher epoch than before, everything that is paused is released first (whoever paused it can take no
        snapshot any more). The inventory also lists attempts of which only images are held (record NONE, not staged),
        and tells of each attempt that is not completed whether its images are whole here, so that a new coordinator can
        take it over or end it; a broken record is told as UNKNOWN.
        """
        ...

    async def mark(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        """Opens the quiescent window of `step`: every member here captures its small state and reports (nbytes 0)."""
        ...

    async def reopen(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        """As mark, for a new coordinator: captures nothing, every member only tells that its window is still open.

        Raises WindowClosedError when a member has begun its next update.
        """
        ...

    async def remember(self, epoch: int, requests: Sequence[SaveRequest]) -> None:
        """Keeps these in memory for the next coordinator, in place of those before: saves that are not over."""
        ...

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        """Closes the window: returns when no copy is running in any member here, and none will start before a mark."""
        ...

    async def pause(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        """Calls pause() of every component here that has it. Does nothing for an attempt that was released already."""
        ...

    async def release(self, epoch: int, head: AttemptHead) -> None:
        """Calls release() of what was paused; harmless when nothing was."""
        ...

    async def snapshot(self, epoch: int, order: SnapshotOrder) -> NodeSnapshot:
        """Copies the members' state into images and seals them. With `order.origin` nothing is copied: the images of
        that attempt are the new one's, and its write is given up; SnapshotError without them.

        Raises WindowClosedError when a member has begun its next update or its last mark was not of `order.head.step`
        (nothing was copied; the request waits for the next mark), SnapshotError naming the member for any other
        failure. Asked again it answers the same vote; after a restart of the stager it copies anew, the same step.
        """
        ...

    async def copying(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        """Returns once every member here holds its updates back for the copy of an overlapped snapshot, or it is over.

        Raises DeadlineError.
        """
        ...

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        """Writes the sealed images of the attempt to the staging directory, hashed and fsynced.

        Raises StagingError (disk full, I/O) naming member, path and bytes, DeadlineError naming what is not written.
        """
        ...

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        """Durably creates the write-once record *accept* with the manifest, unless one stands; tells which stands.

        Answers UNKNOWN when the attempt was never staged here (never accepts it then). Raises StagingError with `errno`
        when the disk says why it takes no record; then asking again is of no use, and refuse tells what stands.
        """
        ...

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        """Durably creates the write-once record *refuse*, unless a record stands; tells which stands."""
        ...

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        """Writes manifest.json, COMPLETED, the step's pointer and latest.json (never backwards) here, fsynced."""
        ...

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        """Copies this node's shards of a committed attempt to the store and verifies them there."""
        ...

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        """Durably notes that the store's COMPLETED for the attempt stands."""
        ...

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        """Deletes images and files of an aborted attempt, and releases what was paused for it; the record stays.

        Asked only once a refuse stands at some participant and none can still accept (or no accept was ever sent); so
        this node's own record may say accept. A write of the attempt that still runs ends first. Raises UsageError
        when the attempt's COMPLETED stands here.
        """
        ...


class StagerPort(ParticipantPort, RestorePort, Protocol):
    """A node's stager as the service needs it."""

    async def highest_epoch(self) -> int: ...

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None: ...

    async def grant(self, epoch: int, grant: Grant) -> None: ...

    async def close_down(self) -> None: ...


@dataclass(frozen=True)
class Notice:
    """Word that a node of the run will be taken away. `key` names it, however often it is told."""

    key: str
    reason: str  # a sentence
    left_s: float | None = None  # until then, as far as it is known


Discover = Callable[[], Awaitable[Sequence[StagerPort]]]
Notices = Callable[[], Awaitable[Sequence[Notice]]]
