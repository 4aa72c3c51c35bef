"""Grants: how far the ranks of a member-led run may train before they must hear from the coordinator again. Pure.

A rank whose step is within its grant goes on at once; past it, it waits in end_step. So once no grant beyond g is out,
every rank stops at the end of step g + 1: that is where a cut is made, without a collective and without a round trip
per step. The rules:

- `granted` only grows, and a new coordinator starts at the highest grant that any stager or agent has heard of.
- No grant reaches the next step at which a save is due; while somebody asks for a save no new one is given at all.
- A rank that does not arrive within `gather_s` of the first one costs that cut. Until it reports again, no cut waits
  for it: each is given up as soon as another rank is there, and the others train on.
- A rank that went on without a grant (the coordinator was away) is caught up with; what it passed is not cut any more.

Time comes in as an argument; steps are numbers of steps that have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .messages import MemberId

AHEAD_S = 1.0  # worth of steps that a grant runs ahead of the fastest rank
AHEAD_STEPS = (2, 1000)  # at least and at most


@dataclass(frozen=True)
class GrantTo:
    """Every rank may go on until it has ended step `step` + 1."""

    step: int
    tell_at: int  # ranks report when they have ended this step


@dataclass(frozen=True)
class CutAt:
    """All ranks have ended `step` and wait there: copy it, then say cut_done."""

    step: int


@dataclass(frozen=True)
class GiveUp:
    """The cut at `step` is not made: `late` (member -> last step it reported, None if none) did not arrive in time."""

    step: int
    late: Mapping[MemberId, int | None]
    waited_s: float | None  # None: a cut was given up for them before, and this one did not wait


class Grants:
    """What was granted in one stretch of a run, and what the ranks reported. One per line; see messages.Line."""

    def __init__(self, members: Iterable[MemberId], granted: int, gather_s: float) -> None:
        """`granted`: the step that the run continues from, or the highest grant that anybody has heard of.

        `gather_s`: how long those that arrived wait for the others.
        """
        self.members = frozenset(members)
        self.granted = granted
        self.absent: dict[MemberId, int | None] = {}  # members that a cut was given up for -> last step reported
        self._gather_s = gather_s
        self._done = granted  # no cut is made up to this step
        self._ended: dict[MemberId, int] = {}
        self._ended_s: dict[MemberId, float] = {}  # when that was first heard
        self._step_s: dict[MemberId, float] = {}

    @property
    def front(self) -> int | None:
        """The last step that the fastest rank reported; None before the first report."""
        return max(self._ended.values(), default=None)

    def ended(self, member: MemberId) -> int | None:
        """The last step that a member reported; None when it has not reported to this coordinator."""
        return self._ended.get(member)

    def report(self, member: MemberId, step: int, step_s: float | None, now_s: float) -> None:
        """A member has ended `step`; one of its steps takes `step_s` seconds, None when it cannot tell yet."""
        if member not in self.members or step <= self._ended.get(member, -1):
            return
        self._ended[member] = step
        self._ended_s[member] = now_s
        self.absent.pop(member, None)
        if step_s is not None:
            self._step_s[member] = step_s

    def cut_done(self, step: int) -> None:
        """The cut at `step` is over, whatever came of it."""
        self._done = max(self._done, step)

    def decide(self, now_s: float, due: Callable[[int], bool], asked: bool) -> GrantTo | CutAt | GiveUp | None:
        """What to do now; None when nothing. Call it again after each decision was carried out, until it says None.

        `due(step)`: whether a save is due at the end of a step. `asked`: a request waits for a cut.
        """
        front = self.front
        if front is not None and front - 1 > self.granted:
            self.granted = front - 1
            self._done = max(self._done, front - 1)
            return GrantTo(self.granted, self.granted)
        step = self.granted + 1
        if step > self._done and (asked or due(step)):
            return self._gather(step, now_s)
        return self._extend(due, asked)

    def _gather(self, step: int, now_s: float) -> CutAt | GiveUp | None:
        late = {member: self._ended.get(member) for member in self.members if self._ended.get(member, -1) < step}
        if not late:
            return CutAt(step)
        first_s = min((self._ended_s[m] for m, ended in self._ended.items() if ended >= step), default=math.inf)
        waited_s = now_s - first_s
        known = late.keys() <= self.absent.keys()
        if waited_s < (0.0 if known else self._gather_s):
            return None
        self.absent = dict(late)
        self._done = step
        return GiveUp(step, late, None if known else waited_s)

    def _extend(self, due: Callable[[int], bool], asked: bool) -> GrantTo | None:
        ahead = self._ahead()
        target = max(self.granted, self._done)
        if self.front is not None:
            while target < self.front + ahead and not asked and not due(target + 1):
                target += 1
        if target == self.granted:
            return None
        self.granted = target
        # One that was given up reports at its next end_step, so that cuts wait for it again.
        return GrantTo(target, 0 if self.absent else target - ahead // 2)

    def _ahead(self) -> int:
        """Steps to grant beyond the fastest rank, by the pace of the slowest."""
        step_s = max(self._step_s.values(), default=math.inf)
        least, most = AHEAD_STEPS
        return max(least, min(most, math.ceil(AHEAD_S / step_s))) if step_s > 0 else most
