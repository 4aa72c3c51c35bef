"""Windows of a run that its members lead: they stand open already when the coordinator hears of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lastgood.coordinator.messages import Blame, SaveKind, SaveState
from lastgood.coordinator.policies import Decision
from tests.unit import memory_world
from tests.unit.memory_world import Scene, manual, run

DUE = Decision(True, "every step")
NOT_DUE = Decision(False, "not now")


def stand_at(scene: Scene, step: int) -> None:
    """Every member has marked the end of `step` by itself."""
    for port in scene.ports.values():
        port.step, port.updating = step, False


def test_a_cut_saves_what_the_members_have_marked_and_captures_nothing_anew() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        stand_at(s, 5)
        outcome = await driver.reopen_window(5, {"loss": 0.5}, DUE)
        assert outcome.opened
        assert [(save.kind, save.step) for save in outcome.saves] == [(SaveKind.SCHEDULED, 5)]
        await driver.drain(50)
        assert driver.checkpoints()[0].step == 5
        assert all("mark" not in port.log for port in s.ports.values())
        await driver.stop()

    run(scene())


def test_a_request_after_the_window_is_forgotten_waits_for_the_next_cut() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        stand_at(s, 5)
        await driver.reopen_window(5, None, NOT_DUE)
        await driver.forget_window()
        assert all("close_window" not in port.log for port in s.ports.values())
        assert (await driver.save(manual("r1"))).waits_for
        stand_at(s, 6)
        (save,) = (await driver.reopen_window(6, None, NOT_DUE)).saves
        assert save.step == 6
        assert (await driver.wait("r1", SaveState.COMMITTED, 20)).committed
        await driver.stop()

    run(scene())


@pytest.mark.parametrize(("due", "failures", "stops"), [(DUE, 1, True), (NOT_DUE, 0, False)])
def test_a_cut_that_is_missed_fails_what_was_due_and_whoever_waited_for_it(
    due: Decision, failures: int, stops: bool
) -> None:
    async def scene() -> None:
        s = Scene(max_consecutive_failures=1)
        driver = await s.ready()
        await driver.save(manual("r1"))
        outcome = await driver.miss_window(5, due, Blame("window", "actor:1 did not arrive", "n2"))
        assert not outcome.opened
        assert outcome.stop == stops
        assert driver.core.failures == failures
        assert "actor:1 did not arrive" in str(outcome.blame)
        save = await driver.wait("r1", SaveState.COMMITTED, 1)
        assert save.failed
        assert "actor:1 did not arrive" in str(save.blame)
        await driver.stop()

    run(scene())


def test_settled_means_that_nothing_is_in_the_foreground_also_when_the_ledger_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slowly(work: Any) -> Any:
        await asyncio.sleep(0.5)
        return work()

    monkeypatch.setattr(memory_world, "at_once", slowly)

    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        (save,) = (await driver.open_window(5, None, DUE)).saves
        assert await driver.settle(20)
        assert driver.core.foreground is None
        assert (await driver.wait(save.request_id, SaveState.COMMITTED, 0)).state is not SaveState.STAGED
        await driver.stop()

    run(scene())
