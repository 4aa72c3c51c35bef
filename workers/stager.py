"""The stager: one per node, owner of the node's staging directory and of its images. Imports no torch and no Ray.

It answers the coordinator (coordinator/ports.py), the agents of its node (poll, images, locate) and other stagers
(read). File work runs in threads; all state lives on the event loop. The trainers may die as soon as their images are
sealed: staging, accepting and uploading need nothing but this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..coordinator.messages import (
    AttemptHead,
    AttemptInventory,
    Inventory,
    LoadRequest,
    MemberId,
    MemberInfo,
    MemberReport,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SnapshotOrder,
)
from ..storage.digest import DEFAULT_BLOCK_BYTES, BlockDigests
from ..storage.errors import LastgoodError, SnapshotError, StagingError, StoreError
from ..storage.failpoints import failpoint
from ..storage.files import write_image
from ..storage.ids import ulid
from ..storage.layout import shard_path
from ..storage.manifest import Completed, ShardRecord
from ..storage.store import Store
from .disk import NodeDisk
from .images import ImageRoom, ImageState
from .orders import Answer, ImageRequest, Order, OrderKind, SealedShard
from .processes import Processes
from .slots import Slots

log = logging.getLogger("lastgood.stager")
_T = TypeVar("_T")

RELEASE_S = 60.0  # until paused components run again
READ_BYTES = 8 << 20  # one piece of a shard that travels between stagers

PeerRead = Callable[[str, AttemptHead, str], AsyncIterator[bytes]]  # (node, attempt, shard path) -> pieces


@dataclass
class _Snapshot:
    """One attempt whose images are sealed here and not yet staged."""

    head: AttemptHead
    vote: NodeSnapshot
    shards: tuple[SealedShard, ...]
    staged: asyncio.Future[tuple[ShardRecord, ...]] | None = None


@dataclass(frozen=True)
class StagerConfig:
    """What a stager is told at birth. Paths are absolute; `block_bytes`: the digest's block, and part size."""

    run: str
    staging: Path
    image_root: Path
    holder: str  # names this stager to people, in the lock file
    address: str  # host name and directory, for reports
    block_bytes: int = DEFAULT_BLOCK_BYTES
    images_per_component: int = 1  # 2: the newest snapshot stays in memory while the next is copied
    write_threads: int = 2


class Stager:
    """Created on the event loop it will run on. Raises StagingError when the directory is unusable or taken."""

    def __init__(self, config: StagerConfig, store: Store, peer_read: PeerRead, changed: Callable[[], None]) -> None:
        self._config = config
        self._disk = NodeDisk(config.staging, config.run, config.holder)
        self._disk.sweep()
        self.node = self._disk.node
        self.incarnation = ulid()
        self._room = ImageRoom(config.image_root, config.run, self.node, self.incarnation)
        self._store = store
        self._peer_read = peer_read
        self._processes = Processes(self.node, changed, self._on_death)
        self._slots = Slots(self._room, self.node, config.images_per_component)
        self._snapshots: dict[str, _Snapshot] = {}
        self._declarations: tuple[RoleDeclaration, ...] = ()
        self._paused: dict[str, tuple[MemberId, ...]] = {}  # by attempt
        self._given_up: deque[str] = deque(maxlen=1000)  # attempts that were refused or discarded here
        self._released: deque[str] = deque(maxlen=1000)  # attempts that were released
        self._epoch_lock = asyncio.Lock()
        self._marked_step: int | None = None
        self._seen_epoch = 0  # in the store
        self._heard_epoch = 0  # in a hello
        self._writers = asyncio.Semaphore(config.write_threads)
        self._locates: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self) -> None:
        """Lets every agent go, unlinks every image and gives the directory back."""
        self._processes.close()
        self._room.close()
        self._disk.close()

    # -- the coordinator's side (ports.ParticipantPort)

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        await self._heed(epoch)
        await self._see_store(epoch)
        if epoch > self._heard_epoch:
            for attempt in list(self._paused):  # whoever paused it can take no snapshot any more
                await self._release(attempt, epoch)
            self._heard_epoch = epoch
        if declarations:
            self._declarations = tuple(declarations)
        on_disk = await asyncio.to_thread(self._disk.inventory)
        return Inventory(
            node=self.node,
            incarnation=self.incarnation,
            highest_epoch=self._disk.highest_epoch,
            members=self._members(),
            attempts=(*on_disk, *self._only_in_memory({found.attempt for found in on_disk})),
            declarations=self._declarations,
            address=self._config.address,
            marked_step=self._marked_step,
            processes=self._processes.count(),
        )

    def _members(self) -> tuple[MemberInfo, ...]:
        """Registered members that count: those of the add_members calls that the run's driver made last.

        All, as long as no coordinator has told which those are.
        """
        current = {(declaration.role, declaration.membership) for declaration in self._declarations}
        members = self._processes.members()
        return tuple(info for info in members if not current or (info.member.role, info.membership) in current)

    def _hosts(self) -> dict[str, tuple[MemberId, ...]]:
        return self._processes.hosts(info.member for info in self._members())

    def _only_in_memory(self, on_disk: Collection[str]) -> list[AttemptInventory]:
        """Attempts that are snapshotted here and not yet staged: a new coordinator refuses and discards them."""
        return [
            AttemptInventory(name, at.step, at.epoch, at.sequence, RecordState.NONE, False, False, False, ())
            for name, at in ((name, snapshot.head) for name, snapshot in self._snapshots.items())
            if name not in on_disk
        ]

    async def highest_epoch(self) -> int:
        """The highest epoch this node has seen; asked before a coordinator has one of its own."""
        return self._disk.highest_epoch

    async def mark(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        self._marked_step = None
        vote = await self._report(OrderKind.MARK, epoch, step, deadline_s)
        self._marked_step = step
        return vote

    async def reopen(self, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        """As mark, for a new coordinator: nothing is captured anew, every member only tells whether it is still so.

        Raises WindowClosedError when a member has begun its next update.
        """
        return await self._report(OrderKind.REOPEN, epoch, step, deadline_s)

    async def _report(self, kind: OrderKind, epoch: int, step: int, deadline_s: float) -> NodeSnapshot:
        await self._heed(epoch)
        answers = await self._processes.ask_all(
            self._hosts(), lambda members: _order(kind, epoch, deadline_s, members, step=step)
        )
        return NodeSnapshot(self.node, _reports(answers))

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        await self._heed(epoch)
        await self._processes.ask_all(
            self._hosts(), lambda members: _order(OrderKind.CLOSE_WINDOW, epoch, deadline_s, members)
        )

    async def pause(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._heed(epoch)
        if head.attempt in self._released:
            return  # this order was overtaken by the release
        pausable = tuple(info.member for info in self._processes.members() if info.pausable)
        self._paused[head.attempt] = pausable
        await self._processes.ask_all(
            self._processes.hosts(pausable),
            lambda members: _order(OrderKind.PAUSE, epoch, deadline_s, members, head=head),
        )

    async def release(self, epoch: int, head: AttemptHead) -> None:
        await self._heed(epoch)
        self._released.append(head.attempt)
        await self._release(head.attempt, epoch)

    async def _release(self, attempt: str, epoch: int) -> None:
        alive = {info.member for info in self._processes.members()}
        paused = [member for member in self._paused.get(attempt, ()) if member in alive]
        if paused:
            await self._processes.ask_all(
                self._processes.hosts(paused),
                lambda members: _order(OrderKind.RELEASE, epoch, RELEASE_S, members),
            )
        self._paused.pop(attempt, None)

    async def snapshot(self, epoch: int, order: SnapshotOrder) -> NodeSnapshot:
        await self._heed(epoch)
        head = order.head
        standing = self._snapshots.get(head.attempt)
        if standing is not None:
            return standing.vote  # asked again
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.to_thread(failpoint, "stager.snapshot.begin")
        answers = await self._processes.ask_all(
            self._processes.hosts(order.members),
            lambda members: _order(OrderKind.SNAPSHOT, epoch, order.deadline_s, members, step=head.step, head=head),
        )
        if head.attempt in self._given_up or head.epoch < self._disk.highest_epoch:
            self._drop_images(head.attempt)  # refused or fenced while it was copied: nobody will ever stage it
            raise SnapshotError(
                f"attempt {head.attempt} was given up while node {self.node} copied it. The previous one stands.",
                node=self.node,
            )
        shards = tuple(self._checked(head, shard) for answer in answers for shard in answer.shards)
        vote = NodeSnapshot(self.node, _reports(answers), loop.time() - began)
        self._snapshots[head.attempt] = _Snapshot(head, vote, shards)
        await asyncio.to_thread(failpoint, "stager.snapshot.sealed")
        return vote

    def _checked(self, head: AttemptHead, shard: SealedShard) -> SealedShard:
        """A member's word that a shard is whole, held against the image's own header page."""
        image = self._slots.find((shard.member, shard.component), shard.image)
        if image is None:
            raise SnapshotError(
                f"{shard.member} sealed an image that node {self.node} did not give it", member=shard.member
            )
        if image.state is not ImageState.SEALED or image.attempt != head.attempt or image.used_bytes != shard.nbytes:
            raise SnapshotError(
                f"the image of {shard.member}.{shard.component} is {image.state.name.lower()} for attempt "
                f"{image.attempt or 'none'} with {image.used_bytes} bytes, not sealed for {head.attempt}; it is not "
                "staged. "
                "The previous checkpoint stands.",
                member=shard.member,
                node=self.node,
            )
        return shard

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        await self._heed(epoch)
        snapshot = self._snapshots.get(head.attempt)
        if snapshot is None:
            staged = await asyncio.to_thread(self._disk.read_staged, head)
            if staged is not None:
                return staged  # asked again after it was done
            raise StagingError(
                f"node {self.node} holds no images for attempt {head.attempt} (its stager was restarted). "
                "The previous checkpoint stands.",
                node=self.node,
            )
        if snapshot.staged is None:
            snapshot.staged = asyncio.ensure_future(self._stage(snapshot))
        return await asyncio.wait_for(asyncio.shield(snapshot.staged), deadline_s)

    async def _stage(self, snapshot: _Snapshot) -> tuple[ShardRecord, ...]:
        head = snapshot.head
        await asyncio.to_thread(failpoint, "stager.stage.begin")
        results = await asyncio.gather(*(self._write(head, shard) for shard in snapshot.shards), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                # Without staged.json it can never be accepted: give the space back now, records need some.
                await asyncio.to_thread(self._disk.discard, head)
                raise result
        records = tuple(result for result in results if isinstance(result, ShardRecord))
        await asyncio.to_thread(failpoint, "stager.stage.written")
        await asyncio.to_thread(self._disk.write_staged, head, records)
        self._free(snapshot)
        return records

    async def _write(self, head: AttemptHead, shard: SealedShard) -> ShardRecord:
        image = self._slots.find((shard.member, shard.component), shard.image)
        assert image is not None, "a sealed image outlives its process until its attempt is over"
        path = shard_path(shard.member.role, shard.member.rank, shard.component)
        async with self._writers:
            place = await asyncio.to_thread(self._disk.shard_file, head, path)
            payload = image.payload[: shard.nbytes]
            digests = await asyncio.to_thread(write_image, payload, place, block_bytes=self._config.block_bytes)
        image.mark_staged()
        return ShardRecord(
            role=shard.member.role,
            rank=shard.member.rank,
            component=shard.component,
            path=path,
            nbytes=shard.nbytes,
            block_bytes=digests.block_bytes,
            blocks=tuple(digests.blocks),
            digest=digests.digest,
            node=self.node,
            chunks=shard.chunks,
        )

    def _free(self, snapshot: _Snapshot) -> None:
        """The attempt needs its images no longer; those of dead processes go."""
        self._snapshots.pop(snapshot.head.attempt, None)
        self._drop_images(snapshot.head.attempt)

    def _drop_images(self, attempt: str) -> None:
        self._slots.release(attempt, self._processes.hosts())

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        await self._heed(epoch)
        return await asyncio.to_thread(self._disk.accept, head, manifest)

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        await self._heed(epoch)
        self._given_up.append(head.attempt)
        return await asyncio.to_thread(self._disk.refuse, head, reason)

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        await self._heed(epoch)
        await asyncio.to_thread(self._disk.publish, completed, manifest)

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        await self._heed(epoch)
        staged = await asyncio.to_thread(self._disk.read_staged, head)
        if staged is None:
            raise StagingError(
                f"node {self.node} has no staged shards of attempt {head.attempt} to upload", node=self.node
            )
        for record in staged:
            key = self._disk.paths.shard(head.step, head.attempt, record.path)
            place = self._disk.paths.place(key)
            await asyncio.to_thread(failpoint, "stager.upload.shard")
            await asyncio.to_thread(self._store.put_file, key, place, BlockDigests.of_record(record))

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        await self._heed(epoch)
        await asyncio.to_thread(self._disk.note_durable, head)

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        await self.release(epoch, head)
        self._given_up.append(head.attempt)
        snapshot = self._snapshots.get(head.attempt)
        if snapshot is not None:
            if snapshot.staged is not None:
                await asyncio.wait([snapshot.staged])  # a write under way ends before its files and images go
            self._free(snapshot)
        self._drop_images(head.attempt)  # sealed by members whose node as a whole did not vote
        await asyncio.to_thread(self._disk.discard, head)

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None:
        """Deletes a committed attempt that retention lets go; see NodeDisk.collect."""
        await self._heed(epoch)
        await asyncio.to_thread(self._disk.collect, head, reason)

    async def load(self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float) -> None:
        """Every member here reads and verifies the checkpoint into host memory. Live state is not touched.

        Raises the first error (IntegrityError names member and path); asked again it starts anew.
        """
        await self._heed(epoch)
        await self._processes.ask_all(
            self._hosts(),
            lambda members: _order(OrderKind.LOAD, epoch, deadline_s, members, step=head.step, head=head, load=request),
        )

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        """Every member here puts what it loaded into live state."""
        await self._heed(epoch)
        await self._processes.ask_all(
            self._hosts(),
            lambda members: _order(OrderKind.APPLY, epoch, deadline_s, members, step=head.step, head=head),
        )

    async def forget(self, epoch: int) -> None:
        """Members drop what they loaded and did not apply; fetched copies are deleted."""
        await self._heed(epoch)
        await self._processes.ask_all(self._hosts(), lambda members: _order(OrderKind.FORGET, epoch, 60.0, members))
        await asyncio.to_thread(self._disk.remove_fetched)

    async def _heed(self, epoch: int) -> None:
        """Refuses the past; notes a newer epoch durably before anything is done for it."""
        if epoch != self._disk.highest_epoch:
            async with self._epoch_lock:
                await asyncio.to_thread(self._disk.note_epoch, epoch)

    async def _see_store(self, epoch: int) -> None:
        """The store is one place for all nodes: the epoch that the coordinator claimed must be visible here."""
        if self._seen_epoch == epoch:
            return
        key = self._disk.paths.epoch(epoch)
        if await asyncio.to_thread(self._store.find, key) is None:
            raise StoreError(
                f"node {self.node} ({self._config.address}) does not see {key} in the store {self._store.url}, which "
                "the coordinator has just written there: the path is not the same place on every node. Nothing is "
                "saved. Mount the same file system at this path on all nodes.",
                node=self.node,
            )
        self._seen_epoch = epoch

    # -- the agents' side

    async def register(self, process: str, pid: int, pid_namespace: str, members: Sequence[MemberInfo]) -> str:
        """Takes a process in. Returns the path of an image through which the agent proves that it sees our memory."""
        self._processes.register(process, pid, pid_namespace, members)
        return str(self._room.folder)

    async def unregister(self, process: str) -> None:
        """The process leaves the run."""
        self._processes.unregister(process)

    async def poll(self, process: str, answer: Answer | None, wait_s: float) -> Order | None:
        """An agent's long poll; see Processes.poll."""
        return await self._processes.poll(process, answer, wait_s)

    async def provide(self, process: str, requests: Sequence[ImageRequest]) -> Mapping[tuple[MemberId, str], str]:
        """Paths of free images with room for what a member will write; see Slots.provide."""
        return await self._slots.provide(process, requests, self._snapshots)

    def _on_death(self, process: str) -> None:
        self._slots.bury(process)

    # -- finding shards for a resume

    async def locate(
        self, head: AttemptHead, record: ShardRecord, rejected: Sequence[str], source: str | None
    ) -> tuple[str, str] | None:
        """A file here that should hold the shard, and the tier it is from; None when every source was rejected.

        `rejected` are paths that the agent found broken. Order: local disk, `source` (resume from a path), the node
        that wrote it, the store. What is fetched lands beside the attempts and is deleted after the resume.
        """
        lock = self._locates.setdefault((head.attempt, record.path), asyncio.Lock())
        async with lock:
            local = self._disk.paths.place(self._disk.paths.shard(head.step, head.attempt, record.path))
            outside = [(Path(source) / record.path, "path")] if source is not None else []
            for place, tier in ((local, "local"), *outside):
                if str(place) not in rejected and await asyncio.to_thread(_has_size, place, record.nbytes):
                    return str(place), tier
            fetches: list[tuple[str, Callable[[Path], Awaitable[None]]]] = []
            if record.node != self.node:
                fetches.append(("peer", lambda place: self._fetch_peer(head, record, place)))
            fetches.append(("store", lambda place: self._fetch_store(head, record, place)))
            for tier, fetch in fetches:
                place = self._disk.fetched_file(head, tier, record.path)
                if str(place) in rejected:
                    continue
                if not await asyncio.to_thread(_has_size, place, record.nbytes):
                    try:
                        await fetch(place)
                    except (LastgoodError, OSError) as error:
                        log.warning(
                            "shard %s of attempt %s not fetched from %s: %s", record.path, head.attempt, tier, error
                        )
                        continue
                return str(place), tier
            return None

    async def _fetch_peer(self, head: AttemptHead, record: ShardRecord, place: Path) -> None:
        with place.open("wb") as file:
            async for piece in self._peer_read(record.node, head, record.path):
                await asyncio.to_thread(file.write, piece)

    async def _fetch_store(self, head: AttemptHead, record: ShardRecord, place: Path) -> None:
        key = self._disk.paths.shard(head.step, head.attempt, record.path)
        with place.open("wb") as file:
            for begin in range(0, record.nbytes, READ_BYTES):
                end = min(begin + READ_BYTES, record.nbytes)
                piece = await asyncio.to_thread(self._store.read_range, key, begin, end)
                await asyncio.to_thread(file.write, piece)

    async def read(self, head: AttemptHead, path: str, begin: int, nbytes: int) -> bytes:
        """A piece of a shard here, for another node's resume; shorter at the end of the file, empty past it."""
        place = self._disk.paths.place(self._disk.paths.shard(head.step, head.attempt, path))
        return await asyncio.to_thread(_read_piece, place, begin, min(nbytes, READ_BYTES))


def _order(
    kind: OrderKind,
    epoch: int,
    deadline_s: float,
    members: tuple[MemberId, ...],
    *,
    step: int = 0,
    head: AttemptHead | None = None,
    load: LoadRequest | None = None,
) -> Order:
    return Order(ulid(), kind, epoch, deadline_s, members, step, head, load)


def _reports(answers: Sequence[Answer]) -> tuple[MemberReport, ...]:
    return tuple(sorted((r for answer in answers for r in answer.reports), key=lambda report: report.member))


def _has_size(place: Path, nbytes: int) -> bool:
    try:
        return place.is_file() and place.stat().st_size == nbytes
    except OSError:
        return False


def _read_piece(place: Path, begin: int, nbytes: int) -> bytes:
    try:
        with place.open("rb") as file:
            file.seek(begin)
            return file.read(nbytes)
    except OSError as error:
        raise StagingError(f"{place} cannot be read: {error}", path=str(place)) from error
