"""One attempt as the core knows it: its phase, its votes, its records, its story.

The rule: `move` is the one door for a change of phase; it takes only what stands in moves.MOVES and writes the reason
into the story. Everything else in here are facts that were told, or questions about them.

A question that is asked after every event must not look at every node each time: with N nodes a save would then cost
N x N. So the counts are compared first, and `ask` names the nodes whose calls may have changed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from ..storage.errors import IllegalMoveError
from ..storage.manifest import ShardRecord
from .membership import Roster, Window
from .messages import (
    AttemptHead,
    Blame,
    HeldSnapshot,
    MemberId,
    NodeSnapshot,
    RecordState,
    SaveKind,
    SaveRequest,
    SaveState,
)
from .moves import COPYING, MOVES, PROVEN, UNDONE, Cause, Phase
from .outcomes import COMMITTED_OR_BEYOND

CERTAIN = (RecordState.ACCEPT, RecordState.REFUSE)  # records that never change
OUTSTANDING = math.inf  # in Attempt.calls: asked, not yet answered

KIND_ORDER = (SaveKind.MEMORY, SaveKind.SCHEDULED, SaveKind.MANUAL, SaveKind.FINAL)


@dataclass
class Pending:
    """A request that the core has taken in."""

    request: SaveRequest
    deadline_s: float  # on the coordinator's clock
    holds_training: bool = False  # end_step waits until it is copied (scheduled and final saves)
    told_late: bool = False  # its deadline has passed, and it was told that the outcome is in doubt


@dataclass(eq=False)
class Attempt:
    """One try at saving one step. Sets of nodes hold those for which the fact is known."""

    head: AttemptHead
    mine: bool  # made by this incarnation
    participants: tuple[str, ...]
    participants_known: bool = True  # False: found without a record; then these are the nodes that hold files of it
    kind: SaveKind = SaveKind.SCHEDULED
    tag: str | None = None
    reason: str = ""
    requested_by: str = ""
    requests: list[Pending] = field(default_factory=list)
    roster: Roster | None = None
    window: Window | None = None
    phase: Phase = Phase.REQUESTED
    phase_deadline_s: float = math.inf
    started_s: float = 0.0
    entered_s: float = 0.0  # when it came into its phase
    lasted_s: dict[Phase, float] = field(default_factory=dict)  # seconds it spent in each phase that is over
    paused: set[str] = field(default_factory=set)
    to_release: set[str] = field(default_factory=set)
    snapshots: dict[str, NodeSnapshot] = field(default_factory=dict)
    shards: dict[str, tuple[ShardRecord, ...]] = field(default_factory=dict)
    updates: dict[MemberId, int | None] = field(default_factory=dict)
    held_at: dict[str, HeldSnapshot] = field(default_factory=dict)  # found in the memory of nodes
    origin: str | None = None  # it takes over the images of that attempt of an earlier incarnation
    staging_failures: int = 0  # after which it stayed in memory
    failing_since_s: float = math.inf  # when the first of them was
    needed: bool = False  # a process that it is of is gone: no deadline of a request ends it
    overdue: bool = False  # it ended by a deadline that somebody gave a save by hand: no failure of the run's
    heir: Attempt | None = None  # takes its images over: until it has, they must not go
    superseded: bool = False  # it was given up while it lay in memory: no disk ever knew of it
    drafted: bool = False  # the manifest is being built: what it says no longer changes
    manifest: bytes | None = None
    may_be_accepted: bool = True  # False: no accept was ever sent for it, by the only one that could
    records: dict[str, RecordState] = field(default_factory=dict)  # written by note_record alone
    told_s: dict[str, float] = field(default_factory=dict)  # node -> when it last said something of this attempt
    proof: str | None = None  # where COMPLETED or a ledger entry was seen
    published: set[str] = field(default_factory=set)
    publish_tried: set[str] = field(default_factory=set)
    lost_at: set[str] = field(default_factory=set)  # participants whose disk came back without it
    ledger_tried: bool = False
    ledger_written: bool = False
    uploaded: set[str] = field(default_factory=set)
    upload_not_before_s: float = 0.0
    upload_failures: int = 0
    given_up: str | None = None  # why it will not be uploaded
    in_store: bool = False
    noted: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)
    stall_s: float = 0.0  # longest copy of any node
    blame: Blame | None = None
    told_doubt: bool = False
    announced: SaveState = SaveState.REQUESTED
    calls: dict[tuple[type, str], float] = field(default_factory=dict)  # OUTSTANDING, or when to ask again (`retry`)
    retries: list[tuple[float, str, str, type]] = field(default_factory=list)  # a heap of calls to ask again; some gone
    tries: dict[tuple[type, str], int] = field(default_factory=dict)
    last_failure: dict[tuple[type, str], str] = field(default_factory=dict)  # of calls that are asked again
    look_s: float = 0.0  # when it must be looked at next; 0 when something about it has changed
    ask: set[str] | None = None  # nodes whose calls must be looked at then; None: everyone's
    deleting: bool = False  # files may go, and every node's Discard has been looked at
    publish_cursor: int = 0  # calls.first_publish_over: how far it had seen participants that are over
    story: list[tuple[float, str]] = field(default_factory=list)
    _refusals: int = 0  # among the records
    _certain: int = 0
    _sure_of: tuple[str, ...] | None = None  # participants whose records are all certain
    _nodes: tuple[tuple[str, ...], frozenset[str]] = ((), frozenset())  # participants, and the same as a set

    @property
    def id(self) -> str:
        return self.head.attempt

    def tell(self, now_s: float, sentence: str) -> None:
        """Adds a sentence to the story; the story of one attempt is bounded."""
        if len(self.story) < 200:
            self.story.append((now_s, sentence))

    def move(self, cause: Cause, now_s: float, sentence: str) -> None:
        """The one door: changes the phase by the table; any other move raises IllegalMoveError and changes nothing."""
        to = MOVES.get((self.phase, cause))
        if to is None:
            raise self.illegal(f"there is no move from {self.phase.value} because of {cause.name}: {sentence}")
        self.story.append((now_s, f"{self.phase.value} -> {to.value}: {sentence}"))
        self.lasted_s[self.phase] = now_s - self.entered_s
        self.entered_s = now_s
        self.phase = to
        self.phase_deadline_s = math.inf
        self.look()

    def look(self, node: str | None = None) -> None:
        """Something about it has changed, at this node or (None) anywhere: it is looked at before the event is over."""
        self.look_s = 0.0
        if node is None:
            self.ask = None
        elif self.ask is not None:
            self.ask.add(node)

    def looked(self, heard: Collection[str]) -> None:
        """Its calls have been looked at; from here on only what changes or falls due is."""
        self.ask = set()
        self.look_s = self.next_retry_s(heard)

    def retry(self, key: tuple[type, str], when_s: float) -> None:
        """A call failed and may be made again from `when_s` on."""
        self.calls[key] = when_s
        kind, node = key
        heapq.heappush(self.retries, (when_s, node, kind.__name__, kind))

    def next_retry_s(self, heard: Collection[str]) -> float:
        """When the first failed call may be made again; infinite without one.

        Calls to nodes that are not heard are passed over for good: hearing a node forgets them and looks at it.
        """
        retries = self.retries
        while retries:
            when_s, node, _, kind = retries[0]
            if self.calls.get((kind, node)) == when_s and (not node or node in heard):
                return when_s
            heapq.heappop(retries)  # answered, forgotten or put off since
        return math.inf

    def wake(self, now_s: float, heard: Collection[str]) -> None:
        """Marks the nodes whose failed calls are due to be looked at."""
        while self.next_retry_s(heard) <= now_s:
            _, node, _, _ = heapq.heappop(self.retries)
            self.look(node or None)

    def illegal(self, what: str) -> IllegalMoveError:
        """The error for something that cannot have happened; tells the story so far."""
        told = "".join(f"\n  {when:.3f} s  {sentence}" for when, sentence in self.story)
        return IllegalMoveError(
            f"attempt {self.id} of step {self.head.step} in phase {self.phase.value}: {what}. Nothing was changed; "
            f"please report this with the story:{told}",
            attempt=self.id,
            phase=self.phase.value,
            story=tuple(self.story),
        )

    def has(self, node: str) -> bool:
        """Whether a node is a participant."""
        if self._nodes[0] is not self.participants:
            self._nodes = (self.participants, frozenset(self.participants))
        return node in self._nodes[1]

    def note_record(self, node: str, record: RecordState) -> None:
        """The one place where a record is written down."""
        before = self.records.get(node)
        self.records[node] = record
        self._sure_of = None
        self._refusals += (record is RecordState.REFUSE) - (before is RecordState.REFUSE)
        self._certain += (record in CERTAIN) - (before in CERTAIN)

    @property
    def deadline_s(self) -> float:
        """When the last of its requests gives up; infinite without requests, or when it is needed without them."""
        if self.needed:
            return math.inf
        return max((pending.deadline_s for pending in self.requests), default=math.inf)

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the order of checkpoints."""
        return (self.head.epoch, self.head.sequence)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(pending.request.request_id for pending in self.requests)

    @property
    def all_accept(self) -> bool:
        """Whether every participant's record is known to say accept: this, and nothing else, is the commit."""
        records = self.records
        if not self.participants_known or self._certain < len(self.participants):
            return False
        return all(records.get(n) is RecordState.ACCEPT for n in self.participants)

    @property
    def refused(self) -> bool:
        """Whether a durable refuse is known: it can never be committed."""
        return self._refusals > 0

    @property
    def aborted(self) -> bool:
        """Whether it is sure that no commit can come of it."""
        return self.phase in UNDONE and (self.refused or not self.may_be_accepted)

    def may_delete(self, everyone_heard: bool) -> bool:
        """Whether files of it may go: it is aborted, and every participant was heard to have a record that says so.

        Without that an unheard participant might hold the accept that, with the others', makes it committed. An own
        attempt for which no accept was ever sent needs no such waiting.
        """
        if self.heir is not None and self.heir.phase in COPYING:
            return False
        if not self.may_be_accepted:
            return self.phase in UNDONE
        if not self.refused or not (self.participants_known or everyone_heard):
            return False
        return self._all_certain()

    def _all_certain(self) -> bool:
        if self._certain < len(self.participants):
            return False
        if self._sure_of is not self.participants:
            if not all(self.records.get(n) in CERTAIN for n in self.participants):
                return False
            self._sure_of = self.participants
        return True

    @property
    def holders(self) -> tuple[str, ...]:
        """Participants that still have what they accepted."""
        if not self.lost_at:
            return self.participants
        return tuple(node for node in self.participants if node not in self.lost_at)

    @property
    def over_everywhere(self) -> bool:
        """Whether every participant is known to have it as committed, or as refused."""
        if self.phase in PROVEN:
            return all(node in self.published for node in self.participants)
        return all(self.records.get(node) is RecordState.REFUSE for node in self.participants)

    @property
    def commit_told(self) -> bool:
        """Whether the commit has been announced."""
        return self.announced in COMMITTED_OR_BEYOND

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do for it as long as no node is heard anew."""
        if self.to_release:
            return False
        if self.phase is Phase.DURABLE:
            fewest = len(self.participants) - len(self.lost_at)
            if len(self.noted) < fewest or len(self.published) < fewest:
                return False
            return all(n in self.noted and n in self.published for n in self.holders)
        return self.phase is Phase.ABORTED

    def strengthen(self, pending: Pending) -> None:
        """Takes a further request in: it is served by this attempt."""
        request = pending.request
        self.requests.append(pending)
        if not self.drafted:
            self.tag = self.tag or request.tag
            self.kind = max(self.kind, request.kind, key=KIND_ORDER.index)
            self.reason = f"{self.reason}; {request.reason}" if self.reason else request.reason
            self.requested_by = self.requested_by or request.requested_by

    def leave(self, pending: Pending) -> None:
        """A request goes: the attempt is what the others make of it."""
        self.requests.remove(pending)
        if self.drafted:
            return
        left = [other.request for other in self.requests]
        self.tag = next((request.tag for request in left if request.tag is not None), None)
        self.kind = max((request.kind for request in left), key=KIND_ORDER.index, default=SaveKind.MEMORY)
        self.requested_by = next((request.requested_by for request in left if request.requested_by), "")
        self.reason = "; ".join(request.reason for request in left)

    def can_serve(self, request: SaveRequest) -> bool:
        """Whether a request for the same window is served by this attempt: its tag is this one's, or can still be."""
        if self.phase in UNDONE or self.phase is Phase.FOUND:
            return False
        return request.tag is None or request.tag == self.tag or (self.tag is None and not self.drafted)

    def slim(self) -> None:
        """Forgets what only an unfinished attempt needs."""
        self.snapshots, self.shards, self.updates, self.held_at = {}, {}, {}, {}
        self.manifest = self.roster = None
        self.calls, self.tries, self.retries, self.last_failure = {}, {}, [], {}
