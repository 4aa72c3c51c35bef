"""The staging directory of one node: everything of a stager that lies on disk. No asyncio, no Ray, no images.

A full disk must not keep a node from saying so: a reserve of RESERVE_BYTES is given up for a refuse record or an epoch
note that finds no room, and taken again when there is some.

Order of effects, which the promises rest on: shards are fsynced before staged.json, staged.json before an accept
record, the record before it is acknowledged, manifest.json before COMPLETED, COMPLETED before the pointers. Records
and COMPLETED are created once and never written again. Files go only when a refuse record stands.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from ..coordinator.messages import AttemptHead, AttemptInventory, RecordState
from ..storage import layout
from ..storage.errors import FencedError, FormatVersionError, IntegrityError, StagingError, UsageError
from ..storage.failpoints import failpoint
from ..storage.files import (
    FULL,
    create_once,
    fsync_dir,
    is_temporary,
    make_dirs_durably,
    remove_quietly,
    replace_durably,
    staging_error,
    translated,
)
from ..storage.ids import new_id, utc_text
from ..storage.layout import RunPaths
from ..storage.manifest import (
    Completed,
    DurableNote,
    EpochNote,
    Head,
    Latest,
    Manifest,
    NodeIdentity,
    Record,
    ShardRecord,
    StagedList,
    Tombstone,
    newest_first,
    read_completed,
)

log = logging.getLogger("lastgood.stager")
_T = TypeVar("_T")

RESERVE_BYTES = 256 << 10  # far more than a refuse record, an epoch note and the blocks of their directories need
RESERVE_NAMES = 4  # a record is made as a temporary file and a link, and tmpfs counts each as an inode


class NodeDisk:
    """One run's part of a node's staging directory, locked for this process while it lives.

    Raises StagingError when another live stager holds the directory or it cannot be written.
    """

    def __init__(self, staging: Path, run: str, holder: str, clock: Callable[[], float] = time.time) -> None:
        self.paths = RunPaths(staging, run)
        self.run = run
        self.staging = staging
        self._clock = clock
        root = self.paths.place(run)
        try:
            make_dirs_durably(root, trusted=set())
        except StagingError as error:
            raise StagingError(
                f"the staging directory {staging} cannot be used: {error.__cause__ or error}. Nothing was changed. "
                f"Create it on the node's local disk, writable for uid {os.getuid()}, or set staging elsewhere.",
                path=str(staging),
            ) from error
        self._final: dict[str, AttemptInventory] = {}  # under _looking: attempts of which nothing changes any more
        self._strangers: set[Path] = set()  # told of
        self._looking = threading.Lock()
        self._reserving = threading.Lock()
        self._pointing = threading.Lock()  # one at a time reads pointers and replaces them by what it has read
        self._lock = self._take_lock(holder)
        self._make_durable()
        self.node = self._identity()
        self.highest_epoch = self._read_epoch()
        make_dirs_durably(self.paths.place(self.paths.records))
        self._keep_reserve()

    def close(self) -> None:
        """Gives the directory back. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self, holder: str) -> int | None:
        path = self.paths.place(self.paths.lock)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StagingError(
                f"the staging directory {self.staging} is not writable: {error}. Nothing was changed. Free space or "
                f"fix its permissions for uid {os.getuid()}.",
                path=str(path),
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 500, 0).decode(errors="replace") or "an unnamed process"
            os.close(lock)
            raise StagingError(
                f"the staging directory {self.staging} is in use for run {self.run} by another live stager: {owner}. "
                "Two nodes may not share one staging directory. Give each node its own, for example "
                "staging='/local/{hostname}' or '/local/{label:NAME}'.",
                path=str(self.staging),
                owner=owner,
            ) from error
        with contextlib.suppress(OSError):  # a full disk: the lock counts, the name in it is for people
            os.ftruncate(lock, 0)
            os.pwrite(lock, holder.encode(), 0)
        return lock

    def _make_durable(self) -> None:
        """Makes the names durable that a stager left which was killed before it came to that.

        What is seen here is acted on and told, so it must outlive a power loss: the node's name and epoch, records, and
        what stands of attempts that are not over. The names of shards are durable before staged.json is written, those
        of a collected attempt before its files are deleted. Raises StagingError.
        """
        root = self.paths.place(self.run)
        folders = {root, self.paths.place(self.paths.records)}
        for step, attempt in self._attempt_dirs():
            folder = self.paths.place(self.paths.attempt_dir(step, attempt))
            if not (folder / layout.DURABLE).exists() and [path.name for path in _listed(folder)] != [layout.COMPLETED]:
                folders |= {folder, folder.parent}
        with translated("sync the directory", root, staging_error):
            for folder in sorted(folders):
                if folder.is_dir():
                    fsync_dir(folder)

    def _identity(self) -> str:
        path = self.paths.place(self.paths.node)
        if path.exists():  # also on a full disk, which takes no temporary file
            try:
                return NodeIdentity.from_bytes(path.read_bytes(), where=str(path)).node
            except FormatVersionError:
                raise  # not damaged: this lastgood must leave the directory to the one that wrote it
            except IntegrityError as error:
                node = self._name_in_lists()
                log.warning("%s; the lists of shards say that this node is %s", error, node or "a new one")
                path.unlink()
                if node is not None:
                    create_once(path, NodeIdentity(node=node).to_bytes())
                    return node
        host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:40].lstrip("-.") or "node"
        create_once(path, NodeIdentity(node=new_id(host)).to_bytes())
        return NodeIdentity.from_bytes(path.read_bytes(), where=str(path)).node

    def _name_in_lists(self) -> str | None:
        """The node's name as its newest list of shards has it."""
        names: dict[tuple[int, int], str] = {}
        for step, attempt in self._attempt_dirs():
            path = self.paths.place(self.paths.staged(step, attempt))
            staged = self._whole(lambda path=path: StagedList.from_bytes(path.read_bytes(), where=str(path)))
            if staged is not None:
                names[staged.head.epoch, staged.head.sequence] = staged.node
        return names[max(names)] if names else None

    # -- the reserve

    def _keep_reserve(self) -> None:
        """Takes the reserve's bytes and names if they are not held; on a full disk that is tried again later."""
        with self._reserving:
            folder = self.paths.place(self.paths.reserve)
            try:
                folder.mkdir(exist_ok=True)
                for number in range(RESERVE_NAMES):
                    place = folder / str(number)
                    if not place.exists():
                        self._reserve(place, RESERVE_BYTES if number == 0 else 0)
            except OSError as error:
                log.warning("%s: no %d bytes could be kept for records: %s", self.staging, RESERVE_BYTES, error)

    @staticmethod
    def _reserve(place: Path, nbytes: int) -> None:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            place.unlink()
            raise
        finally:
            os.close(descriptor)

    def _even_when_full(self, write: Callable[[], _T]) -> _T:
        """Makes a small write that a full disk must not prevent: it is made again in the reserve's place."""
        try:
            return write()
        except StagingError as error:
            if error.facts.get("errno") not in FULL:
                raise
            with self._reserving:
                held = _listed(self.paths.place(self.paths.reserve))
                for place in held:
                    remove_quietly(place)
            if not held:
                raise  # it has been given up already
        try:
            return write()
        finally:
            self._keep_reserve()

    # -- epochs

    def _read_epoch(self) -> int:
        path = self.paths.place(self.paths.epoch_note)
        try:
            return EpochNote.from_bytes(path.read_bytes(), where=str(path)).epoch
        except FileNotFoundError:
            return 0
        except FormatVersionError:
            raise  # it holds attempts that this lastgood cannot read
        except IntegrityError as error:
            epoch = max((found.epoch for found in self.inventory()), default=0)
            log.warning("%s; the attempts here are of epoch %d and earlier: that counts", error, epoch)
            return epoch

    def note_epoch(self, epoch: int) -> None:
        """Durably notes a higher epoch. Raises FencedError for a lower one than was ever seen here."""
        if epoch < self.highest_epoch:
            raise FencedError(
                f"a coordinator of epoch {epoch} speaks, but node {self.node} has seen epoch {self.highest_epoch}: a "
                "newer coordinator leads this run. Nothing was changed; the older one must stop.",
                epoch=epoch,
                highest_epoch=self.highest_epoch,
                node=self.node,
            )
        if epoch > self.highest_epoch:
            note = EpochNote(epoch=epoch, noted_at=utc_text(self._clock()))
            path = self.paths.place(self.paths.epoch_note)
            self._even_when_full(lambda: replace_durably(path, note.to_bytes()))
            self.highest_epoch = epoch

    # -- staging

    def shard_file(self, head: AttemptHead, path: str) -> Path:
        """Where a shard of this attempt lies here; its directory is made."""
        place = self.paths.place(self.paths.shard(head.step, head.attempt, path))
        make_dirs_durably(place.parent)
        return place

    def write_staged(self, head: AttemptHead, shards: Sequence[ShardRecord]) -> None:
        """Makes the list of what was staged durable: from here on this node can accept, even after a restart."""
        staged = StagedList(run=self.run, head=_head(head), node=self.node, shards=tuple(shards))
        create_once(self.paths.place(self.paths.staged(head.step, head.attempt)), staged.to_bytes())

    def read_staged(self, head: AttemptHead) -> tuple[ShardRecord, ...] | None:
        """What this node staged for the attempt; None when it never finished."""
        path = self.paths.place(self.paths.staged(head.step, head.attempt))
        try:
            staged = StagedList.from_bytes(path.read_bytes(), where=str(path))
        except FileNotFoundError:
            return None
        if staged.head.attempt != head.attempt or staged.node != self.node:
            raise IntegrityError(f"{path} belongs to another attempt or node; it is not used", path=str(path))
        return staged.shards

    # -- the write-once record

    def record(self, attempt: str) -> Record | None:
        """The record that stands for the attempt, if one does."""
        path = self.paths.place(self.paths.record(attempt))
        try:
            return Record.from_bytes(path.read_bytes(), where=str(path))
        except FileNotFoundError:
            return None

    def accept(self, head: AttemptHead, manifest: bytes) -> RecordState:
        """Creates the accept record unless one stands; tells which stands. UNKNOWN when it was never staged here.

        Raises IntegrityError when the manifest is not of this attempt, or tells other shards than were staged here.
        """
        standing = self.record(head.attempt)
        if standing is not None:
            self._sync_records()
            return _state(standing)
        staged = self.read_staged(head)
        if staged is None:
            return RecordState.UNKNOWN
        content = Manifest.from_bytes(manifest, where=f"the manifest of attempt {head.attempt}")
        if content.run != self.run or content.head != _head(head):
            raise IntegrityError(
                f"the manifest of attempt {head.attempt} names {content.run} {content.head}", path=None
            )
        if set(content.shards_of(self.node)) != set(staged):
            raise IntegrityError(
                f"the manifest of attempt {head.attempt} tells other shards for node {self.node} than were staged "
                "there; it is not accepted. The previous checkpoint stands.",
                path=None,
            )
        record = Record.accept(_head(head), manifest, content)
        return self._write_record(head, record)

    def refuse(self, head: AttemptHead, reason: str) -> RecordState:
        """Creates the refuse record unless one stands; tells which stands. A full disk does not prevent it."""
        record = Record(state="refuse", head=_head(head), reason=reason)
        return self._even_when_full(lambda: self._write_record(head, record))

    def _write_record(self, head: AttemptHead, record: Record) -> RecordState:
        path = self.paths.place(self.paths.record(head.attempt))
        make_dirs_durably(path.parent)
        failpoint(f"stager.record.{record.state}")
        if create_once(path, record.to_bytes()):
            return _state(record)
        standing = self.record(head.attempt)
        if standing is None:
            raise StagingError(
                f"the record {path} was there and is gone; somebody deletes in {path.parent}", path=str(path)
            )
        return _state(standing)

    def _sync_records(self) -> None:
        """Before a record that was seen is told: the call that writes it may still be on its way to fsync."""
        folder = self.paths.place(self.paths.records)
        with translated("sync the directory", folder, staging_error), contextlib.suppress(FileNotFoundError):
            fsync_dir(folder)

    # -- publish

    def publish(self, completed: Completed, manifest: bytes) -> None:
        """manifest.json, then COMPLETED, then the step's pointer, then latest.json; each only ever forward."""
        head = _attempt_head(completed.head)
        path = self.paths.place(self.paths.completed(head.step, head.attempt))
        standing = self._whole(lambda: read_completed(path.read_bytes(), where=str(path)))
        if isinstance(standing, Tombstone):
            raise UsageError(
                f"attempt {head.attempt} of step {head.step} was collected on node {self.node}: {standing.reason}"
            )
        folder = self.paths.place(self.paths.attempt_dir(head.step, head.attempt))
        make_dirs_durably(folder)
        create_once(self.paths.place(self.paths.manifest(head.step, head.attempt)), manifest)
        failpoint("stager.publish.before_completed")
        create_once(self.paths.place(self.paths.completed(head.step, head.attempt)), completed.to_bytes())
        failpoint("stager.publish.after_completed")
        with self._pointing:
            self._publish_pointers(completed)

    def _publish_pointers(self, completed: Completed) -> None:
        pointer = self.paths.place(self.paths.pointer(completed.step))
        standing = self._read(Completed, pointer)
        if standing is None or (standing.epoch, standing.sequence) < (completed.epoch, completed.sequence):
            replace_durably(pointer, completed.to_bytes())
        path = self.paths.place(self.paths.latest)
        latest = self._read(Latest, path)
        if latest is None or (latest.epoch, latest.sequence) < (completed.epoch, completed.sequence):
            replace_durably(path, Latest.of(completed).to_bytes())

    def forward_pointers(self) -> None:
        """Moves the pointers to the newest commits that stand here, where whoever published those died before it did.

        They are hints: what the disk does not take is logged, and nothing else.
        """
        with self._looking, self._pointing:
            try:
                for completed in newest_first(self._all_completed()):
                    self._publish_pointers(completed)
            except (StagingError, OSError) as error:
                log.warning("the pointers in %s stay as they are for now: %s", self.staging, error)

    def _all_completed(self) -> Iterable[Completed]:
        for step, attempt in self._attempt_dirs():
            path = self.paths.place(self.paths.completed(step, attempt))
            standing = self._whole(lambda path=path: read_completed(path.read_bytes(), where=str(path)))
            if isinstance(standing, Completed):
                yield standing

    @staticmethod
    def _read(kind: type[Completed] | type[Latest], path: Path) -> Completed | Latest | None:
        try:
            return kind.from_bytes(path.read_bytes(), where=str(path))
        except (FileNotFoundError, IntegrityError):
            return None  # a pointer is a hint: one that cannot be read is replaced

    def note_durable(self, head: AttemptHead) -> None:
        """Durably notes that the store's COMPLETED for the attempt stands; latest.json tells it if it is the latest."""
        now = utc_text(self._clock())
        create_once(
            self.paths.place(self.paths.durable(head.step, head.attempt)),
            DurableNote(head=_head(head), noted_at=now).to_bytes(),
        )
        path = self.paths.place(self.paths.latest)
        with self._pointing:
            latest = self._read(Latest, path)
            if isinstance(latest, Latest) and latest.attempt == head.attempt and latest.durable_at is None:
                replace_durably(path, latest.model_copy(update={"durable_at": now}).to_bytes())

    # -- what lies here

    def committed(self, head: AttemptHead) -> bool:
        """Whether the attempt's COMPLETED stands here."""
        return self.paths.place(self.paths.completed(head.step, head.attempt)).exists()

    def inventory(self) -> tuple[AttemptInventory, ...]:
        """Every attempt that lies here or has a record here, in the order of (epoch, sequence)."""
        with self._looking:
            return self._take_inventory()

    def _take_inventory(self) -> tuple[AttemptInventory, ...]:
        attempts: dict[str, AttemptInventory] = {}
        for step, attempt in self._attempt_dirs():
            found = self._look(step, attempt)
            if found is not None:
                attempts[attempt] = found
        records = self.paths.place(self.paths.records)
        for path in sorted(records.glob("*.json")) if records.is_dir() else ():
            name = path.name.removesuffix(".json")
            record = self._whole(lambda name=name: self.record(name)) if layout.NAME.fullmatch(name) else None
            if record is not None and record.head.attempt not in attempts:
                found = self._look(record.head.step, record.head.attempt)
                if found is not None:
                    attempts[record.head.attempt] = found
        self._sync_records()
        return tuple(sorted(attempts.values(), key=lambda a: (a.epoch, a.sequence, a.attempt)))

    def _attempt_dirs(self) -> Iterable[tuple[int, str]]:
        for step_dir in sorted(self.paths.place(self.run).iterdir()):
            step = layout.parse_step_name(step_dir.name)
            if step is None or not step_dir.is_dir() or self._is_stranger(step_dir):
                continue
            for folder in _listed(step_dir):
                if folder.is_dir() and layout.NAME.fullmatch(folder.name) and not self._is_stranger(folder):
                    yield step, folder.name

    def _is_stranger(self, folder: Path) -> bool:
        """A link in a directory's place is nothing of ours: wherever it leads, it is passed over, and told once."""
        if not folder.is_symlink():
            return False
        if folder not in self._strangers:
            self._strangers.add(folder)
            log.warning("%s is a symbolic link, and checkpoints are made of plain directories: it is ignored", folder)
        return True

    def _look(self, step: int, attempt: str) -> AttemptInventory | None:
        """One attempt as it lies here; None for an unfinished directory that names no epoch (swept elsewhere).

        What cannot be read counts as absent, except a record: a broken one says UNKNOWN, which is never an accept and
        never written over.
        """
        if attempt in self._final:
            return self._final[attempt]
        record = self._whole(lambda: self.record(attempt))
        broken_record = record is None and self.paths.place(self.paths.record(attempt)).exists()
        completed_path = self.paths.place(self.paths.completed(step, attempt))
        completed = self._whole(lambda: read_completed(completed_path.read_bytes(), where=str(completed_path)))
        if isinstance(completed, Tombstone):
            return None  # collected; nothing of it counts any more
        staged_path = self.paths.place(self.paths.staged(step, attempt))
        staged = self._whole(lambda: StagedList.from_bytes(staged_path.read_bytes(), where=str(staged_path)))
        head = next((found.head for found in (completed, record, staged) if found is not None), None)
        if head is None:
            return None
        manifest = record.manifest.encode() if record is not None and record.manifest is not None else None
        manifest_path = self.paths.place(self.paths.manifest(step, attempt))
        if manifest is None and completed is not None and manifest_path.exists():
            manifest = manifest_path.read_bytes()
        if (
            completed is not None
            and manifest is not None
            and hashlib.sha256(manifest).hexdigest() != completed.manifest_sha256
        ):
            log.warning("the manifest of attempt %s in %s is not the one that was committed", attempt, self.staging)
            manifest = None
        whole = None
        if record is not None and record.manifest is not None and manifest is not None:
            whole = record.read_manifest(where=str(manifest_path))  # was read with the record
        elif manifest is not None:
            whole = self._whole(lambda: Manifest.from_bytes(manifest, where=str(manifest_path)))
        state = RecordState.UNKNOWN if broken_record else RecordState.NONE if record is None else _state(record)
        found = AttemptInventory(
            attempt=attempt,
            step=head.step,
            epoch=head.epoch,
            sequence=head.sequence,
            record=state,
            staged=staged is not None,
            completed=completed is not None,
            durable=self.paths.place(self.paths.durable(step, attempt)).exists(),
            participants=completed.participants if completed is not None else whole.participants if whole else (),
            manifest=manifest if whole is not None else None,
        )
        if found.completed and found.durable and whole is not None:
            self._final[attempt] = found  # nothing of it changes any more, until retention collects it
        return found

    def _whole(self, read: Callable[[], _T]) -> _T | None:
        """What `read` gives, None when it is absent or broken; a broken one is logged with its path."""
        try:
            return read()
        except FileNotFoundError:
            return None
        except IntegrityError as error:
            log.warning("%s", error)
            return None

    # -- copies fetched for a resume

    def fetched_file(self, head: AttemptHead, tier: str, path: str) -> Path:
        """Where a shard fetched from `tier` for a resume lies; its directory is made. Not part of any checkpoint."""
        key = f"{self.run}/fetched/{head.attempt}/{tier}/{layout.check_relative(path)}"
        place = self.paths.place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def remove_fetched(self) -> None:
        """Deletes what resumes have fetched."""
        shutil.rmtree(self.paths.place(f"{self.run}/fetched"), ignore_errors=True)

    # -- deletion

    def discard(self, head: AttemptHead) -> None:
        """Deletes the files of an aborted attempt. This node's record stays, whatever it says.

        Raises UsageError when the attempt's COMPLETED stands here.
        """
        if self.committed(head):
            raise UsageError(
                f"attempt {head.attempt} of step {head.step} is committed on node {self.node}; it is not discarded",
                attempt=head.attempt,
            )
        self._remove(self.paths.place(self.paths.attempt_dir(head.step, head.attempt)))
        self._keep_reserve()

    def collect(self, head: AttemptHead, reason: str) -> None:
        """Deletes a committed attempt that retention lets go: tombstone in COMPLETED's place first, then the files.

        The tombstone stays, so that nobody who wakes up late completes it again. May be repeated. Raises UsageError
        when the attempt is neither committed nor collected here.
        """
        with self._looking, self._pointing:
            self._final.pop(head.attempt, None)
            folder = self._bury(head, reason)
        failpoint("stager.collect.tombstone")
        self._empty(folder, head.attempt)

    def _empty(self, folder: Path, attempt: str) -> None:
        """Deletes all of a collected attempt but its tombstone; the step's pointer too, if it leads there.

        The tombstone is made durable first: a stager that was killed may have left it before it was.
        """
        fsync_dir(folder)
        pointer = folder.parent / layout.COMPLETED
        pointed = self._read(Completed, pointer)
        if isinstance(pointed, Completed) and pointed.attempt == attempt:
            pointer.unlink()
        for entry in sorted(folder.iterdir()):
            if entry.name == layout.COMPLETED:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self.paths.place(self.paths.record(attempt)).unlink(missing_ok=True)

    def _bury(self, head: AttemptHead, reason: str) -> Path:
        """Puts the tombstone in COMPLETED's place; answers the attempt's directory."""
        path = self.paths.place(self.paths.completed(head.step, head.attempt))
        standing = self._whole(lambda: read_completed(path.read_bytes(), where=str(path)))
        if standing is None:
            raise UsageError(f"attempt {head.attempt} of step {head.step} is not committed on node {self.node}")
        if isinstance(standing, Completed):
            tombstone = Tombstone(
                run=self.run,
                attempt=head.attempt,
                step=head.step,
                epoch=head.epoch,
                sequence=head.sequence,
                reason=reason,
                deleted_at=utc_text(self._clock()),
            )
            replace_durably(path, tombstone.to_bytes())
        return path.parent

    def sweep(self, keep: Iterable[str] = ()) -> list[str]:
        """Deletes what a killed stager left: writes that never finished, attempts without staged.json or a record.

        Only at start, or for attempts not in flight (`keep` names those). Returns the names of what went. What a disk
        does not let go costs space and nothing else.
        """
        kept = set(keep)
        gone = []
        self.remove_fetched()
        for folder, _, names in os.walk(self.paths.place(self.run)):
            for name in names:
                if is_temporary(name):
                    remove_quietly(Path(folder, name))
        for step, attempt in list(self._attempt_dirs()):
            completed = self.paths.place(self.paths.completed(step, attempt))
            standing = self._whole(lambda path=completed: read_completed(path.read_bytes(), where=str(path)))
            try:
                if isinstance(standing, Tombstone):
                    self._empty(completed.parent, attempt)  # a death came between tombstone and files
                elif attempt not in kept and standing is None and self._look(step, attempt) is None:
                    self._remove(self.paths.place(self.paths.attempt_dir(step, attempt)))
                    gone.append(attempt)
            except OSError as error:
                log.warning("what was left of attempt %s in %s stays for now: %s", attempt, self.staging, error)
        for folder in self.paths.place(self.run).iterdir():  # a death came before the attempt's directory was made
            if layout.parse_step_name(folder.name) is not None and folder.is_dir() and not folder.is_symlink():
                _remove_if_empty(folder)
        return gone

    @staticmethod
    def _remove(folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        _remove_if_empty(folder.parent)


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _listed(folder: Path) -> list[Path]:
    """What is in a directory; nothing when it has just been deleted."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _head(head: AttemptHead) -> Head:
    return Head(attempt=head.attempt, step=head.step, epoch=head.epoch, sequence=head.sequence)


def _attempt_head(head: Head) -> AttemptHead:
    return AttemptHead(attempt=head.attempt, step=head.step, epoch=head.epoch, sequence=head.sequence)


def _state(record: Record) -> RecordState:
    return RecordState.ACCEPT if record.state == "accept" else RecordState.REFUSE
