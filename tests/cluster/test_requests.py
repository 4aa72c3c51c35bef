"""Saves that somebody else asks for, at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import lastgood
from tests.cluster.world import World, until


def command(world: World, *arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "lastgood"), *arguments, "--address", str(world.cluster.address)]


def test_another_job_saves_the_last_step_at_once_while_the_actors_are_busy_in_a_rollout(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    digests = world.digests()
    rollout = str(world.root / "rollout")
    busy = [rank.roll_out.remote(rollout) for rank in world.ranks]
    until(lambda: len(list(world.root.glob("rollout.*.busy"))) == 2, "both ranks roll out")
    done = subprocess.run(
        command(world, "save", world.name, "--tag", "emergency_pre_failure", "--deadline", "60", "--json"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["save"]
    assert told["step"] == 1
    checkpoint = world.checkpoint(1)
    assert checkpoint.tag == "emergency_pre_failure"
    Path(f"{rollout}.go").touch()
    import ray

    ray.get(busy)
    world.new_ranks(seed=3)
    world.join()
    assert world.run.resume().step == 1
    assert world.digests() == digests  # random state is that of the step's end, not of the rollout


def test_a_request_in_mid_update_waits_for_the_updates_end(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    update = str(world.root / "update")
    busy = [rank.train.remote(update) for rank in world.ranks]
    until(lambda: len(list(world.root.glob("update.*.busy"))) == 2, "both ranks are in mid-update")
    other = lastgood.connect(world.name)
    save = other.save(tag="mid_update")
    with pytest.raises(lastgood.errors.DeadlineError):
        save.wait("snapshot", timeout_s=1.0)
    assert save.outcome.waits_for
    assert world.checkpoint(1) is None
    Path(f"{update}.go").touch()
    import ray

    ray.get(busy)
    digests = world.digests()
    world.run.end_step(2)
    outcome = save.wait("committed")
    assert outcome.step == 2
    world.new_ranks(seed=3)
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == digests


def test_before_update_closes_the_window_for_loops_without_hooks(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    world.run.before_update()
    save = world.run.save(tag="late")
    assert save.outcome.waits_for
    world.step(2)
    assert save.wait("committed").step == 2


def test_a_save_with_a_deadline_that_passes_leaves_everything_as_it_was(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    world.run.before_update()
    save = world.run.save(tag="too_late", deadline_s=0.5)
    with pytest.raises(lastgood.errors.SaveFailedError, match="previous checkpoint stands"):
        save.wait("committed", timeout_s=60)
    assert world.checkpoint(1) is None
    world.step(2)
    assert world.run.save(tag="now").wait("committed").step == 2


def test_another_job_watches_every_checkpoint_until_the_run_ends_and_reads_its_story(world: World) -> None:
    world.start()
    world.run.resume()
    seen: list[tuple[int, str]] = []
    watcher = threading.Thread(
        target=lambda: seen.extend((c.step, c.state.value) for c in lastgood.connect(world.name).watch())
    )
    watcher.start()
    world.step(1)
    world.durable(1)
    world.step(2)
    world.committed(2)
    (story,) = lastgood.connect(world.name).story(2)
    assert {part.member for part in story.members} == {"actor:0", "actor:1", "trainer:0"}
    assert all(part.nbytes > 0 for part in story.members)
    assert any("accepting -> committed" in sentence for _, sentence in story.events)
    world.run.close()
    watcher.join(90)
    assert not watcher.is_alive()
    assert seen[0][0] == 1
    assert (2, "durable") in seen
    assert len(seen) == len(set(seen))


def test_a_save_whose_deadline_passes_while_the_coordinator_stands_still_is_not_made_later(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    pid, other = world.hello()["pid"], lastgood.connect(world.name)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(lastgood.errors.DeadlineError):
            other.save(tag="too_late", deadline_s=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    world.step(2)
    saved = other.save(tag="in_time", deadline_s=60.0).wait("committed")
    assert (saved.step, world.checkpoint(2).tag) == (2, "in_time")
    assert [checkpoint.tag for checkpoint in world.run.checkpoints()] == ["in_time"]
