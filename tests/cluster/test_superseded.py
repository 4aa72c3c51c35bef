"""What stood still (SIGSTOP) while another cluster took the run over, and then goes on: it changes nothing any more."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import ray

import lastgood
from lastgood.storage.manifest import Latest, Manifest
from lastgood.storage.verify import verify_attempt
from lastgood.workers.stager_actor import find_stagers
from tests.cluster.test_two_clusters import second_cluster
from tests.cluster.world import World, stopped, until


def one_durable_step(world: World, **options: Any) -> None:
    """A run of this process alone, which has one checkpoint and no deadline that could pass meanwhile."""
    world.attach(save_freq=1, accept_deadline_s=3600, save_deadline_s=3600, **options)
    world.run.add_driver({"cursor": world.cursor})
    world.run.resume()
    world.run.end_step(1)
    world.durable(1)


def stands_before_its_accepts(world: World, point: str = "coordinator.accept", **options: Any) -> None:
    """The coordinator has staged step 2 everywhere, and asks nobody to accept it before it is let go."""
    one_durable_step(world, **options)
    world.arm(point, "pause")
    world.run.end_step(2)
    world.fired(point)


def at_rest(root: Path) -> dict[str, str]:
    """Every file below a root, with the digest of what is in it."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def told_to_stop(world: World) -> str:
    """Waits until the coordinator knows that it was superseded; answers what it says of it."""
    return until(lambda: world.run.status()["fenced"], "the first coordinator is fenced")


def test_a_coordinator_that_was_superseded_while_it_stood_still_before_its_accepts_changes_nothing(
    world: World, tmp_path: Path
) -> None:
    stands_before_its_accepts(world)
    first = world.hello()
    with stopped(first["pid"]):
        assert "leads from Restored(step=1" in second_cluster(world, "yes", tmp_path / "second.py")
        before = at_rest(world.store)
        local = at_rest(world.node_dirs()[0] / world.name)
    assert f"epoch {first['epoch'] + 1} was claimed" in told_to_stop(world)
    world.go("coordinator.accept")

    def calls(actor: Any) -> int:
        return len(actor._service.driver._tasks)

    until(lambda: ray.get(world.coordinator().__ray_call__.remote(calls)) == 0, "what it was about to ask is over")
    assert at_rest(world.store) == before
    after = at_rest(world.node_dirs()[0] / world.name)
    changed = {path for path in after.keys() | local.keys() if after.get(path) != local.get(path)}
    assert all(path.startswith("records/") for path in changed), changed  # nothing is published there either
    for call in (lambda: world.run.end_step(3), lambda: world.run.save(tag="late").wait("committed")):
        with pytest.raises(lastgood.errors.FencedError, match=f"epoch {first['epoch']} has been replaced"):
            call()
    assert world.hello()["pid"] == first["pid"]


def test_a_superseded_coordinator_writes_nothing_to_the_store_although_no_heartbeat_has_told_it_yet(
    world: World, tmp_path: Path
) -> None:
    stands_before_its_accepts(world, heartbeat_s=60)  # it looks for a newer one every five heartbeats
    with stopped(world.hello()["pid"]):
        assert "leads from Restored(step=1" in second_cluster(world, "yes", tmp_path / "second.py")
        before = at_rest(world.store)
        world.go("coordinator.accept")  # what it does next is to commit step 2 on its nodes

    def over() -> bool:
        checkpoint = world.checkpoint(2)
        return world.run.status()["fenced"] is not None or (checkpoint is not None and checkpoint.durable)

    until(over, "the first coordinator has made step 2 durable, or was told to stop")
    assert at_rest(world.store) == before
    with pytest.raises(lastgood.errors.FencedError, match=r"epoch \d+ was claimed"):
        world.run.end_step(3)


def test_a_superseded_coordinator_looks_once_more_before_it_asks_for_the_first_accept(
    world: World, tmp_path: Path
) -> None:
    stands_before_its_accepts(world, "coordinator.staged", heartbeat_s=60)
    with stopped(world.hello()["pid"]):
        assert "leads from Restored(step=1" in second_cluster(world, "yes", tmp_path / "second.py")
        before = at_rest(world.node_dirs()[0] / world.name / "records")
        world.go("coordinator.staged")
    told_to_stop(world)
    assert at_rest(world.node_dirs()[0] / world.name / "records") == before
    with pytest.raises(lastgood.errors.FencedError, match=r"epoch \d+ was claimed"):
        world.run.end_step(3)


def test_a_stager_that_stood_still_in_mid_upload_while_the_run_was_taken_over_publishes_nothing(
    world: World, tmp_path: Path
) -> None:
    one_durable_step(world)
    world.arm("stager.upload.shard", "pause")
    world.run.end_step(2)
    world.fired("stager.upload.shard")
    abandoned = world.committed(2).attempt
    store = world.store / world.name
    until(lambda: len(list((store / "ledger").iterdir())) == 2, "the store knows that step 2 was committed")
    (pid,) = world.stager_pids().values()
    with stopped(pid):
        told = second_cluster(world, "yes", tmp_path / "second.py", steps=1)
        assert "leads from Restored(step=1" in told and f"attempt {abandoned}" in told  # what is lost is named
        told_to_stop(world)
        before = at_rest(store)
    world.go("stager.upload.shard")

    def uploads(stager: Any) -> int:
        return len(stager._uploads)

    (stager,) = find_stagers(world.name)
    until(lambda: ray.get(stager.__ray_call__.remote(uploads)) == 0, "the upload is over")
    after = at_rest(store)
    assert before.items() <= after.items()
    shards = f"global_step_2/{abandoned}/"
    assert all(path.startswith(shards) and path.endswith(".safetensors") for path in after.keys() - before.keys())
    latest = Latest.from_bytes((store / "latest.json").read_bytes(), where="latest.json")
    assert latest.global_step == 2 and latest.attempt != abandoned
    place = store / "global_step_2" / latest.attempt
    assert not verify_attempt(place, Manifest.from_bytes((place / "manifest.json").read_bytes(), where=str(place)))
    with pytest.raises(lastgood.errors.FencedError):
        world.run.end_step(3)
