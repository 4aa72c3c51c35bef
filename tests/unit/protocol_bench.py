"""A bench for the protocol core: two nodes, hand-fed events, every command kept. Checks invariants after each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.answers import ANSWERS, success
from lastgood.coordinator.attempt import Attempt
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
)
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.protocol import Deadlines, Protocol, Settings
from lastgood.storage.manifest import ShardRecord
from tests.unit.memory_world import shard

C = TypeVar("C", bound=cmd.Command)
ACTOR0, ACTOR1, TRAINER = MemberId("actor", 0), MemberId("actor", 1), MemberId("trainer", 0)
HOSTS = {"n1": (ACTOR0, TRAINER), "n2": (ACTOR1,)}
SIZES = {"actor": 2, "trainer": 1}
COMPONENTS = {"actor": ("model", "optimizer"), "trainer": ("cursor",)}
MANIFEST = b"the manifest"


class Bench:
    """A core at epoch 5 with everything heard and declared."""

    def __init__(self, *, pausing: Sequence[str] = (), hear: Sequence[str] = ("n1", "n2"), **settings: Any) -> None:
        deadlines = Deadlines(save_s=100, pause_s=5, snapshot_s=10, stage_s=20, accept_s=5)
        self.core = Protocol(
            Settings(run="run", epoch=5, deadlines=deadlines, **settings),
            lambda epoch, sequence: f"a{epoch}.{sequence}",
        )
        self.now_s = 0.0
        self.pausing = pausing
        self.out: list[cmd.Command] = []  # answers to the last event
        self.all: list[cmd.Command] = []
        self.pending: list[cmd.AttemptCommand] = []  # not answered yet
        self.records: dict[tuple[str, str], RecordState] = {}  # what stands on the nodes' disks
        self.processes = {"n1": 1, "n2": 1}
        self.incarnations = {"n1": 1, "n2": 1}
        for role in SIZES:
            self.feed(ev.Declared(RoleDeclaration(role, SIZES[role], COMPONENTS[role], "m1")))
        for node in hear:
            self.hear(node)
        if hear:
            self.feed(ev.RecoveryBegun())

    def feed(self, event: ev.Event, after_s: float = 0.0) -> list[cmd.Command]:
        self.now_s += after_s
        if isinstance(event, ev.AttemptEvent):
            node = event.node if isinstance(event, ev.NodeEvent) else ""
            asked = (ANSWERS[type(event)], event.attempt, node)
            self.pending = [c for c in self.pending if (type(c), c.head.attempt, getattr(c, "node", "")) != asked]
        if isinstance(event, (ev.Accepted, ev.Refused)) and event.record is not RecordState.UNKNOWN:
            self.records[event.attempt, event.node] = event.record
        self.out = self.core.handle(event, self.now_s)
        self.all += self.out
        self.pending += [command for command in self.out if isinstance(command, cmd.AttemptCommand)]
        self.core.invariants()
        return self.out

    def infos(self, node: str) -> tuple[MemberInfo, ...]:
        process = f"{node}-{self.processes[node]}"
        return tuple(
            MemberInfo(
                m,
                SIZES[m.role],
                COMPONENTS[m.role],
                "m1",
                process,
                1,
                pausable=node in self.pausing,
                weights=tuple(name for name in COMPONENTS[m.role] if name == "model"),
            )
            for m in HOSTS[node]
        )

    def hear(self, node: str, *attempts: AttemptInventory, epoch: int = 5) -> list[cmd.Command]:
        inventory = Inventory(node, str(self.incarnations[node]), epoch, self.infos(node), attempts)
        return self.feed(ev.NodeHeard(inventory))

    def report(self, node: str, step: int, updates: int | None = None) -> NodeSnapshot:
        count = step if updates is None else updates
        reports = tuple(MemberReport(m, step, count, COMPONENTS[m.role]) for m in HOSTS[node])
        return NodeSnapshot(node, reports)

    def open(self, step: int, due: bool = False, *, memory: bool = False) -> list[cmd.Command]:
        reports = {node: self.report(node, step) for node in HOSTS}
        said = "every step"
        return self.feed(ev.WindowOpened(step, reports, due=Decision(due, said), memory=Decision(memory, said)))

    def ask(
        self,
        request_id: str,
        *,
        tag: str | None = None,
        kind: SaveKind = SaveKind.MANUAL,
        deadline_s: float | None = None,
        from_memory: bool = False,
    ) -> list[cmd.Command]:
        reason = f"because of {request_id}"
        return self.feed(ev.Asked(SaveRequest(request_id, kind, reason, tag, "me", deadline_s, from_memory)))

    def shards(self, node: str) -> tuple[ShardRecord, ...]:
        return tuple(shard(m, name, node) for m in HOSTS[node] for name in COMPONENTS[m.role])

    def result(self, command: cmd.AttemptCommand) -> Any:
        """What an honest world answers."""
        if isinstance(command, cmd.Snapshot):
            return self.report(command.node, command.head.step)
        if isinstance(command, cmd.Stage):
            return self.shards(command.node)
        if isinstance(command, cmd.BuildManifest):
            return MANIFEST
        if isinstance(command, (cmd.Accept, cmd.Refuse)):
            record = RecordState.ACCEPT if isinstance(command, cmd.Accept) else RecordState.REFUSE
            return self.records.setdefault((command.head.attempt, command.node), record)
        return None

    def answer(self, command: cmd.Command) -> list[cmd.Command]:
        """The command is answered as an honest world does."""
        assert isinstance(command, cmd.AttemptCommand)
        return self.feed(success(command, self.result(command)))

    def until(self, kind: type[C]) -> list[C]:
        """Answers everything until commands of this kind come out, and gives those (unanswered)."""
        while self.pending:
            asked = [command for command in self.pending if isinstance(command, kind)]
            if asked:
                return asked
            self.answer(self.pending[0])
        return []

    def to_the_end(self) -> None:
        """Answers everything until nothing more comes out."""
        while self.pending:
            self.answer(self.pending[0])

    def said(self, kind: type[C]) -> list[C]:
        """All commands of a kind so far."""
        return [command for command in self.all if isinstance(command, kind)]

    def now(self, kind: type[C]) -> list[C]:
        """Commands of a kind in the answer to the last event."""
        return [command for command in self.out if isinstance(command, kind)]

    @property
    def attempt(self) -> Attempt:
        """The newest attempt."""
        return max(self.core.attempts.values(), key=lambda a: a.order)


def found(
    node: str,
    record: RecordState,
    *,
    attempt: str = "old",
    epoch: int = 3,
    sequence: int = 7,
    staged: bool = True,
    completed: bool = False,
    durable: bool = False,
    participants: tuple[str, ...] = ("n1", "n2"),
) -> AttemptInventory:
    """An attempt of an earlier coordinator as it lies on a node."""
    knows = record is RecordState.ACCEPT or completed
    return AttemptInventory(
        attempt,
        400,
        epoch,
        sequence,
        record,
        staged,
        completed,
        durable,
        participants if knows else (),
        MANIFEST if knows else None,
    )


def head(attempt: str = "old", epoch: int = 3, sequence: int = 7) -> AttemptHead:
    return AttemptHead(attempt, 400, epoch, sequence)
