"""Simulated stagers, members and store: durable state with write-once semantics, volatile state that a crash takes.

Each method is one atomic effect; the network around it loses, delays and doubles what leads to it and what it answers.
Every effect that the promises speak of is told to the referee first.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from lastgood.coordinator import commands as cmd
from lastgood.coordinator.messages import (
    AttemptHead,
    AttemptInventory,
    HeldSnapshot,
    Inventory,
    MemberId,
    MemberInfo,
    MemberReport,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SnapshotOrder,
)
from lastgood.storage.errors import (
    FencedError,
    SnapshotError,
    StagingError,
    StoreUnavailableError,
    UsageError,
    WindowClosedError,
)
from tests.simulation.referee import Referee

ACCEPT, REFUSE = RecordState.ACCEPT, RecordState.REFUSE


class Shard(NamedTuple):
    """What the core sees of a ShardRecord, and the step of the state in it."""

    role: str
    rank: int
    component: str
    node: str
    step: int

    @property
    def digest(self) -> str:
        """Other at every step, as that of weights which train."""
        return f"{self.role}:{self.rank}.{self.component} at step {self.step}"


def manifest_bytes(draft: cmd.Draft) -> bytes:
    """A manifest as far as the simulation needs one."""
    return f"{draft.head.attempt}|{','.join(draft.participants)}".encode()


def participants_of(manifest: bytes) -> tuple[str, ...]:
    """The participants that a manifest names."""
    return tuple(manifest.decode().split("|")[1].split(","))


class SimStore:
    """The store: objects, COMPLETEDs, ledger and epochs; `up` is False while it cannot be reached."""

    def __init__(self, referee: Referee) -> None:
        self.up = True
        self.epochs = 0
        self.objects: set[tuple[str, str]] = set()  # (attempt, node): all shards of that node
        self.completed: dict[str, AttemptHead] = {}
        self.ledger: dict[tuple[int, int], AttemptHead] = {}
        self._referee = referee

    def execute(self, command: cmd.AttemptCommand) -> None:
        """WriteLedger or CompleteRemotely."""
        if not self.up:
            raise StoreUnavailableError("the store is down")
        head = command.head
        if isinstance(command, cmd.WriteLedger):
            self._referee.ledger(head, self.ledger.setdefault((head.epoch, head.sequence), head))
            return
        assert isinstance(command, cmd.CompleteRemotely)
        participants = participants_of(command.manifest)
        missing = tuple(node for node in participants if (head.attempt, node) not in self.objects)
        if missing:
            raise StoreUnavailableError("objects are missing", missing_nodes=missing)
        self._referee.completed_in_store(head, participants, self.objects)
        self.completed.setdefault(head.attempt, head)


class SimNode:
    """One node: its staging disk (durable), its stager's memory (volatile) and the members beside it."""

    def __init__(
        self, name: str, members: dict[MemberId, tuple[str, ...]], world_sizes: dict[str, int], referee: Referee
    ) -> None:
        self.name = name
        self.members = members  # member -> components
        self.pausable = False
        self._world_sizes = world_sizes
        self._referee = referee
        # durable
        self.epoch = 0
        self.records: dict[str, RecordState] = {}
        self.manifests: dict[str, bytes] = {}
        self.staged: dict[str, tuple[Shard, ...]] = {}
        self.heads: dict[str, AttemptHead] = {}
        self.completed: set[str] = set()
        self.durable: set[str] = set()
        # the disk: takes all, takes only refusals (full), or takes them and then reports a failure (faulty)
        self.full = self.faulty = False
        # volatile
        self.up = True
        self.incarnation = 1
        self.images: dict[str, dict[MemberId, tuple[int, int]]] = {}
        self.kept: dict[str, HeldSnapshot] = {}  # what is told of images
        self.standing: dict[str, dict[MemberId, tuple[int, int]]] = {}  # images that are staged, and not filled again
        self.paused: set[str] = set()
        self.released: set[str] = set()  # attempts whose pause is over for good: a late pause does nothing
        self.registered = True
        self.declarations: tuple[RoleDeclaration, ...] = ()
        # the members' processes
        self.process = 1
        self.step = 0
        self.updates = 0
        self.updating = False

    def crash(self) -> None:
        """SIGKILL of the stager."""
        self.up = False
        self.images.clear()
        self.kept.clear()
        self.standing.clear()
        self.paused.clear()
        self.registered = False
        self.declarations = ()

    def restart(self) -> None:
        """The stager is back, with its disk and without its memory."""
        self.up = True
        self.incarnation += 1

    def wipe(self) -> None:
        """The disk is lost, but for the node's name; what lay on it is gone."""
        for held in (self.records, self.manifests, self.staged, self.heads, self.completed, self.durable):
            held.clear()

    def infos(self) -> tuple[MemberInfo, ...]:
        """The members that are registered with the stager."""
        if not self.registered:
            return ()
        process = f"{self.name}-{self.process}"
        return tuple(
            MemberInfo(member, self._world_sizes[member.role], names, "m1", process, 1, pausable=self.pausable)
            for member, names in self.members.items()
        )

    def _fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise FencedError(f"{self.name} has seen epoch {self.epoch}, not {epoch}")
        if epoch > self.epoch:
            self.epoch = epoch
            self.paused.clear()  # whoever paused it can take no snapshot any more

    def hello(self, epoch: int, declarations: tuple[RoleDeclaration, ...]) -> Inventory:
        self._fence(epoch)
        self.declarations = declarations or self.declarations
        attempts = []
        for attempt, head in self.heads.items():
            record = self.records.get(attempt, RecordState.NONE)
            manifest = self.manifests.get(attempt)
            participants = () if manifest is None else participants_of(manifest)
            staged = attempt in self.staged
            here = staged or record is not RecordState.NONE or attempt in self.images or attempt in self.paused
            if not here:
                continue
            completed = attempt in self.completed
            attempts.append(
                AttemptInventory(
                    attempt,
                    head.step,
                    head.epoch,
                    head.sequence,
                    record,
                    staged,
                    completed,
                    attempt in self.durable,
                    participants,
                    manifest,
                    self.kept.get(attempt) if self._has_images(attempt) and not completed else None,
                )
            )
        return Inventory(self.name, str(self.incarnation), self.epoch, self.infos(), tuple(attempts), self.declarations)

    def _has_images(self, attempt: str) -> bool:
        return attempt in self.images or attempt in self.standing

    def mark(self, epoch: int) -> NodeSnapshot:
        self._fence(epoch)
        return NodeSnapshot(self.name, self._reports() if self.registered else ())

    def _reports(self) -> tuple[MemberReport, ...]:
        return tuple(MemberReport(m, self.step, self.updates, names) for m, names in self.members.items())

    def execute(self, epoch: int, command: cmd.NodeCommand, store: SimStore) -> Any:
        """Runs a command as the real stager does; answers its result or raises."""
        self._fence(epoch)
        head = command.head
        known = self.heads.setdefault(head.attempt, head)
        if known != head:
            self._referee.blame(f"attempt id {head.attempt} was used for {known} and for {head}")
        return getattr(self, f"_do_{type(command).__name__}")(head, command, store)

    def _do_Pause(self, head: AttemptHead, command: cmd.Pause, store: SimStore) -> None:  # noqa: N802
        if head.attempt not in self.released:
            self.paused.add(head.attempt)

    def _do_Release(self, head: AttemptHead, command: cmd.Release, store: SimStore) -> None:  # noqa: N802
        self.released.add(head.attempt)
        self.paused.discard(head.attempt)

    def _do_Snapshot(self, head: AttemptHead, command: cmd.Snapshot, store: SimStore) -> NodeSnapshot:  # noqa: N802
        order: SnapshotOrder = command.order
        if order.origin is not None and head.attempt not in self.images:
            held = [a for a, kept in self.kept.items() if kept.origin == order.origin and self._has_images(a)]
            if not held:
                raise SnapshotError(f"{self.name} does not hold {order.origin} any more")
            self.images[head.attempt] = self.images.pop(held[0], None) or self.standing.pop(held[0])
            self.kept[head.attempt] = self.kept.pop(held[0])
        if head.attempt in self.images and head.attempt in self.kept:
            return self.kept[head.attempt].vote
        if self.updating or not self.registered or self.step != head.step:
            raise WindowClosedError(f"{self.name} is in an update, or past that step")
        if head.attempt not in self.images and head.attempt not in self.staged:
            self.images[head.attempt] = dict.fromkeys(order.members, (self.step, self.updates))
            self.standing.clear()  # filled again
        copied = self.images.get(head.attempt)
        if copied is None:
            raise StagingError(f"{self.name} has staged {head.attempt} already")
        reports = tuple(MemberReport(m, step, n, self.members[m]) for m, (step, n) in copied.items())
        vote = NodeSnapshot(self.name, reports, 0.01)
        if order.keepsake is not None:
            infos = tuple(info for info in self.infos() if info.member in order.members)
            self.kept[head.attempt] = HeldSnapshot(order.keepsake, vote, infos, head.attempt)
        return vote

    def _do_Stage(self, head: AttemptHead, command: cmd.Stage, store: SimStore) -> tuple[Shard, ...]:  # noqa: N802
        if head.attempt not in self.staged:
            images = self.images.get(head.attempt)
            if images is None:
                raise StagingError(f"{self.name} has no images of {head.attempt}")
            if self.full:
                raise StagingError(f"the disk of {self.name} is full", errno=errno.ENOSPC)
            self.standing = {head.attempt: self.images.pop(head.attempt)}
            self.staged[head.attempt] = tuple(
                Shard(m.role, m.rank, name, self.name, step)
                for m, (step, _) in images.items()
                for name in self.members[m]
            )
        return self.staged[head.attempt]

    def _do_Accept(self, head: AttemptHead, command: cmd.Accept, store: SimStore) -> RecordState:  # noqa: N802
        standing = self.records.get(head.attempt)
        if standing is not None and self._referee.plant != "overwritten_record":
            return standing
        if head.attempt not in self.staged:
            return RecordState.UNKNOWN
        if self.full:
            raise StagingError(f"the disk of {self.name} is full", errno=errno.ENOSPC)
        self.manifests[head.attempt] = command.manifest
        return self._write(head, ACCEPT)

    def _do_Refuse(self, head: AttemptHead, command: cmd.Refuse, store: SimStore) -> RecordState:  # noqa: N802
        standing = self.records.get(head.attempt)
        if standing is not None and self._referee.plant != "overwritten_record":
            return standing
        return self._write(head, REFUSE)

    def _write(self, head: AttemptHead, record: RecordState) -> RecordState:
        self.records[head.attempt] = record
        self._referee.recorded(self.name, head, record)
        if self.faulty:
            raise StagingError(f"the disk of {self.name} took the record and could not say so", errno=errno.EIO)
        return record

    def _do_Publish(self, head: AttemptHead, command: cmd.Publish, store: SimStore) -> None:  # noqa: N802
        self.manifests[head.attempt] = command.manifest
        self.completed.add(head.attempt)
        self._referee.published(self.name, head)

    def _do_Upload(self, head: AttemptHead, command: cmd.Upload, store: SimStore) -> None:  # noqa: N802
        if not store.up:
            raise StoreUnavailableError("the store is down")
        if head.attempt not in self.completed:
            self._referee.blame(f"{self.name} was told to upload {head.attempt}, which is not published there")
        store.objects.add((head.attempt, self.name))

    def _do_NoteDurable(self, head: AttemptHead, command: cmd.NoteDurable, store: SimStore) -> None:  # noqa: N802
        if head.attempt not in store.completed:
            self._referee.blame(f"{self.name} was told that {head.attempt} is durable, and it is not")
        self.durable.add(head.attempt)

    def _do_Discard(self, head: AttemptHead, command: cmd.Discard, store: SimStore) -> None:  # noqa: N802
        if head.attempt in self.completed:
            raise UsageError(f"{head.attempt} is committed on {self.name}")
        self._referee.deleting(self.name, head)
        self.images.pop(head.attempt, None)
        self.staged.pop(head.attempt, None)
        self.released.add(head.attempt)
        self.paused.discard(head.attempt)
