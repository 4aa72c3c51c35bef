"""Two nodes and a store below one directory: real stagers, real files; members and coordinator's calls are played.

<root>/n1/staging   <root>/n2/staging   <root>/nas/store        the disks, which the layer watches
<images>                                                        shared memory, which a power loss empties
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgood.coordinator import epochs
from lastgood.coordinator.messages import AttemptHead, MemberId, MemberInfo, MemberReport, RoleDeclaration
from lastgood.coordinator.remote import Remote
from lastgood.storage import files, ids, layout, store
from lastgood.storage.errors import StagingError
from lastgood.storage.layout import RunPaths
from lastgood.storage.store import FileStore
from lastgood.workers.disk import NodeDisk
from lastgood.workers.images import Image
from lastgood.workers.orders import Answer, ImageRequest, Order, OrderKind, SealedShard
from lastgood.workers.processes import pid_namespace_of_this_process
from lastgood.workers.stager import Stager, StagerConfig

RUN = "run"
PATHS = RunPaths("", RUN)
NODES = ("n1", "n2")
DISKS = ("n1", "n2", "nas")
STORE = "nas/store"
BLOCK_BYTES = 4096
SHARD_BYTES = 10_000  # three blocks: two pieces that are written directly, and a tail that is not
MEMBERS = {"n1": MemberId("actor", 0), "n2": MemberId("trainer", 0)}
COMPONENTS = {"n1": ("model", "optimizer"), "n2": ("cursor",)}
COMMITTED_AT = "2031-05-06T07:08:10.000Z"


def staging(node: str) -> str:
    return f"{node}/staging"


def make_disks(root: Path) -> None:
    """Empty disks. The store's root is there, as a user has made it; those of nodes are made by whoever uses them."""
    for disk in DISKS:
        (root / disk).mkdir(parents=True)
    (root / STORE).mkdir()


def steady(seed: int) -> None:
    """Ids and times that depend on the seed only, in this process from now on: equal runs leave equal bytes.

    A shard is written in several pieces then, small as it is.
    """
    moments, numbers = itertools.count(1_900_000_000), itertools.count(1)

    def clock() -> float:
        return float(next(moments))

    def random_bytes(count: int) -> bytes:
        return (seed << 32 | next(numbers)).to_bytes(count, "big")

    ids.ulid.__defaults__ = ids.new_id.__defaults__ = (clock, random_bytes)
    NodeDisk.__init__.__defaults__ = (clock,)
    epochs.claim_epoch.__defaults__ = (clock,)
    time.time = clock
    files.WRITE_BYTES = BLOCK_BYTES


@contextlib.contextmanager
def no_links() -> Iterator[None]:
    """Paths are put together without looking for symbolic links in them: there are none here, and to look for them
    takes more than half of the campaign's time. What a path may be is checked as always."""
    real = layout.confine

    def quick(root: str | Path, relative: str) -> Path:
        return Path(root) / layout.check_relative(relative)

    layout.confine = store.confine = quick
    try:
        yield
    finally:
        layout.confine = store.confine = real


def content(attempt: str, component: str) -> bytes:
    """The bytes of a shard; every attempt has others."""
    return (f"{attempt} {component} ".encode() * SHARD_BYTES)[:SHARD_BYTES]


@dataclass
class Place:
    """Where everything is in this process."""

    root: Path
    images: Path

    def staging(self, node: str) -> Path:
        return self.root / staging(node)

    @property
    def store(self) -> FileStore:
        return FileStore(self.root / STORE)

    @property
    def remote(self) -> Remote:
        return Remote(self.store, RUN, lambda: COMMITTED_AT)


async def _no_peer(node: str, head: AttemptHead, path: str) -> AsyncIterator[bytes]:
    if node:
        raise StagingError(f"no stager of {node} is asked here")
    yield b""


class Stagers:
    """The stagers of all nodes, opened in this process, each with a member that copies what it is told to."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.of: dict[str, Stager] = {}
        self._members: list[asyncio.Task[None]] = []

    def open(self, name: str) -> Stager:
        """Starts the stager of one disk."""
        where = self.place.staging(name)
        # One thread: several would write in an order that no two tellings share.
        config = StagerConfig(
            RUN, where, self.place.images, "a stager", name, BLOCK_BYTES, shards_at_once=1, threads_per_shard=1
        )
        stager = Stager(config, self.place.store, _no_peer, lambda: None)
        self.of[name] = stager
        return stager

    async def attend(self, name: str) -> None:
        """A member registers with the stager and answers its orders from now on."""
        stager, member = self.of[name], MEMBERS[name]
        info = MemberInfo(member, 1, COMPONENTS[name], "m1", f"process-{name}", os.getpid())
        await stager.register(info.process, info.pid, pid_namespace_of_this_process(), [info])
        self._members.append(asyncio.ensure_future(_member(stager, info)))

    async def close(self) -> None:
        for stager in self.of.values():
            await stager.close()
        for member in self._members:
            member.cancel()
        await asyncio.gather(*self._members, return_exceptions=True)


async def _member(stager: Stager, info: MemberInfo) -> None:
    answer: Answer | None = None
    while True:
        order = await stager.poll(info.process, answer, 60)
        if order is None:
            return
        shards: tuple[SealedShard, ...] = ()
        if order.kind is OrderKind.SNAPSHOT:
            shards = await _copy(stager, info, order)
        report = MemberReport(info.member, order.step, 1, info.components, SHARD_BYTES)
        answer = None if order.kind is OrderKind.NOTHING else Answer(order.order_id, (report,), shards)


async def _copy(stager: Stager, info: MemberInfo, order: Order) -> tuple[SealedShard, ...]:
    assert order.head is not None
    wishes = [ImageRequest(info.member, name, SHARD_BYTES) for name in info.components]
    given = await stager.provide(info.process, wishes)
    shards = []
    for wish in wishes:
        path = given[wish.member, wish.component]
        image = Image.open(Path(path))
        image.begin(order.head.attempt)
        image.payload[:SHARD_BYTES] = content(order.head.attempt, wish.component)
        image.seal(SHARD_BYTES)
        image.close()
        shards.append(SealedShard(wish.member, wish.component, path, SHARD_BYTES, ()))
    return tuple(shards)


DECLARATIONS = tuple(RoleDeclaration(MEMBERS[node].role, 1, COMPONENTS[node], "m1") for node in NODES)
