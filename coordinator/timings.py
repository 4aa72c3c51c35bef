"""How long the phases of this run's saves take, so that a deadline which cannot be met is answered at once.

Part of the protocol core (as pure as protocol.py). A forecast is, for each phase still to come, the 95th percentile of
the last saves that committed, plus a margin. With fewer than ENOUGH of them nothing is forecast: no save is turned away
on a guess.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .moves import Phase

KEEP = 64  # saves that are remembered
ENOUGH = 5  # before this many have committed, nothing is forecast
PERCENTILE = 0.95
MARGIN = 1.1  # times the percentile

# The phases of a save in their order; COMMITTED lasts from the commit until it is announced (publish).
PHASES = (Phase.PAUSING, Phase.SNAPSHOTTING, Phase.STAGING, Phase.ACCEPTING, Phase.COMMITTED)
_WORDS = {Phase.COMMITTED: "publishing"}


@dataclass(frozen=True)
class Forecast:
    """What is still to come until the commit is announced: seconds by phase, in order."""

    phases: tuple[tuple[Phase, float], ...]
    saves: int  # how many past saves it rests on

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    def late_phase(self, left_s: float) -> Phase | None:
        """The first phase that would end after `left_s`; None when all is in time."""
        spent_s = 0.0
        for phase, seconds in self.phases:
            spent_s += seconds
            if spent_s > left_s:
                return phase
        return None

    def sentence(self, left_s: float) -> str:
        """Why a deadline of `left_s` cannot be met, for a person."""
        late = self.late_phase(left_s)
        assert late is not None
        parts = ", ".join(f"{word(phase)} {seconds:.2f} s" for phase, seconds in self.phases)
        return (
            f"it cannot be committed within {left_s:.1f} s: {word(late)} would be late. It needs {self.total_s:.1f} s "
            f"({parts}: what 95 % of the last {self.saves} saves stayed below, plus 10 %). Nothing was touched; ask "
            f"with a deadline of {math.ceil(self.total_s)} s or more, or without one"
        )


def word(phase: Phase) -> str:
    """A phase as people read it."""
    return _WORDS.get(phase, phase.value)


class Timings:
    """Seconds per phase of the last committed saves."""

    def __init__(self) -> None:
        self._lasted: dict[Phase, deque[float]] = {phase: deque(maxlen=KEEP) for phase in PHASES}

    def note(self, lasted: Mapping[Phase, float]) -> None:
        """One save has been committed and announced; `lasted`: seconds it spent in each phase (absent: none)."""
        for phase in PHASES:
            self._lasted[phase].append(lasted.get(phase, 0.0))

    def forecast(self, *saves: tuple[Phase, float] | None) -> Forecast | None:
        """The time that `saves` take one after the other; None as long as too few have been seen.

        Each is where a save stands and how long it has been there, in seconds, or None for one that has not started.
        """
        count = len(self._lasted[Phase.COMMITTED])
        if count < ENOUGH:
            return None
        phases: list[tuple[Phase, float]] = []
        for at in saves:
            first, spent_s = at if at is not None else (PHASES[0], 0.0)
            first = Phase.STAGING if first is Phase.HELD else first
            coming = PHASES[PHASES.index(first) :] if first in PHASES else PHASES
            for phase in coming:
                expected_s = _percentile(self._lasted[phase]) * MARGIN
                if phase is first:
                    expected_s = max(0.0, expected_s - spent_s)
                if expected_s > 0:
                    phases.append((phase, expected_s))
        return Forecast(tuple(phases), count)


def _percentile(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(PERCENTILE * len(ordered)) - 1]
