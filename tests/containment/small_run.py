"""A whole run without Ray: the real coordinator's driver, two real stagers, two real agents, a real store.

Everything is on the disks it was given, so a test can take one of them away. `save` makes one save and answers what
became of it; `stands` checks from the files alone that a step is whole and that nothing else lies around.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lastgood.coordinator.driver import Driver
from lastgood.coordinator.messages import AttemptHead, MemberId, RoleDeclaration, SaveState
from lastgood.coordinator.outcomes import SaveOutcome, WindowOutcome
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.settings import Deadlines, Settings
from lastgood.storage.errors import StagingError
from lastgood.storage.files import is_temporary
from lastgood.storage.ids import ulid, utc_text
from lastgood.storage.layout import RunPaths
from lastgood.storage.manifest import EpochNote, Latest, Manifest
from lastgood.storage.store import FileStore
from lastgood.storage.verify import verify_attempt
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from lastgood.workers.stager import Stager, StagerConfig
from tests.unit.stager_world import LocalLink, Loop

LIMIT_S = 60.0  # nothing here takes longer
DUE = Decision(True, "the test saves every step")


class SmallNode:
    """A node with one rank: directories, stager, agent. `node` names the staging directory, as blames do."""

    def __init__(self, run: SmallRun, rank: int) -> None:
        self.run = run
        self.rank = rank
        self.staging = run.root / f"staging-{rank}"
        self.images = run.root / f"images-{rank}"
        self.images.mkdir(exist_ok=True)
        self.state: dict[str, Any] = {"weights": Tensors(rank), "cursor": {"seen": 0}}
        self.start()
        self.agent = Agent("run", LocalLink(self))

    def start(self) -> None:
        async def build() -> Stager:
            config = StagerConfig("run", self.staging, self.images, f"pid {os.getpid()}", f"node {self.rank}", 5 << 20)
            return Stager(config, self.run.store, self.no_peer, lambda: None)

        self.stager: Stager = self.run.loop.run(build())
        self.node = self.stager.node

    async def no_peer(self, node: str, head: AttemptHead, path: str) -> AsyncIterator[bytes]:
        if node:
            raise StagingError(f"no node {node}")
        yield b""

    def call(self, method: str, *arguments: Any) -> Any:
        return self.run.loop.run(getattr(self.stager, method)(*arguments))

    def join(self) -> None:
        self.agent.add(Member.of("actor", self.rank, 2, self.state, hold_limit_s=LIMIT_S), "m1")

    def close(self) -> None:
        self.agent.close()
        self.call("close")

    @property
    def member(self) -> Member:
        """The rank, as its agent knows it."""
        (member,) = self.agent._members.values()
        return member

    @property
    def files(self) -> Path:
        """The run's part of the staging directory."""
        return self.staging / "run"

    def image_bytes(self) -> int:
        return self.stager._staging._room.nbytes()


class Tensors:
    """A component of 300,000 numbers."""

    def __init__(self, rank: int) -> None:
        self.value = torch.full((300_000,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class SmallRun:
    """Two nodes, a store and a coordinator. `deadlines` are seconds, `settings` go to the protocol.

    Deadlines are long (a busy machine must not fail a save that should commit); `hurry` shortens them for a while.
    """

    def __init__(self, root: Path, deadlines: dict[str, float] | None = None, **settings: Any) -> None:
        self.root = root
        self.loop = Loop()
        self.store_root = root / "store"
        self.store = FileStore(self.store_root)
        self.store.create_exclusive(RunPaths("", "run").epoch(1), EpochNote(epoch=1).to_bytes())
        self.nodes = [SmallNode(self, 0), SmallNode(self, 1)]
        for node in self.nodes:
            node.join()
        limits = {"save_s": 50, "snapshot_s": 30, "stage_s": 30, "accept_s": 30, "mark_s": 30, **(deadlines or {})}
        defaults = {"retry_s": 0.05, "retry_max_s": 0.2, "max_consecutive_failures": 1000}
        self.settings = Settings(run="run", epoch=1, deadlines=Deadlines(**limits), **{**defaults, **settings})
        self.loop.run(self._lead())

    async def _lead(self) -> None:
        self.driver = Driver(
            self.settings,
            store=self.store,
            new_attempt_id=ulid,
            clock=time.monotonic,
            now_utc=lambda: utc_text(time.time()),
            home=RunPaths("", "run").epoch(1),
        )
        self.driver.declare(RoleDeclaration("actor", 2, ("cursor", "weights"), "m1"))
        for node in self.nodes:
            await self.driver.add_node(node.stager)
        await self.driver.recover()

    @contextlib.contextmanager
    def hurry(self, **deadlines: float) -> Iterator[None]:
        """Within the block these deadlines count."""
        before = self.settings.deadlines
        object.__setattr__(self.settings, "deadlines", replace(before, **deadlines))
        try:
            yield
        finally:
            object.__setattr__(self.settings, "deadlines", before)

    # -- saving

    def end_step(self, step: int) -> WindowOutcome:
        """The next update and its end; a save is due."""
        for node in self.nodes:
            node.state["weights"].value += 1.0
            node.state["cursor"]["seen"] = step
        return self.loop.run(self.driver.open_window(step, None, DUE))

    def save(self, step: int) -> SaveOutcome | WindowOutcome:
        """One step and its save; what became of it (the window's outcome when it did not even open)."""
        window = self.end_step(step)
        if not window.opened:
            return window
        (save,) = window.saves
        return self.loop.run(self.driver.wait(save.request_id, SaveState.COMMITTED, LIMIT_S))

    def commits(self, step: int) -> None:
        """A save of `step` is committed, and stands."""
        outcome = self.save(step)
        assert isinstance(outcome, SaveOutcome) and outcome.committed, outcome
        self.stands(step)

    def fails(self, step: int, *named: str, phase: str, node: int | None = None, member: int | None = None) -> str:
        """A save of `step` fails, naming all of this (`named`: patterns); answers the blame's text."""
        outcome = self.save(step)
        blame = outcome.blame
        assert blame is not None, outcome
        if isinstance(outcome, SaveOutcome):
            assert outcome.state is SaveState.ABORTED and not outcome.in_doubt, outcome
        told = str(blame)
        assert blame.phase == phase, told
        assert blame.node == (None if node is None else self.nodes[node].node), told
        assert blame.member == (None if member is None else MemberId("actor", member)), told
        assert f"phase {phase}" in told and (node is None or f"node {self.nodes[node].node}" in told), told
        for text in named:
            assert re.search(text, told), f"{text!r} is not in {told!r}"
        assert "\n" not in told and "Traceback" not in told and "ray::" not in told, told
        return told

    def durable(self, step: int) -> None:
        """Waits until the checkpoint of `step` is durable."""
        until(lambda: any(c.step == step and c.durable for c in self.checkpoints()), f"step {step} durable")

    def checkpoints(self) -> list[Any]:
        async def ask() -> list[Any]:
            return self.driver.checkpoints()

        return self.loop.run(ask())

    def status(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            return self.driver.status()

        return self.loop.run(ask())

    # -- looking

    def clean(self) -> None:
        """Waits until nothing of an aborted attempt is left: no shards, no temporary files, no image in use."""
        until(lambda: not self.leftovers(), f"nothing is left: {self.leftovers()}")

    def leftovers(self) -> list[str]:
        committed = {c.attempt for c in self.checkpoints() if c.committed}
        found = [a for a in self.status()["background"] if a["phase"] == "aborting"]
        left = [f"attempt {a['attempt']} is {a['phase']}: {a['story'][-1]}" for a in found]
        for node in self.nodes:
            for path in (Path(folder, name) for folder, _, names in os.walk(node.files) for name in names):
                attempt = path.parent.parent.name
                if is_temporary(path.name) or (path.suffix == ".safetensors" and attempt not in committed):
                    left.append(str(path))
            left += [
                f"image of {component} on {node.rank} is {image.state.name}"
                for (_, component), image in node.stager._staging._slots.images()
                if image.state.name == "SEALED" or (image.state.name == "STAGED" and image.attempt not in committed)
            ]
        return left

    def stands(self, step: int) -> None:
        """Step `step` is the newest checkpoint on every node's disk, and every byte of it is as it was committed."""
        for node in self.nodes:
            until((node.files / "latest.json").exists, "latest.json is published")

            def latest(node: SmallNode = node) -> Latest:
                return Latest.from_bytes((node.files / "latest.json").read_bytes(), where="latest.json")

            until(lambda latest=latest: latest().global_step == step, f"latest.json tells step {step}")
            place = node.staging / "run" / latest().path
            manifest = Manifest.from_bytes((place / "manifest.json").read_bytes(), where=str(place))
            mine = manifest.shards_of(node.node)
            assert len(mine) == 2
            assert not [finding for finding in verify_attempt(place, manifest, mine) if finding.fatal]

    def close(self) -> None:
        async def stop() -> None:
            await self.driver.stop()

        assert not self.driver.faults
        self.loop.run(stop())
        for node in self.nodes:
            node.close()
        self.loop.stop()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits for a condition and answers its value; fails naming it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def seconds_of(told: str) -> float:
    """The seconds that a blame says were waited."""
    return float(told.rsplit("after ", 1)[1].split(" s", 1)[0])
