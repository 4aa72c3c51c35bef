"""Saves that were asked for survive the coordinator that took them in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lastgood.coordinator.messages import Progress, RoleDeclaration, SaveState
from lastgood.coordinator.restore import ResumeTermsOrder
from lastgood.storage.errors import StagingError
from tests.unit.led_world import Led
from tests.unit.memory_world import COMPONENTS, manual

LIMIT_S = 20.0


async def driven() -> Led:
    """A run that a driver leads, in mid-update after its first step."""
    w = Led(save_freq=None)
    await w.start()
    for rank, port in enumerate(w.ports):
        port.register(rank, f"p{rank}", "m1")
    await w.service.declare(RoleDeclaration("actor", 2, COMPONENTS, "m1"))
    await w.service.resume("none", ResumeTermsOrder(LIMIT_S))
    await step(w, 1)
    return w


async def step(w: Led, number: int) -> None:
    """One step, and the next update begins."""
    await w.service.end_step(number, {}, Progress(), again=False)
    await w.driver.settle(LIMIT_S)
    await w.service.before_update()


async def restarted(w: Led) -> None:
    await w.kill()
    await w.start()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not done():
            await asyncio.sleep(0.01)


def play(scene: Callable[[Led], Awaitable[None]]) -> None:
    """The scene of a run that is in mid-update after its first step."""

    async def whole() -> None:
        w = await driven()
        try:
            await scene(w)
        finally:
            await w.kill()

    asyncio.run(whole())


def tags(w: Led) -> list[tuple[int, str | None]]:
    return [(found.step, found.tag) for found in w.service.checkpoints()]


def test_a_save_that_waited_for_the_updates_end_is_made_under_the_next_coordinator() -> None:
    async def scene(w: Led) -> None:
        outcome = await w.service.save(manual("r", tag="best"))
        assert outcome.waits_for is not None
        await restarted(w)
        assert tags(w) == []
        await step(w, 2)
        assert tags(w) == [(2, "best")]
        assert (await w.service.wait("r", SaveState.COMMITTED, LIMIT_S)).committed
        await until(lambda: all(port.requests == () for port in w.ports))  # it is over
        await restarted(w)
        await step(w, 3)
        assert tags(w) == [(2, "best")]

    play(scene)


def test_one_stager_that_remembers_is_enough() -> None:
    async def scene(w: Led) -> None:
        w.ports[0].fail["remember"] = StagingError("n1 is restarted just now")
        await w.service.save(manual("r", tag="best"))
        await restarted(w)
        await step(w, 2)
        assert tags(w) == [(2, "best")]

    play(scene)


def test_a_save_that_has_failed_is_not_made_later() -> None:
    async def scene(w: Led) -> None:
        for port in w.ports:
            port.fail["stage"] = StagingError("no space")
        await w.service.save(manual("r", tag="best"))
        await w.service.end_step(2, {}, Progress(), again=False)
        assert (await w.service.wait("r", SaveState.COMMITTED, LIMIT_S)).failed
        await w.service.before_update()
        await until(lambda: all(port.requests == () for port in w.ports))
        await restarted(w)
        await step(w, 3)
        assert tags(w) == []

    play(scene)


def test_a_save_that_was_under_way_is_made_once() -> None:
    async def scene(w: Led) -> None:
        await w.service.save(manual("r", tag="best"))
        for port in w.ports:
            port.hang.add("publish")  # every record says accept; nobody was told
        await w.service.end_step(2, {}, Progress(), again=False)
        await until(lambda: all(port.records for port in w.ports))
        for port in w.ports:
            port.hang.clear()
        await restarted(w)
        await w.driver.settle(LIMIT_S)
        await step(w, 3)
        assert tags(w) == [(2, "best")]

    play(scene)
