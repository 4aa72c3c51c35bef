"""Looks at what a crash has left and says what is broken. Reads with the product's own readers; knows no writing code.

`Judge.look` sees each disk as a person without Ray does, then as the stager does that starts on it; what a disk says
alone is remembered, since most crashes leave equal disks. `hold` compares the disks with what was told before.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lastgood.coordinator import catalog
from lastgood.coordinator.messages import AttemptHead, AttemptInventory, RecordState
from lastgood.coordinator.remote import Remote, Survey
from lastgood.storage.digest import BlockDigests
from lastgood.storage.errors import IntegrityError, LastgoodError
from lastgood.storage.files import is_temporary
from lastgood.storage.layout import COMPLETED, parse_step_name
from lastgood.storage.manifest import (
    Completed,
    DurableNote,
    EpochNote,
    FileModel,
    Head,
    Latest,
    LedgerEntry,
    Manifest,
    NodeIdentity,
    Record,
    StagedList,
    Tombstone,
    read_completed,
)
from lastgood.storage.store import FileStore
from lastgood.storage.verify import RejectKind, find_committed, open_checkpoint, read_verified, verify_attempt
from lastgood.workers.disk import NodeDisk
from tests.crash.cluster import COMMITTED_AT, NODES, PATHS, RUN
from tests.crash.disk_model import Key, Tree, Trees, key, write_tree
from tests.crash.journal import Mark

M = TypeVar("M", bound=FileModel)
ROOTS = {**dict.fromkeys(NODES, "staging"), "nas": "store"}  # disk -> the root on it
STORE = "nas"


class Broken(AssertionError):  # noqa: N818 - as the simulation's BrokenPromise
    """A promise that does not hold."""


@functools.lru_cache(maxsize=20_000)
def _parsed(kind: type[M], data: bytes) -> M:
    return kind.from_bytes(data, where="it")


@functools.lru_cache(maxsize=20_000)
def _parsed_completed(data: bytes) -> Completed | Tombstone:
    return read_completed(data, where="it")


@dataclass(frozen=True)
class Root:
    """The files of one root, as they lie on its disk. `name` is the disk's."""

    name: str
    tree: Tree

    def find(self, at: str) -> bytes | None:
        return self.tree.get(f"{ROOTS[self.name]}/{at}")

    def read(self, kind: type[M], at: str) -> M | None:
        """What stands at a key, whole; None when nothing does. Raises Broken for anything else."""
        data = self.find(at)
        try:
            return None if data is None else _parsed(kind, data)
        except IntegrityError as error:
            raise Broken(f"{self.name}: {at} is visible and not whole: {error}") from error

    def completed(self, head: AttemptHead | Head) -> Completed | Tombstone | None:
        """What stands in the place of an attempt's COMPLETED."""
        data = self.find(PATHS.completed(head.step, head.attempt))
        try:
            return None if data is None else _parsed_completed(data)
        except IntegrityError as error:
            raise Broken(f"{self.name}: a COMPLETED is visible and not whole: {error}") from error


@dataclass
class View:
    """What one disk says by itself."""

    committed: dict[str, Head] = field(default_factory=dict)  # whole checkpoints that a reader finds
    inventory: tuple[AttemptInventory, ...] = ()  # a node's, after its stager has started
    node: str = ""  # its name
    accepted: frozenset[str] = frozenset()  # attempts that the node has accepted, and holds whole
    survey: Survey = field(default_factory=Survey)  # the store's
    broken: str | None = None


class Judge:
    """Knows what it has seen. `scratch` is an empty directory of its own."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._views: dict[tuple[str, Key], View] = {}

    @property
    def disks_seen(self) -> int:
        """How many disks it has looked at that differ from each other."""
        return len(self._views)

    def look(self, trees: Trees) -> dict[str, View]:
        """Raises Broken unless everything that is visible is whole, and starting anew makes sense of it."""
        views = {name: self._view(name, tree) for name, tree in trees.items()}
        for view in views.values():
            if view.broken is not None:
                raise Broken(view.broken)
        _accepted_by_all(views, {name: Root(name, tree) for name, tree in trees.items()})
        _resumable(views)
        return views

    def _view(self, name: str, tree: Tree) -> View:
        at = (name, key(tree))
        if at not in self._views:
            place = self._scratch / name
            place.mkdir()
            try:
                write_tree(place, tree)
                self._views[at] = _examine(Root(name, tree), place / ROOTS[name])
            finally:
                shutil.rmtree(place)
        return self._views[at]


def _examine(root: Root, place: Path) -> View:
    view = View()
    try:
        _read_as_a_person(root, place, view)
        if root.name == STORE:
            view.survey = Remote(FileStore(place), RUN, lambda: COMMITTED_AT).survey()
            if view.survey.problems:
                raise Broken(f"the store: {view.survey.problems[0]}")
        else:
            _start(root, place, view)
    except Broken as broken:
        view.broken = str(broken)
    except (LastgoodError, OSError) as error:
        view.broken = f"{root.name}: nothing can start on it: {type(error).__name__}: {error}"
    return view


# -- one disk


def _read_as_a_person(root: Root, place: Path, view: View) -> None:
    """A checkpoint is visible if and only if it is whole; whatever has its final name is whole, hints too."""
    run_dir = place / RUN
    if not run_dir.is_dir():
        return
    node = root.read(NodeIdentity, PATHS.node)
    found = find_committed(run_dir)
    for reject in found.rejected:
        if reject.kind not in (RejectKind.UNCOMMITTED, RejectKind.COLLECTED):
            raise Broken(f"{root.name}: {reject.path.name} is visible and not whole: {reject.reason}")
    for one in found.committed:
        owed = one.manifest.shards_of(node.node) if node is not None else one.manifest.shards
        if root.name != STORE and node is None:
            raise Broken(f"{root.name}: {one.path.name} is committed on a node that has no name")
        wrong = [finding for finding in verify_attempt(one.path, one.manifest, owed, threads=1) if finding.fatal]
        if wrong:
            raise Broken(f"{root.name}: {one.path.name} is committed and not whole: {wrong[0]}")
        view.committed[one.completed.attempt] = one.completed.head
    for step_dir in {one.path.parent for one in found.committed}:
        open_checkpoint(step_dir)  # by the step's pointer
    _parse_all(root)


def _parse_all(root: Root) -> None:
    kinds: dict[str, type[FileModel]] = {
        "epoch.json": EpochNote,
        "latest.json": Latest,
        "staged.json": StagedList,
        "manifest.json": Manifest,
        "DURABLE": DurableNote,
    }
    folders: dict[str, type[FileModel]] = {"records": Record, "ledger": LedgerEntry, "epochs": EpochNote}
    for path, data in root.tree.items():
        parts = path.split("/")[1:]
        if data is None or not parts or is_temporary(parts[-1]):
            continue
        at = "/".join(parts)
        kind = kinds.get(parts[-1]) or (folders.get(parts[1]) if len(parts) == 3 else None)
        if kind is not None:
            root.read(kind, at)
        elif parts[-1] == COMPLETED and len(parts) == 3:
            root.read(Completed, at)  # a step's pointer


def _start(root: Root, place: Path, view: View) -> None:
    """What a stager makes of the directory when it starts."""
    disk = NodeDisk(place, RUN, "the judge")
    try:
        disk.sweep()
        view.node = disk.node
        view.inventory = disk.inventory()
        view.accepted = frozenset(
            found.attempt for found in view.inventory if found.record is RecordState.ACCEPT and _holds(disk, found)
        )
    finally:
        disk.close()
    nobodys(root.name, place, {found.attempt for found in view.inventory})


def _holds(disk: NodeDisk, found: AttemptInventory) -> bool:
    """Whether every shard that the node staged for the attempt is whole."""
    staged = disk.read_staged(AttemptHead(found.attempt, found.step, found.epoch, found.sequence))
    try:
        for shard in staged or ():
            read_verified(
                disk.paths.place(PATHS.shard(found.step, found.attempt, shard.path)), BlockDigests.of_record(shard)
            )
    except IntegrityError:
        return False
    return staged is not None


def nobodys(name: str, place: Path, owned: set[str]) -> None:
    """Raises Broken when something lies below a root that nobody owns: it would stay there for ever."""
    for path in place.rglob("*"):
        if is_temporary(path.name) or ".lastgood-probe" in path.name or path.name == "fetched":
            raise Broken(f"{name}: {path.relative_to(place)} is left for ever")
    for step_dir in (place / RUN).iterdir() if (place / RUN).is_dir() else ():
        if parse_step_name(step_dir.name) is None:
            continue
        attempts = [folder for folder in step_dir.iterdir() if folder.is_dir()]
        if not attempts:
            raise Broken(f"{name}: {step_dir.name} is left for ever, without an attempt")
        for folder in attempts:
            holds = sorted(path.name for path in folder.iterdir())
            if folder.name not in owned and holds != [COMPLETED]:
                raise Broken(f"{name}: {step_dir.name}/{folder.name} is nobody's and holds {holds}")


# -- all disks together


def _accepted_by_all(views: dict[str, View], roots: dict[str, Root]) -> None:
    """COMPLETED anywhere means that every participant has accepted, and none has refused."""
    for attempt, head in {a: h for view in views.values() for a, h in view.committed.items()}.items():
        for node in NODES:
            record = roots[node].read(Record, PATHS.record(attempt))
            if record is None and isinstance(roots[node].completed(head), Tombstone):
                continue  # collected here
            if record is None or record.state != "accept":
                says = "there is none" if record is None else f"it says {record.state}"
                raise Broken(f"{attempt} is visible as committed, but of the record of {node} {says}")


def _resumable(views: dict[str, View]) -> None:
    """Whatever a coordinator would offer for a resume is whole."""
    survey = views[STORE].survey
    inventories = {views[node].node: views[node].inventory for node in NODES}
    holding = {views[node].node: views[node].accepted for node in NODES}
    offered, _ = catalog.candidates(
        catalog.merge(inventories, survey.completed, survey.ledger, survey.collected), "auto"
    )
    for checkpoint in offered:
        if checkpoint.attempt in views[STORE].committed:
            continue
        torn = [node for node in checkpoint.nodes if checkpoint.attempt not in holding.get(node, ())]
        if torn:
            raise Broken(f"{checkpoint} is offered for a resume, and is not whole on {torn}")
    known = {checkpoint.attempt for checkpoint in offered}
    for name, view in views.items():
        gone = view.committed.keys() - known - survey.collected
        if gone:
            raise Broken(f"{name}: {sorted(gone)} is committed and whole, and no resume is offered it")


# -- what was told must be so


class Told:
    """What the story has been told, by call."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._begun: set[tuple[str, str, str]] = set()
        self.ended: list[Mark] = []
        for mark in marks:
            self._begun.add((mark.call, mark.facts.get("node", ""), _attempt(mark)))
            if mark.ended:
                self.ended.append(mark)

    def begun(self, call: str, attempt: str, node: str = "") -> bool:
        return (call, node, attempt) in self._begun

    def going(self, attempt: str, node: str) -> bool:
        """Whether this node's files of the attempt may be going away."""
        return self.begun("discard", attempt, node) or self.begun("collect", attempt, node)


def _attempt(mark: Mark) -> str:
    head = mark.facts.get("head")
    return head.attempt if head is not None else ""


def hold(trees: Trees, marks: list[Mark]) -> None:
    """Raises Broken when something that was told before the crash is not so any more."""
    told, roots = Told(marks), {name: Root(name, tree) for name, tree in trees.items()}
    for mark in told.ended:
        check = _CHECKS.get(mark.call)
        if check is not None:
            check(roots, told, mark.facts)


def _fail(root: Root, what: str, facts: dict[str, Any]) -> None:
    head = facts.get("head")
    raise Broken(f"{root.name}: {what}{f' of {head.attempt}' if head else ''} was told and is gone after the crash")


def _opened(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    identity = roots[facts["node"]].read(NodeIdentity, PATHS.node)
    if identity is None or identity.node != facts["name"]:
        _fail(roots[facts["node"]], "the node's identity", facts)


def _claimed(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    note = roots[STORE].read(EpochNote, PATHS.epoch(facts["epoch"]))
    if note is None or note.owner != facts["owner"]:
        _fail(roots[STORE], f"epoch {facts['epoch']}", facts)


def _hello(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    note = roots[facts["node"]].read(EpochNote, PATHS.epoch_note)
    if note is None or note.epoch < facts["epoch"]:
        _fail(roots[facts["node"]], f"the highest epoch, {facts['epoch']},", facts)


def _staged(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    root, head = roots[facts["node"]], facts["head"]
    if told.going(head.attempt, facts["node"]):
        return
    staged = root.read(StagedList, PATHS.staged(head.step, head.attempt))
    if staged is None or staged.shards != facts["shards"]:
        _fail(root, "staged.json", facts)
    _shards(root, facts)


def _shards(root: Root, facts: dict[str, Any], node: str | None = None) -> None:
    head = facts["head"]
    for shard in facts["shards"]:
        if node is not None and shard.node != node:
            continue
        data = root.find(PATHS.shard(head.step, head.attempt, shard.path))
        if data is None or _digest(data, shard.block_bytes) != shard.digest:
            _fail(root, f"shard {shard.path}", facts)


@functools.lru_cache(maxsize=10_000)
def _digest(data: bytes, block_bytes: int) -> str:
    from lastgood.storage.digest import digest_blocks

    return digest_blocks(data, block_bytes, threads=1).digest


def _record(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    root, head = roots[facts["node"]], facts["head"]
    if told.begun("collect", head.attempt, facts["node"]):
        return
    record = root.read(Record, PATHS.record(head.attempt))
    says = RecordState.NONE if record is None else RecordState(record.state)
    if facts["state"] is not RecordState.UNKNOWN and says is not facts["state"]:
        _fail(root, f"the record {facts['state'].value}", facts)
    manifest = None if record is None or record.manifest is None else record.manifest.encode()
    if says is RecordState.ACCEPT and facts.get("manifest", manifest) != manifest:
        _fail(root, "the manifest in the record", facts)


def _published(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    collecting = told.begun("collect", facts["head"].attempt, facts["node"])
    _stands(roots[facts["node"]], facts, collecting)


def _completed(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    _stands(roots[STORE], facts, told.begun("collect remotely", facts["head"].attempt))


def _stands(root: Root, facts: dict[str, Any], collecting: bool) -> None:
    head = facts["head"]
    standing = root.completed(head)
    if not isinstance(standing, Completed) and not (collecting and isinstance(standing, Tombstone)):
        _fail(root, "COMPLETED", facts)
    if facts.get("hints", True):
        order = (head.epoch, head.sequence)
        latest = root.read(Latest, PATHS.latest)
        if latest is None or (latest.epoch, latest.sequence) < order:
            _fail(root, "latest.json", facts)
        pointer = root.read(Completed, PATHS.pointer(head.step))
        if not collecting and (pointer is None or (pointer.epoch, pointer.sequence) < order):
            _fail(root, "the step's pointer", facts)


def _noted(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    root, head = roots[facts["node"]], facts["head"]
    gone = root.read(DurableNote, PATHS.durable(head.step, head.attempt)) is None
    if gone and not told.going(head.attempt, facts["node"]):
        _fail(root, "DURABLE", facts)


def _uploaded(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    identity = roots[facts["node"]].read(NodeIdentity, PATHS.node)
    if identity is not None and not told.begun("collect remotely", facts["head"].attempt):
        _shards(roots[STORE], facts, identity.node)


def _ledger(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    head = facts["head"]
    if not told.begun("collect remotely", head.attempt):
        entry = roots[STORE].read(LedgerEntry, PATHS.ledger(head.epoch, head.sequence))
        if entry is None or entry.attempt != head.attempt:
            _fail(roots[STORE], "the ledger entry", facts)


def _collected(roots: dict[str, Root], told: Told, facts: dict[str, Any]) -> None:
    root = roots[facts.get("node", STORE)]
    if not isinstance(root.completed(facts["head"]), Tombstone):
        _fail(root, "the tombstone", facts)


_CHECKS = {
    "open": _opened,
    "claim": _claimed,
    "hello": _hello,
    "stage": _staged,
    "accept": _record,
    "refuse": _record,
    "publish": _published,
    "ledger": _ledger,
    "upload": _uploaded,
    "complete": _completed,
    "note_durable": _noted,
    "collect": _collected,
    "collect remotely": _collected,
}
