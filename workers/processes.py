"""The member processes of one node, as its stager knows them: registrations, order queues, deaths.

One order at a time per process, delivered until answered. A process that dies is noticed at once through its pidfd
(the kernel's word, no heartbeat needed on the same machine); whoever waits for it gets an error that names its members.
All of this lives in memory only: agents register again by themselves when a stager comes back.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..coordinator.messages import MemberId, MemberInfo
from ..storage.errors import DeadlineError, LastgoodError, SnapshotError
from .orders import Answer, Order, OrderKind


@dataclass
class _Pending:
    order: Order
    done: asyncio.Future[Answer]


@dataclass
class _Process:
    """One registered process. `outstanding` was delivered and not yet answered."""

    process: str
    pid: int
    members: dict[MemberId, MemberInfo]
    pidfd: int | None = None
    queue: deque[_Pending] = field(default_factory=deque)
    outstanding: _Pending | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False


class Processes:
    """Registry and mailbox. Used on the stager's event loop only; `changed` is called after a birth or a death."""

    def __init__(self, node: str, changed: Callable[[], None], died: Callable[[str], None]) -> None:
        self._node = node
        self._changed = changed
        self._died = died
        self._processes: dict[str, _Process] = {}

    def register(self, process: str, pid: int, pid_namespace: str, members: Iterable[MemberInfo]) -> None:
        """Takes a process in, or replaces what it had registered."""
        infos = {info.member: info for info in members}
        known = self._processes.get(process)
        if known is not None:
            known.members = infos
        else:
            known = _Process(process, pid, infos)
            self._processes[process] = known
            self._watch(known, pid_namespace)
        # The member of the latest add_members call counts (memberships sort by time), whoever registers last: after a
        # stager's restart an actor that was replaced may come back before the one that replaced it.
        for other in self._processes.values():
            if other is not known:
                for member in infos.keys() & other.members.keys():
                    older = other if other.members[member].membership <= infos[member].membership else known
                    del older.members[member]
        self._changed()

    def unregister(self, process: str) -> None:
        """The process says good-bye (its driver ended)."""
        known = self._processes.get(process)
        if known is not None:
            self._bury(known, "left the run")

    def members(self) -> tuple[MemberInfo, ...]:
        """Every member registered here whose process lives, ordered."""
        return tuple(
            sorted(
                (info for process in self._processes.values() for info in process.members.values()),
                key=lambda info: info.member,
            )
        )

    def count(self) -> int:
        """Live registered processes, those without members too."""
        return len(self._processes)

    def hosts(self, members: Iterable[MemberId] | None = None) -> dict[str, tuple[MemberId, ...]]:
        """Process id -> its members among those named (all when None).

        Raises SnapshotError naming those that no live process here hosts.
        """
        wanted = None if members is None else set(members)
        hosts: dict[str, tuple[MemberId, ...]] = {}
        for process in self._processes.values():
            here = tuple(sorted(m for m in process.members if wanted is None or m in wanted))
            if here:
                hosts[process.process] = here
        if wanted is not None:
            missing = wanted - {member for here in hosts.values() for member in here}
            if missing:
                names = ", ".join(str(member) for member in sorted(missing))
                raise SnapshotError(
                    f"no live process on node {self._node} hosts {names}: it died or has not registered",
                    member=min(missing),
                    node=self._node,
                )
        return hosts

    async def ask(self, process: str, order: Order) -> Answer:
        """Delivers an order and waits for its answer, `order.deadline_s` at most.

        Raises the answer's own error, DeadlineError when it stays silent, SnapshotError when it dies; each names its
        members. An order that was not delivered in time is dropped; one that was is awaited before the next.
        """
        known = self._processes.get(process)
        if known is None or known.dead:
            raise SnapshotError(f"process {process} on node {self._node} is gone", node=self._node)
        pending = _Pending(order, asyncio.get_running_loop().create_future())
        known.queue.append(pending)
        known.wake.set()
        names = ", ".join(str(member) for member in order.members or known.members)
        try:
            answer = await asyncio.wait_for(asyncio.shield(pending.done), order.deadline_s)
        except asyncio.TimeoutError as error:
            if pending in known.queue:
                known.queue.remove(pending)
            state = "has not finished it" if known.outstanding is pending else "did not ask for it"
            raise DeadlineError(
                f"{names} (pid {known.pid}, node {self._node}) {state}: order {order.kind.value} after "
                f"{order.deadline_s:.1f} s. The previous checkpoint stands. Is the process stopped, or its host "
                "overloaded?",
                member=min(order.members or known.members, default=None),
                node=self._node,
                waited_s=order.deadline_s,
            ) from error
        if answer.error is not None:
            raise answer.error
        return answer

    async def ask_all(
        self, hosts: dict[str, tuple[MemberId, ...]], order: Callable[[tuple[MemberId, ...]], Order]
    ) -> list[Answer]:
        """Asks several processes at once; every one is heard (or late) before the first error is raised."""
        answers = await asyncio.gather(
            *(self.ask(process, order(members)) for process, members in hosts.items()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def poll(self, process: str, answer: Answer | None, wait_s: float) -> Order | None:
        """An agent hands in its last answer and gets its next order, NOTHING after `wait_s`, or None when unknown here.

        None tells the agent to register again (this stager was restarted).
        """
        known = self._processes.get(process)
        if known is None or known.dead:
            return None
        if answer is not None and known.outstanding is not None and answer.order_id == known.outstanding.order.order_id:
            if not known.outstanding.done.done():
                known.outstanding.done.set_result(answer)
            known.outstanding = None
        if known.outstanding is None and not known.queue:
            known.wake.clear()
            try:
                await asyncio.wait_for(known.wake.wait(), wait_s)
            except asyncio.TimeoutError:
                return Order("", OrderKind.NOTHING, 0, wait_s)
            if known.dead:
                return None
        if known.outstanding is None and known.queue:
            known.outstanding = known.queue.popleft()
        if known.outstanding is None:
            return Order("", OrderKind.NOTHING, 0, wait_s)
        return known.outstanding.order  # delivered anew while unanswered

    def close(self) -> None:
        """Answers every poll and every order that waits; the agents look for another stager."""
        for known in list(self._processes.values()):
            self._bury(known, "lost its stager")

    def _watch(self, known: _Process, pid_namespace: str) -> None:
        if pid_namespace != pid_namespace_of_this_process():
            return  # its pid means nothing here; the deadlines of orders notice its death
        try:
            known.pidfd = os.pidfd_open(known.pid)
        except ProcessLookupError:
            self._bury(known, "died")
            return
        asyncio.get_running_loop().add_reader(known.pidfd, self._bury, known, "died")

    def _bury(self, known: _Process, how: str) -> None:
        if known.dead:
            return
        known.dead = True
        if known.pidfd is not None:
            asyncio.get_running_loop().remove_reader(known.pidfd)
            os.close(known.pidfd)
        self._processes.pop(known.process, None)
        waiting = [*([known.outstanding] if known.outstanding else []), *known.queue]
        for pending in waiting:
            if not pending.done.done():
                pending.done.set_result(Answer(pending.order.order_id, error=self._death(known, pending.order, how)))
        known.wake.set()
        self._died(known.process)
        self._changed()

    def _death(self, known: _Process, order: Order, how: str) -> LastgoodError:
        members = order.members or tuple(sorted(known.members))
        names = ", ".join(str(member) for member in members)
        return SnapshotError(
            f"{names} (pid {known.pid}, node {self._node}) {how} during {order.kind.value}. The previous checkpoint "
            "stands.",
            member=min(members, default=None),
            node=self._node,
        )


def pid_namespace_of_this_process() -> str:
    """Names the pid namespace, so that a pid from another one is never mistaken for one of ours."""
    return str(Path("/proc/self/ns/pid").readlink())
