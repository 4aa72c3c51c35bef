"""Who shares a node with the one it asks speaks over a socket, and over Ray whenever that fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster.world import World, kill


def lines(world: World) -> dict[str, bool]:
    """By stager: whether the coordinator has a line to its socket."""

    def tell(actor: Any) -> dict[str, bool]:
        return {name: port._line is not None for name, port in actor._ports.items()}

    return ray.get(world.coordinator().__ray_call__.remote(tell))


def test_a_socket_is_found_again_after_every_failure_and_no_step_is_lost_to_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start()
    world.run.resume()
    link = world.run._link
    assert world.step(1).saved is not None
    first = link._socket
    assert first is not None  # the driver shares a node with the coordinator
    assert sorted(lines(world).values()) == [False, True]  # and the coordinator with one of two stagers

    world.kill_coordinator()
    with caplog.at_level(logging.INFO, "lastgood"):
        assert world.step(2).saved is not None
    assert "is asked over Ray: its socket failed at end_step" in caplog.text
    assert world.step(3).saved is not None
    assert link._socket not in (None, first)

    for pid in world.stager_pids().values():
        kill(pid)
    assert world.step(4).saved is not None
    assert world.step(5).saved is not None
    assert sorted(lines(world).values()) == [False, True]


def close_door(world: World) -> None:
    """The coordinator lives on without a socket."""

    def close(actor: Any) -> None:
        loop = actor._boot.get_loop()

        async def shut() -> None:
            actor._door.close()
            actor._door = None

        asyncio.run_coroutine_threadsafe(shut(), loop).result(60)

    ray.get(world.coordinator().__ray_call__.remote(close))


def test_without_a_socket_every_step_goes_over_ray_until_there_is_one_again(world: World) -> None:
    world.start()
    world.run.resume()
    link = world.run._link
    assert world.step(1).saved is not None
    close_door(world)
    outcomes = [world.step(step) for step in (2, 3)]  # the first one finds the socket closed, and asks again
    assert all(outcome.saved is not None for outcome in outcomes)
    assert link._socket is None
    world.committed(3)
    assert [c.step for c in world.run.checkpoints()] == [3, 2, 1]  # asked twice, saved once
    world.kill_coordinator()
    world.step(4)
    world.step(5)
    assert link._socket is not None
    folder = Path(world.hello()["door"])
    world.run.close()
    assert not folder.exists()
