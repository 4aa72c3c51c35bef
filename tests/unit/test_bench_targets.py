"""Goals are read out of what the benchmarks printed, and a missed one is told as missed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.targets import Goal, goals, text

STAGING = [
    {"way": "as stagers do: direct, hashed", "gb_per_s": 1.8, "of_raw": 0.9, "cpu_s_per_gb": 0.7},
    {"way": "direct, not hashed", "gb_per_s": 2.0, "of_raw": 1.0, "cpu_s_per_gb": 0.1},
]
STALL = [
    {"what": "one memcpy of the state", "median_s": 0.1},
    {"what": "a save, blocking", "median_s": 0.12},
    {"what": "a save, overlapped", "median_s": 0.04},
    {"what": "the first save, of the second step", "median_s": 0.15},
]
STEPS = [
    {"what": "end_step by a driver, 2 members, nothing due", "median_ms": 1.5},
    {"what": "end_step by a driver, 2 members, a save due", "median_ms": 35.0},
    {"what": "end_step by a driver, 32 members, a save due", "median_ms": 90.0},
    {"what": "end_step at a member that leads itself, nothing due", "median_ms": 0.4},
]


def named(found: dict[str, Any]) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals(found)}


def test_each_goal_has_its_value_and_says_whether_it_is_reached() -> None:
    found = named({"staging": STAGING, "steps": STEPS})
    missed = found["staging over the raw disk"]
    assert (missed.value, missed.op, missed.target, missed.met) == (0.9, ">=", 0.95, False)
    assert found["staging: CPU s per GB"].met
    assert not found["end_step by a driver, 2 members, a save due: ms"].met
    assert found["end_step by a driver, 32 members, a save due: ms"].met
    assert "| staging over the raw disk | 0.90 | >= 0.95 | **missed** |" in text(list(found.values()))


def test_what_an_overlapped_save_loses_is_counted_beyond_the_coordination_of_the_same_run() -> None:
    found = named({"stall": STALL, "steps": STEPS})
    assert found["overlapped: lost beyond coordination, over a memcpy"].value == pytest.approx(0.05)
    assert "overlapped: lost beyond coordination, over a memcpy" not in named({"stall": STALL})


PEERS = [
    {"way": way, "stall_s": stall_s, "safe_s": 1.0, "step": 1.5}
    for way, stall_s in (
        ("lastgood, blocking", 0.1),
        ("lastgood, overlapped", 0.02),
        ("as verl: torch.save", 0.9),
        ("torch.save and fsync", 1.0),
        ("dcp.save", 1.0),
        ("dcp.async_save, thread", 0.4),
        ("dcp.async_save, process", 0.2),
    )
]


def test_the_fastest_rival_counts_and_one_that_could_not_be_measured_does_not() -> None:
    rivals = [{"way": "dlrover, to memory", "stall_s": 0.09}, {"way": "torch-checkpointing, async", "stall_s": None}]
    found = named({"peers": PEERS, "rivals": rivals})
    assert found["stall: the fastest peer over ours, blocking"].value == pytest.approx(0.9)
    assert not found["stall: the fastest peer over ours, overlapped"].met
    assert not [name for name in found if "torch-checkpointing" in name]


def test_nothing_is_told_of_what_was_not_measured_and_a_row_that_is_missing_is_an_error() -> None:
    assert goals({}) == []
    with pytest.raises(AssertionError, match="one memcpy"):
        goals({"stall": STALL[1:]})
