"""Every crash point of the happy path: before and after the effect of every message, of coordinator and stagers.

A first checkpoint is made; during the second one the crash happens; then everything comes back. The first must still
be whole, the second must be decided everywhere, and the next save must commit (schedules.settle and the referee).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from lastgood.coordinator.messages import SaveState
from tests.simulation.schedules import quiet, settle
from tests.simulation.world import Coordinator, World

Crash = Callable[[World, Coordinator, str], None]


def _kill_coordinator(world: World, coordinator: Coordinator, node: str) -> None:
    coordinator.alive = False


def _kill_stager(world: World, coordinator: Coordinator, node: str) -> None:
    world.nodes[node].crash()


def _restart_stager(world: World, coordinator: Coordinator, node: str) -> None:
    world.nodes[node].crash()
    world.nodes[node].restart()
    world.register(node)


def _kill_both(world: World, coordinator: Coordinator, node: str) -> None:
    world.nodes[node].crash()
    coordinator.alive = False


def _replace_coordinator(world: World, coordinator: Coordinator, node: str) -> None:
    world.start_coordinator(skew_s=500.0)  # the old one lingers


def _lose_node(world: World, coordinator: Coordinator, node: str) -> None:
    world.cut.add((coordinator.epoch, node))
    world.lose(coordinator, node)


CRASHES: dict[str, Crash] = {
    "coordinator": _kill_coordinator,
    "stager": _kill_stager,
    "stager, back at once": _restart_stager,
    "stager and coordinator": _kill_both,
    "a second coordinator beside the first": _replace_coordinator,
    "a partition": _lose_node,
}


def begin(nodes: int, pausable: bool) -> tuple[World, Coordinator]:
    """A world with one durable checkpoint, at the start of the second save."""
    world = World(nodes, pausable=pausable)
    coordinator = world.start_coordinator()
    quiet(world, coordinator)
    world.open_window(coordinator, due=True)
    quiet(world, coordinator)
    assert world.referee.commits == 1
    for node in world.nodes:
        world.begin_update(node)
    world.end_update(due=True)
    return world, coordinator


def length(nodes: int, pausable: bool) -> int:
    """How many messages the second save takes, undisturbed."""
    world, coordinator = begin(nodes, pausable)
    count = 0
    while world.flight:
        world.deliver(0)
        count += 1
    assert coordinator.ended and all(a.state is SaveState.DURABLE for a in coordinator.ended.values())
    return count


def points(nodes: int, pausable: bool) -> Iterator[int]:
    return iter(range(length(nodes, pausable) + 1))


def go_on(world: World, actions: int) -> None:
    """Whatever still runs goes on for a while before it all heals."""
    for _ in range(actions):
        if world.flight:
            world.deliver(0)
        elif world.stalled:
            world.time_out(world.stalled.pop())
        else:
            leader = world.leader
            if leader is None or not world.tick(leader):
                return


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize(("nodes", "pausable"), [(2, False), (2, True), (3, False)])
def test_any_crash_at_any_message_keeps_the_last_checkpoint_and_the_next_save_commits(
    crash: str, nodes: int, pausable: bool
) -> None:
    runs = 0
    pauses = (0, 60) if nodes == 2 else (60,)  # how long the rest goes on before it all heals
    for point in points(nodes, pausable):
        for victim, lingering, later in itertools.product(("n1", f"n{nodes}"), (True, False), pauses):
            world, coordinator = begin(nodes, pausable)
            for _ in range(point):
                world.deliver(0)
            CRASHES[crash](world, coordinator, victim)
            if not lingering:
                world.stalled += [call for call, _ in world.flight]
                world.flight.clear()
            go_on(world, later)
            settle(world)
            assert world.referee.commits >= 2
            runs += 1
    assert runs > 100


def test_a_coordinator_that_dies_in_the_recovery_from_a_crash_leaves_nothing_half_done() -> None:
    runs = 0
    for first in points(2, False):
        for second in range(24):
            world, coordinator = begin(2, False)
            for _ in range(first):
                world.deliver(0)
            coordinator.alive = False
            successor = world.start_coordinator()
            go_on(world, second)
            successor.alive = False
            settle(world)
            runs += 1
    assert runs > 700


def test_a_save_is_lost_by_a_crash_of_the_coordinator_only_before_every_copy_is_whole() -> None:
    """The commit is the last record: with it on disk the attempt itself survives. Before that its images do."""
    committed, survived = [], []
    for point in points(2, False):
        world, coordinator = begin(2, False)
        for _ in range(point):
            world.deliver(0)
        committed.append(world.referee.commits == 2)
        coordinator.alive = False
        world.flight.clear()
        settle(world)
        first, *taken_over = [t for t in world.referee.truths.values() if t.head.step == 1]
        assert first.committed is committed[-1]
        assert not (first.committed and taken_over)
        survived.append(first.committed or any(t.committed for t in taken_over))
    for outcomes in (committed, survived):
        assert outcomes == sorted(outcomes) and not outcomes[0] and outcomes[-1]
    assert sum(survived) > sum(committed)
