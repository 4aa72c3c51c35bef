"""A coordinator of another version: recognised, replaced when nobody uses it, refused when somebody does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray

import lastgood
from lastgood.workers.install import leave

from .world import World


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
    assert "is lastgood 0.0.1, this process is" in caplog.text
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
