"""Whatever a stager goes through, what it commits for a step is that step's state, all of it: random stories.

One node that keeps snapshots in memory. Disks fail and hang for single shards, stages time out and are asked again,
newer copies come and are refused, ranks die, resumes end, coordinators take over. After every commit each shard's bytes
are those of its step; at the end nothing stands in memory any more.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import AttemptHead, Keepsake, SnapshotOrder
from lastgood.storage.errors import LastgoodError, StagingError
from lastgood.workers import staging
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from lastgood.workers.staging import Staging
from tests.unit.stager_world import ACTOR, LocalLink, Node, commit, head

COMPONENTS = ("one", "three", "two")
STEPS = 12
SHORT_S = 0.02  # a stage deadline that a write which hangs is over


class Buffer:
    """A component that holds nothing but the number of its step, and may grow."""

    def __init__(self) -> None:
        self.values = torch.zeros(64)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Disk:
    """Writes of some shards fail, or hang until they are let go and then fail or end."""

    def __init__(self, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = draw
        self.broken = True
        self.hanging: list[tuple[threading.Event, list[bool]]] = []
        write = Staging._write_file

        def writes(whose: Staging, at: AttemptHead, key: Any, path: str, payload: Any, progress: Any) -> Any:
            how = self.draw.choice(("well", "well", "fails", "hangs")) if self.broken else "well"
            fails = how == "fails"
            if how == "hangs":
                freed, outcome = threading.Event(), [False]
                self.hanging.append((freed, outcome))
                assert freed.wait(30)
                fails = outcome[0]
            if fails:
                progress.ended = True
                raise StagingError("no space left on device [ENOSPC]", errno=28)
            return write(whose, at, key, path, payload, progress)

        monkeypatch.setattr(Staging, "_write_file", writes)

    def let_go(self, *, fails: bool) -> None:
        hanging, self.hanging = self.hanging, []
        for freed, outcome in hanging:
            outcome[0] = fails
            freed.set()


class Story:
    """The coordinator's part, badly treated: `held` is the newest whole snapshot, at most one."""

    def __init__(self, node: Node, draw: random.Random, disk: Disk) -> None:
        self.node, self.draw, self.disk = node, draw, disk
        self.epoch = 1
        self.step = self.count = self.commits = 0
        self.held: AttemptHead | None = None
        self.owed: list[AttemptHead] = []  # to be discarded
        self.state = {name: Buffer() for name in COMPONENTS}
        self.agent = self.new_agent()

    def new_agent(self) -> Agent:
        self.count += 1
        agent = Agent("run", LocalLink(self.node))
        agent.add(Member.of("actor", 0, 1, self.state), f"m{self.count}")
        return agent

    def try_to(self, method: str, *arguments: Any) -> Any:
        try:
            return self.node.call(method, self.epoch, *arguments) or True
        except LastgoodError:
            return None

    def new_head(self, step: int) -> AttemptHead:
        self.count += 1
        return head(f"A{self.count}", step, self.epoch, self.count)

    def copy(self) -> None:
        """A step ends and is copied; it may come to nothing elsewhere, and then the one before stays."""
        self.step += 1
        for buffer in self.state.values():
            grown = len(buffer.values) * (4 if self.draw.random() < 0.1 else 1)
            buffer.values = torch.full((grown,), float(self.step))
        if self.try_to("mark", self.step, 30.0) is None:
            return
        new = self.new_head(self.step)
        whole = self.try_to("snapshot", SnapshotOrder(new, (ACTOR,), 30.0, keepsake=Keepsake((), {}, ())))
        if whole is None or self.draw.random() < 0.3:
            self.let_go_of(new)
            return
        if self.held is not None:
            self.let_go_of(self.held)
        self.held = new

    def let_go_of(self, attempt: AttemptHead) -> None:
        self.try_to("refuse", attempt, "it came to nothing")
        self.owed.append(attempt)
        self.discard()

    def discard(self) -> None:
        """Again until it is done, as a coordinator does."""
        for attempt in list(self.owed):
            if self.try_to("discard", attempt) is not None:
                self.owed.remove(attempt)

    def save(self) -> None:
        if self.held is not None and self.try_to("stage", self.held, SHORT_S) is not None:
            self.finish()

    def finish(self) -> None:
        assert self.held is not None
        commit(self.node, self.held)
        self.commits += 1
        shards = self.node.root / f"staging/run/global_step_{self.held.step}/{self.held.attempt}/actor"
        found = {path.name.split(".")[1]: load_file(path)["values"].unique() for path in shards.glob("*.safetensors")}
        assert found == {name: torch.tensor([float(self.held.step)]) for name in COMPONENTS}, found
        self.held = None

    def hang_no_more(self) -> None:
        self.disk.let_go(fails=self.draw.random() < 0.5)

    def die(self) -> None:
        """The rank's process goes, and a new one comes, which makes its images ahead."""
        self.agent.close()
        if self.draw.random() < 0.5:
            self.save()
        self.agent = self.new_agent()

    def end_resume(self) -> None:
        self.try_to("forget")

    def take_over(self) -> None:
        """A new coordinator takes over what is in memory, or lets it go."""
        self.epoch += 1
        self.node.claim(self.epoch)
        told = self.node.call("hello", self.epoch, []).attempts
        before, self.held = self.held, None
        if before is None:
            return
        for held in [each.held for each in told if each.attempt == before.attempt and each.held is not None]:
            new = self.new_head(before.step)
            order = SnapshotOrder(new, (ACTOR,), SHORT_S, keepsake=held.keepsake, origin=held.origin)
            if self.try_to("snapshot", order) is not None:
                self.held = new
        self.let_go_of(before)

    def end(self) -> None:
        """The disk is well again: what is held is saved, and nothing is left."""
        self.disk.broken = False
        self.disk.let_go(fails=True)
        if self.held is not None:
            self.try_to("stage", self.held, 30.0)  # what was under way may fail now
            assert self.node.call("stage", self.epoch, self.held, 30.0)
            self.finish()
        self.agent.close()
        self.discard()
        assert not self.owed
        assert not self.node.stager._staging._snapshots


@pytest.mark.parametrize(
    "seed", [*range(6), 16, 30, 45, 53, 61, 70, 72, 82, 87, 99]
)  # those after 5 have found something
def test_what_is_committed_is_of_its_step(keeping_node: Node, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(staging, "LET_GO_S", SHORT_S)
    draw = random.Random(seed)
    story = Story(keeping_node, draw, Disk(draw, monkeypatch))
    acts = (story.copy, story.copy, story.copy, story.save, story.save, story.hang_no_more, story.die, story.end_resume)
    while story.step < STEPS:
        draw.choice((*acts, story.take_over))()
    story.end()
