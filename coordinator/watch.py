"""What a service does by itself at every heartbeat: feels its stagers' pulses, heeds notices, ends when nobody is left.

A part of the service. Asks the store nothing, so that a store that hangs holds none of it up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..storage.errors import FencedError, UsageError
from .driver import Driver
from .messages import SaveKind, SaveRequest, SaveState
from .ports import Notice, Notices
from .report import improving

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("lastgood.coordinator")


@dataclass
class _Try:
    """The last save that was asked for because of one notice."""

    number: int
    request_id: str
    next_s: float  # not asked for again before, by time.monotonic


class Watch:
    """Of one incarnation that has booted. `notices` tells which of the run's nodes are about to go."""

    def __init__(self, service: Service, driver: Driver, notices: Notices) -> None:
        self._service = service
        self._driver = driver
        self._nodes = service.nodes
        self._options = service.options
        self._notices = notices
        self._tried: dict[str, _Try] = {}  # by the notice's key

    async def over_life(self) -> None:
        """Notices stagers that stop or come back, and ends the run when nobody is left."""
        alone_since_s: float | None = None
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            try:
                await self._nodes.feel_pulses()
                if any(self._nodes.processes.values()):
                    alone_since_s = None
                    continue
                alone_since_s = alone_since_s if alone_since_s is not None else time.monotonic()
                if time.monotonic() - alone_since_s > self._options.linger_s and await self._may_end():
                    await self._service.end()
                    return
            except FencedError as error:
                log.error("%s", error)
                return
            except Exception:
                log.exception("one heartbeat of run %s failed; the next one tries again", self._options.run)

    async def _may_end(self) -> bool:
        """Nobody of the run has lived for linger_s: it ends once everything committed is durable, or can never be."""
        run, limit_s = self._options.run, self._options.upload_deadline_s
        log.warning("no process of run %s for %.0f s: it ends when it is durable", run, self._options.linger_s)
        drained = await self._driver.drain(limit_s)
        if any(self._nodes.processes.values()):
            return False  # somebody came meanwhile
        for sentence in drained.lagging:
            log.error("run %s is not durable after %.0f s: %s", run, limit_s, sentence)
        return not improving(self._driver.core)

    async def over_notices(self) -> None:
        """Saves the last finished step when a node of the run is about to be taken away.

        By itself, since it asks the cluster, which may hang: that holds nothing else up.
        """
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            try:
                for notice in await self._notices():
                    if await self._unheeded(notice):
                        await self._save_for(notice)
            except FencedError as error:
                log.error("%s", error)
                return
            except Exception:
                log.exception("run %s could not look for notices; the next heartbeat tries again", self._options.run)

    async def _unheeded(self, notice: Notice) -> bool:
        """Whether a save is to be asked for: none is committed or under way, and another one could be made in time.

        Pauses between tries double: each one that fails counts for on_failure.
        """
        tried = self._tried.get(notice.key)
        if tried is None:
            return True
        try:
            outcome = await self._driver.wait(tried.request_id, SaveState.COMMITTED, 0.0)
        except UsageError:
            return False  # so many saves ago that nobody remembers it
        in_time = notice.left_s is None or notice.left_s > 0
        possible = not self._driver.core.membership.problems() and time.monotonic() >= tried.next_s
        return outcome.failed and in_time and possible

    async def _save_for(self, notice: Notice) -> None:
        """With no deadline of its own, even when it may come too late: half a chance is better than none."""
        log.warning("%s: the last finished step is saved", notice.reason)
        forecast = self._driver.core.timings.forecast(None)
        if notice.left_s is not None and forecast is not None and forecast.late_phase(notice.left_s) is not None:
            log.error("%s: a save needs %.1f s as a rule, so this one may be lost", notice.reason, forecast.total_s)
        number = self._tried[notice.key].number + 1 if notice.key in self._tried else 1
        request_id = f"notice-{self._service.epoch}-{notice.key}" + (f"-{number}" if number > 1 else "")
        request = SaveRequest(request_id, SaveKind.MANUAL, notice.reason, None, "the cluster")
        outcome = await self._service.save(request)
        next_s = time.monotonic() + self._options.heartbeat_s * 2 ** (number - 1)
        self._tried[notice.key] = _Try(number, request_id, next_s)
        if outcome.blame is not None:
            log.error("%s, and no save is made until that is mended: %s", notice.reason, outcome.blame)
