"""What a node holds of attempts in memory, and how it comes to the disk: images, standing snapshots, their writes.

A part of the stager, used on its event loop only. Images outlive the processes that filled them: the trainers may die
as soon as they are sealed. A staged image stays until it is filled again, for a resume that comes before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..coordinator.messages import AttemptHead, AttemptInventory, HeldSnapshot, MemberId, NodeSnapshot, RecordState
from ..storage.digest import DEFAULT_BLOCK_BYTES, DEFAULT_THREADS, BlockDigests
from ..storage.errors import DeadlineError, LastgoodError, SnapshotError, StagingError
from ..storage.failpoints import VARIABLE, failpoint
from ..storage.files import WriteProgress, write_image
from ..storage.lanes import Lane
from ..storage.layout import shard_path
from ..storage.manifest import ShardRecord
from .disk import NodeDisk
from .images import Image, ImageRoom, ImageState
from .orders import ImageRequest, SealedShard
from .priority import lower_this_thread
from .slots import Slots
from .snapshots import StandingSnapshot
from .unchanged import Key, Unchanged

log = logging.getLogger("lastgood.stager")

MEMORY_S = 30.0  # until an image's pages are there
LET_GO_S = 5.0  # until a write whose attempt was given up has ended
MEMORY_THREADS = 2


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
    shards_at_once: int = 2  # of those that are written
    threads_per_shard: int = DEFAULT_THREADS  # that write it, and as many that hash it


async def pass_point(point: str) -> None:
    """Passes a failpoint, off the loop, so that a pause stops this call and nothing else."""
    if os.environ.get(VARIABLE):
        await asyncio.to_thread(failpoint, point)


def observed(future: asyncio.Future[Any]) -> None:
    """The outcome of work that nobody may be waiting for; it must not be reported as never retrieved."""
    if not future.cancelled():
        future.exception()


class Staging:
    """Of one stager. `on_disk` runs a call on the staging directory in the stager's lane for it."""

    def __init__(
        self,
        config: StagerConfig,
        disk: NodeDisk,
        room: ImageRoom,
        on_disk: Callable[..., Awaitable[Any]],
        living: Callable[[], Collection[str]],
    ) -> None:
        """`living`: the processes that are registered now."""
        self.node = disk.node
        self._config = config
        self._disk = disk
        self._on_disk = on_disk
        self._living = living
        self._room = room
        self._snapshots: dict[str, StandingSnapshot] = {}
        self._staged: dict[str, StandingSnapshot] = {}  # the last that was; its images stay until they are filled again
        self._given_up: deque[str] = deque(maxlen=1000)  # attempts that were refused or discarded here
        self._writers = asyncio.Semaphore(config.shards_at_once)
        self._memory_lane = Lane(f"the shared memory of node {self.node}", MEMORY_THREADS, SnapshotError)
        self._freed = asyncio.Event()  # images were
        self._unchanged = Unchanged(config.threads_per_shard, lower_this_thread)
        self._slots = Slots(room, self.node, config.images_per_component, self._create_image)

    def close(self) -> None:
        """Ends the writes and unlinks every image."""
        for snapshot in self._snapshots.values():
            if snapshot.staged is not None:
                snapshot.staged.cancel()
        self._room.close()
        self._memory_lane.close()

    def vote_of(self, attempt: str) -> NodeSnapshot | None:
        """The vote of an attempt that stands in memory and is not staged yet."""
        standing = self._snapshots.get(attempt)
        return None if standing is None else standing.vote

    def is_given_up(self, attempt: str) -> bool:
        """Whether nobody will ever accept it."""
        return attempt in self._given_up

    def stand(
        self, head: AttemptHead, vote: NodeSnapshot, shards: Sequence[SealedShard], held: HeldSnapshot | None = None
    ) -> None:
        """The attempt's images are whole. `held`: what a later coordinator is told when it is to stay in memory."""
        self._snapshots[head.attempt] = StandingSnapshot(head, vote, tuple(shards), held)

    async def take_over(self, origin: str, head: AttemptHead, deadline_s: float) -> NodeSnapshot:
        """What lies in memory since attempt `origin` is that of `head` from now on; a write of it is given up.

        Raises SnapshotError without it, StagingError when its write does not end in time; it stays as it was then.
        """
        for _, snapshot in self._all():
            held = snapshot.held
            if held is None or held.origin != origin or not self._is_whole(snapshot):
                continue
            if snapshot.staged is not None:
                await self._write_ended(snapshot, deadline_s)
                if head.attempt in self._snapshots:
                    return snapshot.vote  # asked twice, and the other one was first
                if not self._is_whole(snapshot):
                    break
            self._seal_for(head.attempt, snapshot)
            for known in (self._snapshots, self._staged):
                known.pop(snapshot.head.attempt, None)
            self.stand(head, snapshot.vote, snapshot.shards, held)
            return snapshot.vote
        raise SnapshotError(
            f"node {self.node} does not hold what was copied for attempt {origin} any more. The previous checkpoint "
            "stands.",
            node=self.node,
        )

    async def _write_ended(self, snapshot: StandingSnapshot, deadline_s: float) -> None:
        """Gives a write up and waits for its end. Raises StagingError when it does not come in time."""
        assert snapshot.staged is not None
        for progress in snapshot.progress.values():
            progress.give_up()
        await asyncio.wait({snapshot.staged}, timeout=deadline_s)
        if snapshot.being_written:
            raise self._still_writing(snapshot)

    def _image_of(self, attempt: str, shard: SealedShard) -> Image | None:
        """The image with a shard of an attempt, while it is as it was when it was sealed for it."""
        image = self._slots.find((shard.member, shard.component), shard.image)
        if image is None or image.attempt != attempt or image.used_bytes != shard.nbytes:
            return None
        return image if image.state in (ImageState.SEALED, ImageState.STAGED) else None

    def _is_whole(self, snapshot: StandingSnapshot) -> bool:
        """Whether its images are still as they were when it was taken."""
        return all(self._image_of(snapshot.head.attempt, shard) is not None for shard in snapshot.shards)

    def _seal_for(self, attempt: str, snapshot: StandingSnapshot) -> None:
        """All of a snapshot that is whole is that attempt's from now on, and nothing of it is staged."""
        for shard in snapshot.shards:
            image = self._image_of(snapshot.head.attempt, shard)
            assert image is not None, "it is whole"
            image.seal_for(attempt)

    def checked(self, head: AttemptHead, shard: SealedShard) -> SealedShard:
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
                "staged. The previous checkpoint stands.",
                member=shard.member,
                node=self.node,
            )
        return shard

    async def stage(self, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        """Writes the attempt's images to the disk, once. Raises StagingError, DeadlineError."""
        snapshot = self._snapshots.get(head.attempt)
        if snapshot is None:
            staged = await self._on_disk("read", self._disk.read_staged, head)
            if staged is not None:
                return staged  # asked again after it was done
            raise StagingError(
                f"node {self.node} holds no images for attempt {head.attempt} (its stager was restarted, or the "
                "attempt was given up). The previous checkpoint stands.",
                node=self.node,
            )
        if snapshot.staged is None:
            snapshot.staged = asyncio.ensure_future(self._stage(snapshot))
            snapshot.staged.add_done_callback(observed)
        staged = snapshot.staged
        await asyncio.wait({staged}, timeout=deadline_s)
        if not staged.done():
            unwritten, member = snapshot.unwritten()
            raise DeadlineError(
                f"the disk of node {self.node} has not taken attempt {head.attempt} within {deadline_s:.1f} s: "
                f"{'; '.join(unwritten[:4]) or 'the list of shards is not written'}. The previous checkpoint stands. "
                f"Look at the disk of {self._config.staging} (dmesg, iostat), or allow more time (stage_deadline_s).",
                member=member,
                node=self.node,
                waited_s=deadline_s,
            )
        return staged.result()

    async def _stage(self, snapshot: StandingSnapshot) -> tuple[ShardRecord, ...]:
        """The images stay as they are until they are filled again: a resume that comes before that reads from them.

        When it fails they stay as well, for another try, until the coordinator has refused or discarded the attempt.
        """
        head = snapshot.head
        staged = False
        try:
            await pass_point("stager.stage.begin")
            results = await asyncio.gather(
                *(self._write(snapshot, shard) for shard in snapshot.shards), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            records = tuple(result for result in results if isinstance(result, ShardRecord))
            await pass_point("stager.stage.written")
            await self._on_disk("write the list of shards in", self._disk.write_staged, head, records)
            staged = True
            self._staged = {head.attempt: snapshot}
        except Exception:
            # Without staged.json it can never be accepted: give the space back now, records need some.
            try:
                await self._on_disk("clean", self._disk.discard, head)
            except LastgoodError as error:
                log.warning("attempt %s failed and its files are still here: %s", head.attempt, error)
            raise
        finally:
            if staged:
                self._snapshots.pop(head.attempt, None)
            elif head.attempt in self._given_up:
                self._free(snapshot)
            else:
                self._stand_again(snapshot)
            self._freed.set()
        return records

    def _stand_again(self, snapshot: StandingSnapshot) -> None:
        """Nothing of it is on the disk; it is staged again from memory, where it is whole."""
        if not self._is_whole(snapshot):
            log.error("attempt %s is not whole in memory any more; it is given up here", snapshot.head.attempt)
            self._free(snapshot)
            return
        self._seal_for(snapshot.head.attempt, snapshot)
        snapshot.staged = None
        snapshot.progress.clear()

    async def _write(self, snapshot: StandingSnapshot, shard: SealedShard) -> ShardRecord:
        head, key = snapshot.head, (shard.member, shard.component)
        image = self._image_of(head.attempt, shard)
        if image is None:
            raise StagingError(
                f"{shard.member}.{shard.component}: its image is not the one that was sealed for attempt "
                f"{head.attempt}; it is not written. The previous checkpoint stands. Please report this.",
                member=shard.member,
                node=self.node,
            )
        path = shard_path(shard.member.role, shard.member.rank, shard.component)
        async with self._writers:
            progress = snapshot.progress[key] = WriteProgress()
            if head.attempt in self._given_up:
                progress.give_up()
            payload = image.payload[: shard.nbytes]
            try:
                digests = await asyncio.to_thread(self._write_file, head, key, path, payload, progress)
            except LastgoodError as error:
                raise type(error)(
                    f"{shard.member}.{shard.component}: {error.message}",
                    **{**error.facts, "member": shard.member, "node": self.node},
                ) from error
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

    def _write_file(
        self, head: AttemptHead, key: Key, path: str, payload: memoryview, progress: WriteProgress
    ) -> BlockDigests:
        """Writes one shard, or links it; blocks. However it ends, `progress.ended` is set."""
        try:
            place = self._disk.shard_file(head, path)
            digests = self._unchanged.link(key, payload, place, progress) or write_image(
                payload,
                place,
                block_bytes=self._config.block_bytes,
                threads=self._config.threads_per_shard,
                start_thread=lower_this_thread,
                progress=progress,
            )
            self._unchanged.note(key, place, digests)
            return digests
        finally:
            progress.ended = True

    def _free(self, snapshot: StandingSnapshot) -> None:
        """The attempt needs its images no longer; those of dead processes go. May be repeated."""
        self._snapshots.pop(snapshot.head.attempt, None)
        self.drop_images(snapshot.head.attempt)

    def drop_images(self, attempt: str) -> None:
        self._slots.release(attempt, self._living())
        self._freed.set()

    def give_up(self, attempt: str) -> None:
        """Nobody will accept the attempt: its images are free at once, or as soon as their writes have ended."""
        self._given_up.append(attempt)
        snapshot = self._snapshots.get(attempt)
        if snapshot is None:
            return
        if snapshot.staged is None:
            self._free(snapshot)
        for progress in snapshot.progress.values():
            progress.give_up()

    def _still_writing(self, snapshot: StandingSnapshot) -> StagingError:
        unwritten, member = snapshot.unwritten()
        return StagingError(
            f"attempt {snapshot.head.attempt} failed, and node {self.node} still writes it: "
            f"{'; '.join(unwritten[:4])}. Its images are free when that ends. Look at the disk of "
            f"{self._config.staging} (dmesg, iostat).",
            node=self.node,
            member=member,
        )

    async def let_go(self, head: AttemptHead) -> None:
        """The attempt is discarded: its writes end, its images are free. Raises StagingError when one does not end."""
        self.give_up(head.attempt)
        snapshot = self._snapshots.get(head.attempt)
        if snapshot is not None and snapshot.staged is not None:
            await asyncio.wait({snapshot.staged}, timeout=LET_GO_S)  # a write ends before its files and images go
            if snapshot.being_written:
                raise self._still_writing(snapshot)
        self.drop_images(head.attempt)  # also those sealed by members whose node as a whole did not vote

    async def provide(self, process: str, requests: Sequence[ImageRequest]) -> Mapping[tuple[MemberId, str], str]:
        """Paths of free images with room for what a member will write; see Slots.provide.

        Raises SnapshotError if memory is too small, or nobody waits for the attempt any more; StagingError if the last
        attempt's images are still being written.
        """
        await self._writes_over(requests)
        await self._room_made(requests)
        paths = await self._slots.provide(process, requests, self._snapshots)
        if process not in self._living():  # it went while its images were made: nobody else lets go of them
            self.bury(process)
            raise SnapshotError(f"process {process} has left node {self.node}; it gets no images", node=self.node)
        return paths

    async def _room_made(self, requests: Sequence[ImageRequest]) -> None:
        """Waits for images whose attempt is over, and the word of it still on its way: the order to copy the next one
        may overtake it."""
        keys = [(request.member, request.component) for request in requests]
        loop = asyncio.get_running_loop()
        until = loop.time() + LET_GO_S
        while self._slots.are_taken(keys, self._snapshots) and loop.time() < until:
            self._freed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._freed.wait(), until - loop.time())

    def bury(self, process: str) -> None:
        """A process is gone; see Slots.bury."""
        self._slots.bury(process, self._given_up)

    def drop_orphans(self) -> None:
        """A resume is over; see Slots.drop_orphans."""
        self._slots.drop_orphans(self._living(), self._snapshots)

    def staged_image(self, head: AttemptHead, record: ShardRecord) -> Image | None:
        """The image that a shard was staged from, while it is still as it was."""
        key = (MemberId(record.role, record.rank), record.component)
        return self._slots.staged(key, head.attempt, record.nbytes) if record.node == self.node else None

    async def _create_image(self, request: ImageRequest) -> Image:
        create = functools.partial(self._room.create, request.nbytes)
        try:
            return await self._memory_lane.run(f"making an image of {request.nbytes} bytes", create, MEMORY_S)
        except SnapshotError as error:
            facts = {**error.facts, "member": request.member, "node": self.node}
            raise SnapshotError(f"{request.member}.{request.component}: {error.message}", **facts) from error

    async def _writes_over(self, requests: Sequence[ImageRequest]) -> None:
        """Waits for writes of attempts that were given up: until they end, nobody may fill their images."""
        for request in requests:
            if request.attempt and request.attempt in self._given_up:
                raise SnapshotError(
                    f"attempt {request.attempt} was given up before {request.member} was copied; nothing was copied",
                    member=request.member,
                    node=self.node,
                )
        loop = asyncio.get_running_loop()
        until = loop.time() + LET_GO_S
        for request in requests:
            for attempt in self._slots.attempts_of((request.member, request.component)):
                snapshot = self._snapshots.get(attempt)
                if snapshot is None or snapshot.staged is None or attempt not in self._given_up:
                    continue
                await asyncio.wait({snapshot.staged}, timeout=max(0.0, until - loop.time()))
                if snapshot.being_written:
                    raise self._still_writing(snapshot)

    def with_images(self, on_disk: Sequence[AttemptInventory]) -> tuple[AttemptInventory, ...]:
        """What the disk holds, and what only memory does: a new coordinator takes an attempt over or discards it."""
        here = {name: snapshot.held for name, snapshot in self._all() if self._is_whole(snapshot)}
        told = [
            found if found.completed else dataclasses.replace(found, held=here.get(found.attempt)) for found in on_disk
        ]
        known = {found.attempt for found in on_disk}
        for name, snapshot in self._snapshots.items():
            if name not in known:
                head, none = snapshot.head, RecordState.NONE
                found = AttemptInventory(name, head.step, head.epoch, head.sequence, none, False, False, False, ())
                told.append(dataclasses.replace(found, held=here.get(name)))
        return tuple(told)

    def _all(self) -> list[tuple[str, StandingSnapshot]]:
        return [*self._snapshots.items(), *self._staged.items()]
