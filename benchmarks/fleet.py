"""A fleet of M members on M/8 nodes that answers honestly and at once, so that only the coordinator's work is measured.

Answers are made beforehand. Of eight members of a node six are actor ranks with three components and two are ref ranks
with two; each shard lists `chunks` boxes of tensors. There are no disks and there is no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lastgood.coordinator.messages import (
    AttemptHead,
    AttemptInventory,
    Grant,
    Inventory,
    LoadRequest,
    MemberId,
    MemberInfo,
    MemberReport,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SaveRequest,
    SnapshotOrder,
)
from lastgood.storage.digest import BlockDigests
from lastgood.storage.layout import shard_path
from lastgood.storage.manifest import Chunk, Completed, ShardRecord
from lastgood.storage.store import Guarantees

MEMBERS_PER_NODE = 8
COMPONENTS = {"actor": ("model", "optimizer", "rng"), "ref": ("model", "rng")}
SHARD_BYTES = 256 << 20
BLOCK_BYTES = 64 << 20
_REFS = (6, 7)  # which of a node's eight are ref ranks


class Fleet:
    """Who there is, and what each node answers."""

    def __init__(self, members: int, chunks: int, name: Callable[[str], str] = str) -> None:
        """`chunks`: boxes of tensors that each shard lists. `name` makes the nodes' names, for tests that count."""
        self.chunks = chunks
        self.nodes: dict[str, tuple[MemberId, ...]] = {}
        self.sizes = {"actor": 0, "ref": 0}
        for first in range(0, members, MEMBERS_PER_NODE):
            here = []
            for slot in range(min(MEMBERS_PER_NODE, members - first)):
                role = "ref" if slot in _REFS else "actor"
                here.append(MemberId(role, self.sizes[role]))
                self.sizes[role] += 1
            self.nodes[name(f"node-{len(self.nodes):05d}")] = tuple(sorted(here))
        self.sizes = {role: size for role, size in self.sizes.items() if size}
        self.declarations = tuple(
            RoleDeclaration(role, size, COMPONENTS[role], "m1") for role, size in self.sizes.items()
        )
        self.shards = {
            node: tuple(_shard(member, name, node, chunks) for member in here for name in COMPONENTS[member.role])
            for node, here in self.nodes.items()
        }

    @property
    def members(self) -> int:
        return sum(self.sizes.values())

    def infos(self, node: str) -> tuple[MemberInfo, ...]:
        return tuple(
            MemberInfo(m, self.sizes[m.role], COMPONENTS[m.role], "m1", f"{m.role}-{m.rank}", 1, {f"{m.role}.dim": 64})
            for m in self.nodes[node]
        )

    def snapshot(self, node: str, step: int, nbytes: int = SHARD_BYTES) -> NodeSnapshot:
        reports = tuple(MemberReport(m, step, step, COMPONENTS[m.role], nbytes) for m in self.nodes[node])
        return NodeSnapshot(node, reports, 0.05)

    def inventory(self, node: str, epoch: int, attempts: Iterable[AttemptInventory] = ()) -> Inventory:
        return Inventory(
            node, "i1", epoch, self.infos(node), tuple(attempts), self.declarations, processes=len(self.nodes[node])
        )

    def stored(self, heads: Iterable[AttemptHead], manifests: dict[str, bytes]) -> tuple[AttemptInventory, ...]:
        """Attempts of an earlier coordinator, as they lie on every node: accepted and completed, not known durable."""
        return tuple(
            AttemptInventory(
                head.attempt,
                head.step,
                head.epoch,
                head.sequence,
                RecordState.ACCEPT,
                staged=True,
                completed=True,
                durable=False,
                participants=tuple(self.nodes),
                manifest=manifests[head.attempt],
            )
            for head in heads
        )


def _shard(member: MemberId, component: str, node: str, chunks: int) -> ShardRecord:
    blocks = tuple(
        hashlib.sha256(f"{member} {component} {n}".encode()).hexdigest() for n in range(SHARD_BYTES // BLOCK_BYTES)
    )
    rows = 4096
    return ShardRecord(
        role=member.role,
        rank=member.rank,
        component=component,
        path=shard_path(member.role, member.rank, component),
        nbytes=SHARD_BYTES,
        block_bytes=BLOCK_BYTES,
        blocks=blocks,
        digest=hashlib.sha256(b"".join(map(bytes.fromhex, blocks))).hexdigest(),
        node=node,
        chunks=tuple(
            Chunk(
                fqn=f"model.layers.{n}.self_attn.q_proj.weight",
                dtype="bfloat16",
                global_shape=(rows * (member.rank + 1), 4096),
                offsets=(rows * member.rank, 0),
                sizes=(rows, 4096),
                begin=4096 + n * 1024,
                end=4096 + (n + 1) * 1024,
            )
            for n in range(chunks)
        ),
    )


class FleetPort:
    """One node's stager: service.StagerPort, answered at once. `calls` counts them by method, over all nodes."""

    def __init__(self, fleet: Fleet, node: str, calls: dict[str, int]) -> None:
        self.node = node
        self._fleet = fleet
        self._calls = calls
        self.attempts: tuple[AttemptInventory, ...] = ()
        self.manifest_bytes = 0  # sent to this node

    def _count(self, method: str) -> None:
        self._calls[method] = self._calls.get(method, 0) + 1

    async def highest_epoch(self) -> int:
        self._count("highest_epoch")
        return 0

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        self._count("hello")
        return self._fleet.inventory(self.node, epoch, self.attempts)

    async def mark(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        self._count("mark")
        return self._fleet.snapshot(self.node, step, 0)

    async def reopen(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        self._count("reopen")
        return self._fleet.snapshot(self.node, step, 0)

    async def remember(self, epoch: int, requests: Sequence[SaveRequest]) -> None:
        self._count("remember")

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        self._count("close_window")

    async def pause(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        self._count("pause")

    async def release(self, epoch: int, head: AttemptHead) -> None:
        self._count("release")

    async def copying(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        self._count("copying")

    async def snapshot(self, epoch: int, order: SnapshotOrder) -> NodeSnapshot:
        self._count("snapshot")
        return self._fleet.snapshot(self.node, order.head.step)

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        self._count("stage")
        return self._fleet.shards[self.node]

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        self._count("accept")
        self.manifest_bytes += len(manifest)
        return RecordState.ACCEPT

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        self._count("refuse")
        return RecordState.REFUSE

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        self._count("publish")
        self.manifest_bytes += len(manifest)

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        self._count("upload")

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        self._count("note_durable")

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        self._count("discard")

    async def load(self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float, members: Any) -> None:
        self._count("load")

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float, members: Any) -> None:
        self._count("apply")

    async def forget(self, epoch: int) -> None:
        self._count("forget")

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None:
        self._count("collect")

    async def grant(self, epoch: int, grant: Grant) -> None:
        self._count("grant")

    async def close_down(self) -> None:
        self._count("close_down")


class FleetStore:
    """A Store in a dictionary in which every shard stands, whole. `heads` counts the shards that were asked for."""

    url = "memory://fleet"
    guarantees = Guarantees(True, True, "it is a dictionary")

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.heads = 0

    def probe(self, folder: str) -> None:
        """It is there."""

    def create_exclusive(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.objects[key] = data
        return True

    def replace(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def replace_if(self, key: str, data: bytes, etag: str | None) -> bool:
        self.objects[key] = data
        return True

    def put_file(self, key: str, path: Path, digests: BlockDigests, same_as: str | None = None) -> None:
        raise NotImplementedError("the fleet has no files")

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def find(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        return self.objects[key][begin:end]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def head(self, key: str) -> tuple[int, str] | None:
        if key.endswith(".safetensors"):
            self.heads += 1
            return (SHARD_BYTES, "etag")
        data = self.objects.get(key)
        return None if data is None else (len(data), "etag")

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        return 0


async def at_once(work: Callable[[], Any]) -> Any:
    """Blocking work on the loop: its CPU is counted where it is spent."""
    return work()
