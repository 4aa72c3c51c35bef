"""The pace of one member of a member-led run: how far it may go on, and what it was told.

The rule: past its grant it waits. The agent's thread brings grants (`take`), the training thread asks (`covers`,
`wait`). No Ray, no call, no torch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..coordinator.messages import Grant, Line

_KEEP = 100  # outcomes that were not asked for yet
_BLEND = 0.3  # weight of the last step in the mean time of a step


class Pace:
    """One member's grant. `grant` is None before the first resume."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.grant: Grant | None = None
        self.step_s: float | None = None  # mean seconds of a step, without waiting in end_step
        self._clock = clock
        self._changed = threading.Condition()
        self._heard_s = clock()  # when a grant came last
        self._told = False  # the report that this grant asks for was made
        self._outcomes: deque[tuple[int, Any]] = deque(maxlen=_KEEP)  # each with the step whose end it is kept for
        self._outcome = (0, 0)  # epoch and number of the newest outcome
        self._left_s: float | None = None  # when end_step returned last

    def open(self, line: Line) -> None:
        """A resume has answered: the member is on this line. A grant on it may have come before."""
        with self._changed:
            if self.grant is None or self.grant.line.key < line.key:
                self.grant = Grant(line, line.step, line.step)
                self._told = False
            self._outcomes.clear()
            self._left_s = self.step_s = None

    def take(self, grant: Grant, epoch: int) -> None:
        """A grant has come, by the coordinator of `epoch`. An older one than known changes nothing."""
        with self._changed:
            self._heard_s = self._clock()
            known = self.grant
            if known is None or grant.order > known.order or (grant.order == known.order and grant != known):
                self.grant = grant
                self._told = False
            if grant.outcome is not None and (epoch, grant.outcome_number) > self._outcome:
                self._outcome = (epoch, grant.outcome_number)
                self._outcomes.append((grant.stop_at or 0, grant.outcome))
            self._changed.notify_all()

    def ended(self) -> None:
        """end_step was called: the time since it returned last is that of one step."""
        now_s = self._clock()
        if self._left_s is not None:
            step_s = now_s - self._left_s
            self.step_s = step_s if self.step_s is None else (1 - _BLEND) * self.step_s + _BLEND * step_s

    def left(self) -> None:
        """end_step returns."""
        self._left_s = self._clock()

    def covers(self, step: int) -> bool:
        """Whether the member may go on after `step`."""
        grant = self.grant
        return grant is not None and step <= grant.step

    def wants_report(self, step: int) -> bool:
        """Whether the coordinator wants to know that `step` has ended; true once for each grant."""
        with self._changed:
            if self.grant is None or self._told or step < self.grant.tell_at:
                return False
            self._told = True
            return True

    def wait(self, step: int, timeout_s: float) -> bool:
        """Waits until a grant covers `step`, or training must stop at it; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.covers(step) or self._stops(step), timeout_s)

    def _stops(self, step: int) -> bool:
        return any(0 < at <= step for at, _ in self._outcomes)

    def silent_s(self) -> float:
        """Seconds since a grant came, of whatever step: the coordinator repeats the last one as a sign of life."""
        with self._changed:
            return self._clock() - self._heard_s

    def outcomes(self, step: float = math.inf) -> list[Any]:
        """What came of cuts since this was asked last, oldest first; what is for the end of a later step is kept."""
        with self._changed:
            found = [outcome for at, outcome in self._outcomes if at <= step]
            self._outcomes = deque((kept for kept in self._outcomes if kept[0] > step), maxlen=_KEEP)
            return found
