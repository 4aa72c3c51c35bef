"""SIGKILL at a named point of every phase: the newest commit stays whole, and the next save commits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

import lastgood
from lastgood.storage import failpoints
from lastgood.storage.manifest import Manifest
from lastgood.storage.verify import verify_attempt
from tests.cluster.world import LIMIT_S, World, kill, rank_state, until


def whole(world: World, step: int) -> None:
    """The newest committed checkpoint of a step verifies byte for byte on the nodes that hold its shards."""
    checkpoint = world.committed(step)
    for root in world.node_dirs():
        place = root / world.name / f"global_step_{step}" / checkpoint.attempt
        until((place / "COMPLETED").exists, f"COMPLETED rolled forward to {root.name}")
        manifest = Manifest.from_bytes((place / "manifest.json").read_bytes(), where=str(place))
        node = (root / world.name / "node.json").read_text()
        mine = [shard for shard in manifest.shards if shard.node in node]
        assert mine
        assert not [f for f in verify_attempt(place, manifest, mine) if f.fatal]


COORDINATOR_POINTS = (
    "coordinator.pause",
    "coordinator.snapshot",
    "coordinator.release",
    "coordinator.stage",
    "coordinator.staged",
    "coordinator.build_manifest",
    "coordinator.accept",
    "coordinator.publish",
    "coordinator.write_ledger",
    "coordinator.upload",
    "coordinator.complete_remotely",
    "coordinator.note_durable",
)


class Engine:
    """A component of the driver that stands still while it is copied."""

    def __init__(self) -> None:
        self.paused = False

    def state_dict(self) -> dict[str, int]:
        return {"requests": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to put back."""

    def pause(self) -> None:
        self.paused = True

    def release(self) -> None:
        self.paused = False


def test_the_coordinator_dies_before_every_command_and_the_run_goes_on(world: World) -> None:
    engine = Engine()
    world.new_ranks()
    world.attach()
    world.run.add_members("actor", world.ranks, state=rank_state)
    world.run.add_driver({"cursor": world.cursor, "engine": engine})
    world.run.resume()
    world.step(1)
    world.durable(1)
    step, epoch = 1, world.hello()["epoch"]
    for point in COORDINATOR_POINTS:
        step += 1
        world.update()
        world.arm(point, "kill")
        world.run.end_step(step)
        world.fired(point)
        hello = world.hello()
        assert hello["epoch"] > epoch, point
        epoch = hello["epoch"]
        newest = max(c.step for c in world.run.checkpoints() if c.committed)
        assert newest in (step - 1, step), point
        whole(world, newest)
        step += 1
        world.step(step)
        whole(world, step)
        world.durable(step)
        until(lambda: not engine.paused, f"the engine runs again after {point}")
    steps = [c.step for c in world.run.checkpoints() if c.committed]
    assert steps == sorted(steps, reverse=True)


def test_a_save_that_the_coordinator_died_in_is_committed_though_the_ranks_die_too(world: World) -> None:
    world.start()
    world.run.resume()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    world.step(1)
    world.durable(1)
    world.update()
    after = world.digests()
    world.arm("coordinator.accept", "kill")
    assert world.run.end_step(2).saving is not None
    for pid in pids:
        kill(pid)
    world.fired("coordinator.accept")
    whole(world, 2)
    world.new_ranks(seed=9)
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == after


def test_coordinator_and_stagers_die_at_once_and_the_run_goes_on(world: World) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    world.durable(1)
    for pid in (world.hello()["pid"], *world.stager_pids().values()):
        kill(pid)
    world.step(2)
    world.step(3)
    whole(world, 3)
    world.run.close()


STAGER_POINTS = (
    "stager.snapshot.begin",
    "stager.snapshot.sealed",
    "stager.stage.begin",
    "stager.stage.written",
    "stager.record.accept",
    "stager.publish.before_completed",
    "stager.publish.after_completed",
    "stager.upload.shard",
)


def test_a_stager_dies_in_every_phase_and_the_run_goes_on(world: World) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    world.durable(1)
    step = 1
    for point in STAGER_POINTS:
        step += 1
        world.update()
        world.arm(point, "kill")
        world.run.end_step(step)
        world.fired(point)
        newest = max(c.step for c in world.run.checkpoints() if c.committed)
        assert newest in (step - 1, step), point
        step += 1
        world.step(step)
        whole(world, step)
        world.durable(step)


@pytest.mark.parametrize("point", ["stager.stage.begin", "coordinator.accept"])
def test_members_that_die_after_the_snapshot_do_not_cost_the_attempt(world: World, point: str) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    before = world.digests()
    world.committed(1)
    world.update()
    world.arm(point, "pause")
    after = world.digests()
    world.run.end_step(2)
    world.fired(point)
    for pid in ray.get([rank.pid.remote() for rank in world.ranks]):
        kill(pid)
    world.go(point)
    whole(world, 2)
    world.new_ranks(seed=3)
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == after != before
    world.step(3)
    whole(world, 3)


@pytest.mark.parametrize("point", ["member.mark", "member.snapshot", "member.copy"])
def test_a_member_that_dies_before_its_vote_costs_one_attempt_and_is_named(
    world: World, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(failpoints.VARIABLE)  # this process is a member too, and must not be the one that stops
    world.start()
    world.run.resume()
    world.step(1)
    before = world.digests()
    world.committed(1)
    world.update()
    pids = ray.get([rank.pid.remote() for rank in world.ranks])
    world.arm(point, "pause")  # whichever rank comes first stops there
    import threading

    outcomes: list = []
    thread = threading.Thread(target=lambda: outcomes.append(world.run.end_step(2)))
    thread.start()
    world.fired(point)
    for pid in pids:
        kill(pid)
    world.go(point)
    thread.join(90)
    assert outcomes
    assert outcomes[0].saved is None
    assert any("actor:" in failure for failure in outcomes[0].failures), outcomes[0]
    assert world.checkpoint(2) is None
    whole(world, 1)
    world.new_ranks(seed=3)
    world.join()
    assert world.run.resume().step == 1
    assert world.digests() == before
    world.step(2)
    whole(world, 2)


def test_the_coordinator_comes_back_with_a_higher_epoch_and_knows_every_checkpoint(world: World) -> None:
    world.start()
    world.run.resume()
    for step in (1, 2, 3):
        world.step(step)
        world.committed(step)
    before = [(c.step, c.attempt) for c in world.run.checkpoints()]
    epoch = world.hello()["epoch"]
    world.kill_coordinator()
    claimed = world.store / world.name / "epochs" / f"{epoch + 1:08d}"
    until(claimed.exists, "the new incarnation recovers although nobody calls it")
    assert world.hello()["epoch"] > epoch
    assert [(c.step, c.attempt) for c in world.run.checkpoints()] == before
    assert world.run.status()["missing"] == []  # nobody had to register again


def test_a_new_coordinator_saves_the_last_step_in_the_same_window_and_close_commits_it(world: World) -> None:
    world.start(save_freq=100)
    world.run.resume()
    world.step(1)
    digests = world.digests()
    world.kill_coordinator()
    assert world.run.save(tag="after_restart").wait("committed").step == 1
    world.step(2)
    world.kill_coordinator()
    world.hello()
    world.run.close()  # the last step was never due; close saves it although this coordinator never saw it end
    assert len(list((world.store / world.name / "global_step_2").glob("*/COMPLETED"))) == 1
    world.attach()
    world.join()
    assert world.run.resume(1).step == 1
    assert world.digests() == digests


def test_after_a_rewind_a_checkpoint_of_the_abandoned_line_does_not_pass_for_a_save(world: World) -> None:
    world.start(save_freq=2)
    world.run.resume()
    for step in range(1, 5):
        world.step(step)
    world.committed(4)
    abandoned = world.checkpoint(4).attempt
    assert world.run.resume(2).step == 2
    world.step(3)
    world.update()
    world.arm("coordinator.snapshot", "kill")
    outcome = world.run.end_step(4)
    world.fired("coordinator.snapshot")
    assert outcome.saved not in (None, abandoned)
    until(lambda: world.checkpoint(4).attempt != abandoned, "the new line's step 4")
    assert world.durable(4).attempt == outcome.saved  # it lies on the nodes since before that
    manifest = Manifest.from_bytes(
        (world.node_dirs()[0] / world.name / "global_step_4" / outcome.saved / "manifest.json").read_bytes(), where="m"
    )
    assert manifest.parent is not None
    assert manifest.parent.step == 2


@pytest.mark.parametrize("on_failure", ["continue", "abort"])
def test_a_failure_after_the_snapshot_is_told_with_the_next_step(world: World, on_failure: str) -> None:
    world.start(on_failure=on_failure)
    world.run.resume()
    world.step(1)
    world.committed(1)
    world.arm("storage.write_image.begin", "raise")
    world.step(2)
    world.fired("storage.write_image.begin")
    until(lambda: world.run.status()["foreground"] is None, "the attempt is over")
    world.update()
    if on_failure == "abort":
        with pytest.raises(lastgood.errors.SaveFailedError, match="step 2"):
            world.run.end_step(3)
    else:
        outcome = world.run.end_step(3)
        assert any("step 2" in failure and "failpoint" in failure for failure in outcome.failures), outcome
        assert world.committed(3).step == 3
    assert world.checkpoint(2) is None
    whole(world, 1)


def test_everything_dies_and_a_new_start_resumes_the_newest_commit(world: World) -> None:
    world.start()
    world.run.resume()
    for step in (1, 2):
        world.step(step)
        world.committed(step)
    digests = world.digests()
    stagers = world.stager_pids()
    coordinator = world.hello()["pid"]
    for pid in [*ray.get([rank.pid.remote() for rank in world.ranks]), *stagers.values(), coordinator]:
        kill(pid)
    world.new_ranks(seed=9)
    world.attach()
    world.join()
    assert world.run.resume().step == 2
    assert world.digests() == digests
    until(lambda: set(world.stager_pids()) == set(stagers), "the same directories are led by new stagers")
    world.step(3)
    whole(world, 3)


def test_a_resume_waits_for_a_stager_that_dies_while_the_ranks_read(world: World) -> None:
    world.start(save_freq=1)
    world.run.resume()
    world.step(1)
    after = world.digests()
    world.durable(1)
    world.end_ranks()
    world.new_ranks(seed=9)
    world.join()
    world.arm("member.load", "pause")
    resumed: list[Any] = []
    thread = threading.Thread(target=lambda: resumed.append(world.run.resume()))
    thread.start()
    world.fired("member.load")
    kill(next(iter(world.stager_pids().values())))
    world.go("member.load")
    thread.join(LIMIT_S)
    assert [restored.step for restored in resumed] == [1]
    assert world.digests() == after
