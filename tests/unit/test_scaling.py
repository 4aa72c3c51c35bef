"""What a save costs the coordinator grows with the number of nodes, not with its square. Counted, never timed.

Counted are commands, calls, and the lines of Python that run (a loop over all nodes for each node shows at once). The
nodes' names are strings that compare in Python, so that a search which C code does in a list or tuple shows too.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.commits import HandDriven, recovery, service_of
from benchmarks.fleet import Fleet
from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.answers import failure
from lastgood.coordinator.messages import Progress, RecordState
from lastgood.coordinator.moves import Phase
from lastgood.storage.errors import StagingError
from lastgood.storage.manifest import Manifest

SMALL, LARGE = 80, 1600  # members: 10 and 200 nodes
MOST = 20.2  # times the lines for twenty times the nodes; the counts are exact, and one loop too many shows


class CountedName(str):
    """A node's name whose comparisons are lines of Python."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return str.__ne__(self, other)

    def __lt__(self, other: str) -> bool:
        return str.__lt__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python ran, those of comprehensions and generators each time round."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def ready(members: int, kind: type[HandDriven] = HandDriven, *, manifests: bool = False) -> HandDriven:
    hand = kind(Fleet(members, 1, CountedName), manifests=manifests)
    hand.meet()
    return hand


class LastNodeFails(HandDriven):
    """The last node cannot stage: the save is refused and discarded everywhere."""

    def answer(self, command: cmd.AttemptCommand) -> ev.Event:
        if isinstance(command, cmd.Stage) and command.node == list(self.fleet.nodes)[-1]:
            return failure(command, StagingError("the disk is full"))
        return super().answer(command)

    def abort(self) -> None:
        reports = {node: self.fleet.snapshot(node, 1, 0) for node in self.fleet.nodes}
        self.feed(ev.WindowOpened(1, reports, due=_DUE))
        self.answer_all()
        (attempt,) = self.core.attempts.values()
        assert attempt.phase is Phase.ABORTED and attempt.blame is not None and "full" in attempt.blame.reason


class LastNodeRefuses(HandDriven):
    """All others have accepted already: every record is looked at before anything is deleted."""

    def answer(self, command: cmd.AttemptCommand) -> ev.Event:
        if isinstance(command, cmd.Accept) and command.node == list(self.fleet.nodes)[-1]:
            return ev.Accepted(command.head.attempt, command.node, RecordState.REFUSE)
        if isinstance(command, cmd.Accept):
            return failure(command, StagingError("it is not known whether it landed"))
        return super().answer(command)

    def abort(self) -> None:
        self.feed(ev.WindowOpened(1, {n: self.fleet.snapshot(n, 1, 0) for n in self.fleet.nodes}, due=_DUE))
        self.answer_all()
        (attempt,) = self.core.attempts.values()
        assert attempt.phase is Phase.ABORTED and len(attempt.discarded) == len(self.fleet.nodes)


class EveryNodeFailsOnce(HandDriven):
    """Every node's publish fails at first: all of them are asked again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.failed: set[str] = set()

    def answer(self, command: cmd.AttemptCommand) -> ev.Event:
        if isinstance(command, cmd.Publish) and command.node not in self.failed:
            self.failed.add(command.node)
            return failure(command, StagingError("the disk is slow"))
        return super().answer(command)

    def retried(self) -> None:
        self.feed(ev.WindowOpened(1, {n: self.fleet.snapshot(n, 1, 0) for n in self.fleet.nodes}, due=_DUE))
        self.answer_all()
        while (wake_s := self.core.next_wakeup_s()) < self.now_s + 60:
            self.now_s = wake_s
            self.feed(ev.Tick())
            self.answer_all()
        (attempt,) = self.core.attempts.values()
        assert attempt.phase is Phase.DURABLE and attempt.finished and len(self.failed) == len(self.fleet.nodes)


_DUE = ev.Decision(True, "every step")


def commit(members: int) -> Callable[[], Any]:
    hand = ready(members)
    return lambda: hand.commit(1)


def commit_with_manifest(members: int) -> Callable[[], Any]:
    hand = ready(members, manifests=True)
    return lambda: hand.commit(1)


def step(members: int) -> Callable[[], Any]:
    hand = ready(members)
    hand.commit(1)
    return lambda: hand.step(2)


def abort(members: int) -> Callable[[], Any]:
    hand = ready(members, LastNodeFails)
    assert isinstance(hand, LastNodeFails)
    return hand.abort


def refused(members: int) -> Callable[[], Any]:
    hand = ready(members, LastNodeRefuses)
    assert isinstance(hand, LastNodeRefuses)
    return hand.abort


def heard_in_mid_save(members: int) -> Callable[[], Any]:
    hand = ready(members)
    hand.feed(ev.WindowOpened(1, {n: hand.fleet.snapshot(n, 1, 0) for n in hand.fleet.nodes}, due=_DUE))

    def hear() -> None:
        for node in hand.fleet.nodes:
            hand.feed(ev.NodeHeard(hand.fleet.inventory(node, 5), asked_s=hand.now_s))
        assert hand.core.copying and len(hand.core.heard) == len(hand.fleet.nodes)

    return hear


def retries(members: int) -> Callable[[], Any]:
    hand = ready(members, EveryNodeFailsOnce)
    assert isinstance(hand, EveryNodeFailsOnce)
    return hand.retried


def recover(members: int) -> Callable[[], Any]:
    fleet = Fleet(members, 1, CountedName)
    return lambda: recovery(fleet, 3)


@pytest.mark.parametrize(
    "scene",
    [
        commit,
        commit_with_manifest,
        step,
        abort,
        refused,
        heard_in_mid_save,
        retries,
        recover,
    ],
)
def test_the_work_grows_with_the_nodes_not_with_their_square(scene: Callable[[int], Callable[[], Any]]) -> None:
    small, large = (lines_run(scene(members)) for members in (SMALL, LARGE))
    assert small > 100, "nothing was counted"
    assert large <= MOST * small, f"{small} lines for {SMALL} members, {large} for {LARGE}"


def test_a_commit_takes_six_calls_per_node_and_three_for_the_run() -> None:
    for members in (8, SMALL, LARGE):
        cost = ready(members).commit(1)
        nodes = members // 8
        per_node = ("Snapshot", "Stage", "Accept", "Publish", "Upload", "NoteDurable")
        assert {name: cost.commands[name] for name in per_node} == dict.fromkeys(per_node, nodes)
        once = ("BuildManifest", "WriteLedger", "CompleteRemotely")
        assert [cost.commands[name] for name in once] == [1, 1, 1]
        assert cost.events.total() == 6 * nodes + 3 + 1  # and the window


def test_the_manifest_grows_with_the_members() -> None:
    small, large = (ready(members, manifests=True).commit(1).manifest_bytes for members in (SMALL, LARGE))
    assert 18 < large / small < 21


def test_a_save_reads_no_manifest_that_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one of 10,000 members takes seconds."""
    read: list[str] = []
    whole = Manifest.from_bytes.__func__

    def from_bytes(kind: type[Manifest], data: bytes, *, where: str) -> Manifest:
        read.append(where)
        return whole(kind, data, where=where)

    monkeypatch.setattr(Manifest, "from_bytes", classmethod(from_bytes))

    async def scene() -> None:
        service, _ = service_of(Fleet(SMALL, 1), Counter())
        await service.boot()
        assert service.driver is not None
        listed: list[str] = []  # while it is committed and not in the store yet, too
        service.driver.on_announce.append(lambda said: listed.extend(c.kind for c in service.checkpoints()))
        for number in (1, 2):
            told = await service.end_step(number, {}, Progress(), False)
            assert (told.saved is not None) == (number == 2) and not told.failures
            await service.before_update()
        assert (await service.driver.drain(60)).drained
        (checkpoint,) = service.checkpoints()
        assert checkpoint.durable and checkpoint.kind == "scheduled" and checkpoint.manifest is not None
        assert read == [] and set(listed) == {"scheduled"}
        from_bytes(Manifest, checkpoint.manifest, where="counted")
        assert read == ["counted"]
        await end(service)

    asyncio.run(scene())


async def end(service: Any) -> None:
    for task in list(service._tasks):
        task.cancel()
    await service.end()


def test_every_call_of_a_step_goes_once_to_each_node() -> None:
    async def scene() -> None:
        calls: Counter[str] = Counter()
        service, ports = service_of(Fleet(SMALL, 1), calls)
        await service.boot()
        assert service.driver is not None
        calls.clear()
        await service.end_step(1, {}, Progress(), False)
        await service.before_update()
        assert calls == dict.fromkeys(("mark", "close_window"), len(ports))
        calls.clear()
        await service.end_step(2, {}, Progress(), False)
        assert (await service.driver.drain(60)).drained
        once = ("mark", "snapshot", "stage", "accept", "publish", "upload", "note_durable")
        assert calls == dict.fromkeys(once, len(ports))
        await end(service)

    asyncio.run(scene())


def test_registrations_of_all_members_take_one_hello_per_node_not_one_of_every_node_each() -> None:
    async def scene() -> None:
        calls: Counter[str] = Counter()
        service, ports = service_of(Fleet(SMALL, 1), calls)
        last = ports.pop()
        await service.boot()
        calls.clear()
        await asyncio.gather(*(service.nodes.node_changed(port.node) for port in ports for _ in range(8)))
        assert len(ports) <= calls["hello"] <= len(ports) + 1  # the first change is told before the others have come
        calls.clear()
        await service.nodes.node_changed(ports[0].node)  # a later change is asked for anew
        assert calls["hello"] == 1
        calls.clear()
        ports.append(last)  # a new node: found by discovery, the others are not asked again
        assert service.nodes.missing().members
        await service.nodes.node_changed(last.node)
        assert calls["hello"] == 1 and not service.nodes.missing().members
        await end(service)

    asyncio.run(scene())


def test_a_node_whose_stager_was_replaced_is_found_again_when_it_tells_of_a_change() -> None:
    async def scene() -> None:
        service, ports = service_of(Fleet(SMALL, 1), Counter())
        await service.boot()
        old, fleet_calls = ports[0], Counter()

        async def dead(epoch: int, declarations: Any) -> Any:
            raise StagingError("the actor is dead")

        old.hello = dead
        ports[0] = type(old)(old._fleet, old.node, fleet_calls)
        await service.nodes.node_changed(old.node)
        assert fleet_calls["hello"] == 1 and service.nodes.silent == set()
        await end(service)

    asyncio.run(scene())
