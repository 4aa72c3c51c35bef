"""One node for tests: a real stager on a loop of its own, and agents that reach it over its socket, without Ray."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import torch

from lastgood.coordinator.messages import AttemptHead, MemberId, RecordState, SnapshotOrder
from lastgood.storage.errors import StagingError
from lastgood.storage.layout import RunPaths
from lastgood.storage.manifest import Completed, EpochNote, Manifest, MemberRecord, RoleRecord, ShardRecord
from lastgood.storage.store import FileStore
from lastgood.workers.ray_link import RayStagerLink
from lastgood.workers.stager import Stager, StagerConfig

ACTOR = MemberId("actor", 0)


class Loop:
    """An event loop in a thread of its own, as an actor has it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class LocalLink(RayStagerLink):
    """An agent's link to a stager in this process: introduced without Ray, then over the socket."""

    def __init__(self, node: Any) -> None:
        super().__init__("run", "here")
        self._node = node

    def _find(self, method: str, *arguments: Any) -> Any:
        return self._node.call(method, *arguments)


class Node:
    """One node: a stager with its directories, on its own loop."""

    def __init__(self, root: Path, images_per_component: int = 1) -> None:
        self.root = root
        self.images_per_component = images_per_component
        self.loop = Loop()
        self.changes = 0
        self.stager = self.open()

    def open(self) -> Stager:
        store = FileStore(self.root / "store")

        async def build() -> Stager:
            holder, images = f"pid {os.getpid()}", self.images_per_component
            config = StagerConfig("run", self.root / "staging", self.root, holder, "here", 5 << 20, images)
            return Stager(config, store, self.no_peer, self.changed)

        return self.loop.run(build())

    def restart(self) -> None:
        self.call("close")
        self.stager = self.open()

    def changed(self) -> None:
        self.changes += 1

    async def no_peer(self, node: str, head: AttemptHead, path: str) -> AsyncIterator[bytes]:
        if node:
            raise StagingError(f"no node {node}")
        yield b""

    def call(self, method: str, *arguments: Any) -> Any:
        if arguments and isinstance(arguments[0], int) and arguments[0] < 10:
            self.claim(arguments[0])
        return self.loop.run(getattr(self.stager, method)(*arguments))

    def claim(self, epoch: int) -> None:
        """As a coordinator does before it calls anybody."""
        note = EpochNote(epoch=epoch).to_bytes()
        FileStore(self.root / "store").create_exclusive(RunPaths("", "run").epoch(epoch), note)

    def close(self) -> None:
        self.call("close")
        self.loop.stop()


def training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "cursor": {"seen": 5}}


def update(state: dict[str, Any]) -> None:
    state["model"](torch.randn(2, 4)).sum().backward()
    state["optimizer"].step()


def head(name: str = "A1", step: int = 1, epoch: int = 1, sequence: int = 1) -> AttemptHead:
    return AttemptHead(name, step, epoch, sequence)


def snapshot(node: Node, at: AttemptHead) -> Any:
    return node.call("snapshot", at.epoch, SnapshotOrder(at, (ACTOR,), 30.0))


def stage(node: Node, at: AttemptHead) -> tuple[ShardRecord, ...]:
    return tuple(node.call("stage", at.epoch, at, 30.0))


def manifest_of(node: Node, at: AttemptHead, shards: tuple[ShardRecord, ...]) -> bytes:
    components = {
        role: tuple(sorted(s.component for s in shards if s.role == role)) for role in {s.role for s in shards}
    }
    return Manifest(
        run="run",
        attempt=at.attempt,
        step=at.step,
        epoch=at.epoch,
        sequence=at.sequence,
        kind="scheduled",
        created_at="2031-05-06T07:08:09.123Z",
        roles={role: RoleRecord(world_size=1, components=names) for role, names in sorted(components.items())},
        members=tuple(MemberRecord(role=role, rank=0, node=node.stager.node, updates=1) for role in sorted(components)),
        participants=(node.stager.node,),
        shards=shards,
    ).to_bytes()


def commit(node: Node, at: AttemptHead) -> bytes:
    manifest = manifest_of(node, at, stage(node, at))
    assert node.call("accept", at.epoch, at, manifest) is RecordState.ACCEPT
    completed = Completed.of(Manifest.from_bytes(manifest, where="m"), manifest, "2031-05-06T07:08:10.000Z")
    node.call("publish", at.epoch, completed, manifest)
    return manifest
