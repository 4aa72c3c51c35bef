"""The stager: one per node, owner of the node's staging directory and of its images. Imports no torch and no Ray.

It answers the coordinator (coordinator/ports.py), the agents of its node (poll, images, locate) and other stagers
(read). All state lives on the event loop; the disk, the images' memory and the store each have threads of their own, so
that one of them standing still takes nothing from the others. The trainers may die as soon as their images are
sealed: staging, accepting and uploading need nothing but this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..coordinator.messages import (
    AttemptHead,
    Grant,
    HeldSnapshot,
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
from ..coordinator.node_socket import SocketServer
from ..coordinator.ports import WAITED_FOR
from ..storage.digest import BlockDigests
from ..storage.errors import (
    DeadlineError,
    FencedError,
    LastgoodError,
    SnapshotError,
    StagingError,
    StoreError,
    StoreUnavailableError,
)
from ..storage.files import staging_error
from ..storage.ids import ulid
from ..storage.lanes import Lane
from ..storage.layout import epochs_in
from ..storage.manifest import Completed, ShardRecord
from ..storage.store import Store
from .copies import Copies
from .disk import NodeDisk
from .finder import Finder, PeerRead
from .images import ImageRoom
from .orders import Answer, ImageRequest, Order, OrderKind
from .processes import Processes
from .staging import StagerConfig, Staging, observed, pass_point

log = logging.getLogger("lastgood.stager")
_T = TypeVar("_T")

RELEASE_S = 60.0  # until paused components run again
DISK_S = 60.0  # for one look at the staging directory, or one small write there
REST_S = 10.0  # until writes have ended when the stager does
STORE_S = 60.0  # for one look into the store
SHARD_S = 3600.0  # for one shard to or from the store; the coordinator's upload_s bounds an upload more tightly
DISK_THREADS = 8
STORE_THREADS = 4
FOR_AGENTS = ("unregister", "poll", "provide", "member_copying", "locate")
GRANT_S = 10.0  # until a process that does not ask for its grant is passed over; the next one comes anyway


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
        self._processes = Processes(self.node, changed, self._on_death)
        self._agents = SocketServer(self._room.folder, self, FOR_AGENTS + WAITED_FOR)
        self._staging = Staging(config, self._disk, self._room, self._on_disk, self._processes.hosts)
        self._declarations: tuple[RoleDeclaration, ...] = ()
        self._paused: dict[str, tuple[MemberId, ...]] = {}  # by attempt
        self._copies = Copies()
        self._released: deque[str] = deque(maxlen=1000)  # attempts that were released
        self._epoch_lock = asyncio.Lock()
        self._marked_step: int | None = None
        self._requests: tuple[SaveRequest, ...] = ()  # saves that are not over
        self._granted: Grant | None = None  # the highest that was passed on
        self._deliveries: set[asyncio.Task[None]] = set()
        self._seen_epoch = 0  # in the store
        self._heard_epoch = 0  # in a hello
        self._disk_lane = Lane(f"the staging disk of node {self.node} at {config.staging}", DISK_THREADS, StagingError)
        self._store_lane = Lane(f"the store {store.url}", STORE_THREADS, StoreUnavailableError)
        self._uploads: dict[str, asyncio.Future[None]] = {}  # by attempt
        self._stored: dict[tuple[str, int, str], tuple[str, BlockDigests]] = {}  # where a component's last shard stands
        self._finder = Finder(self._disk, self._on_disk, store, self._at_store, peer_read)

    async def close(self) -> None:
        """Lets every agent go, unlinks every image, lets writes to the disk end and gives the directory back."""
        self._processes.close()
        self._agents.close()
        for upload in self._uploads.values():
            upload.cancel()
        self._staging.close()
        if not await self._disk_lane.rest(REST_S):
            log.warning("the disk of node %s still writes as its stager ends; the next one tidies up", self.node)
        self._disk.close()
        for lane in (self._disk_lane, self._store_lane):
            lane.close()

    async def _on_disk(self, doing: str, work: Callable[..., _T], *arguments: object) -> _T:
        """Work on the staging directory, in a thread. An error of the operating system becomes a StagingError."""
        try:
            return await self._disk_lane.run(f"{doing} it", lambda: work(*arguments), DISK_S)
        except OSError as error:
            raise staging_error(doing, Path(error.filename or self._config.staging), error) from error

    async def _at_store(self, doing: str, work: Callable[..., _T], *arguments: object, limit_s: float = STORE_S) -> _T:
        """A call to the store, in a thread. Raises StoreUnavailableError when it hangs."""
        return await self._store_lane.run(doing, lambda: work(*arguments), limit_s)

    # -- the coordinator's side (ports.ParticipantPort)

    async def hello(self, epoch: int, declarations: Sequence[RoleDeclaration]) -> Inventory:
        await self._heed(epoch)
        await self._see_store(epoch)
        if epoch > self._heard_epoch:
            for attempt in list(self._paused):  # whoever paused it can take no snapshot any more
                await self._release(attempt, epoch)
            await self._on_disk("forward the pointers in", self._disk.forward_pointers)
            self._heard_epoch = epoch
        if declarations:
            self._declarations = tuple(declarations)
        on_disk = await self._on_disk("list", self._disk.inventory)
        return Inventory(
            node=self.node,
            incarnation=self.incarnation,
            highest_epoch=self._disk.highest_epoch,
            members=self._members(),
            attempts=self._staging.with_images(on_disk),
            declarations=self._declarations,
            address=self._config.address,
            marked_step=self._marked_step,
            processes=self._processes.count(),
            granted=self._granted,
            requests=self._requests,
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

    async def remember(self, epoch: int, requests: Sequence[SaveRequest]) -> None:
        await self._heed(epoch)
        self._requests = tuple(requests)

    async def close_window(self, epoch: int, deadline_s: float) -> None:
        await self._heed(epoch)
        await self._processes.ask_all(
            self._hosts(), lambda members: _order(OrderKind.CLOSE_WINDOW, epoch, deadline_s, members)
        )

    async def grant(self, epoch: int, grant: Grant) -> None:
        """Passes a grant on to every member here, and remembers it first: a new coordinator begins above it.

        Returns before the members have it; a member that misses it gets it with the next one.
        """
        while epoch != self._disk.highest_epoch:  # nothing may come between the check and the note
            await self._heed(epoch)
        if self._granted is None or grant.order > self._granted.order:
            self._granted = grant
        for process, members in self._hosts().items():
            order = _order(OrderKind.GRANT, epoch, GRANT_S, members, grant=grant)
            task = asyncio.ensure_future(self._deliver(process, order))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, process: str, order: Order) -> None:
        try:
            await self._processes.ask(process, order)
        except LastgoodError as error:
            log.info("a grant did not arrive: %s", error)

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
        standing = self._staging.vote_of(head.attempt)
        if standing is not None:
            return standing  # asked again
        if order.origin is not None:
            return await self._staging.take_over(order.origin, head, order.deadline_s)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await pass_point("stager.snapshot.begin")
        hosts = self._processes.hosts(order.members)
        infos = tuple(info for info in self._processes.members() if info.member in order.members)
        self._copies.expect(head.attempt, hosts)
        try:
            answers = await self._processes.ask_all(
                hosts,
                lambda members: replace(
                    _order(OrderKind.SNAPSHOT, epoch, order.deadline_s, members, step=head.step, head=head),
                    overlapped=order.overlapped,
                ),
            )
        finally:
            await self._copies.end(head.attempt)
        if self._staging.is_given_up(head.attempt) or head.epoch < self._disk.highest_epoch:
            self._staging.drop_images(head.attempt)  # refused or fenced while it was copied: nobody will ever stage it
            raise SnapshotError(
                f"attempt {head.attempt} was given up while node {self.node} copied it. The previous one stands.",
                node=self.node,
            )
        shards = tuple(self._staging.checked(head, shard) for answer in answers for shard in answer.shards)
        vote = NodeSnapshot(self.node, _reports(answers), loop.time() - began)
        held = None if order.keepsake is None else HeldSnapshot(order.keepsake, vote, infos, head.attempt)
        self._staging.stand(head, vote, shards, held)
        await pass_point("stager.snapshot.sealed")
        return vote

    async def copying(self, epoch: int, head: AttemptHead, deadline_s: float) -> None:
        await self._heed(epoch)
        try:
            await asyncio.wait_for(self._copies.wait(head.attempt), deadline_s)
        except asyncio.TimeoutError as error:
            raise DeadlineError(
                f"node {self.node} has not begun to copy attempt {head.attempt} within {deadline_s:.1f} s. The "
                "previous checkpoint stands.",
                node=self.node,
                waited_s=deadline_s,
            ) from error

    async def stage(self, epoch: int, head: AttemptHead, deadline_s: float) -> Sequence[ShardRecord]:
        await self._heed(epoch)
        return await self._staging.stage(head, deadline_s)

    async def accept(self, epoch: int, head: AttemptHead, manifest: bytes) -> RecordState:
        await self._heed(epoch)
        return await self._on_disk("accept in", self._disk.accept, head, manifest)

    async def refuse(self, epoch: int, head: AttemptHead, reason: str) -> RecordState:
        await self._heed(epoch)
        self._staging.give_up(head.attempt)
        return await self._on_disk("refuse in", self._disk.refuse, head, reason)

    async def publish(self, epoch: int, completed: Completed, manifest: bytes) -> None:
        await self._heed(epoch)
        await self._on_disk("publish in", self._disk.publish, completed, manifest)

    async def upload(self, epoch: int, head: AttemptHead) -> None:
        await self._heed(epoch)
        upload = self._uploads.get(head.attempt)
        if upload is None:  # asked again while it runs, it goes on
            upload = self._uploads[head.attempt] = asyncio.ensure_future(self._upload(epoch, head))
            upload.add_done_callback(observed)
            upload.add_done_callback(lambda _: self._uploads.pop(head.attempt, None))
        await asyncio.shield(upload)

    async def _upload(self, epoch: int, head: AttemptHead) -> None:
        staged = await self._on_disk("read", self._disk.read_staged, head)
        if staged is None:
            raise StagingError(
                f"node {self.node} has no staged shards of attempt {head.attempt} to upload", node=self.node
            )
        highest = await self._look_at_store(epoch)
        if highest > epoch:  # of another cluster: no hello of it has come here
            raise FencedError(
                f"epoch {highest} was claimed in the store by a newer coordinator. Node {self.node} uploads nothing "
                f"for epoch {epoch}.",
                epoch=epoch,
                highest_epoch=highest,
                node=self.node,
            )
        for record in staged:
            key = self._disk.paths.shard(head.step, head.attempt, record.path)
            place = self._disk.paths.place(key)
            await pass_point("stager.upload.shard")
            digests = BlockDigests.of_record(record)
            shard = (record.role, record.rank, record.component)
            before = self._stored.get(shard)
            same_as = None if before is None or before[1] != digests else before[0]
            await self._at_store(f"storing {key}", self._store.put_file, key, place, digests, same_as, limit_s=SHARD_S)
            self._stored[shard] = (key, digests)

    async def note_durable(self, epoch: int, head: AttemptHead) -> None:
        await self._heed(epoch)
        await self._on_disk("note in", self._disk.note_durable, head)

    async def discard(self, epoch: int, head: AttemptHead) -> None:
        await self.release(epoch, head)
        await self._staging.let_go(head)
        await self._on_disk("clean", self._disk.discard, head)

    async def collect(self, epoch: int, head: AttemptHead, reason: str) -> None:
        """Deletes a committed attempt that retention lets go; see NodeDisk.collect."""
        await self._heed(epoch)
        await self._on_disk("collect in", self._disk.collect, head, reason)

    async def load(
        self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float, members: Sequence[MemberId]
    ) -> None:
        """Every member here reads and verifies the checkpoint into host memory. Live state is not touched.

        Raises StagingError unless all `members` are here, else the first error (IntegrityError names member and
        path); asked again it starts anew.
        """
        await self._heed(epoch)
        self._require(members, "load")
        await self._processes.ask_all(
            self._hosts(),
            lambda members: _order(OrderKind.LOAD, epoch, deadline_s, members, step=head.step, head=head, load=request),
        )

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float, members: Sequence[MemberId]) -> None:
        """Every member here puts what it loaded into live state. Raises StagingError unless all `members` are here."""
        await self._heed(epoch)
        self._require(members, "apply")
        await self._processes.ask_all(
            self._hosts(),
            lambda members: _order(OrderKind.APPLY, epoch, deadline_s, members, step=head.step, head=head),
        )

    def _require(self, members: Sequence[MemberId], order: str) -> None:
        """A stager that was restarted knows its members only when they have registered again: none is passed over."""
        here = {info.member for info in self._members()}
        if missing := sorted(set(members) - here):
            raise StagingError(
                f"{missing[0]} is not registered with the stager of node {self.node} (was it restarted just now?): it "
                f"was not asked to {order}",
                node=self.node,
                member=missing[0],
                away=True,
            )

    async def forget(self, epoch: int) -> None:
        """Members drop what they loaded and did not apply; fetched copies are deleted, and what dead members left."""
        await self._heed(epoch)
        self._staging.drop_orphans()
        await self._processes.ask_all(self._hosts(), lambda members: _order(OrderKind.FORGET, epoch, 60.0, members))
        await self._on_disk("clean", self._disk.remove_fetched)

    async def _heed(self, epoch: int) -> None:
        """Refuses the past; notes a newer epoch durably before anything is done for it."""
        if epoch != self._disk.highest_epoch:
            async with self._epoch_lock:
                await self._on_disk("note an epoch in", self._disk.note_epoch, epoch)

    async def _see_store(self, epoch: int) -> None:
        """The store is one place for all nodes: the epoch that the coordinator claimed must be visible here."""
        if self._seen_epoch != epoch:
            await self._look_at_store(epoch)
            self._seen_epoch = epoch

    async def _look_at_store(self, epoch: int) -> int:
        """The highest epoch there. Raises StoreError unless this one's object stands: the directory of a lost mount
        takes files as well."""
        key = self._disk.paths.epoch(epoch)
        folder = f"{self._disk.paths.epochs}/"
        epochs = await self._at_store(f"looking for {key}", lambda: epochs_in(self._store.list(folder)))
        if epoch not in epochs:
            raise StoreError(
                f"node {self.node} ({self._config.address}) does not see {key} in the store {self._store.url}, which "
                "the coordinator has written there: the path is not the same place on every node, or its file system "
                "is not mounted any more. Nothing was written there. Mount the same file system at this path on all "
                "nodes.",
                node=self.node,
            )
        return max(epochs)

    async def door(self) -> str:
        """The folder of its socket, for a coordinator on the same node. Raises StagingError when there can be none."""
        await self._agents.open()
        return str(self._room.folder)

    # -- the agents' side

    async def register(self, process: str, pid: int, pid_namespace: str, members: Sequence[MemberInfo]) -> str:
        """Takes a process in. Returns the folder of images, which the agent must see: its calls go over a socket there.

        Raises StagingError when there can be no socket.
        """
        await self._agents.open()
        self._processes.register(process, pid, pid_namespace, members)
        return str(self._room.folder)

    async def unregister(self, process: str) -> None:
        """The process leaves the run."""
        self._processes.unregister(process)

    async def poll(self, process: str, answer: Answer | None, wait_s: float) -> Order | None:
        """An agent's long poll; see Processes.poll."""
        return await self._processes.poll(process, answer, wait_s)

    async def member_copying(self, process: str, attempt: str) -> None:
        """The process holds its updates back until its copy for the attempt has ended."""
        await self._copies.begin(attempt, process)

    async def provide(self, process: str, requests: Sequence[ImageRequest]) -> Mapping[tuple[MemberId, str], str]:
        """Paths of free images with room for what a member will write; see Staging.provide."""
        return await self._staging.provide(process, requests)

    def _on_death(self, process: str) -> None:
        self._staging.bury(process)

    async def locate(
        self, head: AttemptHead, record: ShardRecord, rejected: Sequence[str], source: str | None
    ) -> tuple[str, str] | None:
        """Finds a shard for a resume: the image that it was staged from, or see Finder.locate."""
        image = self._staging.staged_image(head, record)
        if image is not None and str(image.path) not in rejected:
            return str(image.path), "memory"
        return await self._finder.locate(head, record, rejected, source)

    # -- other stagers' side

    async def read(self, head: AttemptHead, path: str, begin: int, nbytes: int) -> bytes:
        """A piece of a shard here; see Finder.read."""
        return await self._finder.read(head, path, begin, nbytes)


def _order(
    kind: OrderKind,
    epoch: int,
    deadline_s: float,
    members: tuple[MemberId, ...],
    *,
    step: int = 0,
    head: AttemptHead | None = None,
    load: LoadRequest | None = None,
    grant: Grant | None = None,
) -> Order:
    return Order(ulid(), kind, epoch, deadline_s, members, step, head, load, grant)


def _reports(answers: Sequence[Answer]) -> tuple[MemberReport, ...]:
    return tuple(sorted((r for answer in answers for r in answer.reports), key=lambda report: report.member))
