"""Lanes: a few threads for blocking calls of one kind, so that calls which hang cannot take the threads of another.

The rule: a call that hangs keeps its own thread and nothing else. Whoever waited for it goes on at its limit, and once
every thread of a lane is held by calls that were given up, further ones are refused at once instead of queued.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .errors import LastgoodError

T = TypeVar("T")


class Lane:
    """Threads for one kind of call. Used on one event loop; `what` names the kind in errors ("the store /mnt/ckpts").

    `late` is the class of the error for a call that is not answered in time.
    """

    def __init__(self, what: str, threads: int, late: type[LastgoodError]) -> None:
        self._what = what
        self._late = late
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, f"lastgood-{what.split(' ')[-1][-20:]}")
        self._running: set[Future[Any]] = set()
        self._given_up: dict[Future[Any], tuple[str, float]] = {}  # still running: (what it does, when it began)

    async def run(self, doing: str, work: Callable[[], T], limit_s: float) -> T:
        """Runs `work` on a thread of the lane; `doing` says for people what it does.

        Raises what `work` raises, or `late` when it has not ended (or not begun) within `limit_s` seconds, or at once
        while every thread is held by calls that were given up earlier.
        """
        if len(self._given_up) >= self._count:
            raise self._error(doing, 0.0)
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        running = self._threads.submit(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        waiting = asyncio.wrap_future(running)
        waiting.add_done_callback(_observe)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=limit_s)
            if done:
                return waiting.result()
            raise self._error(doing, limit_s)
        finally:
            if not running.cancel() and not running.done():  # it has begun: its thread is gone until it ends
                self._given_up[running] = (doing, began)
                running.add_done_callback(lambda future: _quietly(loop, self._ended, future))

    def _ended(self, future: Future[Any]) -> None:
        self._given_up.pop(future, None)

    def _error(self, doing: str, waited_s: float) -> LastgoodError:
        now = time.monotonic()
        hanging = "; ".join(f"{what} for {now - began:.0f} s" for what, began in self._given_up.values())
        still = f" (still hanging there: {hanging})" if hanging else ""
        how = f"has not answered within {waited_s:.1f} s" if waited_s else "does not answer, so it was not asked"
        return self._late(
            f"{self._what} {how}: {doing}{still}. Whether it happened is unknown; what is committed stands; look at "
            "its disk or mount.",
            waited_s=waited_s,
        )

    async def rest(self, limit_s: float) -> bool:
        """Waits for calls that run, also those that nobody waits for. Answers whether none runs any more."""
        running = [asyncio.wrap_future(future) for future in list(self._running)]
        if running:
            await asyncio.wait(running, timeout=limit_s)
        return not self._running

    def close(self) -> None:
        """Takes no further calls. Those that run are left alone: a thread that hangs cannot be ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _quietly(loop: asyncio.AbstractEventLoop, call: Callable[[Future[Any]], None], future: Future[Any]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, future)


def _observe(future: asyncio.Future[Any]) -> None:
    """The outcome of a call that nobody waits for any more; it must not be reported as never retrieved."""
    if not future.cancelled():
        future.exception()
