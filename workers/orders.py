"""What a stager asks of a member process, and what it hears back.

An agent polls its node's stager; the stager answers with one order at a time. An order is delivered until it is
answered (the agent recognises a repeated id and repeats its answer), so a lost reply costs a round trip and nothing
else. Plain frozen dataclasses: they cross Ray actors and never reach a disk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..coordinator.messages import AttemptHead, Grant, LoadRequest, MemberId, MemberReport
from ..storage.manifest import Chunk


class OrderKind(enum.Enum):
    """What the agent shall do in its process, for the members named in the order."""

    MARK = "mark"  # a step has ended: capture small state, open the quiescent window
    REOPEN = "reopen"  # a new coordinator asks whether the window of a step is still open
    CLOSE_WINDOW = "close_window"  # an update is about to begin
    PAUSE = "pause"
    RELEASE = "release"
    SNAPSHOT = "snapshot"  # copy the state into images
    LOAD = "load"  # read and verify a checkpoint into host memory; touch nothing
    APPLY = "apply"  # put what was loaded into live state
    FORGET = "forget"  # drop what was loaded
    GRANT = "grant"  # of a member-led run: how far its ranks may go on
    NOTHING = "nothing"  # the poll's wait ended


@dataclass(frozen=True)
class Order:
    """One thing to do. `deadline_s`: seconds the agent may take, counted from when it hears the order."""

    order_id: str
    kind: OrderKind
    epoch: int
    deadline_s: float
    members: tuple[MemberId, ...] = ()
    step: int = 0
    head: AttemptHead | None = None
    load: LoadRequest | None = None
    grant: Grant | None = None
    overlapped: bool = False  # of a snapshot: tell when updates are held back (StagerLink.copying)


@dataclass(frozen=True)
class SealedShard:
    """One component of one member, whole in an image."""

    member: MemberId
    component: str
    image: str  # the image's path in shared memory
    nbytes: int  # length of the shard file in it
    chunks: tuple[Chunk, ...]  # the boxes of tensors in it, for a resume on another world size


@dataclass(frozen=True)
class Answer:
    """What became of an order. Exactly one of `error` and the rest counts."""

    order_id: str
    reports: tuple[MemberReport, ...] = ()
    shards: tuple[SealedShard, ...] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class ImageRequest:
    """A member's wish for an image of `nbytes` for one component, to copy it for an attempt."""

    member: MemberId
    component: str
    nbytes: int
    attempt: str = ""
