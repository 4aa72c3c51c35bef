"""Which copies have begun on a node: from then on no update of a member can change what is copied (gate.py).

With overlapped snapshots end_step returns when that is so everywhere. Used on the stager's event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

_KEEP = 1000  # attempts whose copies are over


class Copies:
    """The copies of one stager, by attempt."""

    def __init__(self) -> None:
        self._awaited: dict[str, set[str]] = {}  # processes that have not begun yet
        self._over: deque[str] = deque(maxlen=_KEEP)
        self._changed = asyncio.Condition()

    def expect(self, attempt: str, processes: Collection[str]) -> None:
        """These processes are told to copy."""
        self._awaited[attempt] = set(processes)

    async def begin(self, attempt: str, process: str) -> None:
        """A process holds its updates back from now on, until its copy has ended."""
        self._awaited.get(attempt, set()).discard(process)
        await self._notify()

    async def end(self, attempt: str) -> None:
        """The copy is over, well or not: nobody waits for its beginning."""
        self._awaited.pop(attempt, None)
        self._over.append(attempt)
        await self._notify()

    async def wait(self, attempt: str) -> None:
        """Returns once every process of the attempt has begun, or the copy is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: attempt in self._over or self._awaited.get(attempt) == set())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
