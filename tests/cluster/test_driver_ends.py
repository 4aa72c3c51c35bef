"""A driver's actors end with it: lastgood outlives the driver, and holds nothing of the user's alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import ray

from tests.cluster.world import World, gone, until

DRIVER = """
import json, signal, sys
from pathlib import Path
import ray, ray.cloudpickle
from tests.cluster import world as world_module
ray.cloudpickle.register_pickle_by_value(world_module)
address, name, root, failpoints = sys.argv[1:]
ray.init(address=address, namespace="tests", log_to_driver=False)
world = world_module.World(name, Path(root), Path(failpoints), None)
world.start()
world.run.resume()
world.step(1)
world.durable(1)
told = {
    "ranks": ray.get([rank.pid.remote() for rank in world.ranks]),
    "stagers": world.stager_pids(),
    "coordinator": world.hello()["pid"],
    "digests": world.digests(),
}
(Path(root) / "told.new").write_text(json.dumps(told))
(Path(root) / "told.new").rename(Path(root) / "told")
signal.pause()
"""


def test_ranks_of_a_driver_that_dies_are_gone_while_the_coordinator_lives_and_the_next_driver_resumes(
    world: World,
) -> None:
    (world.root / "store").rmdir()  # the driver's own world makes it
    arguments = [world.cluster.address, world.name, str(world.root), str(world.failpoints)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], env=environment)
    try:
        until((world.root / "told").exists, "the driver has saved a step")
        told = json.loads((world.root / "told").read_text())
        assert not any(gone(pid) for pid in told["ranks"])
    finally:
        driver.kill()
    assert driver.wait() == -signal.SIGKILL
    for pid in told["ranks"]:
        until(lambda pid=pid: gone(pid), f"rank {pid} gone with its driver")
    assert world.hello()["pid"] == told["coordinator"]
    assert world.stager_pids() == told["stagers"]

    (world.root / "rendezvous-1").unlink()  # where those ranks met
    world.new_ranks(seed=3)
    world.attach()
    world.join()
    assert world.run.resume().step == 1
    assert world.digests() == told["digests"]
    world.step(2)
    world.durable(2)
    assert (world.hello()["pid"], world.stager_pids()) == (told["coordinator"], told["stagers"])


def test_ranks_that_a_driver_has_replaced_and_let_go_of_end_although_nobody_kills_them(world: World) -> None:
    """Ray ends an actor when nobody has a handle to it: one that lastgood kept would keep the process and its GPU."""
    world.start()
    world.run.resume()
    world.step(1)
    world.committed(1)
    before, pids = world.digests(), ray.get([rank.pid.remote() for rank in world.ranks])
    coordinator, stagers = world.hello()["pid"], world.stager_pids()
    world.ranks = []  # the run has handles still
    world.new_ranks(seed=3)
    assert not any(gone(pid) for pid in pids)
    world.join()  # those of the new ranks from now on
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"rank {pid} gone once nobody has a handle to it")
    assert world.run.resume().step == 1
    assert world.digests() == before
    assert (world.hello()["pid"], world.stager_pids()) == (coordinator, stagers)
