"""Faults of nodes, disks and the store in a real cluster: each costs one attempt, is named, and training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lastgood
from lastgood.coordinator.outcomes import StepOutcome
from lastgood.storage import failpoints
from tests.cluster.world import LIMIT_S, World, node_of, stopped, until
from tests.containment.disks import full, must, tmpfs


def points(node: str) -> dict[str, str | None]:
    """Where the coordinator pauses while a node's stager is stopped: before what each phase asks of that node."""
    return {
        "window": None,  # the stager stands still before it hears of the step's end
        "snapshotting": f"coordinator.snapshot.{node}",
        "staging": f"coordinator.stage.{node}",
        "accepting": "coordinator.staged",
    }


def test_a_stager_that_stands_still_costs_one_attempt_in_any_phase_and_changes_nothing_when_it_goes_on(
    world: World,
) -> None:
    world.start(snapshot_deadline_s=4, stage_deadline_s=4, accept_deadline_s=4, max_consecutive_failures=100)
    world.run.resume()
    world.step(1)
    world.durable(1)
    node = node_of(world, 1)
    pid = world.stager_pids()[node]
    step = 1
    for phase, point in points(node).items():
        step += 1
        outcome = _step_with_a_stopped_stager(world, step, phase, point, pid, node)
        if phase == "window":
            (told,) = outcome.failures
            assert node in told and "phase window" in told and "member actor:1" in told and "after " in told, told
        if phase != "accepting":  # there its late accept completes the commit, or its late refusal ends it
            assert world.checkpoint(step) is None, phase
        for _ in range(2):  # one more may still be waiting for what the stager has to make up for
            step += 1
            outcome = world.step(step)
            if outcome.saved:
                break
        assert outcome.saved, (phase, outcome)
        assert world.committed(step).step == step
        until(lambda: all(a["phase"] != "aborting" for a in world.run.status()["background"]), "all is cleaned")


def _step_with_a_stopped_stager(
    world: World, step: int, phase: str, point: str | None, pid: int, node: str
) -> StepOutcome:
    """One step whose attempt meets a stager that stands still in a phase, until the attempt has been given up."""
    world.update()
    outcomes: list[StepOutcome] = []
    ending = threading.Thread(target=lambda: outcomes.append(world.run.end_step(step)))
    if point is not None:
        world.arm(point, "pause")
        ending.start()
        world.fired(point)
    with stopped(pid):
        if point is None:
            ending.start()
            # Longer than the mark's deadline; then end_step only waits for the node to come back.
            until(lambda: node in world.run.status()["nodes_silent"], "the node is missed")
        else:
            world.go(point)
            told = until(
                lambda: blame_of(world, step) or (outcomes and outcomes[0].failures), "the attempt is given up"
            )
            assert node in str(told) and f"phase {phase}" in str(told) and "after " in str(told), told
    ending.join(LIMIT_S)
    return outcomes[0]


@contextlib.contextmanager
def third_node(world: World) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A raylet of its own with slot=2: (where failpoints are armed for its processes alone, how to make it vanish)."""
    points = world.root / "points"
    points.mkdir()
    here = os.environ[failpoints.VARIABLE]
    os.environ[failpoints.VARIABLE] = str(points)
    try:
        node = world.cluster.add_node(num_cpus=2, object_store_memory=80 << 20, labels={"slot": "2"})
    finally:
        os.environ[failpoints.VARIABLE] = here
    there = [node]

    def vanish() -> None:
        world.lose_node(there.pop())

    try:
        until(lambda: len(world.alive_nodes()) == 3, "the third node is there")
        yield points, vanish
    finally:
        if there:
            vanish()


def test_a_node_that_disappears_in_mid_attempt_is_named_and_training_goes_on_without_it(world: World) -> None:
    world.attach()  # the coordinator is on another node
    with third_node(world) as (points, vanish):
        world.new_ranks(first_node=1)
        world.join()
        world.run.resume()
        world.step(1)
        before = world.digests()
        world.durable(1)
        lost = node_of(world, 2)
        failpoints.arm(points, "stager.stage.begin", "pause")
        world.step(2)
        until(lambda: failpoints.fired(points, "stager.stage.begin"), "the third node is about to stage")
        vanish()
        told = until(lambda: blame_of(world, 2), "the attempt is given up")
        assert lost in told and "phase staging" in told and "after " in told and "\n" not in told, told
        assert world.checkpoint(2) is None
    world.new_ranks(seed=3)
    world.join()
    assert world.run.resume().step == 1  # the lost node's shards come from the store
    assert world.digests() == before
    world.step(2)
    assert world.committed(2).step == 2


def blame_of(world: World, step: int) -> str | None:
    """Why an attempt of the step is being given up."""
    return next((a["blame"] for a in world.run.status()["background"] if a["step"] == step and a["blame"]), None)


def test_too_many_failures_in_a_row_stop_training_with_the_reason_and_a_commit_starts_the_count_anew(
    world: World,
) -> None:
    world.start(max_consecutive_failures=2)
    world.run.resume()

    def fail(step: int) -> Any:
        world.cursor["bad"] = object()
        try:
            return world.step(step)
        finally:
            del world.cursor["bad"]

    assert any("trainer:0.cursor" in failure for failure in fail(1).failures)
    world.step(2)
    world.committed(2)
    assert any("bad" in failure for failure in fail(3).failures)
    with pytest.raises(lastgood.errors.SaveFailedError) as caught:
        fail(4)
    for word in ("bad", "trainer:0", "phase ", "max_consecutive_failures=2", "previous checkpoint stands"):
        assert word in str(caught.value), caught.value
    assert world.checkpoint(2) is not None
    world.step(5)  # whoever goes on all the same
    assert world.committed(5).step == 5
    assert any("bad" in failure for failure in fail(6).failures)


def test_a_full_disk_on_one_node_costs_one_attempt(world: World) -> None:
    with tmpfs(world.root / "node-1", "8m"):
        world.start()
        world.run.resume()
        world.step(1)
        world.committed(1)
        with full(world.root / "node-1"):
            outcome = world.step(2)
            assert outcome.saved, outcome  # training went on as soon as the state was copied
            told = " ".join(world.step(3).failures)
            assert "step 2" in told and "ENOSPC" in told and "bytes" in told, told
            assert "phase staging" in told and "member actor:1" in told and node_of(world, 1) in told, told
            assert world.checkpoint(2) is None
        world.step(4)
        assert world.committed(4).step == 4
        world.run.close()


def test_training_does_not_notice_a_store_whose_mount_is_lost_and_it_catches_up(world: World) -> None:
    with tmpfs(world.store, "64m"):
        world.start()
        world.run.resume()
        world.step(1)
        world.durable(1)
        must("mount", "-t", "tmpfs", "tmpfs", world.store)
        try:
            for step in (2, 3, 4):
                outcome = world.step(step)
                assert outcome.saved is not None and not outcome.failures, outcome
                assert not world.committed(step).durable
            until(lambda: "mounted" in str(world.run.status()["background"]), "the lost mount is told")
            assert not [path for path in world.store.rglob("*") if path.is_file()]
        finally:
            must("umount", "--lazy", world.store)
        for step in (2, 3, 4):
            world.durable(step)
        world.run.close()
