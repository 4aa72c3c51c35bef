"""snapshot="overlapped": training goes on while the state is copied, and only its next update waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from tests.cluster.world import LIMIT_S, World, rank_state, until


def test_end_step_returns_while_a_copy_runs_and_the_next_update_waits_for_it(world: World) -> None:
    world.new_ranks()
    world.attach(snapshot="overlapped")
    world.run.add_members("actor", world.ranks, state=rank_state)  # the ranks alone, so that it is one that copies
    world.run.resume()
    world.update()
    digests = world.digests()
    world.arm("member.copy", "pause")
    outcome = world.run.end_step(1)
    assert outcome.saving and outcome.saved is None and not outcome.failures  # its copy has only begun
    world.fired("member.copy")
    assert not world.run.checkpoints()
    updates = [rank.train.remote() for rank in world.ranks]
    done, _ = ray.wait(updates, num_returns=2, timeout=2.0)
    assert len(done) < 2  # the update of the rank that copies waits, and has changed nothing
    world.go("member.copy")
    ray.get(updates)
    assert world.digests() != digests
    assert world.committed(1).attempt == outcome.saving
    world.new_ranks(seed=3)
    world.run.add_members("actor", world.ranks, state=rank_state)
    assert world.run.resume().step == 1
    assert world.digests() == digests


def test_end_step_waits_until_every_process_holds_its_updates_back(world: World) -> None:
    world.start(snapshot="overlapped")
    world.run.resume()
    world.update()
    world.arm("stager.snapshot.begin", "pause")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(world.run.end_step, 1)
        world.fired("stager.snapshot.begin")
        with pytest.raises(TimeoutError):
            ended.result(1.0)
        world.go("stager.snapshot.begin")
        assert ended.result(LIMIT_S).saving


def test_every_step_is_saved_when_updates_follow_at_once(world: World) -> None:
    world.start(snapshot="overlapped")
    world.run.resume()
    saved = [world.step(step).saving for step in range(1, 9)]
    assert all(saved)
    assert world.run.end_step(9).saving  # without an update before it
    world.run.close()
    assert [c.step for c in reversed(world.attach().checkpoints()) if c.committed] == list(range(1, 10))


def test_a_copy_that_fails_behind_training_is_told_with_the_next_step(world: World) -> None:
    world.start(snapshot="overlapped", save_freq=2)
    world.run.resume()
    world.step(1)
    world.arm("member.copy", "raise")
    assert not world.step(2).failures
    world.fired("member.copy")
    until(lambda: world.run.status()["failures_in_a_row"] == 1, "the failure is known")
    assert "member.copy" in " ".join(world.step(3).failures)
    assert world.step(4).saving
    assert world.committed(4)
