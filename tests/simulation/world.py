"""The world: simulated nodes and store, a lossy network, several coordinators at once, and training going on.

Each coordinator is the real protocol core (its commands and answers go through the same translation as the driver's).
A scheduler (schedules.py) decides what happens next; nothing in here is random.
"""

from __future__ import annotations

import itertools
from typing import Any

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.answers import failure, success
from lastgood.coordinator.messages import Blame, MemberId, RoleDeclaration, SaveKind, SaveRequest
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.protocol import Deadlines, Protocol, Settings
from lastgood.storage.errors import FencedError, LastgoodError
from tests.simulation import planted
from tests.simulation.nodes import SimNode, SimStore, manifest_bytes
from tests.simulation.referee import Referee

DEADLINES = Deadlines(save_s=20.0, pause_s=2.0, snapshot_s=3.0, stage_s=4.0, accept_s=3.0)


_PLACES = {cmd.BuildManifest: "", cmd.WriteLedger: "store", cmd.CompleteRemotely: "store"}


class Call:
    """One command on its way. `done`: the coordinator has been told an outcome; what comes later is dropped."""

    __slots__ = ("asked_s", "coordinator", "done", "node", "number", "what")

    def __init__(self, coordinator: Coordinator, node: str, what: cmd.AttemptCommand | None, number: int = 0) -> None:
        self.coordinator = coordinator
        self.node = node  # "" for the coordinator itself, "store"
        self.what = what  # None: hello
        self.number = number
        self.asked_s = coordinator.world.now_s + coordinator.skew_s
        self.done = False

    def __repr__(self) -> str:
        what = "hello" if self.what is None else f"{type(self.what).__name__} {self.what.head.attempt}"
        return f"{what} c{self.coordinator.epoch}->{self.node or 'itself'}"


class Coordinator:
    """One incarnation: a core, its calls, its own clock."""

    def __init__(self, world: World, epoch: int, skew_s: float, core: Protocol) -> None:
        self.world = world
        self.epoch = epoch
        self.skew_s = skew_s
        self.core = core
        self.alive = True
        self.booting = set(world.nodes)  # nodes whose first hello is not over
        self.hellos = itertools.count()
        self.last_hello: dict[str, int] = {}
        self.ended: dict[str, cmd.Announce] = {}  # request -> its newest announcement

    def feed(self, event: ev.Event) -> None:
        """One event into the core; its commands onto the network."""
        world = self.world
        if world.trace is not None:
            world.trace.append(f"{world.now_s:7.3f}  c{self.epoch} <- {event}")
        commands = self.core.handle(event, world.now_s + self.skew_s)
        if world.invariants:
            self.core.invariants()
        for command in commands:
            if isinstance(command, cmd.AttemptCommand):
                world.referee.sent(command)
                place = command.node if isinstance(command, cmd.NodeCommand) else _PLACES[type(command)]
                world.flight.append((Call(self, place, command), None))
            elif isinstance(command, cmd.Announce):
                world.referee.announced(self, command)
                for request_id in command.request_ids:
                    self.ended[request_id] = command
        if self.core.fenced is not None:
            self.alive = False

    def hello(self, node: str) -> None:
        """Sends hello to a node."""
        self.world.flight.append((Call(self, node, None, next(self.hellos)), None))

    def hello_over(self, node: str) -> None:
        """The first hello to a node was answered or given up; with the last of them recovery begins."""
        if node in self.booting:
            self.booting.discard(node)
            if not self.booting and self.alive:
                store = self.world.store
                if store.up:
                    self.feed(ev.StoreSurveyed(tuple(store.completed.values()), tuple(store.ledger.values())))
                if self.alive:
                    self.feed(ev.RecoveryBegun(frozenset(self.world.nodes)))


Flying = tuple[Call, "ev.Event | FencedError | tuple[Any] | None"]


class World:
    """Everything there is."""

    def __init__(
        self,
        node_count: int = 2,
        *,
        pausable: bool = False,
        in_memory: bool = True,
        plant: str | None = None,
        invariants: bool = True,
    ) -> None:
        """`in_memory`: option snapshot_freq is set. `plant`: one of planted.PLANTS. `invariants`: the core's own are
        checked too, after every event."""
        self.now_s = 0.0
        self.trace: list[str] | None = None
        self.referee = Referee(plant)
        self.referee.world = self
        self.store = SimStore(self.referee)
        self.coordinators: list[Coordinator] = []
        self.flight: list[Flying] = []  # requests (no answer yet) and answers, in no order
        self.stalled: list[Call] = []  # lost on the way; a timeout tells their coordinator
        self.cut: set[tuple[int, str]] = set()  # (epoch, node) pairs that cannot talk
        self.windows = 0
        self.saving = 0.8  # share of steps at which a save is due
        self.invariants = invariants
        self._in_memory = in_memory
        self._plant = plant
        self._core_type = planted.CORES.get(plant, Protocol)
        names = [f"n{i + 1}" for i in range(node_count)]
        self.declarations = (
            RoleDeclaration("actor", node_count, ("model", "optimizer"), "m1"),
            RoleDeclaration("trainer", 1, ("cursor",), "m1"),
        )
        sizes = {"actor": node_count, "trainer": 1}
        self.nodes: dict[str, SimNode] = {}
        for rank, name in enumerate(names):
            members: dict[MemberId, tuple[str, ...]] = {MemberId("actor", rank): ("model", "optimizer")}
            if rank == 0:
                members[MemberId("trainer", 0)] = ("cursor",)
            self.nodes[name] = SimNode(name, members, sizes, self.referee)
            self.nodes[name].pausable = pausable and rank == node_count - 1
        self.owed = sorted(
            (member.role, member.rank, name)
            for node in self.nodes.values()
            for member, names_ in node.members.items()
            for name in names_
        )
        self._requests = itertools.count()

    # ---- coordinators

    def start_coordinator(self, skew_s: float = 0.0) -> Coordinator:
        """A new incarnation; older ones go on until somebody ends them."""
        self.store.epochs += 1
        epoch = self.store.epochs
        settings = Settings(
            run="sim", epoch=epoch, deadlines=DEADLINES, retry_s=0.2, retry_max_s=1.0, in_memory=self._in_memory
        )
        if self._plant == "reused_ids":
            made = itertools.count(1)
            core = self._core_type(settings, lambda epoch, sequence: f"a{next(made)}")
        else:
            core = self._core_type(settings, lambda epoch, sequence: f"a{epoch}.{sequence}")
        coordinator = Coordinator(self, epoch, skew_s, core)
        self.coordinators.append(coordinator)
        if epoch == 1:
            for declaration in self.declarations:
                coordinator.feed(ev.Declared(declaration))
        for node in self.nodes:
            coordinator.hello(node)
        return coordinator

    @property
    def leader(self) -> Coordinator | None:
        """The newest coordinator that lives."""
        return next((c for c in reversed(self.coordinators) if c.alive), None)

    # ---- the network

    def reachable(self, coordinator: Coordinator, node: str) -> bool:
        return self.nodes[node].up and (coordinator.epoch, node) not in self.cut

    def deliver(self, index: int, *, lost: bool = False, doubled: bool = False) -> None:
        """What is at `index` of the flight arrives (or is lost; or arrives and is still on its way)."""
        flight = self.flight
        call, answer = flight[index]
        if not doubled:
            flight[index] = flight[-1]
            flight.pop()
        elif len(flight) > 200:
            doubled = False
        coordinator = call.coordinator
        if answer is not None:
            self._answer(call, answer, lost)
            return
        node = call.node
        if node == "":
            if coordinator.alive and not call.done:
                assert isinstance(call.what, cmd.BuildManifest)
                flight.append((call, success(call.what, manifest_bytes(call.what.draft))))
            return
        if lost or (node != "store" and not self.reachable(coordinator, node)):
            if not call.done and coordinator.alive and not doubled:
                self.stalled.append(call)
            return
        flight.append((call, self.effect(call)))

    def effect(self, call: Call) -> ev.Event | FencedError | tuple[Any]:
        """The call is executed where it arrived; answers what comes back."""
        epoch, what = call.coordinator.epoch, call.what
        if self.trace is not None:
            self.trace.append(f"{self.now_s:7.3f}  {call} is executed")
        try:
            if what is None:
                told = tuple(call.coordinator.core.membership.declarations.values())
                return (self.nodes[call.node].hello(epoch, told),)
            if call.node == "store":
                self.store.execute(what)
                return success(what, None)
            assert isinstance(what, cmd.NodeCommand)
            return success(what, self.nodes[call.node].execute(epoch, what, self.store))
        except FencedError as error:
            return error
        except LastgoodError as error:
            assert what is not None
            return failure(what, error)

    def _answer(self, call: Call, answer: ev.Event | FencedError | tuple[Any], lost: bool) -> None:
        coordinator = call.coordinator
        if call.done or not coordinator.alive:
            return
        if lost or (call.node in self.nodes and (coordinator.epoch, call.node) in self.cut):
            self.stalled.append(call)
            return
        call.done = True
        if isinstance(answer, FencedError):
            coordinator.feed(ev.Fenced(str(answer)))
        elif isinstance(answer, tuple):
            if coordinator.last_hello.get(call.node, -1) < call.number:
                coordinator.last_hello[call.node] = call.number
                coordinator.feed(ev.NodeHeard(answer[0], call.asked_s))
            coordinator.hello_over(call.node)
        else:
            coordinator.feed(answer)

    def time_out(self, call: Call) -> None:
        """The coordinator gives a call up; what it does at its node may still happen."""
        if call.done or not call.coordinator.alive:
            return
        call.done = True
        if call.what is None:
            call.coordinator.hello_over(call.node)
        else:
            call.coordinator.feed(failure(call.what, TimeoutError("no answer")))

    # ---- training

    def begin_update(self, node: str) -> None:
        self.nodes[node].updating = True

    def end_update(self, due: bool, memory: bool = False) -> None:
        """Every member has ended its update; the leader is told."""
        for node in self.nodes.values():
            node.step += 1
            node.updates += 1
            node.updating = False
        leader = self.leader
        if leader is not None:
            self.open_window(leader, due, memory)

    def open_window(self, coordinator: Coordinator, due: bool, memory: bool = False) -> None:
        """What Driver.open_window does, in one go."""
        self.windows += 1
        core = coordinator.core
        reports, failures = {}, {}
        for name in core.membership.nodes():
            if name not in core.heard or not self.reachable(coordinator, name):
                failures[name] = Blame("window", "no answer", name)
                continue
            try:
                reports[name] = self.nodes[name].mark(coordinator.epoch)
            except FencedError as error:
                coordinator.feed(ev.Fenced(str(error)))
                return
        step = next(iter(self.nodes.values())).step
        said = "the test says so"
        coordinator.feed(ev.WindowOpened(step, reports, failures, Decision(due, said), memory=Decision(memory, said)))

    def ask(
        self, coordinator: Coordinator, tag: str | None, deadline_s: float | None, *, from_memory: bool = False
    ) -> str:
        """Somebody wants a checkpoint."""
        request_id = f"r{next(self._requests)}"
        request = SaveRequest(request_id, SaveKind.MANUAL, "asked", tag, "somebody", deadline_s, from_memory)
        coordinator.feed(ev.Asked(request))
        return request_id

    def register(self, node: str) -> None:
        """The agents of a node (re)register; every coordinator that hears the node is told."""
        there = self.nodes[node]
        there.registered = True
        for coordinator in self.coordinators:
            if coordinator.alive and node in coordinator.core.heard and self.reachable(coordinator, node):
                coordinator.feed(ev.MembersChanged(node, there.infos()))

    def kill_members(self, node: str) -> None:
        """SIGKILL of the processes that host a node's members; new ones take their place, restored to the same step."""
        there = self.nodes[node]
        there.process += 1
        for coordinator in self.coordinators:
            for member in there.members:
                if coordinator.alive:
                    coordinator.feed(ev.MemberDropped(member, "killed"))
        there.registered = False

    def lose(self, coordinator: Coordinator, node: str) -> None:
        coordinator.feed(ev.NodeLost(node, "it does not answer"))

    def tick(self, coordinator: Coordinator) -> bool:
        """Time passes until the coordinator wants to look at it; False when it waits for nothing."""
        wake_s = coordinator.core.next_wakeup_s() - coordinator.skew_s
        if wake_s == float("inf"):
            return False
        self.now_s = max(self.now_s, wake_s + 0.001)
        coordinator.feed(ev.Tick())
        return True
