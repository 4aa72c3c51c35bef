"""benchmarks/rivals: a rival that cannot be measured does not keep the others from being measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals.environments import PINS, RivalError
from benchmarks.rivals.ways import WAYS

SEEN = {
    "first_s": 3.0,
    "returns_s": [0.1, 0.1, 0.1],
    "stalls_s": [0.2, 0.4, 0.3],
    "written_s": [1.0, 2.0, 1.5],
    "synced_s": [2.0, 3.0, 2.5],
    "steps_s": [0.5, 0.5],
    "steps_beside_s": [1.0],
}


def test_a_rival_that_cannot_be_installed_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(rival: str) -> Path:
        if rival == "dlrover":
            raise RivalError("no such version")
        return Path("python")

    monkeypatch.setattr(rivals, "environment", environment)
    monkeypatch.setattr(rivals, "saved", lambda name, *_: rivals.Cost.of(name, WAYS[name], SEEN))
    found = rivals.measure(1.0, 3, "")
    assert [each.way for each in found] == list(WAYS)
    assert {each.way for each in found if each.reason} == {"dlrover, to memory", "dlrover, to memory and disk"}
    assert "not measured: no such version" in rivals.text(found)


@pytest.mark.parametrize(
    ("name", "safe_s", "with_fsync_s", "returns_s"),
    [
        ("torch-checkpointing, async", None, 2.5, 0.1),
        ("moonclip", 1.5, None, None),
        ("dlrover, to memory", None, None, None),
    ],
)
def test_only_what_a_rival_syncs_itself_counts_as_safe(
    name: str, safe_s: float | None, with_fsync_s: float | None, returns_s: float | None
) -> None:
    cost = rivals.Cost.of(name, WAYS[name], SEEN)
    assert (cost.safe_s, cost.safe_with_fsync_s, cost.returns_s) == (safe_s, with_fsync_s, returns_s)
    assert (cost.stall_s, cost.least_s, cost.most_s) == (0.3, 0.2, 0.4)


def test_every_way_has_an_environment_of_pinned_versions() -> None:
    assert {way.rival for way in WAYS.values()} == set(PINS)
    assert all("==" in each for pins in PINS.values() for each in pins.split())
