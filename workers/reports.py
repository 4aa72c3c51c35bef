"""Reports of a node's ranks on their way to the coordinator. The rule: one call at a time, the newest of each rank.

While a call is out, what comes in is kept for the next; so however many ranks a node has and however fast they are,
the coordinator hears one call per node and round trip. A report that is lost is told again while its rank waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..coordinator.messages import MemberId, RankReport


class ReportBatch:
    """Used on one event loop. `send` must not raise."""

    def __init__(self, send: Callable[[Sequence[RankReport]], Awaitable[None]]) -> None:
        self._send = send
        self._newest: dict[MemberId, RankReport] = {}
        self._sending: asyncio.Task[None] | None = None

    def add(self, report: RankReport) -> None:
        """Takes a report in; an older one of the same rank that was not sent yet is dropped."""
        self._newest[report.member] = report
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while self._newest:
            reports, self._newest = tuple(self._newest.values()), {}
            await self._send(reports)
