"""Hypothesis drives the world: it looks for a short schedule that breaks a promise, and shrinks what it finds."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lastgood.coordinator import events as ev
from tests.simulation.schedules import settle
from tests.simulation.world import Coordinator, World

NODES = st.sampled_from(["n1", "n2", "n3"])
INDEX = st.integers(0, 30)


class Commit(RuleBasedStateMachine):
    """Three nodes (or two), any number of coordinators; at the end everything heals."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(nodes=st.integers(2, 3), pausable=st.booleans())
    def build(self, nodes: int, pausable: bool) -> None:
        self.world = World(nodes, pausable=pausable)
        self.world.start_coordinator()

    def _node(self, name: str) -> str:
        return name if name in self.world.nodes else "n1"

    def _coordinator(self, index: int) -> Coordinator | None:
        living = [c for c in self.world.coordinators if c.alive]
        return living[index % len(living)] if living else None

    @precondition(lambda self: self.world.flight)
    @rule(index=INDEX, lost=st.booleans(), doubled=st.booleans())
    def deliver_one(self, index: int, lost: bool, doubled: bool) -> None:
        self.world.deliver(index % len(self.world.flight), lost=lost, doubled=doubled)

    @precondition(lambda self: self.world.flight)
    @rule(count=st.integers(1, 12))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(count):
            if self.world.flight:
                self.world.deliver(0)

    @precondition(lambda self: self.world.stalled or self.world.flight)
    @rule(index=INDEX)
    def time_out(self, index: int) -> None:
        if self.world.stalled:
            self.world.time_out(self.world.stalled.pop(index % len(self.world.stalled)))
        else:
            self.world.time_out(self.world.flight[index % len(self.world.flight)][0])

    @rule(due=st.booleans())
    def a_step_ends(self, due: bool) -> None:
        self.world.end_update(due)

    @rule(name=NODES, told=st.booleans())
    def an_update_begins(self, name: str, told: bool) -> None:
        leader = self.world.leader
        if told and leader is not None:
            leader.feed(ev.WindowClosed())
        self.world.begin_update(self._node(name))

    @rule(tag=st.sampled_from([None, "a", "b"]), deadline_s=st.sampled_from([None, 0.5, 3.0]), index=INDEX)
    def somebody_asks(self, tag: str | None, deadline_s: float | None, index: int) -> None:
        coordinator = self._coordinator(index)
        if coordinator is not None:
            self.world.ask(coordinator, tag, deadline_s)

    @rule(name=NODES)
    def a_stager_crashes_or_comes_back(self, name: str) -> None:
        node = self.world.nodes[self._node(name)]
        if node.up:
            node.crash()
        else:
            node.restart()
            self.world.register(node.name)

    @rule(name=NODES)
    def members_die_and_come_back(self, name: str) -> None:
        self.world.kill_members(self._node(name))
        self.world.register(self._node(name))

    @rule(index=INDEX, killed=st.booleans())
    def another_coordinator(self, index: int, killed: bool) -> None:
        coordinator = self._coordinator(index)
        if killed and coordinator is not None:
            coordinator.alive = False
        if len([c for c in self.world.coordinators if c.alive]) < 3:
            self.world.start_coordinator(skew_s=10.0 * index)

    @rule(index=INDEX, name=NODES)
    def a_partition_comes_or_goes(self, index: int, name: str) -> None:
        coordinator = self._coordinator(index)
        if coordinator is not None:
            self.world.cut ^= {(coordinator.epoch, self._node(name))}

    @rule(index=INDEX, name=NODES)
    def a_node_is_lost_or_greeted(self, index: int, name: str) -> None:
        coordinator = self._coordinator(index)
        if coordinator is not None:
            if self._node(name) in coordinator.core.heard and not self.world.reachable(coordinator, self._node(name)):
                self.world.lose(coordinator, self._node(name))
            else:
                coordinator.hello(self._node(name))

    @rule()
    def the_store_comes_or_goes(self) -> None:
        self.world.store.up = not self.world.store.up

    @rule(index=INDEX)
    def time_passes(self, index: int) -> None:
        coordinator = self._coordinator(index)
        if coordinator is not None:
            self.world.tick(coordinator)

    def teardown(self) -> None:
        settle(self.world)


TestCommit = Commit.TestCase
TestCommit.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
