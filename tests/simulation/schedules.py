"""Schedules: what happens next in a world. Random ones by seed, and the quiet end that each of them must come to."""

from __future__ import annotations

import random
from collections.abc import Callable

from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import SaveState
from lastgood.coordinator.outcomes import reached
from tests.simulation.referee import BrokenPromise
from tests.simulation.world import Coordinator, World

STEPS = 40  # random actions before everything heals; short ones, so that there can be many


def run_seed(
    seed: int, *, steps: int = STEPS, plant: str | None = None, trace: list[str] | None = None, invariants: bool = True
) -> World:
    """One random schedule: faults for `steps` actions, then healing, quiescence and one more save.

    Raises BrokenPromise, AssertionError or IllegalMoveError when the protocol is at fault. The same seed gives the
    same schedule.
    """
    rng = random.Random(seed)
    draw = rng.random
    world = World(
        2 if draw() < 0.6 else 3,
        pausable=draw() < 0.3,
        in_memory=draw() < 0.6,
        plant=plant,
        invariants=invariants,
    )
    world.trace = trace
    names = list(world.nodes)
    world.saving = 0.8 if draw() < 0.6 else 0.2  # else most steps are only kept in memory
    loss = 0.25 * draw() if draw() < 0.6 else 0.0
    doubling = 0.1 if draw() < 0.4 else 0.0
    trouble = 0.04 + 0.3 * draw() * draw()  # share of actions that are faults
    world.start_coordinator()
    for _ in range(steps):
        roll = draw()
        flight = world.flight
        if roll < trouble:
            _trouble(world, draw, names)
        elif flight and roll < 0.93:
            world.now_s += 0.02 * draw()
            # mostly first come first served, so that saves get somewhere; often enough any order
            index = 0 if draw() < 0.5 else int(draw() * len(flight))
            world.deliver(index, lost=draw() < loss, doubled=draw() < doubling)
        elif world.stalled and roll < 0.8:
            world.time_out(world.stalled.pop(int(draw() * len(world.stalled))))
        elif flight or roll < 0.4 or not _mend(world, draw):
            _train(world, draw)
    settle(world)
    return world


def _train(world: World, draw: Callable[[], float]) -> None:
    """Updates begin and end, windows open and close, somebody asks for a save."""
    leader = world.leader
    busy = [node for node in world.nodes.values() if not node.updating]
    roll = draw()
    if leader is not None and roll < 0.15:
        deadline_s = None if draw() < 0.6 else 0.5 + 5.0 * draw()
        world.ask(leader, "tagged" if draw() < 0.3 else None, deadline_s, from_memory=draw() < 0.3)
    elif leader is not None and roll < 0.2 and len(busy) == len(world.nodes):
        world.open_window(leader, due=True)  # a step's end is told once more
    elif leader is not None and leader.core.requests.window is None and len(busy) == len(world.nodes) and roll < 0.9:
        if leader.core.heard:
            world.open_window(leader, due=draw() < world.saving, memory=draw() < 0.8)
    elif busy:
        if leader is not None and draw() < 0.6:
            leader.feed(ev.WindowClosed())
        for node in busy if draw() < 0.8 else [busy[int(draw() * len(busy))]]:
            world.begin_update(node.name)
    else:
        world.end_update(due=draw() < world.saving, memory=draw() < 0.8)


def _mend(world: World, draw: Callable[[], float]) -> bool:
    """Heals one thing, as operators, Ray and retries do; False when nothing was amiss."""
    leader = world.leader
    if leader is None:
        world.start_coordinator(skew_s=1000.0 * draw())
        return True
    for name, node in world.nodes.items():
        if node.full or node.faulty:
            node.full = node.faulty = False
            return True
        if not node.up:
            node.restart()
            return True
        if not node.registered:
            world.register(name)
            return True
        if (leader.epoch, name) in world.cut:
            world.cut.discard((leader.epoch, name))
            return True
        if leader.core.heard.get(name) != str(node.incarnation):
            leader.hello(name)
            return True
    world.store.up = True
    return False


def _trouble(world: World, draw, names: list[str]) -> None:
    roll = draw()
    name = names[int(draw() * len(names))]
    node = world.nodes[name]
    living = [c for c in world.coordinators if c.alive]
    one = living[int(draw() * len(living))] if living else None
    if roll < 0.12:
        if node.up:
            node.crash()
        else:
            node.restart()
            if draw() < 0.7:
                world.register(name)
    elif roll < 0.2:
        if not node.up:
            node.restart()
        world.register(name)
        if one is not None:
            one.hello(name)
    elif roll < 0.3:
        if one is not None and draw() < 0.6:
            one.alive = False  # SIGKILL; what it sent is still on its way
        if len([c for c in living if c.alive]) < 3:
            world.start_coordinator(skew_s=1000.0 * draw())
    elif roll < 0.36:
        if one is not None:
            pair = (one.epoch, name)
            world.cut ^= {pair}
    elif roll < 0.42:
        world.store.up = not world.store.up
    elif roll < 0.46:
        world.kill_members(name)
        if draw() < 0.6:
            world.register(name)
    elif roll < 0.6:
        if one is not None and name in one.core.heard:
            if draw() < 0.7 and world.reachable(one, name):
                one.hello(name)
            else:
                world.lose(one, name)
        elif one is not None:
            one.hello(name)
    elif roll < 0.72:
        if one is not None:
            world.tick(one)
    elif roll < 0.77:
        well, full = not node.full and not node.faulty, draw() < 0.5
        node.full, node.faulty = well and full, well and not full
    elif world.flight:
        call, _ = world.flight[int(draw() * len(world.flight))]
        world.time_out(call)  # too early: it is still on its way


def settle(world: World) -> None:
    """All faults heal; then everything must be decided, everywhere, and the next save must commit."""
    world.store.up = True
    world.cut.clear()
    for node in world.nodes.values():
        if not node.up:
            node.restart()
        node.updating = node.full = node.faulty = False
        node.registered = True
    flight = world.flight
    while flight:  # what lingers arrives first
        world.deliver(0)
    for coordinator in world.coordinators:
        coordinator.alive = False
    last = world.start_coordinator()
    for declaration in world.declarations:  # the run's driver comes back too; stagers may all have forgotten
        last.feed(ev.Declared(declaration))
    quiet(world, last)
    for node in world.nodes.values():
        node.step += 1
        node.updates += 1
    world.open_window(last, due=True)
    request = world.ask(last, None, None)
    quiet(world, last)
    announce = last.ended.get(request)
    if announce is None or not reached(announce.state, SaveState.COMMITTED):
        raise BrokenPromise(f"after healing the next save did not commit: {announce}")
    world.referee.final()


def quiet(world: World, coordinator: Coordinator, limit: int = 3000) -> None:
    """Lets everything arrive and every timer run out, until nothing is left to do."""
    flight = world.flight
    for _ in range(limit):
        if flight:
            world.deliver(0)
        elif world.stalled:
            world.time_out(world.stalled.pop())
        elif not world.tick(coordinator):
            return
    raise BrokenPromise(f"no rest after {limit} actions: {coordinator.core.active}")
