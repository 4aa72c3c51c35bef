"""What cannot work is refused with what, where and what to do, before anything is touched."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import ray

import lastgood
from lastgood.coordinator.ray_names import session_dir
from tests.cluster.world import World, rank_state


def test_roots_that_cannot_be_kept_are_refused(world: World) -> None:
    for options in (
        {"store": "ckpts", "staging": world.staging},
        {"store": str(world.store), "staging": "ckpts"},
        {"store": f"{session_dir()}/x", "staging": world.staging},
        {"store": str(world.store), "staging": f"{session_dir()}/x"},
        {"store": str(world.store), "staging": world.staging, "save_frequency": 3},
    ):
        with pytest.raises(lastgood.errors.OptionsError):
            lastgood.attach(world.name, **options)
    assert not list(world.store.iterdir())


def test_a_staging_directory_of_another_live_stager_is_refused_by_name(world: World) -> None:
    world.new_ranks()
    shared = str(world.root / "node-shared")
    run = lastgood.attach(world.name, store=world.store, staging=shared)
    with pytest.raises(lastgood.errors.StagingError, match="in use for run"):
        run.add_members("actor", world.ranks, state=rank_state)


def test_a_staging_directory_that_cannot_be_written_is_refused(world: World) -> None:
    (world.root / "file").write_text("not a directory")
    with pytest.raises(lastgood.errors.StagingError, match="cannot be used"):
        lastgood.attach(world.name, store=world.store, staging=str(world.root / "file" / "x"))


class Single:
    """An actor that is a driver itself."""

    def __init__(self) -> None:
        self.state = {"n": 1}

    def attach_with_itself(self, name: str, store: str, staging: str) -> str:
        run = lastgood.attach(name, store=store, staging=staging)
        own = ray.get_runtime_context().current_actor
        try:
            run.add_members("actor", [own], state=lambda worker: {"state": worker.state})
        except lastgood.errors.MembershipError as error:
            return str(error)
        return "not refused"

    def bad(self) -> object:
        return object()


def test_the_callers_own_actor_is_refused(world: World) -> None:
    actor: Any = ray.remote(Single).options(num_cpus=0).remote()
    told = ray.get(actor.attach_with_itself.remote(world.name, str(world.store), world.staging))
    assert "add_driver" in told
    ray.kill(actor)


def test_a_component_that_cannot_be_kept_is_named(world: World) -> None:
    world.attach()
    actor: Any = ray.remote(Single).options(num_cpus=0).remote()
    with pytest.raises(lastgood.errors.UsageError, match="thing"):
        world.run.add_members("single", [actor], state=lambda worker: {"thing": object()})
    ray.kill(actor)


def test_a_rank_that_is_missing_from_the_list_is_named(world: World) -> None:
    world.new_ranks()
    world.attach()
    with pytest.raises(lastgood.errors.MembershipError, match=r"0\.\.1"):
        world.run.add_members("actor", world.ranks[:1], state=rank_state)


def test_a_value_that_cannot_be_stored_fails_the_save_and_names_its_path(world: World) -> None:
    world.start()
    world.run.resume()
    world.cursor["lock"] = {"deep": [1, object()]}
    outcome = world.step(1)
    assert outcome.saved is None
    assert any("lock" in failure and "deep" in failure for failure in outcome.failures), outcome
    del world.cursor["lock"]
    world.step(2)
    assert world.committed(2)


def test_a_member_with_another_update_count_fails_the_step_and_is_named(world: World) -> None:
    world.start()
    world.run.resume()
    world.step(1)
    world.committed(1)
    ray.get(world.ranks[1].__ray_call__.remote(step_alone))
    outcome = world.run.end_step(2)
    assert outcome.saved is None
    assert any("updates" in failure for failure in outcome.failures), outcome
    assert world.checkpoint(2) is None


def step_alone(worker: object) -> None:
    worker.optimizer.step()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_path_that_is_no_checkpoint_is_refused_and_a_copied_checkpoint_is_taken(world: World) -> None:
    world.start()
    nothing = world.root / "nothing"
    nothing.mkdir()
    with pytest.raises(lastgood.errors.NotACheckpointError):
        world.run.resume(str(nothing))
    world.run.resume("none")
    world.step(1)
    digests = world.digests()
    durable = world.durable(1)
    world.step(2)
    copy = world.root / "copied" / world.name / "global_step_1" / durable.attempt
    shutil.copytree(world.store / world.name / "global_step_1" / durable.attempt, copy)
    restored = world.run.resume(str(copy))
    assert restored.step == 1
    assert world.digests() == digests


def test_a_checkpoint_of_another_run_is_refused_naming_both(world: World) -> None:
    world.start()
    world.run.resume("none")
    world.step(1)
    durable = world.durable(1)
    path = world.store / world.name / "global_step_1" / durable.attempt
    world.run.close()
    first, world.name = world.name, f"{world.name}-other"
    world.attach()
    world.join()
    with pytest.raises(lastgood.errors.WrongRunError) as caught:
        world.run.resume(str(path))
    assert repr(first) in str(caught.value)
    assert repr(world.name) in str(caught.value)


def test_a_changed_fingerprint_is_shown_with_both_values(world: World) -> None:
    world.start(fingerprint={"dataset_length": 100})
    world.run.resume()
    world.step(1)
    world.durable(1)
    world.run.close()
    world.attach(fingerprint={"dataset_length": 90})
    world.join()
    with pytest.raises(lastgood.errors.FingerprintError) as caught:
        world.run.resume()
    assert "dataset_length" in str(caught.value)
    assert "100" in str(caught.value)
    assert "90" in str(caught.value)
    assert world.run.resume(allow_changes=["dataset_length"]).step == 1
