"""A commit that was never uploaded is lost with a node's disk: it is named, and on_lost says if the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import ray

import lastgood
from lastgood.storage.manifest import LedgerEntry
from lastgood.workers.install import leave
from lastgood.workers.stager_actor import find_stagers
from tests.cluster.world import World, gone, node_of, until


def lose_the_newest_commit(world: World, on_lost: str) -> tuple[str, list[str]]:
    """Step 1 durable, step 2 committed on two nodes only; then no process is left, and of one node nothing at all.

    Answers what a sentence on the loss must name and the digests of step 1. New ranks are members again.
    """
    world.start(on_lost=on_lost)
    world.run.resume()
    world.step(1)
    first = world.digests()
    world.durable(1)
    world.arm("stager.upload.shard", "pause")
    world.step(2)
    world.fired("stager.upload.shard")
    attempt, lost = world.committed(2).attempt, node_of(world, 1)
    entry = until(lambda: next((e for e in ledger(world) if e.step == 2), None), "the ledger names step 2")
    assert (entry.attempt, lost in entry.nodes, len(entry.nodes)) == (attempt, True, 2)
    end_everything(world)
    assert not list((world.store / world.name / "global_step_2").glob("*/COMPLETED"))
    shutil.rmtree(world.root / "node-1")
    world.new_ranks(seed=3)
    world.attach(on_lost=on_lost)
    world.join()
    assert node_of(world, 1) != lost
    which = f"step 2 (attempt {attempt}, epoch {entry.epoch}, sequence {entry.sequence})"
    return f"{which} is committed, but the part on {lost}", first


def ledger(world: World) -> list[LedgerEntry]:
    """What the store knows of commits."""
    files = sorted((world.store / world.name / "ledger").glob("*.json"))
    return [LedgerEntry.from_bytes(path.read_bytes(), where=str(path)) for path in files]


def end_everything(world: World) -> None:
    """Every process of the run is killed, none is asked; Ray is to restart none. This process was the driver."""
    leave(world.name)
    stagers = find_stagers(world.name)
    pids = [world.hello()["pid"], *world.stager_pids().values(), *ray.get([rank.pid.remote() for rank in world.ranks])]
    for actor in [world.coordinator(), *stagers, *world.ranks]:
        ray.kill(actor, no_restart=True)
    world.ranks = []
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"process {pid} gone")


def checkpoints_at_rest(world: World) -> dict[Path, bytes]:
    """Every file of a checkpoint, and everything that points to one, on all nodes and in the store."""
    places = [
        place for root in (*world.node_dirs(), world.store) for place in (root / world.name).glob("global_step_*")
    ]
    hints = [root / world.name / "latest.json" for root in (*world.node_dirs(), world.store)]
    files = [path for place in places for path in place.rglob("*")] + hints
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_is_told_by_name_what_is_lost(world: World) -> None:
    loss, first = lose_the_newest_commit(world, "continue")
    restored = world.run.resume("auto")
    assert (restored.step, restored.rejected) == (1, ())
    (told,) = restored.lost
    assert loss in told and "the store does not have it" in told
    assert world.digests() == first
    world.step(2)  # made again; it is newer than what is lost, which nobody misses from then on
    world.durable(2)
    restored = world.run.resume("auto")
    assert (restored.step, restored.lost) == (2, ())


def test_a_run_that_shall_not_lose_commits_is_refused_by_name_and_nothing_is_touched(world: World) -> None:
    loss, _ = lose_the_newest_commit(world, "refuse")
    live, before = world.digests(), checkpoints_at_rest(world)
    for mode in ("auto", "latest"):
        with pytest.raises(lastgood.errors.ResumeError, match="are lost") as caught:
            world.run.resume(mode)
        assert loss in str(caught.value) and "on_lost='continue'" in str(caught.value)
        assert [loss in told for told in caught.value.lost] == [True]
    assert world.digests() == live
    assert checkpoints_at_rest(world) == before
    assert world.run.resume(1).step == 1  # whoever names a step has decided
