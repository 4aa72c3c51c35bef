"""Which checkpoints there are: local inventories, the store's listing and the ledger merged into one ordered list.

Pure. The order is (epoch, sequence), never the step (a run may be rewound), never a clock. What is not whole is
listed with what it lacks, and never offered for a resume; what was lost is told in sentences.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..storage.errors import IntegrityError
from ..storage.manifest import Completed, LedgerEntry, Manifest
from .messages import AttemptHead, AttemptInventory
from .recovery import Verdict, decide


class Standing(enum.Enum):
    """How sure a checkpoint is."""

    DURABLE = "durable"  # the store's COMPLETED for it stands
    COMMITTED = "committed"  # every participant has accepted it
    IN_DOUBT = "in_doubt"  # every record that was heard says accept, one is not heard
    LOST = "lost"  # it was committed, and nothing that was heard holds it


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of the run, as far as is known now."""

    step: int
    attempt: str
    epoch: int
    sequence: int
    state: Standing
    tag: str | None = None
    kind: str = ""
    nodes: tuple[str, ...] = ()  # its participants
    where: tuple[str, ...] = ()  # nodes that hold their shards of it, and "store"
    missing: tuple[str, ...] = ()  # participants that are not heard or no longer have their shards
    manifest: bytes | None = field(default=None, repr=False)  # when some node holds it

    @property
    def head(self) -> AttemptHead:
        return AttemptHead(self.attempt, self.step, self.epoch, self.sequence)

    @property
    def durable(self) -> bool:
        return self.state is Standing.DURABLE

    @property
    def committed(self) -> bool:
        """Whether it is certainly a commit that something still holds a part of."""
        return self.state in (Standing.COMMITTED, Standing.DURABLE)

    @property
    def whole(self) -> bool:
        """Whether all of it can be read now, from the store or from the nodes that are heard."""
        return self.durable or (self.state is Standing.COMMITTED and not self.missing)

    def __str__(self) -> str:
        tag = f" '{self.tag}'" if self.tag else ""
        return f"step {self.step}{tag} (attempt {self.attempt}, epoch {self.epoch}, sequence {self.sequence})"


@dataclass(frozen=True)
class Problem:
    """An object of the store that is not used: damaged, in another's place, or of another format version."""

    key: str
    reason: str  # a sentence that names the key
    other_version: bool = False  # whole, as far as can be told, and written by another lastgood
    attempt: str | None = None  # whose COMPLETED it should be, by its key
    step: int | None = None  # the same
    order: tuple[int, int] | None = None  # (epoch, sequence), of a ledger entry, by its key

    def __str__(self) -> str:
        return self.reason


@dataclass
class _Sighting:
    head: AttemptHead
    participants: tuple[str, ...] = ()
    at: dict[str, AttemptInventory] = field(default_factory=dict)
    store: Completed | None = None
    ledger: LedgerEntry | None = None
    manifest: bytes | None = None
    tag: str | None = None
    kind: str = ""


def merge(
    inventories: Mapping[str, Iterable[AttemptInventory]],
    store: Iterable[Completed] = (),
    ledger: Iterable[LedgerEntry] = (),
    collected: Collection[str] = (),
    words: dict[str, tuple[str | None, str]] | None = None,
) -> list[Checkpoint]:
    """Every checkpoint that somebody knows of, newest first; aborted and collected attempts are none.

    `inventories`: node -> what it holds, of the nodes that are heard. `collected`: attempts that retention let go.
    `words`: attempt -> (tag, kind), as far as known; what must be read from a manifest is added, for the next time.
    """
    words = {} if words is None else words
    seen: dict[str, _Sighting] = {}

    def sighting(attempt: str, step: int, epoch: int, sequence: int) -> _Sighting:
        return seen.setdefault(attempt, _Sighting(AttemptHead(attempt, step, epoch, sequence)))

    for completed in store:
        entry = sighting(completed.attempt, completed.step, completed.epoch, completed.sequence)
        entry.store = completed
        entry.participants = entry.participants or completed.participants
        entry.tag, entry.kind = completed.tag, completed.kind
    for line in ledger:
        entry = sighting(line.attempt, line.step, line.epoch, line.sequence)
        entry.ledger = line
        entry.participants = entry.participants or line.nodes
    for node, attempts in inventories.items():
        for found in attempts:
            entry = sighting(found.attempt, found.step, found.epoch, found.sequence)
            if found.head != entry.head:
                continue  # a file there is damaged; the core tells of it
            entry.at[node] = found
            entry.participants = entry.participants or found.participants
            entry.manifest = entry.manifest or found.manifest
    made = (_judge(entry, inventories.keys(), words) for entry in seen.values() if entry.head.attempt not in collected)
    return sorted((c for c in made if c is not None), key=lambda c: (c.epoch, c.sequence), reverse=True)


def _judge(entry: _Sighting, heard: Collection[str], words: dict[str, tuple[str | None, str]]) -> Checkpoint | None:
    head = entry.head
    participants = entry.participants or tuple(sorted(entry.at))
    holding = tuple(node for node in sorted(entry.at) if entry.at[node].staged)
    proof = next((f"COMPLETED stands at {node}" for node, found in entry.at.items() if found.completed), None)
    durable = entry.store is not None or any(found.durable for found in entry.at.values())
    if durable or entry.ledger is not None:
        proof = proof or "the store knows of it"
    verdict = decide(participants, {n: found.record for n, found in entry.at.items()}, proof, heard).verdict
    if verdict in (Verdict.ABORTED, Verdict.REFUSE_FIRST) or (verdict is Verdict.IN_DOUBT and not entry.participants):
        return None
    held = frozenset(holding)
    missing = tuple(node for node in participants if node not in held)
    if durable:
        state = Standing.DURABLE
    elif verdict is Verdict.IN_DOUBT:
        state = Standing.IN_DOUBT
    else:
        state = Standing.COMMITTED if holding else Standing.LOST
    tag, kind = entry.tag, entry.kind
    if not kind and entry.manifest is not None:
        tag, kind = _tag_and_kind(entry.manifest, head.attempt, words)
    where = (*holding, "store") if durable else holding
    return Checkpoint(
        head.step,
        head.attempt,
        head.epoch,
        head.sequence,
        state,
        tag,
        kind,
        participants,
        where,
        missing,
        entry.manifest,
    )


def _tag_and_kind(manifest: bytes, attempt: str, words: dict[str, tuple[str | None, str]]) -> tuple[str | None, str]:
    if attempt not in words:  # manifests never change, and are long
        try:
            content = Manifest.from_bytes(manifest, where=f"the manifest of {attempt}")
        except IntegrityError:
            return None, ""
        words[attempt] = (content.tag, content.kind)
    return words[attempt]


def candidates(
    checkpoints: Sequence[Checkpoint], mode: int | str, problems: Collection[Problem] = ()
) -> tuple[list[Checkpoint], list[str]]:
    """What a resume may try, newest first, and a sentence for each newer checkpoint that cannot be had.

    `mode`: 'auto' or 'latest' (any step), or a step's number. `checkpoints`: newest first, as merge gives them. A
    problem is told unless what it hides is known to be another step's, or older than what is tried first.
    """
    wanted = [c for c in checkpoints if mode in ("auto", "latest") or c.step == mode]
    usable = [c for c in wanted if c.whole]
    newest = (usable[0].epoch, usable[0].sequence) if usable else (-1, -1)
    damaged = {problem.attempt: problem for problem in problems}
    told = [why_not(c, damaged.get(c.attempt)) for c in wanted if not c.whole and (c.epoch, c.sequence) > newest]
    known = {c.attempt for c in checkpoints} | {(c.epoch, c.sequence) for c in checkpoints}
    for problem in problems:
        elsewhere = isinstance(mode, int) and problem.step not in (None, mode)
        older = problem.order is not None and problem.order <= newest
        if not (elsewhere or older or problem.attempt in known or problem.order in known):
            told.append(problem.reason)
    return usable, told


def why_not(checkpoint: Checkpoint, problem: Problem | None = None) -> str:
    """Why a checkpoint cannot be resumed from now, as a sentence. `problem`: what became of its COMPLETED in the
    store."""
    nodes = ", ".join(checkpoint.missing) or "its nodes"
    stored = f"; what the store has of it is not used: {problem}" if problem is not None else ""
    if checkpoint.state is Standing.IN_DOUBT:
        return (
            f"{checkpoint} is in doubt: every record that was heard says accept, and {nodes} was not heard; it may "
            f"have been committed{stored or '.'}"
        )
    if checkpoint.state is Standing.LOST:
        gone = f"which do not hold it now{stored}" if stored else "and neither they nor the store hold it now."
        return f"{checkpoint} was committed on {nodes}, {gone}"
    gone = stored or " and the store does not have it."
    return f"{checkpoint} is committed, but the part on {nodes} is not there{gone}"
