"""Twenty thousand random schedules: every promise holds after every event, and everything is decided in the end.

LASTGOOD_SIM_SEEDS=1000000 runs more of them, LASTGOOD_SIM_FIRST=n begins elsewhere.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.report import run_seeds

SEEDS = int(os.environ.get("LASTGOOD_SIM_SEEDS", "20000"))
FIRST = int(os.environ.get("LASTGOOD_SIM_FIRST", "0"))


@pytest.mark.timeout(max(300, SEEDS // 50))
def test_no_schedule_of_faults_breaks_a_promise() -> None:
    tally = run_seeds(range(FIRST, FIRST + SEEDS))
    assert not tally.failures, "\n\n".join(tally.failures)
    assert tally.schedules == SEEDS
    # The schedules are worth their time only while saves get through and fail in all of them together.
    assert tally.commits > 1.2 * SEEDS and tally.aborts > 0.5 * SEEDS and tally.coordinators > 2 * SEEDS, str(tally)
