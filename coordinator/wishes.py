"""Saves that somebody has asked for and that are not over, as the stagers remember them for the next coordinator.

A part of the service. Whoever waits for a save asks again by itself after a restart; a job that has asked and gone on
does not. Each request is served once, however often it comes: its id stands in the manifest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from .commands import Announce
from .messages import SaveKind, SaveRequest, SaveState
from .outcomes import COMMITTED_OR_BEYOND
from .ports import StagerPort
from .runner import answer_within

log = logging.getLogger("lastgood.coordinator")

TELL_S = 5.0  # until a stager that does not answer is passed over; one that remembers is enough


class Wishes:
    """Of one incarnation. `ports` is read at every call; `background` runs something beside the answers."""

    def __init__(
        self, ports: Mapping[str, StagerPort], epoch: int, background: Callable[[Awaitable[None]], object]
    ) -> None:
        self._ports = ports
        self._epoch = epoch
        self._background = background
        self._open: dict[str, SaveRequest] = {}
        self._telling = asyncio.Lock()

    def note(self, request: SaveRequest) -> None:
        """A request is about to be taken in. Those of the run itself come again with its next step."""
        if request.kind is SaveKind.MANUAL:
            self._open[request.request_id] = request

    async def keep(self, request: SaveRequest) -> None:
        """Returns once the stagers know of it, or nothing is left to remember."""
        if request.request_id in self._open:
            await self._tell()

    def hear(self, announce: Announce) -> None:
        """What is committed, or has failed and was told so, is over."""
        if announce.state is not SaveState.ABORTED and announce.state not in COMMITTED_OR_BEYOND:
            return
        over = [request_id for request_id in announce.request_ids if self._open.pop(request_id, None) is not None]
        if over:
            self._background(self._tell())

    async def _tell(self) -> None:
        async with self._telling:  # an older list must not arrive after a newer one
            wishes = tuple(self._open.values())
            answers = await asyncio.gather(
                *(
                    answer_within(port.remember(self._epoch, wishes), TELL_S, f"the stager of {node}", "remember")
                    for node, port in list(self._ports.items())
                ),
                return_exceptions=True,
            )
        for answer in answers:
            if isinstance(answer, BaseException):
                log.info("a stager does not remember what was asked for: %s", answer)
