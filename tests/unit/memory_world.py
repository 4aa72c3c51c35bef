"""Stagers and a store in memory, and an event loop whose time passes only when nobody has anything to do.

For tests of the driver: real manifests, no disks, no waiting. Each port can be told to fail, to hang or to be slow.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lastgood.coordinator.driver import Driver
from lastgood.coordinator.messages import (
    AttemptHead,
    AttemptInventory,
    Inventory,
    MemberId,
    MemberInfo,
    MemberReport,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SaveKind,
    SaveRequest,
    SnapshotOrder,
)
from lastgood.coordinator.protocol import Deadlines, Settings
from lastgood.storage.digest import BlockDigests
from lastgood.storage.errors import FencedError, StagingError, StoreError, StoreUnavailableError, WindowClosedError
from lastgood.storage.ids import utc_text
from lastgood.storage.layout import RunPaths, shard_path
from lastgood.storage.manifest import Completed, Manifest, ShardRecord
from lastgood.storage.store import Guarantees

T = TypeVar("T")
PATHS = RunPaths("", "run")
COMPONENTS = ("model", "optimizer")


class _Selector(selectors.SelectSelector):
    """Never sleeps: it tells the loop that the time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with its own time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run(scene: Coroutine[Any, Any, T]) -> T:
    """Runs a scene to its end in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(scene)
    finally:
        loop.close()


class MemoryStore:
    """A Store in a dictionary; `down` makes every call fail, with an unknown outcome."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.down = False
        self.writes: list[str] = []
        self._etag = 0

    url = "memory://"
    guarantees = Guarantees(True, True, "it is a dictionary")

    def probe(self, folder: str) -> None:
        self._reach()

    def _reach(self) -> None:
        if self.down:
            raise StoreUnavailableError("the store is down")

    def create_exclusive(self, key: str, data: bytes) -> bool:
        self._reach()
        if key in self.objects:
            return False
        self.writes.append(key)
        self.objects[key] = data
        return True

    def replace(self, key: str, data: bytes) -> None:
        self._reach()
        self.writes.append(key)
        self.objects[key] = data

    def replace_if(self, key: str, data: bytes, etag: str | None) -> bool:
        standing = self.head(key)
        if (None if standing is None else standing[1]) != etag:
            return False
        self.replace(key, data)
        return True

    def put_file(self, key: str, path: Path, digests: BlockDigests, same_as: str | None = None) -> None:
        raise NotImplementedError("ports in memory have no files")

    def get(self, key: str) -> bytes:
        self._reach()
        if key not in self.objects:
            raise StoreError(f"there is no {key}", missing=True)
        return self.objects[key]

    def find(self, key: str) -> bytes | None:
        self._reach()
        return self.objects.get(key)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        return self.get(key)[begin:end]

    def list(self, prefix: str) -> list[str]:
        self._reach()
        return sorted(key for key in self.objects if key.startswith(prefix))

    def head(self, key: str) -> tuple[int, str] | None:
        self._reach()
        data = self.objects.get(key)
        return None if data is None else (len(data), hashlib.sha256(data).hexdigest())

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        return 0


class MemoryPort:
    """One node. `fail[method]` is raised once; `hang` holds methods that never answer; `log` what was called."""

    def __init__(self, node: str, members: dict[MemberId, int], store: MemoryStore) -> None:
        self.node = node
        self.members = members  # member -> world size of its role
        self.store = store
        self.step = 0
        self.updates = 0
        self.updating = False
        self.pausable = False
        self.epoch = 0
        self.incarnation = 1
        self.process = 1
        self.declarations: tuple[RoleDeclaration, ...] = ()
        self.requests: tuple[SaveRequest, ...] = ()
        self.images: dict[str, tuple[MemberReport, ...]] = {}
        self.staged: dict[str, tuple[ShardRecord, ...]] = {}
        self.heads: dict[str, AttemptHead] = {}
        self.records: dict[str, tuple[RecordState, bytes | None]] = {}
        self.completed: dict[str, Completed] = {}
        self.durable: set[str] = set()
        self.fail: dict[str, BaseException] = {}
        self.hang: set[str] = set()
        self.slow_s: dict[str, float] = {}
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}  # a method waits here until the test lets it on

    async def _pass(self, method: str, epoch: int) -> None:
        self.log.append(method)
        if method in self.gates:
            await self.gates[method].wait()
        if method in self.hang:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.slow_s.get(method, 0.001))
        if epoch < self.epoch:
            raise FencedError(f"{self.node} has seen epoch {self.epoch}", epoch=epoch)
        self.epoch = epoch
        if method in self.fail:
            raise self.fail.pop(method)

    def infos(self) -> tuple[MemberInfo, ...]:
        return tuple(
            MemberInfo(
                m, size, COMPONENTS, "m1", f"{self.node}-{self.process}", 1, {f"{m.role}.size": size}, self.pausable
            )
            for m, size in self.members.items()
        )

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        await self._pass("hello", epoch)
        self.declarations = tuple(declarations) or self.declarations
        attempts = []
        for attempt, head in self.heads.items():
            record, manifest = self.records.get(attempt, (RecordState.NONE, None))
            participants = () if manifest is None else Manifest.from_bytes(manifest, where="record").participants
            attempts.append(
                AttemptInventory(
                    attempt,
                    head.step,
                    head.epoch,
                    head.sequence,
                    record,
                    attempt in self.staged,
                    attempt in self.completed,
                    attempt in self.durable,
                    participants,
                    manifest,
                )
            )
        return Inventory(
            self.node,
            str(self.incarnation),
            self.epoch,
            self.infos(),
            tuple(attempts),
            self.declarations,
            requests=self.requests,
        )

    async def mark(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        await self._pass("mark", epoch)
        self.step, self.updating = step, False
        return NodeSnapshot(self.node, tuple(MemberReport(m, step, self.updates, COMPONENTS) for m in self.members))

    async def reopen(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        await self._pass("reopen", epoch)
        if self.updating or step != self.step:
            raise WindowClosedError(f"{self.node} is in an update")
        return NodeSnapshot(self.node, tuple(MemberReport(m, step, self.updates, COMPONENTS) for m in self.members))

    async def remember(self, epoch: int, requests: Sequence[SaveRequest]) -> None:
        await self._pass("remember", epoch)
        self.requests = tuple(requests)

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        await self._pass("close_window", epoch)
        self.updating = True
        self.updates += 1

    async def pause(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._pass("pause", epoch)

    async def release(self, epoch: int, head: AttemptHead) -> None:
        await self._pass("release", epoch)

    async def copying(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._pass("copying", epoch)

    async def snapshot(self, epoch: int, order: SnapshotOrder) -> NodeSnapshot:
        await self._pass("snapshot", epoch)
        if self.updating or order.head.step != self.step:
            raise WindowClosedError(f"{self.node} is in an update")
        self.heads[order.head.attempt] = order.head
        reports = tuple(MemberReport(m, self.step, self.updates, COMPONENTS, 8) for m in order.members)
        self.images[order.head.attempt] = reports
        return NodeSnapshot(self.node, reports, 0.25)

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        await self._pass("stage", epoch)
        if head.attempt not in self.staged:
            if head.attempt not in self.images:
                raise StagingError(f"{self.node} holds no images of {head.attempt}")
            self.staged[head.attempt] = tuple(
                shard(report.member, component, self.node)
                for report in self.images.pop(head.attempt)
                for component in COMPONENTS
            )
        return self.staged[head.attempt]

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        await self._pass("accept", epoch)
        if head.attempt not in self.staged:
            return RecordState.UNKNOWN
        return self.records.setdefault(head.attempt, (RecordState.ACCEPT, manifest))[0]

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        await self._pass("refuse", epoch)
        self.heads.setdefault(head.attempt, head)
        return self.records.setdefault(head.attempt, (RecordState.REFUSE, None))[0]

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        await self._pass("publish", epoch)
        self.completed[completed.attempt] = completed

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        await self._pass("upload", epoch)
        for record in self.staged[head.attempt]:
            self.store.replace(PATHS.shard(head.step, head.attempt, record.path), content(record))

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        await self._pass("note_durable", epoch)
        self.durable.add(head.attempt)

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        await self._pass("discard", epoch)
        self.images.pop(head.attempt, None)
        self.staged.pop(head.attempt, None)

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None:
        await self._pass("collect", epoch)
        for held in (self.heads, self.records, self.staged, self.completed):
            held.pop(head.attempt, None)


def content(record: ShardRecord) -> bytes:
    return f"{record.role}{record.rank}{record.component}".encode().ljust(record.nbytes, b"-")


def shard(member: MemberId, component: str, node: str) -> ShardRecord:
    data = f"{member.role}{member.rank}{component}".encode().ljust(64, b"-")
    block = hashlib.sha256(data).hexdigest()
    return ShardRecord(
        role=member.role,
        rank=member.rank,
        component=component,
        path=shard_path(member.role, member.rank, component),
        nbytes=len(data),
        block_bytes=1 << 20,
        blocks=(block,),
        digest=hashlib.sha256(bytes.fromhex(block)).hexdigest(),
        node=node,
    )


async def at_once(work: Callable[[], T]) -> T:
    """Runs blocking work on the loop: threads have no place in virtual time."""
    await asyncio.sleep(0)
    return work()


class Scene:
    """Two nodes with an actor rank each, the run's driver on the first, a store, and coordinators on demand."""

    def __init__(self, **settings: Any) -> None:
        self.store = MemoryStore()
        self.ports = {
            "n1": MemoryPort("n1", {MemberId("actor", 0): 2, MemberId("trainer", 0): 1}, self.store),
            "n2": MemoryPort("n2", {MemberId("actor", 1): 2}, self.store),
        }
        self.epoch = 0
        self.settings = {"retry_s": 0.1, "retry_max_s": 1.0, **settings}

    def new_driver(self, store: MemoryStore | str | None = "own") -> Driver:
        """A coordinator with the next epoch."""
        self.epoch += 1
        made = iter(range(1, 1000))
        epoch = self.epoch
        loop = asyncio.get_running_loop()
        return Driver(
            Settings(run="run", epoch=epoch, **{"deadlines": DEADLINES, **self.settings}),
            store=self.store if isinstance(store, str) else store,
            new_attempt_id=lambda: f"e{epoch}-{next(made)}",
            clock=loop.time,
            now_utc=lambda: utc_text(1_700_000_000 + loop.time()),
            versions={"lastgood": "test"},
            blocking=at_once,
        )

    async def ready(self, store: MemoryStore | str | None = "own") -> Driver:
        """A coordinator that has heard both nodes, knows the roles and has recovered."""
        driver = self.new_driver(store)
        driver.declare(RoleDeclaration("actor", 2, COMPONENTS, "m1"))
        driver.declare(RoleDeclaration("trainer", 1, COMPONENTS, "m1"))
        for port in self.ports.values():
            await driver.add_node(port)
        await driver.recover()
        return driver

    def restart(self, node: str) -> None:
        """The stager is killed and comes back: its images are gone."""
        port = self.ports[node]
        port.incarnation += 1
        port.images.clear()


DEADLINES = Deadlines(save_s=100, pause_s=5, snapshot_s=10, stage_s=20, accept_s=5, mark_s=5, call_s=2, ledger_s=1)


def manual(request_id: str, tag: str | None = None, deadline_s: float | None = None) -> SaveRequest:
    return SaveRequest(request_id, SaveKind.MANUAL, "somebody asked", tag, "a test", deadline_s)


def count(calls: Iterable[str], name: str) -> int:
    return sum(call == name for call in calls)
