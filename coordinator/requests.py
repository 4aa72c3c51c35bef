"""Requests and windows: who asked for a checkpoint, when it can be taken, and which attempt serves whom.

Part of the protocol core (as pure as protocol.py); the rule: a request that was taken in is in exactly one place,
`waiting` or served by an attempt, until it has been told its outcome. How requests meet:

- A request while the window is open starts an attempt at once. While an attempt of this same window is under way it
  joins that one, unless both carry different tags or its manifest is already drawn up without the tag: then it gets an
  attempt of its own, after that one and in the same window if it is still open.
- A scheduled or final save of a window that already has a committed attempt is served by it; a manual one makes a new
  attempt (somebody wants one now).
- One attempt is in the foreground (from its start to the announced commit). A scheduled save that falls due before the
  last is committed waits for it, and end_step waits with it: saving faster than the disk is the run's pace then.
- A request outside of a window, or whose copy met an update, waits for the next window, up to its own deadline.
- A request keeps its own deadline when it joins: when that passes it alone is told who was late; the attempt ends when
  the last of its requests gives up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import commands as cmd
from . import events as ev
from .attempt import Attempt, Pending
from .membership import Window
from .messages import Blame, MemberId, SaveKind, SaveRequest, SaveState
from .moves import COPYING, PROVEN, Cause, Phase

if TYPE_CHECKING:
    from .protocol import Protocol


class Requests:
    """The waiting room and the window of one Protocol."""

    def __init__(self, core: Protocol) -> None:
        self._core = core
        self.window: Window | None = None
        self.waiting: list[Pending] = []
        self._served: dict[str, str] = {}  # request id -> attempt id
        self._ended: dict[str, cmd.Announce] = {}  # request id -> how it ended without an attempt
        self._window_attempt: Attempt | None = None  # newest attempt of the open window
        self._number = 0  # of the newest window

    @property
    def holds_training(self) -> bool:
        """Whether a save that training waits for has not been started yet."""
        return self.window is not None and any(pending.holds_training for pending in self.waiting)

    def next_deadline_s(self) -> float:
        """When the first waiting request gives up."""
        return min((self._gives_up_s(pending) for pending in self.waiting), default=math.inf)

    def _gives_up_s(self, pending: Pending) -> float:
        """The last moment at which a waiting request could start and still be in time."""
        if pending.request.deadline_s is None:
            return pending.deadline_s
        forecast = self._core.timings.forecast(None)
        return pending.deadline_s - (forecast.total_s if forecast is not None else 0.0)

    def attempt_of(self, request_id: str) -> str | None:
        """The attempt that serves a request."""
        return self._served.get(request_id)

    def serve(self, pending: Pending, attempt: Attempt) -> None:
        """Notes which attempt serves a request."""
        self._served[pending.request.request_id] = attempt.id

    def forget(self, attempt: Attempt) -> None:
        """The attempt is no longer remembered."""
        for request_id in attempt.request_ids:
            self._served.pop(request_id, None)

    # ---- events

    def served_before(self, event: ev.ServedBefore) -> None:
        for request_id in event.request_ids:
            self._served.setdefault(request_id, event.attempt)

    def asked(self, event: ev.Asked) -> None:
        request = event.request
        core = self._core
        if request.request_id in self._ended:
            core.say(self._ended[request.request_id])
            return
        if any(pending.request.request_id == request.request_id for pending in self.waiting):
            return
        pending = self.pending(request, event.wall_s)
        served = core.attempts.get(self._served.get(request.request_id, ""))
        if served is not None:
            if not served.mine and request.request_id not in served.request_ids:
                served.requests.append(pending)  # asked of the coordinator before this one: told what becomes of it
            core.tell_joined(served, pending)
            return
        if blame := self.over_already(pending):
            self.end(pending, blame)
            return
        if request.from_memory:
            if blame := core.memory.ask(pending):
                self.end(pending, blame)
            return
        if problems := core.membership.problems():
            self.end(pending, Blame("requested", f"the membership is not complete: {'; '.join(problems)}"))
            return
        self._take_in(pending)

    def pending(self, request: SaveRequest, wall_s: float = 0.0) -> Pending:
        """A deadline that somebody has set counts from when they asked, through whatever lies between.

        `wall_s`: seconds since 1970 now; that clock may be set meanwhile, so it is told with each event.
        """
        core = self._core
        left_s = request.deadline_s if request.deadline_s is not None else core.settings.deadlines.save_s
        if request.deadline_s is not None and request.asked_at and wall_s:
            left_s -= max(0.0, wall_s - request.asked_at)
        return Pending(request, core.now_s + left_s, request.kind is not SaveKind.MANUAL)

    def over_already(self, pending: Pending) -> Blame | None:
        """Why nothing can be done for a request any more whose deadline was over when it arrived; None when it can."""
        given_s, late_s = pending.request.deadline_s, self._core.now_s - pending.deadline_s
        if given_s is None or late_s < 0:
            return None
        reason = f"it came to the coordinator {given_s + late_s:.1f} s after it was asked for, {late_s:.1f} s too late"
        return Blame("requested", f"{reason}; nothing was saved for it", waited_s=given_s + late_s)

    def _take_in(self, pending: Pending, *, quietly: bool = False) -> None:
        attempt = self._window_attempt
        request = pending.request
        if request.kind is SaveKind.MEMORY and (attempt is not None or self._core.foreground is not None):
            return  # what is under way, or was made in this window, is as new
        if attempt is not None and self.window is not None and attempt.can_serve(request):
            committed = attempt.phase in PROVEN and attempt.commit_told
            if not committed or request.kind is not SaveKind.MANUAL:
                if blame := self.too_late(pending, attempt):
                    self.end(pending, blame)
                    return
                attempt.strengthen(pending)
                self.serve(pending, attempt)
                if attempt is self._core.memory.held:
                    self._core.memory.want(request.reason)
                self._core.tell_joined(attempt, pending)
                return
        if blame := self.too_late(pending, None):
            self.end(pending, blame)
            return
        self.waiting.append(pending)
        self.settle()
        if pending in self.waiting and not quietly:
            self._tell_waiting(pending)

    def too_late(self, pending: Pending, joins: Attempt | None) -> Blame | None:
        """Why a deadline that somebody has set cannot be met, as far as past saves tell; None when it can."""
        if pending.request.deadline_s is None:
            return None
        core = self._core
        front = joins or core.foreground
        ahead: list[tuple[Phase, float]] = []
        if front is not None and not front.commit_told:
            ahead = [(front.phase, core.now_s - front.entered_s if front.phase is not Phase.HELD else 0.0)]
        forecast = core.timings.forecast(*ahead, *([] if joins else [None]))
        left_s = pending.deadline_s - core.now_s
        if forecast is None or forecast.late_phase(left_s) is None:
            return None
        return Blame("requested", forecast.sentence(left_s))

    def _tell_waiting(self, pending: Pending) -> None:
        why = "the update's end" if self.window is None else "the save that is under way"
        request = pending.request
        self._core.say(
            cmd.Announce(SaveState.REQUESTED, (request.request_id,), kind=request.kind, tag=request.tag, waits_for=why)
        )

    def window_opened(self, event: ev.WindowOpened) -> None:
        core = self._core
        checked = core.membership.window_problem(event.step, event.reports, event.failures)
        again = self._same_window(event.step, checked)
        front = core.foreground
        if front is not None and front.phase in COPYING and front.origin is None and not again:
            self.window_was_closed(front, "the next window opened before every node had copied")
        if isinstance(checked, Blame):
            self._not_opened(event, checked, event.due is not None and event.due.due)
            return
        if not again:
            core.forget_failure(self._unopened(event.step))
            self._number += 1
            processes = core.membership.roster().processes
            self.window = Window(self._number, event.step, checked, processes, dict(event.metrics))
            self._window_attempt = self._taken_over()
        ids = tuple(pending.request.request_id for pending in self.waiting)
        scheduled = any(pending.request.kind is SaveKind.SCHEDULED for pending in self.waiting)
        if event.due is not None and event.due.due and not scheduled:
            kind, reason = SaveKind.SCHEDULED, event.due.reason
        elif event.memory is not None and event.memory.due and not self.waiting:
            kind, reason = SaveKind.MEMORY, event.memory.reason
        else:
            core.say(cmd.WindowVerdict(event.step, True, None, ids))
            return
        request_id = f"{kind.value}-{core.settings.epoch}-{self._number}"
        core.say(cmd.WindowVerdict(event.step, True, None, (*ids, request_id)))
        if request_id not in self._served:
            self._take_in(self.pending(SaveRequest(request_id, kind, reason)), quietly=True)

    def _taken_over(self) -> Attempt | None:
        """An attempt that was taken over from an earlier coordinator and is of this very window, if there is one."""
        window = self.window
        for attempt in (self._core.foreground, self._core.memory.held):
            if attempt is not None and attempt.origin is not None and attempt.window is not None and window is not None:
                theirs = attempt.window
                of_it = {member: window.updates.get(member) for member in theirs.updates} == dict(theirs.updates)
                if theirs.step == window.step and of_it and theirs.processes.items() <= window.processes.items():
                    return attempt
        return None

    def _unopened(self, step: int) -> str:
        """Names the window of a step that did not open. Told once more when a stager has come back, it is the same."""
        return f"step {step} after window {self._number}"

    def _same_window(self, step: int, checked: Blame | dict[MemberId, int | None]) -> bool:
        """Whether the open window is told of once more: a client that repeats itself must not make a second save."""
        window = self.window
        return (
            window is not None
            and window.step == step
            and window.updates == checked
            and window.processes == self._core.membership.roster().processes
        )

    def _not_opened(self, event: ev.WindowOpened, blame: Blame, due: bool) -> None:
        core = self._core
        self.window = self._window_attempt = None
        if due and not event.again:
            core.count_failure(self._unopened(event.step))
        if core.membership.problems() or event.ends_waiting:
            for pending in list(self.waiting):
                self.waiting.remove(pending)
                self.end(pending, blame)
        core.say(cmd.WindowVerdict(event.step, False, blame, stop=due and core.stop))

    def live_state_changed(self) -> None:
        """A resume has written into live state: what the window said no longer holds."""
        self.window = self._window_attempt = None

    def window_closed(self, event: ev.WindowClosed) -> None:
        self.window = self._window_attempt = None
        for pending in self.waiting:
            self._tell_waiting(pending)

    def window_was_closed(self, attempt: Attempt, why: str) -> None:
        """A copy met an update: the attempt is given up without blame, its requests wait for the next window."""
        core = self._core
        if self.window is attempt.window:
            self.window = self._window_attempt = None
        pendings, attempt.requests = attempt.requests, []
        core.fail(attempt, Blame(attempt.phase.value, f"an update had begun ({why})"), Cause.WINDOW_CLOSED)
        for pending in pendings:
            self._served.pop(pending.request.request_id, None)
            if pending.request.kind is SaveKind.MEMORY:
                continue  # the next window brings the next one
            self.waiting.append(pending)
            self._tell_waiting(pending)

    # ---- after each event

    def settle(self) -> None:
        """Ends requests whose time is up and starts an attempt when one can start."""
        if not self.waiting:
            return
        core = self._core
        for pending in [p for p in self.waiting if self._gives_up_s(p) <= core.now_s]:
            self.waiting.remove(pending)
            self.end(pending, self._waited_too_long(pending))
        while core.foreground is None and self.waiting and self.window is not None:
            self._start_next()

    def _waited_too_long(self, pending: Pending) -> Blame:
        core = self._core
        what = "no update ended" if self.window is None else "the save that is under way did not end"
        left_s = pending.deadline_s - core.now_s
        late = self.too_late(pending, None)
        if left_s <= 0 or late is None:
            reason = f"{what} before the deadline"
        elif self.window is not None and core.foreground is None:
            reason = late.reason
        else:
            reason = f"{what} in time: {late.reason}"
        if problems := core.membership.problems():
            reason = f"{reason}; the membership is not complete: {'; '.join(problems)}"
        given_s = pending.request.deadline_s or core.settings.deadlines.save_s
        return Blame("requested", reason, waited_s=given_s - max(0.0, left_s))

    def _start_next(self) -> None:
        core, window = self._core, self.window
        assert window is not None
        batch = self._batch()
        if problems := core.membership.problems():
            self._end_all(batch, Blame("requested", f"the membership is not complete: {'; '.join(problems)}"))
            return
        roster = core.membership.roster()
        if roster.processes != window.processes:
            self.window = self._window_attempt = None  # someone came back since it reported; the next end_step tells
            for pending in self.waiting:
                self._tell_waiting(pending)
            return
        unheard = [node for node in roster.members_of if node not in core.heard]
        if unheard:
            members = ", ".join(str(member) for member in roster.members_of[unheard[0]])
            reason = f"the stager of {', '.join(unheard)} is not heard; it is needed for {members}"
            self._end_all(batch, Blame("requested", reason, node=unheard[0]))
            return
        self.waiting = [pending for pending in self.waiting if pending not in batch]
        core.start(batch, window)
        self._window_attempt = core.foreground
        assert core.foreground is not None
        for pending in batch:
            self._served[pending.request.request_id] = core.foreground.id

    def _batch(self) -> list[Pending]:
        """The waiting requests that one attempt can serve: all without a tag, and those with the first tag."""
        tag = next((p.request.tag for p in self.waiting if p.request.tag is not None), None)
        return [p for p in self.waiting if p.request.tag in (None, tag)]

    def expire_joined(self, attempt: Attempt) -> None:
        """Tells requests of an attempt in the foreground whose own time is up; others keep it going.

        Once its manifest is drawn up it bears what they asked for, and may still be committed: then they are told that
        this is in doubt, and hear what becomes of it.
        """
        core = self._core
        late = [p for p in attempt.requests if p.deadline_s <= core.now_s and not p.told_late]
        for pending in late:
            blame = core.awaited_blame(attempt, "the deadline of the request")
            if not attempt.drafted:
                attempt.leave(pending)
                self.end(pending, blame, attempt)
                continue
            pending.told_late = True
            ids = (pending.request.request_id,)
            core.say(
                cmd.Announce(
                    attempt.announced, ids, attempt.head, attempt.kind, attempt.tag, blame=blame, in_doubt=True
                )
            )

    def _end_all(self, batch: list[Pending], blame: Blame) -> None:
        self._core.count_failure(batch[0].request.request_id)
        self.waiting = [pending for pending in self.waiting if pending not in batch]
        for pending in batch:
            self.end(pending, blame)

    def end(self, pending: Pending, blame: Blame, attempt: Attempt | None = None) -> None:
        """A request ends without a checkpoint of its own; told again whenever it is sent again."""
        request = pending.request
        announce = cmd.Announce(
            SaveState.ABORTED,
            (request.request_id,),
            attempt.head if attempt is not None else None,
            request.kind,
            request.tag,
            blame=blame,
            stop=pending.holds_training and self._core.stop,
        )
        self._served.pop(request.request_id, None)
        self._remember(request.request_id, announce)
        self._core.say(announce)

    def end_all_of(self, attempt: Attempt, announce: cmd.Announce) -> None:
        """The attempt fails for all who asked for it, though it may be tried again later; `announce` tells so."""
        for request_id in announce.request_ids:
            self._served.pop(request_id, None)
            self._remember(request_id, announce)
        for pending in list(attempt.requests):
            attempt.leave(pending)
        self._core.say(announce)

    def _remember(self, request_id: str, announce: cmd.Announce) -> None:
        self._ended[request_id] = announce
        if len(self._ended) > 1000:
            del self._ended[next(iter(self._ended))]

    # ---- fenced

    def fence(self) -> None:
        """Tells every request that this coordinator stops."""
        core = self._core
        blame = Blame("fenced", f"a newer coordinator has taken over: {core.fenced}")
        for pending in self.waiting:
            self.end(pending, blame)
        self.waiting = []
        for attempt in core.active.values():
            ids = tuple(i for i in attempt.request_ids)
            if ids and not attempt.commit_told and attempt.announced is not SaveState.ABORTED:
                core.say(cmd.Announce(attempt.announced, ids, attempt.head, blame=blame, in_doubt=True))

    def turn_away(self, event: ev.Event) -> list[cmd.Command]:
        """What a fenced coordinator answers: nothing is done any more, and whoever asks is told why."""
        blame = Blame("fenced", f"a newer coordinator has taken over: {self._core.fenced}")
        if isinstance(event, ev.Asked):
            request = event.request
            return [cmd.Announce(SaveState.ABORTED, (request.request_id,), kind=request.kind, blame=blame)]
        if isinstance(event, ev.WindowOpened):
            return [cmd.WindowVerdict(event.step, False, blame)]
        return []

    def invariants(self) -> None:
        """A request is waiting or served, never both; nothing waits while it could start."""
        core = self._core
        for pending in self.waiting:
            assert pending.request.request_id not in self._served, f"{pending.request.request_id} is in two places"
        assert not (core.foreground is None and self.waiting and self.window is not None), "a request waits for nothing"
