"""Snapshots that stay in memory: a crash costs the step in progress, not those since the last save."""

from __future__ import annotations

import pytest
import ray

import lastgood
from tests.cluster.world import World, kill, until


def keep(world: World, *steps: int) -> None:
    for step in steps:
        outcome = world.step(step)
        assert outcome.in_memory and outcome.saved is None, outcome


def in_mid_update(world: World) -> list:
    """Both ranks stand half-way through the next update until they are killed."""
    updates = [rank.train.remote(str(world.root / "hold")) for rank in world.ranks]
    until(lambda: len(list(world.root.glob("hold.*.busy"))) == 2, "both ranks in mid-update")
    return updates


def test_when_a_rank_dies_in_mid_update_the_last_finished_step_is_saved_and_resumed(world: World) -> None:
    world.start(save_freq=50, snapshot_freq=1)
    world.run.resume()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    keep(world, 1, 2, 3)
    after = world.digests()
    assert world.run.checkpoints() == []
    updates = in_mid_update(world)
    kill(pids[0])
    world.committed(3)
    del updates
    world.new_ranks(seed=9)
    world.join()
    assert world.run.resume().step == 3
    assert world.digests() == after
    keep(world, 4)
    world.run.close()  # the last step is saved from memory
    assert (world.store / world.name / "global_step_4" / "COMPLETED").exists()


def test_what_is_in_memory_is_saved_on_request_in_mid_update_and_after_every_rank_died(world: World) -> None:
    world.start(save_freq=50, snapshot_freq=2)
    world.run.resume()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    assert not world.step(1).in_memory
    keep(world, 2)
    updates = in_mid_update(world)
    other = lastgood.connect(world.name)
    saved = other.save(tag="rescue", from_memory=True).wait("committed")
    assert (saved.step, world.checkpoint(2).tag) == (2, "rescue")
    with pytest.raises(lastgood.errors.SaveFailedError, match="no snapshot is in memory"):
        other.save(from_memory=True).wait("committed")
    for pid in pids:
        kill(pid)
    del updates
    world.new_ranks(seed=9)
    world.join()
    assert world.run.resume().step == 2


@pytest.mark.parametrize("first", ["coordinator", "coordinator.stage", "coordinator.accept"])
def test_when_ranks_and_coordinator_die_the_last_finished_step_is_saved_all_the_same(world: World, first: str) -> None:
    world.start(save_freq=50, snapshot_freq=1)
    world.run.resume()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    keep(world, 1, 2, 3)
    after, epoch = world.digests(), world.hello()["epoch"]
    coordinator = world.hello()["pid"]
    if first == "coordinator":
        kill(coordinator)
        until(lambda: world.run.status()["in_memory"] == 3, "the next coordinator has it")
        assert world.run.checkpoints() == []
    else:
        world.arm(first, "kill")  # while it saves what it has in memory, since the ranks have died
    for pid in pids:
        kill(pid)
    assert world.committed(3).epoch > epoch
    world.new_ranks(seed=9)
    world.join()
    assert world.run.resume().step == 3
    assert world.digests() == after
    world.run.close()


def test_a_fast_loop_keeps_every_step_in_memory(world: World) -> None:
    cursor = {"seen": 0}
    run = world.attach(save_freq=1000, snapshot_freq=1, on_failure="abort")
    run.add_driver({"cursor": cursor})
    run.resume()
    for step in range(1, 201):
        cursor["seen"] = step
        outcome = run.end_step(step)  # as fast as it goes: all on one node
        assert outcome.in_memory and not outcome.failures, outcome
    run.close(save_last=False)


def test_when_saving_what_is_in_memory_fails_it_is_tried_again_and_a_resume_waits(world: World) -> None:
    world.start(save_freq=50, snapshot_freq=1)
    world.run.resume()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    keep(world, 1, 2, 3)
    after = world.digests()
    nodes = world.node_dirs()
    for node in nodes:
        (node / world.name / "global_step_3").write_text("in the way")  # no directory can be made there
    for pid in pids:
        kill(pid)
    until(lambda: world.run.status()["in_memory_failures"] >= 2, "it was tried again")
    world.new_ranks(seed=9)
    world.join()
    for node in nodes:
        (node / world.name / "global_step_3").unlink()
    assert world.run.resume().step == 3
    assert world.digests() == after
    world.run.close()
