"""What the coordinator itself writes to and reads from the store: ledger, COMPLETED, pointers, listing. Synchronous.

The order that the promises rest on: every object verified, then manifest.json, then the attempt's COMPLETED by
exclusive create, then the step's pointer, then latest.json. The pointers only ever move forward in (epoch, sequence).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..storage.errors import (
    AlreadyExistsError,
    FencedError,
    FormatVersionError,
    IntegrityError,
    StoreError,
    StoreUnavailableError,
)
from ..storage.layout import COMPLETED, RunPaths, epochs_in, parse_ledger_name, parse_step_name
from ..storage.manifest import (
    Completed,
    Head,
    Latest,
    LedgerEntry,
    Manifest,
    Tombstone,
    newest_first,
    read_completed,
)
from ..storage.store import Store
from .catalog import Problem

_TRIES = 10  # of a replace that others race with


@dataclass(frozen=True)
class Survey:
    """What the store knows of a run. `problems`: objects that are not used, each with what its key tells of it."""

    completed: tuple[Completed, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()  # without those of collected attempts
    collected: frozenset[str] = frozenset()  # attempts with a tombstone in COMPLETED's place
    half_collected: tuple[Head, ...] = ()  # those of them of which more than the tombstone stands
    problems: tuple[Problem, ...] = ()


class Remote:
    """One run's part of the store, as the coordinator uses it. Every method blocks; run them in a thread."""

    def __init__(self, store: Store, run: str, now_utc: Callable[[], str], home: str | None = None) -> None:
        """`home`: the key of the epoch that the coordinator claimed; it stands wherever this run's store is. Without it
        nothing is written: the empty directory of a lost mount takes files too, and what is published there is in no
        store. Nor is anything beside a higher one: a newer coordinator leads the run."""
        self._home = home
        self._store = store
        self._paths = RunPaths("", run)
        self._now_utc = now_utc

    def survey(self) -> Survey:
        """Lists the store. Raises StoreError when it cannot be listed; single broken objects are told as problems."""
        completed: list[Completed] = []
        ledger: list[LedgerEntry] = []
        problems: list[Problem] = []
        collected: dict[str, Head] = {}
        objects: Counter[str] = Counter()  # by attempt
        for key in self._store.list(f"{self._paths.ledgers}/"):
            try:
                ledger.append(self._ledger_entry(key))
            except IntegrityError as error:
                order = parse_ledger_name(key.rsplit("/", 1)[-1])
                problems.append(Problem(key, str(error), isinstance(error, FormatVersionError), order=order))
        for key in self._store.list(f"{self._paths.run}/global_step_"):
            _, step_dir, attempt, *rest = *key.split("/"), ""
            objects[attempt] += 1
            step = parse_step_name(step_dir)
            if rest != [COMPLETED, ""] or step is None:
                continue
            try:
                found = self._completed(key, step, attempt)
            except IntegrityError as error:
                problems.append(Problem(key, str(error), isinstance(error, FormatVersionError), attempt, step))
                continue
            if isinstance(found, Tombstone):
                head = Head(attempt=found.attempt, step=found.step, epoch=found.epoch, sequence=found.sequence)
                collected[found.attempt] = head
            else:
                completed.append(found)
        kept = tuple(entry for entry in ledger if entry.attempt not in collected)
        half = tuple(head for attempt, head in collected.items() if objects[attempt] > 1)
        return Survey(tuple(completed), kept, frozenset(collected), half, tuple(problems))

    def _ledger_entry(self, key: str) -> LedgerEntry:
        entry = LedgerEntry.from_bytes(self._store.get(key), where=key)
        if (entry.run, self._paths.ledger(entry.epoch, entry.sequence)) != (self._paths.run, key):
            raise _misplaced(key, f"epoch {entry.epoch}, sequence {entry.sequence} of run {entry.run}")
        return entry

    def _completed(self, key: str, step: int, attempt: str) -> Completed | Tombstone:
        found = read_completed(self._store.get(key), where=key)
        if (found.run, found.step, found.attempt) != (self._paths.run, step, attempt):
            raise _misplaced(key, f"step {found.step}, attempt {found.attempt} of run {found.run}")
        return found

    def read_manifest(self, completed: Completed) -> bytes:
        """The manifest of a checkpoint in the store. Raises IntegrityError if it is not the one that was committed."""
        key = self._paths.manifest(completed.step, completed.attempt)
        data = self._store.get(key)
        if hashlib.sha256(data).hexdigest() != completed.manifest_sha256:
            raise IntegrityError(
                f"{key} is not the manifest that was committed: its digest is not the one in COMPLETED. It was left as "
                "it is; this checkpoint is taken from another copy, or an earlier one is used.",
                path=key,
            )
        return data

    def require_lead(self) -> None:
        """Raises FencedError when a newer coordinator has claimed an epoch, StoreError when that cannot be told."""
        if self._home is None:
            return
        (epoch,) = epochs_in([self._home])
        epochs = epochs_in(self._store.list(f"{self._paths.epochs}/"))
        if epoch not in epochs:
            raise StoreUnavailableError(
                f"{self._home} is not in the store {self._store.url} any more, so this is not the place that this "
                "coordinator has begun to write to: is its file system still mounted? Nothing was written. What is "
                "committed stands on the nodes and is uploaded when it is back.",
                key=self._home,
            )
        if max(epochs) > epoch:  # its heartbeat would find out too, but this write comes first
            raise FencedError(
                f"epoch {max(epochs)} was claimed in the store by a newer coordinator",
                epoch=epoch,
                highest_epoch=max(epochs),
            )

    def write_ledger(self, completed: Completed) -> None:
        """Notes the commit in the store. May be repeated.

        Raises StoreUnavailableError when the store is not there, FencedError when a newer coordinator leads the run.
        """
        self.require_lead()
        entry = LedgerEntry(
            run=completed.run,
            attempt=completed.attempt,
            step=completed.step,
            epoch=completed.epoch,
            sequence=completed.sequence,
            nodes=completed.participants,
            manifest_sha256=completed.manifest_sha256,
            committed_at=completed.committed_at,
        )
        key = self._paths.ledger(completed.epoch, completed.sequence)
        if self._store.create_exclusive(key, entry.to_bytes()):
            return
        standing = LedgerEntry.from_bytes(self._store.get(key), where=key)
        if standing.attempt != completed.attempt:
            raise AlreadyExistsError(
                f"{key} names attempt {standing.attempt}, not {completed.attempt}: two coordinators used one epoch. "
                "Nothing was overwritten; end all coordinators of this run but one.",
                key=key,
            )

    def complete(self, completed: Completed, manifest_bytes: bytes, manifest: Manifest | None = None) -> Completed:
        """Verifies every object and makes the attempt durable; answers the COMPLETED that stands. May be repeated.

        `manifest`: what the bytes say, for a caller that has read them.

        Raises StoreError with `missing_nodes` when objects are absent or of another length, with `collected` when a
        tombstone stands in COMPLETED's place, FencedError when a newer coordinator leads the run.
        """
        self.require_lead()
        if manifest is None:
            manifest = Manifest.from_bytes(manifest_bytes, where=f"the manifest of {completed.attempt}")
        self._check_objects(manifest)
        step, attempt = completed.step, completed.attempt
        key = self._paths.manifest(step, attempt)
        if not self._store.create_exclusive(key, manifest_bytes) and self._store.get(key) != manifest_bytes:
            raise AlreadyExistsError(f"another manifest stands at {key}; it was left as it is.", key=key)
        key = self._paths.completed(step, attempt)
        if not self._store.create_exclusive(key, completed.to_bytes()):
            standing = read_completed(self._store.get(key), where=key)
            if isinstance(standing, Tombstone):
                raise StoreError(
                    f"attempt {attempt} of step {step} was collected in the store ({standing.reason}); it is not "
                    "completed again. Newer checkpoints stand.",
                    collected=True,
                )
            if standing.manifest_sha256 != completed.manifest_sha256:
                raise AlreadyExistsError(f"COMPLETED of another manifest stands at {key}; it was left.", key=key)
            completed = standing
        self._forward(self._paths.pointer(step), completed.to_bytes(), completed, Completed)
        self._forward_latest(completed)
        return completed

    def forward_pointers(self, completed: Iterable[Completed]) -> None:
        """Moves the pointers to the newest of these, where whoever completed them died before it did.

        Raises StoreError.
        """
        self.require_lead()
        newest = newest_first(completed)
        for one in newest:
            self._forward(self._paths.pointer(one.step), one.to_bytes(), one, Completed)
        if newest:
            self._forward_latest(newest[0])

    def _forward_latest(self, completed: Completed) -> None:
        latest = Latest.of(completed, self._now_utc())
        self._forward(self._paths.latest, latest.to_bytes(), completed, Latest)

    def _check_objects(self, manifest: Manifest) -> None:
        wrong: list[str] = []
        nodes: set[str] = set()
        for shard in manifest.shards:
            key = self._paths.shard(manifest.step, manifest.attempt, shard.path)
            found = self._store.head(key)
            if found is None or found[0] != shard.nbytes:
                has = "is missing" if found is None else f"has {found[0]} of {shard.nbytes} bytes"
                wrong.append(f"{key} {has}")
                nodes.add(shard.node)
        if wrong:
            raise StoreError(
                f"{len(wrong)} of {len(manifest.shards)} objects are not whole in the store: {'; '.join(wrong[:3])}. "
                "The checkpoint stays committed on its nodes, which upload again.",
                missing_nodes=tuple(sorted(nodes)),
            )

    def _forward(self, key: str, data: bytes, completed: Completed, kind: type[Completed] | type[Latest]) -> None:
        """Replaces a pointer unless it is at this checkpoint or a newer one already."""
        for _ in range(_TRIES):
            head = self._store.head(key)
            if head is None:
                if self._store.create_exclusive(key, data):
                    return
                continue
            standing = self._order_of(key, kind)
            if standing is not None and standing >= (completed.epoch, completed.sequence):
                return
            if self._store.replace_if(key, data, head[1]):
                return
        raise StoreError(f"{key} could not be moved forward in {_TRIES} tries: others keep replacing it.", key=key)

    def _order_of(self, key: str, kind: type[Completed] | type[Latest]) -> tuple[int, int] | None:
        """Where a pointer stands; None when it cannot be read: it is a hint, and is replaced then."""
        data = self._store.find(key)
        try:
            standing = None if data is None else kind.from_bytes(data, where=key)
        except IntegrityError:
            standing = None
        return None if standing is None else (standing.epoch, standing.sequence)


def _misplaced(key: str, what: str) -> IntegrityError:
    return IntegrityError(f"{key} speaks of {what}: it stands in another one's place and is not used.", path=key)
