"""The referee: knows every disk and every message at once, and says so when a promise is broken.

It is told of each effect as it happens and checks only what that effect can break; `final` looks at everything. It
shares no code with the protocol: what it demands are the promises of DESIGN section 7 (1, 2, 4, 9, 10).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lastgood.coordinator import commands as cmd
from lastgood.coordinator.messages import AttemptHead, RecordState, SaveState
from lastgood.coordinator.outcomes import COMMITTED_OR_BEYOND

if TYPE_CHECKING:
    from tests.simulation.world import Coordinator, World

ACCEPT, REFUSE = RecordState.ACCEPT, RecordState.REFUSE


class BrokenPromise(AssertionError):  # noqa: N818 - it is what it says
    """A promise did not hold; the message says which and where."""


@dataclass
class Truth:
    """What is really so about one attempt."""

    head: AttemptHead
    participants: tuple[str, ...] = ()  # from the draft; empty before the manifest was built
    records: dict[str, RecordState] = field(default_factory=dict)  # first record written, by node
    accept_sent: bool = False
    committed: bool = False
    told_aborted: bool = False
    deleted: set[str] = field(default_factory=set)


class Referee:
    """Watches one world."""

    def __init__(self, plant: str | None = None) -> None:
        self.plant = plant  # a bug planted in the world, for the test of the net itself
        self.world: World | None = None
        self.truths: dict[str, Truth] = {}
        self._places: dict[tuple[int, int], str] = {}
        self.commits = 0

    def blame(self, what: str) -> None:
        raise BrokenPromise(what)

    def sent(self, command: cmd.AttemptCommand) -> None:
        """A coordinator gave a command."""
        head = command.head
        truth = self.truths.get(head.attempt)
        if truth is None:
            truth = self.truths[head.attempt] = Truth(head)
            standing = self._places.setdefault((head.epoch, head.sequence), head.attempt)
            if standing != head.attempt:
                self.blame(f"{standing} and {head.attempt} both are (epoch {head.epoch}, sequence {head.sequence})")
        elif truth.head != head:
            self.blame(f"attempt id {head.attempt} was used for {truth.head} and for {head}")
        if isinstance(command, cmd.BuildManifest):
            truth.participants = command.draft.participants
            self._complete(command.draft)
        elif isinstance(command, cmd.Accept):
            truth.accept_sent = True

    def _complete(self, draft: cmd.Draft) -> None:
        """Promise 4: every member x component, once, of one step."""
        assert self.world is not None
        have = sorted((shard.role, shard.rank, shard.component) for shard in draft.shards)
        if have != self.world.owed:
            self.blame(f"{draft.head} has shards {have}, owed are {self.world.owed}")

    def recorded(self, node: str, head: AttemptHead, record: RecordState) -> None:
        """A record was written on a disk."""
        truth = self.truths[head.attempt]
        standing = truth.records.setdefault(node, record)
        if standing is not record:
            self.blame(f"the record of {head.attempt} on {node} was {standing.value} and became {record.value}")
        if record is ACCEPT and not truth.committed and self._all_accept(truth):
            truth.committed = True
            self.commits += 1
            self.whole(truth)
            if truth.told_aborted:
                self.blame(f"{head.attempt} was announced as aborted, and then it was committed")

    def _all_accept(self, truth: Truth) -> bool:
        return all(truth.records.get(node) is ACCEPT for node in truth.participants)

    def whole(self, truth: Truth) -> None:
        """Promise 1: all of it is on the disks, and all of it is of its step."""
        assert self.world is not None
        shards = []
        for node in truth.participants:
            staged = self.world.nodes[node].staged.get(truth.head.attempt)
            if staged is None:
                self.blame(f"{truth.head.attempt} is committed, and {node} has no shards of it")
                return
            shards += staged
        if any(shard.step != truth.head.step for shard in shards):
            self.blame(f"{truth.head.attempt} of step {truth.head.step} mixes steps: {shards}")
        have = sorted((shard.role, shard.rank, shard.component) for shard in shards)
        if have != self.world.owed:
            self.blame(f"{truth.head.attempt} is committed with {have}, owed are {self.world.owed}")

    def published(self, node: str, head: AttemptHead) -> None:
        """COMPLETED was written on a disk."""
        truth = self.truths[head.attempt]
        if not truth.committed:
            self.blame(f"COMPLETED of {head.attempt} on {node}, but the records are {truth.records}")
        self.whole(truth)

    def ledger(self, head: AttemptHead, standing: AttemptHead) -> None:
        if not self.truths[head.attempt].committed:
            self.blame(f"a ledger entry for {head.attempt}, which is not committed")
        if standing != head:
            self.blame(f"the ledger has {standing} where {head} was to be noted")

    def completed_in_store(
        self, head: AttemptHead, participants: tuple[str, ...], objects: set[tuple[str, str]]
    ) -> None:
        truth = self.truths[head.attempt]
        if not truth.committed:
            self.blame(f"{head.attempt} became durable, but the records are {truth.records}")
        if participants != truth.participants or any((head.attempt, n) not in objects for n in participants):
            self.blame(f"COMPLETED in the store for {head.attempt} without all its objects")

    def deleting(self, node: str, head: AttemptHead) -> None:
        """Files are about to be deleted (promise 2)."""
        truth = self.truths[head.attempt]
        truth.deleted.add(node)
        if truth.committed:
            self.blame(f"files of {head.attempt} are deleted on {node}, and it is committed")
        if not truth.accept_sent:
            return  # no participant can hold an accept
        silent = [n for n in truth.participants if n not in truth.records]
        if silent:
            self.blame(f"files of {head.attempt} are deleted on {node} while {silent} has not been heard")
        if REFUSE not in truth.records.values():
            self.blame(f"files of {head.attempt} are deleted on {node} though nobody refused it")

    def announced(self, coordinator: Coordinator, announce: cmd.Announce) -> None:
        """What waiters are told must be true."""
        head = announce.head
        if head is None:
            return
        truth = self.truths.get(head.attempt)
        if announce.state in COMMITTED_OR_BEYOND and not announce.in_doubt:
            if truth is None or not truth.committed:
                self.blame(f"{head.attempt} was announced as {announce.state.value}, and it is not committed")
        elif announce.state is SaveState.ABORTED and truth is not None:
            attempt = coordinator.core.attempts.get(head.attempt)
            if attempt is not None and attempt.aborted:
                truth.told_aborted = True
                if truth.committed:
                    self.blame(f"{head.attempt} was announced as aborted, and it is committed")

    def final(self) -> None:
        """After healing and quiescence: every attempt is decided, everywhere, the same way."""
        assert self.world is not None
        nodes = self.world.nodes
        for attempt, truth in self.truths.items():
            if truth.committed:
                self.whole(truth)
                for name in truth.participants:
                    node = nodes[name]
                    if attempt not in node.completed or node.records.get(attempt) is not ACCEPT:
                        self.blame(f"{attempt} is committed, and {name} does not have its COMPLETED")
                    if attempt not in node.durable:
                        self.blame(f"{attempt} is committed, and {name} does not know it as durable")
                if attempt not in self.world.store.completed:
                    self.blame(f"{attempt} is committed, and never became durable")
                continue
            for node in nodes.values():
                if attempt in node.completed:
                    self.blame(f"{attempt} is not committed, and COMPLETED stands on {node.name}")
                if attempt in node.staged or attempt in node.images:
                    self.blame(f"{attempt} is not committed, and {node.name} still holds files or images of it")
                if attempt in node.paused:
                    self.blame(f"{attempt} is over, and {node.name} is still paused for it")
