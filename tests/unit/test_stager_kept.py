"""A staging that came to nothing is done again from the same bytes, whatever came in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import Keepsake, SnapshotOrder
from lastgood.storage.errors import DeadlineError, StagingError
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from lastgood.workers.staging import Staging
from tests.unit.stager_world import ACTOR, LocalLink, Node, commit, head, snapshot, training, update


class Optimizer:
    """Where the writes of the optimizer's shard are held, until they fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.full = True
        write = Staging._write_file

        def writes(whose: Staging, at: Any, key: Any, path: str, payload: Any, progress: Any) -> Any:
            if key[1] == "optimizer" and self.full:
                self.begun.set()
                assert self.go.wait(30)
                progress.ended = True
                raise StagingError("no space left on device [ENOSPC]", errno=28)
            return write(whose, at, key, path, payload, progress)

        monkeypatch.setattr(Staging, "_write_file", writes)

    def end(self) -> None:
        """They fail, and the disk has room again."""
        self.full = False
        self.go.set()


def started(node: Node) -> tuple[dict[str, Any], Agent]:
    """One rank, copied at step 1."""
    state = training()
    update(state)
    agent = Agent("run", LocalLink(node))
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    node.call("snapshot", 1, SnapshotOrder(head(), (ACTOR,), 30.0, keepsake=Keepsake((), {}, ())))
    return state, agent


def standing(node: Node, work: Callable[[], Any]) -> None:
    """Waits until the write that failed has been taken back."""

    async def over() -> None:
        while any(each.staged is not None for each in node.stager._staging._snapshots.values()):
            await asyncio.sleep(0)

    work()
    node.loop.run(over())


def test_no_image_of_a_save_that_is_still_written_is_filled_for_the_next_step(
    keeping_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = Optimizer(monkeypatch)
    state, agent = started(keeping_node)
    weight = state["model"].weight.detach().clone()
    with pytest.raises(DeadlineError):
        keeping_node.call("stage", 1, head(), 0.5)  # the model is on the disk, the optimizer is not
    update(state)
    keeping_node.call("mark", 1, 2, 30.0)
    snapshot(keeping_node, head("A2", 2, 1, 2))
    standing(keeping_node, optimizer.end)
    keeping_node.call("discard", 1, head("A2", 2, 1, 2))
    agent.close()
    commit(keeping_node, head())
    saved = load_file(keeping_node.root / "staging/run/global_step_1/A1/actor/rank_00000.model.safetensors")
    assert torch.equal(saved["weight"], weight)


@pytest.mark.parametrize("how", ["the resume ends", "a new process makes its images"])
def test_what_is_half_on_the_disk_stays_in_memory(
    keeping_node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    optimizer = Optimizer(monkeypatch)
    state, agent = started(keeping_node)
    weight = state["model"].weight.detach().clone()
    agent.close()
    with pytest.raises(DeadlineError):
        keeping_node.call("stage", 1, head(), 0.5)
    if how == "the resume ends":
        keeping_node.call("forget", 1)
    else:
        agent = Agent("run", LocalLink(keeping_node))
        agent.add(Member.of("actor", 0, 1, training()), "m2")
        keeping_node.call("mark", 1, 1, 30.0)
        assert agent._images._making is not None
        agent._images._making.join(30)
        agent.close()
    standing(keeping_node, optimizer.end)
    commit(keeping_node, head())
    saved = load_file(keeping_node.root / "staging/run/global_step_1/A1/actor/rank_00000.model.safetensors")
    assert torch.equal(saved["weight"], weight)
    assert not keeping_node.stager._staging._snapshots


def test_a_take_over_that_meets_a_write_that_hangs_is_made_when_that_has_ended(
    keeping_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = Optimizer(monkeypatch)
    _, agent = started(keeping_node)
    with pytest.raises(DeadlineError):
        keeping_node.call("stage", 1, head(), 0.5)
    after = head("B1", 1, 2, 2)
    order = SnapshotOrder(after, (ACTOR,), 0.2, keepsake=Keepsake((), {}, ()), origin="A1")
    with pytest.raises(StagingError, match="still writes it"):
        keeping_node.call("snapshot", 2, order)
    standing(keeping_node, optimizer.end)
    keeping_node.call("snapshot", 2, order)
    commit(keeping_node, after)
    agent.close()
