"""Runs many seeds and says what came of them; a failing seed is run again with its trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from lastgood.storage.errors import IllegalMoveError
from tests.simulation.schedules import run_seed

FAULTS = (AssertionError, IllegalMoveError)  # BrokenPromise is an AssertionError
TRACE_LINES = 80


@dataclass
class Tally:
    """What a number of schedules came to."""

    schedules: int = 0
    commits: int = 0
    aborts: int = 0
    coordinators: int = 0
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)  # seed, fault and trace of each

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {len(self.failures)} failed; {self.commits} commits, {self.aborts} aborted "
            f"attempts, {self.coordinators} coordinators; {self.cpu_s:.0f} s of one core"
        )


def run_seeds(seeds: Iterable[int], *, minutes: float | None = None, stop_after: int = 3) -> Tally:
    """Runs the schedules of these seeds, until `minutes` have passed or `stop_after` of them failed."""
    tally = Tally()
    cpu_s, end_s = time.process_time(), None if minutes is None else time.monotonic() + 60 * minutes
    for seed in seeds:
        try:
            world = run_seed(seed)
            tally.commits += world.referee.commits
            tally.aborts += sum(not truth.committed for truth in world.referee.truths.values())
            tally.coordinators += len(world.coordinators)
        except FAULTS as fault:
            tally.failures.append(tell(seed, fault))
        tally.schedules += 1
        if len(tally.failures) >= stop_after or (end_s is not None and time.monotonic() > end_s):
            break
    tally.cpu_s = time.process_time() - cpu_s
    return tally


def tell(seed: int, fault: BaseException) -> str:
    """The fault of a seed, with the trace of its schedule."""
    trace: list[str] = []
    with contextlib.suppress(*FAULTS):
        run_seed(seed, trace=trace)
    last = "\n".join(line[:240] for line in trace[-TRACE_LINES:])
    return f"seed {seed}: {type(fault).__name__}: {fault}\n{last}"
