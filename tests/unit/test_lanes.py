"""Calls that hang keep their own thread and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from lastgood.storage.errors import StoreUnavailableError
from lastgood.storage.lanes import Lane


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def lane(threads: int = 2) -> Lane:
    return Lane("the store /mnt/ckpts", threads, StoreUnavailableError)


def test_a_call_answers_or_raises_its_own_error() -> None:
    async def scene() -> None:
        here = lane()
        assert await here.run("adding", lambda: 1 + 1, 60) == 2
        with pytest.raises(TimeoutError, match="its own"):
            await here.run("failing", fail, 60)
        here.close()

    def fail() -> None:
        raise TimeoutError("its own")

    run(scene())


def test_a_call_that_hangs_is_given_up_at_its_limit_and_named() -> None:
    async def scene() -> None:
        here, go_on = lane(), threading.Event()
        with pytest.raises(StoreUnavailableError, match=r"/mnt/ckpts has not answered within .* s: reading x"):
            await here.run("reading x", lambda: go_on.wait(60), 0.02)
        assert await here.run("adding", lambda: 1 + 1, 60) == 2  # on the other thread
        go_on.set()
        here.close()

    run(scene())


def test_nothing_queues_behind_calls_that_hang_and_all_goes_on_when_they_end() -> None:
    async def scene() -> None:
        here, go_on = lane(), threading.Event()
        for number in range(2):
            with pytest.raises(StoreUnavailableError):
                await here.run(f"reading {number}", lambda: go_on.wait(60), 0.02)
        with pytest.raises(StoreUnavailableError, match=r"was not asked: adding .*reading 0 for 0 s; reading 1"):
            await here.run("adding", lambda: 1 + 1, 60)  # at once, not after a minute
        go_on.set()
        while here._given_up:
            await asyncio.sleep(0.001)
        assert await here.run("adding", lambda: 1 + 1, 60) == 2
        here.close()

    run(scene())


def test_a_call_that_never_began_never_runs_once_it_was_given_up() -> None:
    async def scene() -> None:
        here, go_on, ran = lane(1), threading.Event(), threading.Event()
        first = asyncio.ensure_future(here.run("hanging", lambda: go_on.wait(60), 60))
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailableError):
            await here.run("late", ran.set, 0.02)
        go_on.set()
        assert await first
        assert await here.run("adding", lambda: 1 + 1, 60) == 2
        assert not ran.is_set()
        here.close()

    run(scene())


def test_a_caller_that_is_cancelled_leaves_its_thread_to_the_call() -> None:
    async def scene() -> None:
        here, go_on = lane(1), threading.Event()
        call = asyncio.ensure_future(here.run("reading x", lambda: go_on.wait(60), 60))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(StoreUnavailableError, match="reading x"):
            await here.run("adding", lambda: 1 + 1, 60)
        go_on.set()
        here.close()

    run(scene())


def test_a_lane_comes_to_rest_when_calls_that_nobody_waits_for_have_ended() -> None:
    async def scene() -> None:
        here, begun, go_on = lane(), threading.Event(), threading.Event()
        written: list[str] = []

        def write() -> None:
            begun.set()
            go_on.wait(60)
            written.append("whole")

        assert await here.rest(60)
        writing = asyncio.ensure_future(here.run("writing", write, 60))
        assert await asyncio.to_thread(begun.wait, 60)
        writing.cancel()
        assert not await here.rest(0.01)
        go_on.set()
        assert await here.rest(60) and written == ["whole"]
        here.close()

    run(scene())
