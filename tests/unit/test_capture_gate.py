"""The quiescent window: an update waits for a copy, a copy is refused during an update, nothing waits for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import lastgood
from lastgood.storage.errors import DeadlineError, SnapshotError, UsageError, WindowClosedError
from lastgood.workers.member import Member


class Training:
    """A small model whose optimizer step can be stopped in the middle."""

    def __init__(self, hold_limit_s: float = 60.0, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = kind(self.model.parameters(), lr=0.1)  # pyright: ignore[reportCallIssue]
        self.member = Member.of(
            "actor", 0, 1, {"model": self.model, "optimizer": self.optimizer}, hold_limit_s=hold_limit_s
        )

    def update(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Stopped(torch.optim.SGD):
    """Its step waits in the middle until it is let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inside, self.go = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> None:
        self.inside.set()
        assert self.go.wait(60)
        super().step(closure)


class Fails(torch.optim.SGD):
    """Its step raises when told to."""

    broken = False

    def step(self, closure: Any = None) -> None:
        if self.broken:
            raise RuntimeError("out of memory")
        super().step(closure)


def until_it_waits(training: Training, update: threading.Thread) -> None:
    """Returns when the update's thread stands in the pre-hook: it closes the window before it waits."""
    while training.member.gate.open_step is not None:
        update.join(0.001)


def test_an_update_waits_until_a_running_copy_is_done() -> None:
    training = Training()
    training.member.mark(0)
    before = training.model.weight.detach().clone()
    update = threading.Thread(target=training.update)
    with training.member.gate.copying(0):
        weight = training.member.capture(0)["model"]["weight"]
        update.start()
        until_it_waits(training, update)
        assert update.is_alive()
        assert torch.equal(weight, before)
    update.join(60)
    assert not update.is_alive()
    assert not torch.equal(training.model.weight, before)
    assert training.member.updates == 1


def test_no_copy_begins_while_an_update_waits() -> None:
    training = Training()
    training.member.mark(0)
    update = threading.Thread(target=training.update)
    with training.member.gate.copying(0):
        update.start()
        until_it_waits(training, update)
        with pytest.raises(WindowClosedError), training.member.gate.copying(0):
            pass
    update.join(60)


def test_capture_and_mark_in_mid_update_are_refused() -> None:
    training = Training(kind=Stopped)
    training.member.mark(0)
    update = threading.Thread(target=training.update)
    update.start()
    assert training.optimizer.inside.wait(60)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(WindowClosedError, match="its next update has begun"):
        training.member.capture(0)
    with pytest.raises(WindowClosedError), training.member.gate.copying(0):
        pass
    with pytest.raises(WindowClosedError, match="update is running"):
        training.member.mark(1)
    training.optimizer.go.set()  # pyright: ignore[reportAttributeAccessIssue]
    update.join(60)
    assert training.member.mark(1).updates == 1
    training.member.capture(1)


def test_an_update_that_ended_keeps_the_window_closed_until_the_next_mark() -> None:
    training = Training()
    training.member.mark(0)
    training.update()
    with pytest.raises(WindowClosedError, match="actor:0"):
        training.member.capture(0)
    training.member.mark(1)
    with pytest.raises(WindowClosedError, match="window of step 1 is open"):
        training.member.capture(0)


def test_a_stuck_copy_lets_the_update_go_on_and_is_void() -> None:
    training = Training(hold_limit_s=0.05)
    training.member.mark(0)
    with pytest.raises(DeadlineError, match=r"actor:0: the copy of step 0 .* is void"), training.member.gate.copying(0):
        update = threading.Thread(target=training.update)
        update.start()
        update.join(60)
        assert not update.is_alive()
    assert training.member.updates == 1


def test_closing_the_window_waits_for_a_copy_and_names_and_voids_it_when_it_is_late() -> None:
    training = Training()
    training.member.mark(4)
    with pytest.raises(DeadlineError, match="is void"), training.member.gate.copying(4):
        with pytest.raises(DeadlineError, match="the copy of step 4"):
            training.member.close_window(0.02)
        with pytest.raises(WindowClosedError):
            training.member.capture(4)
    training.member.close_window(0.02)


def test_a_step_that_raised_leaves_no_state_to_save() -> None:
    training = Training(kind=Fails)
    training.optimizer.broken = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="out of memory"):
        training.update()
    with pytest.raises(SnapshotError, match="began and never ended") as refused:
        training.member.mark(1)
    assert not isinstance(refused.value, WindowClosedError)
    training.optimizer.broken = False  # pyright: ignore[reportAttributeAccessIssue]
    training.update()
    assert training.member.mark(1).updates == 1


def test_a_step_that_calls_its_parents_hooked_step_is_one_update() -> None:
    Training(kind=torch.optim.SGD)  # from here on SGD.step has torch's hooks
    training = Training(kind=Fails)  # and this step calls it
    training.update()
    training.update()
    assert training.member.updates == 2


def test_closing_the_member_removes_its_hooks() -> None:
    training = Training()
    training.member.close()
    training.update()
    assert training.member.updates == 0
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not training.optimizer._optimizer_step_post_hooks


def test_a_failing_component_is_named_and_the_window_stays_closed() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("cursor")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    member = Member.of("trainer", 0, 1, {"dataloader": Loader()})
    with pytest.raises(SnapshotError, match=r"trainer:0: component dataloader .* KeyError"):
        member.mark(3)
    with pytest.raises(WindowClosedError):
        member.capture(3)


def test_pausable_state_is_captured_between_pause_and_release() -> None:
    class Queue:
        def __init__(self) -> None:
            self.items, self.calls = [1], []

        def pause(self) -> None:
            self.calls.append("pause")

        def release(self) -> None:
            self.calls.append("release")

        def state_dict(self) -> dict[str, Any]:
            self.calls.append("state")
            return {"items": self.items}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.items = state["items"]

    queue = Queue()
    member = Member.of("rollout", 0, 1, {"queue": queue, "cursor": {"n": 1}})
    assert member.pausable
    member.mark(1)
    assert queue.calls == []
    queue.items.append(2)
    member.pause()
    captured = member.capture(1)
    member.release()
    assert captured == {"cursor": {"n": 1}, "queue": {"items": [1, 2]}}
    assert queue.calls == ["pause", "state", "release"]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_role_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="does not exist among 2 members"):
        Member.of("actor", rank, 2, {"cursor": {}})


def test_components_that_cannot_be_kept_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"component actor.critic is None"):
        Member.of("actor", 0, 1, {"critic": None})
    with pytest.raises(UsageError, match=r"component actor.thing is a builtins.int.*StatefulDataLoader"):
        Member.of("actor", 0, 1, {"thing": 3})
    with pytest.raises(UsageError, match="names no component"):
        Member.of("actor", 0, 1, {})
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"actor.optimizer: parameter 0 of group 0 .* no module"):
        Member.of("actor", 0, 1, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


def test_whoever_requires_the_window_of_a_step_whose_mark_failed_is_told_which_component_raised() -> None:
    locked = True

    def read() -> int:
        if locked:
            raise ValueError("the replay buffer is locked")
        return 1

    model = nn.Linear(2, 2)
    member = Member.of("actor", 1, 2, {"model": model, "buffer": lastgood.Value(read, lambda value: None)})
    with pytest.raises(SnapshotError):
        member.mark(20)
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"component buffer could not keep its small state.*is locked") as told:
            member.gate.require(20)
        assert told.value.component == "buffer"
    with pytest.raises(WindowClosedError):
        member.gate.require(19)
    locked = False
    member.mark(20)
    member.close_window(1.0)
    with pytest.raises(WindowClosedError):
        member.gate.require(20)


def test_whoever_requires_the_window_of_a_step_is_told_that_its_update_had_raised() -> None:
    training = Training(kind=Fails)
    training.optimizer.broken = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        training.update()
    with pytest.raises(SnapshotError):
        training.member.mark(1)
    with pytest.raises(SnapshotError, match="may be half updated"):
        training.member.gate.require(1)
