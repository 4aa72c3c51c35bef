"""The nodes of a run and the members on them, as they were last heard: who is there, who is missing, who may come back.

A part of the service: it asks stagers, and decides nothing about saves. What a stager says goes to the driver first
(`Driver.add_node`), which knows what lies on its disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ..storage.errors import FencedError
from .driver import Driver
from .messages import Inventory, MemberId, MemberInfo, RoleDeclaration, SaveRequest
from .outcomes import Missing
from .ports import Discover, StagerPort
from .runner import answer_within

log = logging.getLogger("lastgood.coordinator")

RETURN_POLL_S = 0.1
HEARTBEAT_MISSES = 5  # heartbeats a stager may miss before it counts as lost


class Nodes:
    """All by node name. `led` gives the driver once there is one; `hear` is told every inventory."""

    def __init__(
        self, discover: Discover, led: Callable[[], Driver], hear: Callable[[Inventory], None], heartbeat_s: float
    ) -> None:
        self.ports: dict[str, StagerPort] = {}
        self.members: dict[str, tuple[MemberInfo, ...]] = {}  # registered, of processes that live
        self.processes: dict[str, int] = {}  # live processes that are registered
        self.incarnations: dict[str, str] = {}  # of their stagers
        self._trouble: dict[int, str] = {}  # by id of the port: why it did not answer the last hello
        self.silent: set[str] = set()  # nodes whose stagers did not answer the last hello
        self.marked_steps: set[int | None] = set()  # of the nodes with members, at boot
        self.wishes: dict[str, Sequence[SaveRequest]] = {}  # saves that are not over, as each node's stager remembers
        self.awaited: set[str] = set()  # memberships whose members may be anywhere: whoever knew it has died
        self.ending = False  # stagers that do not answer are no news any more
        self._discover = discover
        self._led = led
        self._hear = hear
        self._heartbeat_s = heartbeat_s
        self._homes: dict[tuple[str, int, str], tuple[str, str]] = {}  # role, rank, membership -> node, incarnation
        self._refreshing = asyncio.Lock()
        self._changed: set[str] = set()  # nodes that told of changed registrations and were not said hello to since
        self._missed: dict[str, int] = {}  # heartbeats in a row

    def _declared(self) -> Mapping[str, RoleDeclaration]:
        return self._led().core.membership.declarations

    async def discover(self) -> list[StagerPort]:
        """Stagers that live, also those that were not met."""
        return list(await self._discover())

    async def refresh(self) -> None:
        """Says hello to every stager that lives: new nodes, restarted stagers, changed registrations."""
        if self.ending:
            return
        async with self._refreshing:
            self._changed.clear()
            ports = await self.discover()
            await self.meet(ports)
            there = set(map(id, ports))
            self.silent = {node for node in self.silent if id(self.ports[node]) in there}
            self._trouble = {known: why for known, why in self._trouble.items() if known in there}

    async def node_changed(self, node: str) -> None:
        """A stager's registrations changed: says hello to it alone. Changes that wait for their turn share one hello.

        Every member's registration is told so; to ask every node each time would cost members x nodes calls.
        """
        self._changed.add(node)
        async with self._refreshing:
            if self.ending or node not in self._changed:
                return  # a hello that was sent after this change has told it
            changed, self._changed = self._changed, set()
            ports = [self.ports[known] for known in sorted(changed) if known in self.ports]
            if len(ports) < len(changed):  # new ones, of which only the names are known
                ports += await self._strangers()
            if not await self.meet(ports):
                await self.meet(await self._strangers())  # the directory may have gone to another stager

    async def _strangers(self) -> list[StagerPort]:
        """Stagers that live and have not been met."""
        known = set(map(id, self.ports.values()))
        return [port for port in await self.discover() if id(port) not in known]

    async def meet(self, ports: Sequence[StagerPort]) -> bool:
        """Says hello to these; answers whether all of them have answered."""
        everyone = True
        answers = await asyncio.gather(*(self._led().add_node(port) for port in ports), return_exceptions=True)
        for port, answer in zip(ports, answers, strict=True):
            if isinstance(answer, FencedError):
                raise answer
            if isinstance(answer, BaseException):
                log.log(logging.INFO if self.ending else logging.WARNING, "a stager does not answer: %s", answer)
                everyone = False
                self._trouble[id(port)] = str(answer) or type(answer).__name__
                self.silent.update(node for node, known in self.ports.items() if known is port)
                continue
            self.silent.discard(answer.node)
            self._trouble.pop(id(port), None)
            self.ports[answer.node] = port
            self.members[answer.node] = answer.members
            self.processes[answer.node] = answer.processes
            self.incarnations[answer.node] = answer.incarnation
            self._hear(answer)
            self.wishes[answer.node] = answer.requests
            if answer.members:
                self.marked_steps.add(answer.marked_step)
            for info in answer.members:
                home = (info.member.role, info.member.rank, info.membership)
                self._homes[home] = (answer.node, answer.incarnation)
        return everyone

    def count_members(self) -> int:
        """Registered members whose processes live."""
        return sum(len(infos) for infos in self.members.values())

    def processes_of(self, role: str) -> list[str]:
        """Ids of the live processes that host members of a role."""
        return sorted({info.process for infos in self.members.values() for info in infos if info.member.role == role})

    def missing(self) -> Missing:
        """Declared members that no live process hosts."""
        there = {
            (info.member.role, info.member.rank, info.membership) for infos in self.members.values() for info in infos
        }
        absent = [
            f"{declaration.role}:{rank}"
            for declaration in self._declared().values()
            for rank in range(declaration.world_size)
            if (declaration.role, rank, declaration.membership) not in there
        ]
        return Missing(tuple(absent), tuple(sorted(set(self._trouble.values()))) if absent else ())

    async def await_return(self, until: float) -> None:
        """Waits for members whose stager is gone or was restarted: their agents register again by themselves.

        Until `until` on the monotonic clock at most; a member that its living stager has seen die is not waited for.
        """
        await self.refresh()
        while self.returning() and time.monotonic() < until:
            await asyncio.sleep(RETURN_POLL_S)
            await self.refresh()
        self.awaited.clear()

    def returning(self) -> list[str]:
        """Members that may be back in a moment: their stager does not answer, or is another one than they knew."""
        missing = set(self.missing().members)
        return [
            f"{role}:{rank}"
            for (role, rank, membership), (node, incarnation) in self._homes.items()
            if role in self._declared()
            and self._declared()[role].membership == membership
            and (node in self.silent or (f"{role}:{rank}" in missing and self._is_gone(node, incarnation)))
        ] + [name for name in missing if self._declared()[name.partition(":")[0]].membership in self.awaited]

    def _is_gone(self, node: str, incarnation: str) -> bool:
        return node not in self._led().core.heard or self.incarnations.get(node) != incarnation

    def forget_replaced(self, declaration: RoleDeclaration) -> None:
        """The role's members of earlier memberships are not waited for any more."""
        role, membership = declaration.role, declaration.membership
        self._homes = {home: at for home, at in self._homes.items() if home[0] != role or home[2] == membership}

    def with_declared_members(self) -> dict[str, StagerPort]:
        """Stagers of the nodes that host members which count now.

        A node that has just vanished is still listed with the members it had; those that took their place do count.
        """
        return {node: self.ports[node] for node in self.declared_members()}

    def declared_members(self) -> dict[str, tuple[MemberId, ...]]:
        """The members that count now, by node; see with_declared_members."""
        now = {(declared.role, declared.membership) for declared in self._declared().values()}
        counting = {
            node: tuple(sorted(info.member for info in infos if (info.member.role, info.membership) in now))
            for node, infos in self.members.items()
        }
        return {node: members for node, members in counting.items() if members}

    async def feel_pulses(self) -> None:
        """Asks every stager for a sign of life. Raises FencedError."""
        await asyncio.gather(*(self._feel_pulse(node) for node in list(self.ports)))

    async def _feel_pulse(self, node: str) -> None:
        """After HEARTBEAT_MISSES in a row the node counts as lost."""
        missed = self._missed
        try:
            limit_s = self._heartbeat_s * HEARTBEAT_MISSES
            await answer_within(self.ports[node].highest_epoch(), limit_s, f"the stager of node {node}", "a heartbeat")
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this stager does not answer as it should
            missed[node] = missed.get(node, 0) + 1
            if missed[node] == HEARTBEAT_MISSES:
                self.members[node] = ()
                self.processes[node] = 0
                self._led().lose_node(node, f"{missed[node]} heartbeats in a row: {error}")
            await self.refresh()  # it may have come back under another handle
            return
        if missed.pop(node, 0):
            await self.refresh()
