"""A machine that is taken away says so: SIGTERM in the driver, Ray's drain notice. Both save the last finished step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ray

from lastgood.storage.manifest import Manifest
from tests.cluster.world import World, until

DRIVER = """
import sys
from pathlib import Path
import ray, ray.cloudpickle
from tests.cluster import world as world_module
ray.cloudpickle.register_pickle_by_value(world_module)
address, name, root, failpoints = sys.argv[1:]
ray.init(address=address, namespace="tests", log_to_driver=False)
world = world_module.World(name, Path(root), Path(failpoints), None)
world.start(save_freq=50)
world.run.resume()
world.step(1)
world.step(2)
ray.get([rank.roll_out.remote(root + "/rollout") for rank in world.ranks])  # a call that takes minutes
"""


def test_sigterm_in_a_driver_that_waits_for_a_rollout_saves_the_last_step_before_it_ends(world: World) -> None:
    (world.root / "store").rmdir()  # the driver's own world makes it
    arguments = [world.cluster.address, world.name, str(world.root), str(world.failpoints)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], env=environment)
    until(lambda: len(list(world.root.glob("rollout.*.busy"))) == 2, "both ranks are busy in a rollout")
    assert not list(world.root.rglob("COMPLETED"))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(120) != 0
    found = Manifest.from_bytes(completed(world, 2).with_name("manifest.json").read_bytes(), where="step 2")
    assert (found.kind, found.reason) == ("final", "SIGTERM in the driver")


def completed(world: World, step: int) -> Path:
    """The attempt's COMPLETED on the first node."""
    return until(lambda: next(world.root.glob(f"node-0/*/global_step_{step}/*/COMPLETED"), None), "COMPLETED")


def test_a_drain_notice_for_a_node_of_the_run_saves_the_last_step(world: World) -> None:
    shape = {"num_cpus": 16, "object_store_memory": 100 << 20, "include_dashboard": False}
    spot = world.cluster.add_node(**shape, labels={"slot": "2"})
    try:
        until(lambda: len([node for node in ray.nodes() if node["Alive"]]) == 3, "a third node")
        world.new_ranks(first_node=1)  # on the second and the third
        world.attach(save_freq=50)
        world.join()
        world.run.resume()
        world.step(1)
        assert world.run.checkpoints() == []
        command = ["drain-node", "--address", world.cluster.address, "--node-id", spot.node_id]
        why = [
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "spot",
            "--deadline-remaining-seconds",
            "300",
        ]
        subprocess.run([Path(sys.executable).with_name("ray"), *command, *why], check=True, capture_output=True)
        world.committed(1)
        found = Manifest.from_bytes(completed(world, 1).with_name("manifest.json").read_bytes(), where="step 1")
        assert found.kind == "manual"
        assert f"Ray drains node {spot.node_id}" in found.reason
        world.step(2)
        assert [c.step for c in world.run.checkpoints()] == [1]  # the notice is heeded once
    finally:
        world.end_ranks()
        world.lose_node(spot)
