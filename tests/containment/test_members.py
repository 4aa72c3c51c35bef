"""A member that raises or stalls while it is marked or copied: one attempt, named; and nothing hangs after it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgood.coordinator.outcomes import SaveOutcome
from lastgood.storage import files
from lastgood.storage.errors import DeadlineError
from lastgood.workers.gate import Gate
from tests.containment.small_run import SmallRun, seconds_of, until

HURRY = {"snapshot_s": 1.5, "mark_s": 1.5}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    here = SmallRun(tmp_path)
    yield here
    here.close()


def boom(*_: Any) -> Any:
    raise ValueError("the optimizer state is on the moon")


@pytest.mark.parametrize(
    ("method", "phase"), [("capture", "snapshotting"), ("hold", "window")], ids=["copied", "told of a step's end"]
)
def test_a_member_that_raises_is_named_with_its_component(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, method: str, phase: str
) -> None:
    run.commits(1)
    with monkeypatch.context() as patch:
        patch.setattr(run.nodes[1].member.components["weights"], method, boom)
        told = run.fails(2, "component weights", "ValueError", "on the moon", phase=phase, node=1, member=1)
        assert seconds_of(told) < 20  # the deadline is 30
    run.clean()
    run.stands(1)
    run.commits(3)


def test_an_error_outside_of_any_component_is_told_in_one_line_with_its_place(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.commits(1)
    with monkeypatch.context() as patch:
        patch.setattr(run.nodes[1].member, "capture", boom)
        run.fails(2, "actor:1", "ValueError", r"test_members\.py:\d+", phase="snapshotting", node=1, member=1)
    run.commits(3)


@contextlib.contextmanager
def stalled(run: SmallRun, method: str) -> Iterator[threading.Event]:
    """Rank 1's process stands still in a method of a component, until the block ends. Tells when it does."""
    entered, go_on = threading.Event(), threading.Event()
    component = run.nodes[1].member.components["weights"]
    original = getattr(component, method)

    def wait() -> Any:
        entered.set()
        assert go_on.wait(60)
        return original()

    setattr(component, method, wait)
    try:
        yield entered
    finally:
        setattr(component, method, original)
        go_on.set()


def test_a_step_s_end_that_never_ends_costs_its_deadline(run: SmallRun) -> None:
    run.commits(1)
    with stalled(run, "hold") as entered, run.hurry(**HURRY):
        told = run.fails(2, "actor:1", "has not finished it: order mark", phase="window", node=1, member=1)
        assert entered.is_set() and 1 <= seconds_of(told) < 20
    run.commits(3)


def test_a_copy_that_never_ends_costs_its_deadline_and_so_do_those_behind_it(run: SmallRun) -> None:
    run.commits(1)
    with stalled(run, "capture") as entered, run.hurry(**HURRY):
        told = run.fails(2, "actor:1", "has not finished it: order snapshot", phase="snapshotting", node=1, member=1)
        assert entered.is_set() and 1 <= seconds_of(told) < 20
        run.clean()
        # The process is stuck in the last order: it cannot even be told that a step has ended.
        told = run.fails(3, "actor:1", "did not ask for it", phase="window", node=1, member=1)
        assert 1 <= seconds_of(told) < 20
        run.stands(1)
    run.commits(4)  # the order that was stuck ends first, and changes nothing
    run.clean()


def test_a_copy_whose_attempt_was_given_up_copies_nothing_when_it_goes_on(run: SmallRun) -> None:
    run.commits(1)
    images = [image for _, image in run.nodes[1].stager._staging._slots.images()]
    with stalled(run, "capture"), run.hurry(**HURRY):
        run.fails(2, "actor:1", phase="snapshotting", node=1, member=1)
        run.clean()
    process = next(iter(run.nodes[1].stager._processes._processes.values()))
    until(lambda: process.outstanding is None, "the order that was stuck has ended")
    assert {image.state.name for image in images} <= {"FREE", "STAGED"}  # staged: of the commit before


def test_training_waits_for_a_stuck_copy_no_longer_than_the_attempt_does() -> None:
    """The update's wait counts from the copy's begin: not a deadline for the save and another one for the update."""
    now = [0.0]
    gate = Gate("actor:0", hold_limit_s=60.0, clock=lambda: now[0])
    with gate.marking(1):
        pass
    with pytest.raises(DeadlineError, match="is void"), gate.copying(1):
        now[0] = 60.0  # the attempt has just been given up
        gate.before_step(1, sys._getframe())  # and the update goes on at once


def test_a_failure_elsewhere_does_not_cost_the_next_save_though_a_node_still_writes(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 fails while node 1 is in the middle of its shard: that write ends early, and its images are free."""
    write_all, writing, failed = files.write_all, threading.Event(), threading.Event()

    def slow(fd: int, data: memoryview, at: int) -> None:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        if "/store/" not in name and "rank_00000.weights" in name and at == 0:
            assert writing.wait(30)
            raise OSError(5, "Input/output error")
        if "/store/" not in name and "rank_00001.weights" in name and at:
            writing.set()
            assert failed.wait(30)  # until somebody wants the images
        write_all(fd, data, at)

    run.commits(1)
    monkeypatch.setattr(files, "WRITE_BYTES", 100_000)
    monkeypatch.setattr(files, "write_all", slow)
    run.fails(2, "EIO", phase="staging", node=0, member=0)
    monkeypatch.setattr(files, "write_all", write_all)
    threading.Timer(0.3, failed.set).start()
    outcome = run.save(3)
    assert isinstance(outcome, SaveOutcome) and not outcome.failed, outcome
    run.stands(3)
    run.clean()
