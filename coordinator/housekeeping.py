"""What a coordinator does for its run beside the saves, every heartbeat: owner.json, retention, leftovers in the store.

A part of the service that nothing waits for. Everything here may be repeated, by this incarnation or the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from ..storage.errors import FencedError, LastgoodError, StoreError, UsageError
from ..storage.lanes import Lane
from ..storage.layout import RunPaths
from ..storage.store import ABANDONED_S, Store
from .commands import Announce
from .driver import Driver
from .messages import AttemptHead, SaveState
from .options import Options
from .ownership import Ownership
from .ports import StagerPort
from .retention import collect_remotely, to_collect

log = logging.getLogger("lastgood.coordinator")
T = TypeVar("T")

STORE_S = 30.0  # for one call to the store
SWEEP_S = 600.0  # for a look at every name of the run in the store


class Housekeeping:
    """The housekeeping of one incarnation. `ports` (by node) is read at every round."""

    def __init__(
        self,
        options: Options,
        store: Store,
        lane: Lane,
        ownership: Ownership,
        led: Driver,
        ports: Mapping[str, StagerPort],
    ) -> None:
        self._options = options
        self._store = store
        self._lane = lane
        self._ownership = ownership
        self._led = led
        self._ports = ports
        self._protected: set[str] = set()
        self._paths = RunPaths("", options.run)
        self._epoch = led.settings.epoch
        self._next_owner_s = 0.0
        self._has_committed = False  # this incarnation has; retention waits for it
        self._resumes = 0  # under way: they may read any checkpoint that was there when they began

    async def run(self) -> None:
        """Until it is cancelled or fenced. Neither a store that is long to look through, nor a deletion that is long,
        nor a node that does not answer holds owner.json up: the run would look as if nobody led it."""
        await asyncio.gather(self._sweep_abandoned(), self._rounds(self._tell_owner), self._rounds(self._collect))

    async def _rounds(self, work: Callable[[], Awaitable[None]]) -> None:
        """A round that fails is logged, and the next one tries again."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            try:
                await work()
            except FencedError as error:
                log.error("%s", error)
                return
            except Exception:
                log.exception("run %s could not be tidied; the next heartbeat tries again", self._options.run)

    def hear(self, announce: Announce) -> None:
        """Retention begins after the first commit of this incarnation."""
        if announce.state is SaveState.COMMITTED and announce.head is not None and announce.head.epoch == self._epoch:
            self._has_committed = True

    def protect(self, resumed: AttemptHead | None) -> None:
        """Retention leaves alone what the run continued from, and not what it continued from before that."""
        self._protected = set() if resumed is None else {resumed.attempt}

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within it nothing is collected."""
        self._resumes += 1
        try:
            yield
        finally:
            self._resumes -= 1

    async def sweep(self, older_than_s: float, limit_s: float) -> int:
        """Removes writes of this run that never finished from the store, see Store.sweep. Raises StoreError."""
        sweep = functools.partial(self._store.sweep, f"{self._paths.run}/", older_than_s)
        return await self._lane.run("sweeping it", sweep, limit_s)

    async def _sweep_abandoned(self) -> None:
        try:
            swept = await self.sweep(ABANDONED_S, SWEEP_S)
        except StoreError as error:
            log.warning("unfinished writes stay in the store for now: %s", error)
            return
        if swept:
            log.info("%d writes that never finished were removed from the store", swept)

    async def _tell_owner(self) -> None:
        """Refreshes owner.json when it is time. Raises FencedError when a newer coordinator leads the run."""
        if time.monotonic() < self._next_owner_s:
            return
        self._next_owner_s = time.monotonic() + self._ownership.interval_s
        try:
            beat = functools.partial(self._ownership.beat, self._epoch)
            superseded = await self._at_store("the coordinator's heartbeat", beat)
        except StoreError as error:
            log.warning("the store did not take this coordinator's heartbeat: %s", error)
            return
        if superseded is not None:
            self._led.fence(superseded)

    async def _collect(self) -> None:
        """Deletes what retention lets go: in the store first, then on every node; always tombstone before files.

        Only once this incarnation has committed: a run that is about to rewind may need any of them. Raises FencedError
        once a newer coordinator leads the run.
        """
        if self._led.core.fenced is not None:
            self._led.fence(self._led.core.fenced)  # raises: whoever took over decides what is kept
        if not self._has_committed or self._resumes:
            return
        for node, heads in self._led.leftovers().items():  # they were away when these were collected
            for head in heads:
                await self._collect_at(node, head, "collected while this node was away")
        for head in self._led.half_collected():  # a death came between tombstone and files
            if not await self._collect_in_store(head, ""):
                return
            self._led.collected(head)
        for checkpoint, reason in to_collect(self._led.checkpoints(), self._options.save_total_limit, self._protected):
            if self._resumes:
                return
            head = checkpoint.head
            if not await self._collect_in_store(head, reason):
                return
            self._led.collected(head)  # the tombstone stands: from here on nobody is offered it
            for node in list(self._ports):
                await self._collect_at(node, head, reason)
            log.info("step %d (attempt %s) collected: %s", head.step, head.attempt, reason)

    async def _collect_in_store(self, head: AttemptHead, reason: str) -> bool:
        """The store's part; False when the store does not let it be done now. Raises FencedError."""

        def collect() -> str | None:
            superseded = self._ownership.beat(self._epoch)
            if superseded is None:
                collect_remotely(self._store, self._paths, head, reason)
            return superseded

        try:
            superseded = await self._at_store(f"collecting step {head.step}", collect)
        except StoreError as error:
            log.warning("step %d (attempt %s) stays in the store for now: %s", head.step, head.attempt, error)
            return False
        if superseded is not None:
            self._led.fence(superseded)  # raises: whoever took over decides what is kept
        return True

    async def _collect_at(self, node: str, head: AttemptHead, reason: str) -> None:
        """One node's part; a node that does not answer does it when it is back (leftovers)."""
        try:
            await self._ports[node].collect(self._epoch, head, reason)
        except FencedError:
            raise
        except UsageError:
            pass  # it holds nothing of it
        except LastgoodError as error:
            log.warning("node %s keeps attempt %s for now: %s", node, head.attempt, error)
            return
        self._led.collected_at(node, head)

    async def _at_store(self, doing: str, work: Callable[[], T]) -> T:
        return await self._lane.run(doing, work, STORE_S)
