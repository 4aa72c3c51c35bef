"""The commit protocol as a pure state machine: events in, commands out. No I/O, no clock, no ids of its own, no Ray.

Two rules: (1) `handle` checks that an event may arrive (moves.EXPECTED) before anything changes, and an illegal one
raises IllegalMoveError with the story; (2) phases change only through `Attempt.move`, by the table. The same events at
the same times give the same commands.

How to drive it: feed every outcome as an event with the monotonic time, run every command that comes back (order
within one list does not matter unless a command's docstring says so), and feed Tick at `next_wakeup_s()`.
Requests and windows are in requests.py; this part leads attempts from their start to durable or aborted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..storage.errors import IllegalMoveError
from . import commands as cmd
from . import events as ev
from .answers import ANSWERS, RETRIED
from .attempt import CERTAIN, Attempt, Pending
from .calls import calls_due, first_publish_over
from .draft import draft_of
from .hearing import Hearing
from .invariants import check
from .membership import Membership, Roster, Window
from .memory import Memory
from .messages import AttemptHead, Blame, RecordState, SaveKind, SaveRequest, SaveState
from .moves import BEFORE_COMMIT, COPYING, EXPECTED, LATE, PROVEN, Cause, Phase
from .progress import Progress
from .recovery import Verdict, decide
from .requests import Requests
from .settings import Deadlines, Settings
from .standstill import Standstill
from .timings import Timings
from .votes import silent

__all__ = ["Deadlines", "IllegalMoveError", "Protocol", "Settings"]

_TOUCHES_ALL = frozenset({ev.StoreSurveyed, ev.RecoveryBegun})
_KEEP = 2000  # finished attempts that are remembered with their story


class Protocol:
    """One incarnation of the coordinator's mind. Not thread-safe; nothing in here waits."""

    attempt_type = Attempt  # the simulation plants bugs here, to show that its net catches them

    def __init__(self, settings: Settings, new_attempt_id: Callable[[int, int], str]) -> None:
        """`new_attempt_id(epoch, sequence)` answers an id that no attempt ever had, valid as a path's name."""
        self.settings = settings
        self._new_attempt_id = new_attempt_id
        self.membership = Membership()
        self.heard: dict[str, str] = {}  # node -> incarnation of its stager; nodes that answered hello and are not lost
        self.incarnations: dict[str, str] = {}  # last known, also of lost nodes
        self.expected: frozenset[str] = frozenset()
        self.unheard: set[str] = set()  # of the expected
        self.recovering = True  # until RecoveryBegun: found attempts are not decided yet
        self.fenced: str | None = None
        self.attempts: dict[str, Attempt] = {}  # all that are remembered
        self.active: dict[str, Attempt] = {}  # those with something left to do
        self.foreground: Attempt | None = None  # the one between its start and its announced commit
        self.uploading: Attempt | None = None
        self.highest_sequence = 0
        self.parent: AttemptHead | None = None
        self._failed_after: dict[str, int] = {}  # failed saves in a row -> sequence of the attempt before each
        self.requests = Requests(self)
        self.hearing = Hearing(self)
        self.progress = Progress(self)
        self.memory = Memory(self)
        self.timings = Timings()
        self.standstill = Standstill()
        self.own_ids: set[str] = set()
        self._parent_is_live = False  # an own commit or a resume said so; found commits no longer matter
        self._parent_is_own = False  # it is a commit of this incarnation
        self._parent_floor = 0  # own attempts up to this sequence were made before the resume
        self._out: list[cmd.Command] = []
        self.now_s = 0.0
        self._run_handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Declared: self._declared,
            ev.NodeHeard: self.hearing.node_heard,
            ev.NodeLost: self.hearing.node_lost,
            ev.MembersChanged: self.hearing.members_changed,
            ev.MemberDropped: self.hearing.member_dropped,
            ev.StoreSurveyed: self.hearing.store_surveyed,
            ev.RecoveryBegun: self.hearing.recovery_begun,
            ev.Resumed: self._resumed,
            ev.ServedBefore: self.requests.served_before,
            ev.MemoryDropped: self._memory_dropped,
            ev.WindowOpened: self.requests.window_opened,
            ev.WindowClosed: self.requests.window_closed,
            ev.Asked: self.requests.asked,
            ev.Tick: self._tick,
            ev.Fenced: self._fenced,
        }
        self._attempt_handlers: dict[type[ev.AttemptEvent], Callable[[Attempt, Any], None]] = {
            ev.Paused: self.progress.paused,
            ev.PauseFailed: self.progress.call_failed,
            ev.SnapshotTaken: self.progress.snapshot_taken,
            ev.SnapshotFailed: self.progress.call_failed,
            ev.SnapshotWindowClosed: self.progress.snapshot_window_closed,
            ev.Released: self.progress.released,
            ev.Staged: self.progress.staged,
            ev.StageFailed: self.progress.call_failed,
            ev.ManifestBuilt: self.progress.manifest_built,
            ev.ManifestFailed: self.progress.manifest_failed,
            ev.Accepted: self.progress.accepted,
            ev.AcceptFailed: self.progress.accept_failed,
            ev.Refused: self.progress.refused,
            ev.Published: self.progress.published,
            ev.PublishFailed: self.progress.publish_failed,
            ev.LedgerWritten: self.progress.ledger_written,
            ev.LedgerFailed: self.progress.ledger_failed,
            ev.Uploaded: self.progress.uploaded,
            ev.UploadFailed: self.progress.upload_failed,
            ev.CompletedRemotely: self.progress.completed_remotely,
            ev.RemoteFailed: self.progress.remote_failed,
            ev.RemoteRefused: self.progress.remote_refused,
            ev.DurableNoted: self.progress.durable_noted,
            ev.Discarded: self.progress.discarded,
        }

    # ---- the face

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        """Takes one event in at `now_s` (monotonic seconds) and answers what is to be done.

        Raises IllegalMoveError, with nothing changed, for an event that cannot have happened.
        """
        if self.fenced is not None:
            return self.requests.turn_away(event)
        if isinstance(event, ev.AttemptEvent):
            attempt = self._attempt_of(event)
            if attempt is None:
                return []
            self.now_s = max(self.now_s, now_s)
            self._out = []
            self._attempt_event(attempt, event)
        else:
            if isinstance(event, ev.NodeHeard):
                self.hearing.check_inventory(event.inventory)
            if type(event) in _TOUCHES_ALL:
                for attempt in self.active.values():
                    attempt.look()
            elif isinstance(event, (ev.NodeHeard, ev.NodeLost)):
                node = event.inventory.node if isinstance(event, ev.NodeHeard) else event.node
                for attempt in self.active.values():
                    attempt.look(node)
            self.now_s = max(self.now_s, now_s)
            self._out = []
            self._run_handlers[type(event)](event)
        if self.fenced is None:
            self._settle()
        out, self._out = self._out, []
        return out

    def next_wakeup_s(self) -> float:
        """When to feed Tick at the latest; infinite when nothing waits for time."""
        if self.fenced is not None:
            return math.inf
        now_s = self.now_s
        times = [self.requests.next_deadline_s(), self.memory.next_deadline_s()]
        for attempt in self.active.values():
            if attempt.phase in BEFORE_COMMIT:
                times += [pending.deadline_s for pending in attempt.requests]
            times += [attempt.phase_deadline_s, attempt.upload_not_before_s, attempt.next_retry_s(self.heard)]
        return min([when for when in times if when > now_s], default=math.inf)

    @property
    def holds_training(self) -> bool:
        """Whether end_step must still wait: a copy is running that may not overlap with training, or a due save waits
        for the foreground."""
        if self.fenced is not None:
            return False
        return (self.copying and not self.settings.overlapped) or self.requests.holds_training

    @property
    def copying(self) -> bool:
        """Whether an attempt is between its start and its last snapshot vote."""
        return self.fenced is None and self.foreground is not None and self.foreground.phase in COPYING

    # ---- one event of one attempt

    def _attempt_of(self, event: ev.AttemptEvent) -> Attempt | None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None:
            if event.attempt in self.own_ids:
                return None  # finished long ago
            raise IllegalMoveError(
                f"{type(event).__name__} for attempt {event.attempt}, which nobody here started or found. Nothing was "
                "changed; please report this.",
                attempt=event.attempt,
                phase=None,
                story=(),
            )
        if (attempt.phase, type(event)) not in EXPECTED:
            raise attempt.illegal(f"{type(event).__name__} cannot have happened")
        if isinstance(event, ev.NodeEvent) and not attempt.has(event.node):
            raise attempt.illegal(f"{type(event).__name__} came from {event.node}, which is no participant")
        if isinstance(event, (ev.Accepted, ev.Refused)):
            known = attempt.records.get(event.node)
            if known in CERTAIN and event.record in CERTAIN and known is not event.record:
                raise attempt.illegal(f"the write-once record of {event.node} was {known} and is {event.record}")
        return attempt

    def _attempt_event(self, attempt: Attempt, event: ev.AttemptEvent) -> None:
        kind = type(event)
        node = event.node if isinstance(event, ev.NodeEvent) else ""
        attempt.look(node or None)
        key = (ANSWERS[kind], node)
        if kind in RETRIED:
            tries = attempt.tries[key] = attempt.tries.get(key, 0) + 1
            pause_s = min(self.settings.retry_s * 2 ** min(tries - 1, 30), self.settings.retry_max_s)
            attempt.retry(key, self.now_s + pause_s)
            attempt.last_failure[key] = _reason(event)
            attempt.tell(self.now_s, f"{key[0].__name__} {node} failed, again in {pause_s:.1f} s: {_reason(event)}")
        else:
            attempt.calls.pop(key, None)
            attempt.tries.pop(key, None)
            attempt.last_failure.pop(key, None)
            if not isinstance(event, ev.NodeFailure):
                attempt.told_s[node] = self.now_s
        if EXPECTED[attempt.phase, kind] is LATE:
            attempt.tell(self.now_s, f"late: {kind.__name__} {node}")
            return
        handler = self._attempt_handlers.get(kind)
        if handler is not None:
            handler(attempt, event)

    # ---- failing, deciding, announcing

    def fail(self, attempt: Attempt, blame: Blame, cause: Cause = Cause.FAILED) -> None:
        """Gives an own attempt up; refusing and cleaning go on in the background, the next may start."""
        was = attempt.phase
        attempt.move(cause, self.now_s, str(blame))
        attempt.blame = blame
        attempt.phase_deadline_s = self.now_s + self.settings.deadlines.accept_s
        if self.foreground is attempt:
            self.foreground = None
        if cause is Cause.FAILED and self.counts(attempt):
            self.count_failure(attempt.id, attempt.head.sequence - 1)
        if cause is Cause.WINDOW_CLOSED:
            attempt.announced = SaveState.ABORTED  # no failure: its requests wait for the next window
        elif not attempt.may_be_accepted:
            self.announce(attempt, SaveState.ABORTED)
        else:
            self.judge(attempt)
        if was is Phase.ACCEPTING:
            self.memory.keep_images_of(attempt)

    @staticmethod
    def counts(attempt: Attempt) -> bool:
        """Whether its failure is one of the run's saves: those for memory have no commits to count anew from."""
        return attempt.kind is not SaveKind.MEMORY and not attempt.overdue

    @property
    def failures(self) -> int:
        """Failed saves in a row."""
        return len(self._failed_after)

    def count_failure(self, save: str, after: int | None = None) -> None:
        """A save has failed (told twice, it counts once), after the attempt with this sequence (None: the newest)."""
        self._failed_after[save] = self.highest_sequence if after is None else after

    def forget_failure(self, save: str) -> None:
        """It did not fail after all."""
        self._failed_after.pop(save, None)

    @property
    def stop(self) -> bool:
        """Whether on_failure says, after a failure, that training must stop."""
        return self.settings.on_failure == "abort" or self.failures >= self.settings.max_consecutive_failures

    def judge(self, attempt: Attempt) -> None:
        """Looks at the records of an attempt whose outcome was not known, and moves it by the recovery table."""
        if not attempt.may_be_accepted or (self.recovering and not attempt.mine) or attempt in self.memory.kept:
            return
        told = attempt.phase is Phase.ABORTING and attempt.announced is SaveState.ABORTED
        if told and attempt.refused and attempt.proof is None:
            return  # further records change nothing
        decision = decide(attempt.participants, attempt.records, attempt.proof, self.heard)
        if decision.verdict is Verdict.COMMITTED:
            cause = Cause.PROOF if attempt.proof is not None else Cause.ALL_ACCEPT
            self.commit(attempt, cause, decision.reason)
            return
        if decision.verdict is Verdict.IN_DOUBT:
            if attempt.phase is not Phase.IN_DOUBT:
                attempt.move(Cause.UNHEARD, self.now_s, decision.reason)
            self._tell_doubt(attempt, decision.reason)
            return
        if attempt.phase in (Phase.FOUND, Phase.IN_DOUBT):
            attempt.move(Cause.REFUSAL, self.now_s, decision.reason)
        if decision.verdict is Verdict.ABORTED and attempt.announced is not SaveState.ABORTED:
            if attempt.blame is None:
                attempt.blame = Blame(attempt.phase.value, decision.reason)
            self.announce(attempt, SaveState.ABORTED)

    def _tell_doubt(self, attempt: Attempt, reason: str) -> None:
        if attempt.told_doubt or not attempt.mine:
            return
        attempt.told_doubt = True
        why = f"{attempt.blame.reason}; {reason}" if attempt.blame is not None else reason
        self._out.append(self._announcement(attempt, attempt.announced, attempt.request_ids, in_doubt=True, why=why))

    def say_failed(self, attempt: Attempt, blame: Blame) -> None:
        """Tells whoever waits for the attempt that it has failed for them, though it may be tried again."""
        attempt.blame = blame
        self.requests.end_all_of(attempt, self._announcement(attempt, SaveState.ABORTED, attempt.request_ids))

    def announce(self, attempt: Attempt, state: SaveState) -> None:
        """Tells whoever waits for the attempt's requests."""
        attempt.announced = state
        self._out.append(self._announcement(attempt, state, attempt.request_ids))

    def _announcement(
        self, attempt: Attempt, state: SaveState, request_ids: tuple[str, ...], *, in_doubt: bool = False, why: str = ""
    ) -> cmd.Announce:
        failed = in_doubt or state is SaveState.ABORTED
        blame = attempt.blame if failed else None
        if blame is not None and why:
            blame = Blame(blame.phase, why, blame.node, blame.member, blame.waited_s)
        return cmd.Announce(
            state,
            request_ids,
            attempt.head,
            attempt.kind,
            attempt.tag,
            blame=blame,
            in_doubt=in_doubt,
            stop=failed and attempt.mine and self.counts(attempt) and not attempt.superseded and self.stop,
            stall_s=attempt.stall_s,
        )

    def tell_joined(self, attempt: Attempt, pending: Pending) -> None:
        """Tells a request that joined an attempt how far that has come."""
        doubt = attempt.phase is Phase.IN_DOUBT
        why = decide(attempt.participants, attempt.records, attempt.proof, self.heard).reason if doubt else ""
        if doubt and attempt.blame is None:
            attempt.blame = Blame(attempt.phase.value, why)
        ids = (pending.request.request_id,)
        self._out.append(self._announcement(attempt, attempt.announced, ids, in_doubt=doubt, why=why))

    def say(self, command: cmd.Command) -> None:
        """Adds a command to the answer of the event at hand."""
        self._out.append(command)

    def is_committed(self, attempt: Attempt) -> bool:
        """The commit: every participant's record says accept."""
        return attempt.all_accept

    def learn_record(self, attempt: Attempt, node: str, record: RecordState) -> None:
        """Notes what is known of a participant's record; a certain one stays."""
        if attempt.records.get(node) in CERTAIN or attempt.records.get(node) is record:
            return
        attempt.note_record(node, record)
        attempt.tell(self.now_s, f"{node}: the record is {record.value}")

    def commit(self, attempt: Attempt, cause: Cause, reason: str) -> None:
        """The attempt is committed: rolled forward everywhere from here on."""
        attempt.move(cause, self.now_s, reason)
        parent = self.parent
        newer = parent is None or attempt.order > (parent.epoch, parent.sequence)
        if attempt.mine:  # what failed after it was begun still stands, though it comes late
            self._failed_after = {
                s: before for s, before in self._failed_after.items() if before >= attempt.head.sequence
            }
            if attempt.head.sequence > self._parent_floor and (newer or not self._parent_is_own):
                self.parent, self._parent_is_live, self._parent_is_own = attempt.head, True, True
            self.memory.inherit_nothing(attempt)
            return
        if newer and not self._parent_is_live:
            self.parent = attempt.head
        unknown = (None, RecordState.UNKNOWN)
        attempt.lost_at.update(  # a disk that came back without it cannot be published to
            node
            for node in attempt.participants
            if node in self.heard and attempt.records.get(node) in unknown and node not in attempt.published
        )

    def hold_up(self, attempt: Attempt, why: str) -> None:
        """The upload did not succeed: the attempt stays committed, others get their turn, it is tried again later."""
        attempt.upload_failures += 1
        pause_s = min(self.settings.retry_s * 2 ** min(attempt.upload_failures - 1, 30), self.settings.retry_max_s)
        attempt.upload_not_before_s = self.now_s + pause_s
        if attempt.phase is Phase.UPLOADING:
            attempt.move(Cause.UPLOAD_HELD_UP, self.now_s, f"again in {pause_s:.1f} s: {why}")
            self.uploading = None

    # ---- starting

    def start(self, batch: list[Pending], window: Window) -> None:
        """Starts an attempt of the window's step for these requests. The membership is complete."""
        attempt = self._begin(self.membership.roster(), window)
        for pending in batch:
            attempt.strengthen(pending)
        deadlines = self.settings.deadlines
        assert attempt.roster is not None
        if attempt.roster.pausing:
            attempt.move(Cause.PAUSE_ASKED, self.now_s, attempt.reason)
            attempt.phase_deadline_s = self.now_s + deadlines.pause_s
        else:
            attempt.move(Cause.NOTHING_TO_PAUSE, self.now_s, attempt.reason)
            attempt.phase_deadline_s = self.now_s + deadlines.snapshot_s
        self.announce(attempt, SaveState.REQUESTED)

    def take_over(
        self, origin: str, roster: Roster, window: Window, requests: Sequence[SaveRequest], wall_s: float = 0.0
    ) -> Attempt:
        """Starts an attempt of what lies whole in memory since `origin`, for these requests of an earlier incarnation.
        `wall_s` as RecoveryBegun has it."""
        attempt = self._begin(roster, window)
        attempt.origin = origin
        for request in requests:
            pending = self.requests.pending(request, wall_s)
            if blame := self.requests.over_already(pending):
                self.requests.end(pending, blame)
                continue
            attempt.strengthen(pending)
            self.requests.serve(pending, attempt)
        attempt.move(Cause.NOTHING_TO_PAUSE, self.now_s, f"its images lie in memory since {origin}")
        attempt.phase_deadline_s = self.now_s + self.settings.deadlines.snapshot_s
        self.announce(attempt, SaveState.REQUESTED)
        return attempt

    def _begin(self, roster: Roster, window: Window) -> Attempt:
        sequence = self.highest_sequence + 1
        epoch = self.settings.epoch
        head = AttemptHead(self._new_attempt_id(epoch, sequence), window.step, epoch, sequence)
        if head.attempt in self.attempts or head.attempt in self.own_ids:
            raise self.attempts[head.attempt].illegal("its id was handed out a second time; ids must never repeat")
        self.highest_sequence = sequence
        attempt = self.attempt_type(
            head,
            mine=True,
            participants=tuple(roster.members_of),
            roster=roster,
            window=window,
            started_s=self.now_s,
            entered_s=self.now_s,
            may_be_accepted=False,
            kind=SaveKind.MEMORY,
        )
        self.attempts[head.attempt] = self.active[head.attempt] = attempt
        self.own_ids.add(head.attempt)
        self.foreground = attempt
        return attempt

    def _draft(self, attempt: Attempt) -> cmd.Draft:
        return draft_of(attempt, self.settings, self.parent)

    # ---- after each event

    def _settle(self) -> None:
        self._check_deadlines()
        self.memory.settle()
        self.requests.settle()
        now_s, heard = self.now_s, self.heard
        everyone_heard = not self.unheard
        for attempt in list(self.active.values()):
            attempt.wake(now_s, heard)
            if attempt.look_s <= now_s:
                self._advance(attempt, everyone_heard)
        if self.uploading is None and self.active and self.settings.upload:
            self._next_upload()
        for attempt in list(self.active.values()):
            if attempt.look_s > now_s:
                continue
            self._out += calls_due(attempt, now_s, heard, self.settings, everyone_heard, self._draft)
            attempt.looked(heard)
            if attempt.finished:
                attempt.slim()
                del self.active[attempt.id]
                self._prune()

    def _advance(self, attempt: Attempt, everyone_heard: bool) -> None:
        """Moves and announcements that follow from facts already known."""
        if attempt.phase in PROVEN:
            if attempt.in_store and attempt.phase is not Phase.DURABLE:
                attempt.move(Cause.IN_STORE, self.now_s, "the store's COMPLETED stands")
                if self.uploading is attempt:
                    self.uploading = None
            if not attempt.commit_told:
                ledger_over = attempt.ledger_tried or attempt.ledger_written or not self.settings.upload
                ledger_over = ledger_over or attempt.manifest is None
                if attempt.in_store or (first_publish_over(attempt, self.heard) and ledger_over):
                    if attempt.mine:
                        self.timings.note({**attempt.lasted_s, attempt.phase: self.now_s - attempt.entered_s})
                    self.announce(attempt, SaveState.COMMITTED)
                    if self.foreground is attempt:
                        self.foreground = None
                        self.memory.settle()
                        self.requests.settle()
            if attempt.phase is Phase.DURABLE and attempt.commit_told and attempt.announced is not SaveState.DURABLE:
                self.announce(attempt, SaveState.DURABLE)
        elif attempt.phase is Phase.ABORTING:
            gone = len(attempt.discarded) >= len(attempt.participants)
            gone = gone and all(node in attempt.discarded for node in attempt.participants)
            if gone and attempt.may_delete(everyone_heard):
                attempt.move(Cause.CLEAN, self.now_s, "images and files are gone everywhere; records stay")

    def _next_upload(self) -> None:
        ready = [
            attempt
            for attempt in self.active.values()
            if attempt.phase is Phase.COMMITTED
            and attempt.commit_told
            and attempt.given_up is None
            and not attempt.lost_at
            and attempt.manifest is not None
            and attempt.upload_not_before_s <= self.now_s
            and len(attempt.published) >= len(attempt.participants)
            and all(node in attempt.published and node in self.heard for node in attempt.participants)
        ]
        if ready:
            self.uploading = min(ready, key=lambda attempt: attempt.order)
            self.uploading.move(Cause.UPLOAD, self.now_s, "the oldest that is ready")
            if self.uploading.announced is SaveState.COMMITTED:
                self.announce(self.uploading, SaveState.UPLOADING)

    def _check_deadlines(self) -> None:
        now_s, front = self.now_s, self.foreground
        if front is not None and front.phase in BEFORE_COMMIT:
            deadline_s = front.deadline_s
            if front.phase_deadline_s <= now_s or deadline_s <= now_s:
                limit = "the deadline of the save" if deadline_s <= now_s else "the deadline of the phase"
                by_hand = not any(pending.holds_training for pending in front.requests)
                front.overdue = by_hand and front.phase_deadline_s > now_s
                blame = silent(front, self._awaited(front), now_s - front.started_s, limit)
                if front.phase is Phase.STAGING:
                    self.memory.keep_or_fail(front, blame)
                else:
                    self.fail(front, blame)
            elif len(front.requests) > 1 or front.needed:
                self.requests.expire_joined(front)
        for attempt in self.active.values():
            if attempt.phase_deadline_s <= now_s and attempt.phase is Phase.ABORTING:
                attempt.phase_deadline_s = math.inf
                if not attempt.aborted:
                    self._tell_doubt(attempt, "it is not known yet whether every accept had landed")

    def _awaited(self, attempt: Attempt) -> list[str]:
        assert attempt.roster is not None
        done = {
            Phase.PAUSING: attempt.paused | (set(attempt.participants) - attempt.roster.pausing),
            Phase.SNAPSHOTTING: attempt.snapshots.keys(),
            Phase.STAGING: attempt.shards.keys(),
            Phase.ACCEPTING: {n for n, record in attempt.records.items() if record is RecordState.ACCEPT},
        }[attempt.phase]
        return [node for node in attempt.participants if node not in done]

    def awaited_blame(self, attempt: Attempt, limit: str) -> Blame:
        """Who has not answered, for a request that gives up before the attempt does."""
        return silent(attempt, self._awaited(attempt), self.now_s - attempt.started_s, limit)

    def _prune(self) -> None:
        if len(self.attempts) > 2 * _KEEP:
            finished = [a for a in self.attempts.values() if a.id not in self.active]
            for attempt in sorted(finished, key=lambda a: a.order)[:_KEEP]:
                del self.attempts[attempt.id]
                self.own_ids.add(attempt.id)
                self.requests.forget(attempt)

    # ---- small events

    def _declared(self, event: ev.Declared) -> None:
        self.membership.declare(event.declaration)

    def _tick(self, event: ev.Tick) -> None:
        """Time alone; _settle looks at it."""

    def _resumed(self, event: ev.Resumed) -> None:
        self.parent, self._parent_is_live, self._parent_is_own = event.head, True, False
        self._parent_floor = self.highest_sequence
        self.memory.drop("live state was restored from a checkpoint")
        self.standstill.forget()
        self.requests.live_state_changed()

    def _memory_dropped(self, event: ev.MemoryDropped) -> None:
        self.memory.drop(event.reason)

    def _fenced(self, event: ev.Fenced) -> None:
        self.stop_for_good(event.reason)

    def stop_for_good(self, reason: str) -> None:
        """A newer coordinator leads: nothing is done any more, and everyone is told."""
        self.fenced = reason
        self.requests.fence()

    def invariants(self) -> None:
        """Raises AssertionError naming the first invariant that does not hold. Callable after every event."""
        check(self)


def _reason(event: ev.AttemptEvent) -> str:
    return str(getattr(event, "reason", ""))
