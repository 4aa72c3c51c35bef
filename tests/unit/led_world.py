"""A member-led run without Ray: a real Service over ports in memory, and ranks made of a real Pace."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lastgood.coordinator.driver import Driver
from lastgood.coordinator.messages import Grant, Inventory, MemberId, MemberInfo, RankClaim, RankReport
from lastgood.coordinator.options import Options
from lastgood.coordinator.ownership import Identity
from lastgood.coordinator.ports import Notice
from lastgood.coordinator.restore import ResumeTermsOrder
from lastgood.coordinator.service import Service
from lastgood.storage.errors import StoreUnavailableError
from lastgood.storage.lanes import Lane
from lastgood.workers.pace import Pace
from tests.unit.memory_world import COMPONENTS, MemoryPort, MemoryStore


class LedPort(MemoryPort):
    """A node whose members lead. `infos_` are the registered members."""

    def __init__(self, node: str, store: MemoryStore) -> None:
        super().__init__(node, {}, store)
        self.name = node
        self.registered: dict[MemberId, MemberInfo] = {}
        self.granted: Grant | None = None
        self.paces: dict[MemberId, Pace] = {}
        self.deaf = False

    @property
    def granted_step(self) -> int:
        """How far its ranks may go; -1 before the first grant."""
        return -1 if self.granted is None else self.granted.step

    def infos(self) -> tuple[MemberInfo, ...]:
        return tuple(self.registered.values())

    async def hello(self, epoch: int, declarations: Sequence[Any]) -> Inventory:
        found = await super().hello(epoch, declarations)
        return dataclasses.replace(found, processes=len(self.registered), granted=self.granted)

    async def highest_epoch(self) -> int:
        return self.epoch

    async def grant(self, epoch: int, grant: Grant) -> None:
        await self._pass("grant", epoch)
        if self.granted is None or grant.order > self.granted.order:
            self.granted = grant
        for pace in self.paces.values():
            pace.take(grant, epoch)

    async def load(self, epoch: int, head: Any, request: Any, deadline_s: float, members: Any) -> None:
        await self._pass("load", epoch)

    async def apply(self, epoch: int, head: Any, deadline_s: float, members: Any) -> None:
        await self._pass("apply", epoch)
        self.step = head.step

    async def forget(self, epoch: int) -> None:
        await self._pass("forget", epoch)

    async def collect(self, epoch: int, head: Any, reason: str) -> None:
        await self._pass("collect", epoch)
        for where in (self.staged, self.completed, self.records, self.heads):
            where.pop(head.attempt, None)

    async def close_down(self) -> None:
        self.log.append("close_down")

    def register(self, rank: int, process: str, membership: str, size: int = 2, role: str = "actor") -> None:
        member = MemberId(role, rank)
        self.members[member] = size
        self.registered[member] = MemberInfo(
            member, size, COMPONENTS, membership, process, 1, {f"{role}.size": size}, False
        )
        self.paces[member] = Pace()

    def die(self, rank: int, role: str = "actor") -> None:
        self.registered.pop(MemberId(role, rank), None)
        self.paces.pop(MemberId(role, rank), None)
        self.members.pop(MemberId(role, rank), None)


class Led:
    """Two nodes, one rank each, and a coordinator."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        self.ports = [LedPort("n1", self.store), LedPort("n2", self.store)]
        self.ended: list[str] = []
        self.notices: list[Notice] = []
        self.going: asyncio.Future[None] | None = None  # a group that trains on by itself
        self.options = Options(
            run="run", store="/nowhere/store", staging="/nowhere/staging", **{"heartbeat_s": 0.05, **options}
        )
        self.service: Service = None  # type: ignore[assignment]

    async def start(self) -> Service:
        async def discover() -> Sequence[Any]:
            return [port for port in self.ports if not port.deaf]

        async def shut_down() -> None:
            self.ended.append("ended")

        async def notices() -> Sequence[Notice]:
            return tuple(self.notices)

        lane = Lane("memory", 2, StoreUnavailableError)
        self.service = Service(
            self.options,
            self.store,
            lane,
            Identity("c", "token", "here"),
            discover,
            shut_down,
            notices,
        )
        await self.service.boot()
        return self.service

    @property
    def driver(self) -> Driver:
        assert self.service.driver is not None, "boot makes it"
        return self.service.driver

    async def kill(self) -> None:
        """The coordinator is killed: its tasks end without a word."""
        service = self.service
        service.nodes.ending = True
        for task in list(service._tasks):
            task.cancel()
        assert service.driver is not None
        await service.driver.stop()

    async def join(self, generation: str, size: int = 2, role: str = "actor") -> str:
        claims = [
            RankClaim(
                f"{generation}-{rank}", role, rank, size, COMPONENTS, f"{generation}-p{rank}", f"pid {generation}{rank}"
            )
            for rank in range(size)
        ]
        gathering = self.service.member_led.gathering
        told = await asyncio.gather(*(gathering.join(claim, 20.0) for claim in claims))
        membership = told[0]
        assert membership is not None
        for rank in range(size):
            self.ports[rank % 2].register(rank, f"{generation}-p{rank}", membership, size, role)
        await self.service.nodes.refresh()
        return membership

    def resume(
        self,
        rank: int,
        membership: str,
        after: Any = None,
        mode: Any = "auto",
        deadline_s: float = 5.0,
        role: str = "actor",
    ) -> asyncio.Future[Any]:
        terms = ResumeTermsOrder(deadline_s)
        return asyncio.ensure_future(
            self.service.member_led.resume(MemberId(role, rank), membership, after, mode, terms)
        )

    def end(self, step: int, line: Any, ranks: Sequence[int] = (0, 1), step_s: float | None = 1.0) -> None:
        """These ranks have ended `step`, and say so."""
        for rank in ranks:
            port = self.ports[rank % 2]
            port.step, port.updating, port.updates = step, False, step
        self.service.member_led.report([RankReport(MemberId("actor", rank), line.key, step, step_s) for rank in ranks])


async def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not done():
            await asyncio.sleep(0.01)


def run(scene: Any, limit_s: float = 20.0) -> None:
    """Runs a scene; whatever still runs at its end is cancelled until it is gone."""

    async def whole() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await scene
        finally:
            for _ in range(20):
                left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=0.2) if left else None

    asyncio.run(whole())
