"""Housekeeping beside a driver: what holds what up, and what happens when something does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest

from lastgood.coordinator.commands import Announce
from lastgood.coordinator.housekeeping import Housekeeping
from lastgood.coordinator.messages import AttemptHead, SaveState
from lastgood.coordinator.options import Options
from lastgood.coordinator.ownership import Ownership
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.ports import StagerPort
from lastgood.storage.errors import FencedError, StagingError
from lastgood.storage.lanes import Lane
from tests.unit.memory_world import Scene, manual, run

DUE = Decision(True, "every step")


class AtOnce:
    """A lane whose calls are over at once."""

    async def run(self, doing: str, work: Callable[[], Any], limit_s: float) -> Any:
        return work()


class Beats:
    """owner.json: counts how often it was refreshed."""

    interval_s = 0.0

    def __init__(self) -> None:
        self.count = 0

        self.superseded: str | None = None

    def beat(self, epoch: int) -> str | None:
        self.count += 1
        return self.superseded


def housekeeping(s: Scene, driver: Any, beats: Beats | None = None) -> Housekeeping:
    """Keeps one checkpoint, and begins at once."""
    options = Options(run="run", store="/nowhere/store", staging="/nowhere/staging", save_total_limit=1)
    ports = cast("dict[str, StagerPort]", s.ports)
    owner = cast("Ownership", beats or Beats())
    keeping = Housekeeping(options, s.store, cast("Lane", AtOnce()), owner, driver, ports)
    keeping.hear(Announce(SaveState.COMMITTED, (), AttemptHead("A0", 0, driver.settings.epoch, 0)))
    return keeping


async def saved(driver: Any, *steps: int) -> None:
    """These steps are durable."""
    for step in steps:
        await driver.open_window(step, None, DUE)
        await driver.drain(20)
        await driver.close_window()


def test_a_node_that_fails_to_collect_is_asked_again() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await saved(driver, 1, 2, 3)
        s.ports["n2"].fail["collect"] = StagingError("the staging disk of n2 has not answered")
        keeping = housekeeping(s, driver)
        await keeping._collect()
        assert [c.step for c in driver.checkpoints()] == [3]
        assert sorted(s.ports["n2"].staged) == ["e1-1", "e1-3"] or sorted(s.ports["n2"].staged) == ["e1-2", "e1-3"]
        await keeping._collect()
        assert [sorted(port.staged) for port in s.ports.values()] == [["e1-3"], ["e1-3"]]
        assert driver.leftovers() == {}
        await driver.stop()

    run(scene())


def test_the_story_of_a_collected_checkpoint_does_not_call_it_durable() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await saved(driver, 1, 2)
        await housekeeping(s, driver)._collect()
        told = {step: driver.stories(step, str)[0] for step in (1, 2)}
        assert (told[1].state, told[2].state) == ("collected", "durable")
        assert "save_total_limit" in told[1].events[-1][1]
        await driver.stop()

    run(scene())


def test_nothing_is_collected_while_a_resume_reads() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await saved(driver, 1, 2)
        keeping = housekeeping(s, driver)
        with keeping.at_rest():
            await keeping._collect()
            assert [c.step for c in driver.checkpoints()] == [2, 1]
        await keeping._collect()
        assert [c.step for c in driver.checkpoints()] == [2]
        await driver.stop()

    run(scene())


def test_a_node_that_hangs_in_its_collection_does_not_hold_up_the_owners_sign_of_life() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await saved(driver, 1, 2)
        s.ports["n1"].hang.add("collect")
        beats = Beats()
        work = asyncio.ensure_future(housekeeping(s, driver, beats).run())
        while "collect" not in s.ports["n1"].log:
            await asyncio.sleep(0.1)
        before = beats.count
        await asyncio.sleep(100)
        assert beats.count > before + 50
        work.cancel()
        await driver.stop()

    run(scene())


def test_a_hello_that_was_overtaken_by_a_commit_does_not_hide_it() -> None:
    async def scene() -> None:
        s = Scene()
        s.ports["n1"].members |= s.ports.pop("n2").members
        driver = await s.ready()
        s.store.down = True
        port = s.ports["n1"]
        await driver.open_window(1, None, Decision(False, "not due"))
        answer_now, hello = asyncio.Event(), port.hello

        async def late(*arguments: Any) -> Any:
            answer = await hello(*arguments)
            await answer_now.wait()
            return answer

        port.hello = late  # type: ignore[method-assign]
        hearing = asyncio.ensure_future(driver.add_node(port))
        await asyncio.sleep(0.1)
        await driver.save(manual("r"))
        assert (await driver.wait("r", SaveState.COMMITTED, 20)).committed
        answer_now.set()
        await hearing
        assert [c.step for c in driver.checkpoints()] == [1]
        await driver.stop()

    run(scene())


@pytest.mark.parametrize("knows", [True, False], ids=["it knows", "only the store knows"])
def test_a_coordinator_that_was_superseded_collects_nothing(knows: bool) -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await saved(driver, 1, 2)
        beats = Beats()
        keeping = housekeeping(s, driver, beats)
        if knows:
            with pytest.raises(FencedError):
                driver.fence("epoch 2 was claimed in the store by a newer coordinator")
        else:
            beats.superseded = "epoch 2 was claimed in the store by a newer coordinator"
        before = s.store.list("")
        with contextlib.suppress(FencedError):
            await keeping._collect()
        assert s.store.list("") == before
        assert [sorted(port.staged) for port in s.ports.values()] == [["e1-1", "e1-2"], ["e1-1", "e1-2"]]
        await driver.stop()

    run(scene())
