"""Somebody attaches while a coordinator lives: of another version, with other options, made in a group that ends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import lastgood
from lastgood.workers.install import leave
from tests.cluster.world import World, until


def grow_old(world: World) -> None:
    """The live coordinator says that it is another version."""

    def patch(_: Any) -> None:
        from lastgood.coordinator import actor

        told = {**actor.versions(), "lastgood": "0.0.1"}
        actor.versions = lambda: told

    ray.get(world.coordinator().__ray_call__.remote(patch))
    assert world.hello()["versions"]["lastgood"] == "0.0.1"


def test_a_coordinator_of_another_version_is_refused_while_members_live_and_replaced_afterwards(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    before = world.digests()
    world.durable(1)
    grow_old(world)
    epoch = world.hello()["epoch"]
    with caplog.at_level(logging.WARNING, "lastgood"):
        latest = lastgood.connect(world.name).latest()  # looking is not refused
    assert latest is not None and latest.step == 1
    assert f"the coordinator of {world.name} is 0.0.1: calls may fail" in caplog.text
    with pytest.raises(lastgood.errors.UsageError, match=r"lastgood 0\.0\.1 \(this process has"):
        world.attach()
    assert world.hello()["epoch"] == epoch
    world.step(2)  # nothing was touched
    world.durable(2)

    leave(world.name)
    world.end_ranks()
    world.new_ranks(seed=3)
    world.attach()
    assert (world.hello()["epoch"], world.hello()["versions"]["lastgood"]) != (epoch, "0.0.1")
    world.join()
    assert world.run.resume(1).step == 1
    assert world.digests() == before


def test_a_driver_that_comes_back_with_other_options_gets_a_coordinator_that_has_them(world: World) -> None:
    world.start(save_freq=1)
    world.run.resume()
    world.step(1)
    world.durable(1)
    before, epoch = world.digests(), world.hello()["epoch"]
    with pytest.raises(lastgood.errors.UsageError, match=r"other options \(save_freq\)"):
        world.attach(save_freq=2)  # its members live: nothing is touched
    world.step(2)
    world.durable(2)

    leave(world.name)
    world.end_ranks()
    world.new_ranks(seed=3)
    world.attach(save_freq=2)
    hello = world.hello()
    assert hello["epoch"] > epoch
    assert hello["options"]["save_freq"] == 2
    world.join()
    restored = world.run.resume(1)
    assert restored is not None and restored.step == 1
    assert world.digests() == before
    assert [world.step(step).saved is not None for step in (2, 3, 4)] == [True, False, True]


class Owner:
    """A driver in an actor; what it creates goes into its own placement group, unless told otherwise."""

    def run(self, name: str, store: str, staging: str) -> int:
        run = lastgood.attach(name, store=store, staging=staging, save_freq=1, heartbeat_s=0.5, linger_s=600)
        run.add_driver({"cursor": lastgood.Value(lambda: {"seen": 7}, lambda value: None)})
        run.resume()
        saved = run.end_step(1).saved
        assert saved is not None
        return 1


def test_what_was_made_inside_a_placement_group_outlives_it(world: World) -> None:
    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    owner: Any = ray.remote(Owner).options(num_cpus=1, scheduling_strategy=inside).remote()
    assert ray.get(owner.run.remote(world.name, str(world.store), world.staging)) == 1
    before = (world.hello()["pid"], world.stager_pids())
    remove_placement_group(group)

    def ended() -> bool:
        try:
            ray.get(owner.run.remote(world.name, "", ""))
        except ray.exceptions.RayActorError:
            return True
        return False

    until(ended, "the group's removal ends the driver")
    assert (world.hello()["pid"], world.stager_pids()) == before
    world.run = lastgood.connect(world.name)
    assert world.durable(1).step == 1


def test_taking_over_is_for_one_attach_and_not_for_a_coordinator_that_ray_restarts(world: World) -> None:
    world.start(takeover=True)
    world.run.resume()
    world.step(1)
    first = world.hello()
    assert first["options"]["takeover"]
    world.kill_coordinator()
    again = world.hello()
    assert again["epoch"] > first["epoch"]
    assert not again["options"]["takeover"]  # somebody else may have taken over since
    world.step(2)
    assert world.committed(2)
