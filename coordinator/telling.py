"""What a run is told at the end of a step: what came of it, and what has become of saves since it was told last.

A part of the service. Saves fail, and alarms come, when no call of the run is there to hear of it; the next one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..storage.errors import FencedError
from .commands import Announce
from .driver import Driver
from .messages import AttemptHead, SaveKind, SaveState
from .moves import UNDONE
from .outcomes import StepOutcome, WindowOutcome, reached
from .policies import Decision

log = logging.getLogger("lastgood.coordinator")


class Telling:
    """Of one incarnation. `led` gives the driver once there is one; `newest` the order of the newest checkpoint."""

    def __init__(self, led: Callable[[], Driver], newest: Callable[[], tuple[int, int]]) -> None:
        self.saved_step: int | None = None  # the last that this incarnation saves or has restored
        self._led = led
        self._newest = newest
        self._failed: list[tuple[str, bool]] = []  # what failed since the last step, and whether training must stop
        self._left: list[AttemptHead] = []  # attempts of earlier coordinators that come to nothing

    def hear(self, announce: Announce) -> None:
        """What became of saves whose end_step has long returned."""
        if announce.blame is None or not (announce.state is SaveState.ABORTED or announce.in_doubt):
            return
        head = announce.head
        if head is not None and head.epoch < self._led().settings.epoch:
            self._left.append(head)
            return
        step = head.step if head is not None else None
        if step is not None and step == self.saved_step:
            self.saved_step = None
        where = f"step {step}: " if step is not None else ""
        self._failed.append((f"{where}{announce.blame}", announce.stop))

    def _unsaved_before(self) -> list[str]:
        """What an earlier coordinator left unsaved, unless something as new is saved, or lies in memory, by now."""
        core, newest = self._led().core, self._newest()
        mine = [attempt.head.step for attempt in core.active.values() if attempt.mine and attempt.phase not in UNDONE]
        left, self._left = self._left, []
        known = max(mine, default=-1)
        steps = {head.step for head in left if (head.epoch, head.sequence) > newest and head.step > known}
        if not steps:
            return []
        named = ", ".join(map(str, sorted(steps)))
        what, it = (f"step {named} was", "it") if len(steps) == 1 else (f"steps {named} were", "each")
        return [
            f"{what} not saved: the coordinator before this one had given {it} up, or died before {it} was committed. "
            "What is committed stands; the next save is made as usual."
        ]

    def outcome(self, window: WindowOutcome, decision: Decision, stall_s: float = 0.0) -> StepOutcome:
        """What came of a step, with all that was not told yet."""
        begun = [save for save in window.saves if save.attempt is not None and not save.failed]
        whole = {save.attempt for save in begun if reached(save.state, SaveState.SNAPSHOT)}
        saving = next((save.attempt for save in begun if save.kind is not SaveKind.MEMORY), None)
        if saving is not None:
            self.saved_step = window.step
        self._failed += [(sentence, False) for sentence in self._unsaved_before()]
        failures, stop = [sentence for sentence, _ in self._failed], any(stop for _, stop in self._failed)
        self._failed.clear()
        led = self._led()
        alarms, led.untold_alarms = led.untold_alarms, []
        if window.blame is not None:
            failures.append(f"step {window.step}: {window.blame}")
            log.error("step %d: %s", window.step, window.blame)
        return StepOutcome(
            window.step,
            decision.reason,
            saving,
            saving if saving in whole else None,
            stall_s,
            tuple(failures),
            window.stop or stop,
            self._newest(),
            in_memory=bool(whole),
            alarms=tuple(alarms),
        )

    def news(self, step: int) -> StepOutcome | None:
        """What failed, and alarms, since that was told last; None when there is nothing to tell."""
        self._failed += [(sentence, False) for sentence in self._unsaved_before()]
        if not self._failed and not self._led().untold_alarms:
            return None
        return self.outcome(WindowOutcome(step, True), Decision(False, "no save was due"))


def fenced(error: FencedError) -> StepOutcome:
    """The outcome of every step from now on: somebody else leads the run, training must stop."""
    return StepOutcome(0, "another coordinator leads the run", failures=(str(error),), stop=True)
