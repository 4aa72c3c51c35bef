"""Two Ray clusters, one store: the second is refused by name, or fences the first when it is told to take over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from tests.cluster.world import World, until

SECOND = """
import sys, ray, lastgood
name, store, staging, takeover, steps = sys.argv[1:]
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
try:
    run = lastgood.attach(name, store=store, staging=staging, heartbeat_s=0.5, takeover=takeover == "yes")
except lastgood.errors.UsageError as error:
    print("refused:", error)
else:
    state = {"seen": 0}
    run.add_driver({"cursor": state})
    restored = run.resume(allow_changes=["actor.world_size", "actor"])
    print("leads from", restored)
    for step in range(run.next_step, run.next_step + int(steps)):
        run.end_step(step)
    if int(steps):
        run.close()
"""


def second_cluster(world: World, takeover: str, script: Path, steps: int = 0) -> str:
    """What a driver in a cluster of its own is told; it makes `steps` steps, all durable in the end, and is gone."""
    script.write_text(SECOND)
    staging = str(world.root / "second-staging")
    done = subprocess.run(
        [sys.executable, str(script), world.name, str(world.store), staging, takeover, str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_second_cluster_is_refused_and_a_takeover_fences_the_first(world: World, tmp_path: Path) -> None:
    world.attach(save_freq=1)
    world.run.add_driver({"cursor": world.cursor})
    world.run.resume()
    world.run.end_step(1)
    world.durable(1)
    told = second_cluster(world, "no", tmp_path / "second.py")
    assert "refused:" in told
    assert str(world.hello()["pid"]) in told
    world.run.end_step(2)
    world.durable(2)
    told = second_cluster(world, "yes", tmp_path / "second.py")
    assert "leads from Restored(step=2" in told

    def fenced() -> bool:
        try:
            world.run.end_step(3)
        except lastgood.errors.FencedError:
            return True
        return False

    until(fenced, "the first coordinator is fenced")
    with pytest.raises(lastgood.errors.FencedError):
        world.run.save(tag="late").wait("committed")
