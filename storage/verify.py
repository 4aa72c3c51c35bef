"""Is this checkpoint whole? Looks at files only: no Ray, no torch, nothing is changed.

The rule: only COMPLETED plus a manifest with its very digest count, and every byte of every shard is compared with the
manifest before anybody uses it. What is wrong is reported with its place; what nobody listed is ignored and reported.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import files, layout
from .digest import DEFAULT_THREADS, BlockDigests, digest_blocks
from .errors import FormatVersionError, IntegrityError, LastgoodError, NotACheckpointError
from .manifest import Completed, Manifest, ShardRecord, Tombstone, read_completed


class FindingKind(enum.Enum):
    """What is wrong with a file."""

    MISSING = "missing"
    LENGTH = "length"  # truncated, or longer than written
    FLIPPED = "flipped"  # right length, other bytes
    SWAPPED = "swapped"  # holds another shard's bytes
    NOT_A_FILE = "not a plain file"  # a link, directory or device, or it leads outside
    UNREADABLE = "unreadable"
    STRANGER = "stranger"  # nobody listed it; ignored


@dataclass(frozen=True)
class Finding:
    """One thing that verify found."""

    kind: FindingKind
    path: str  # inside the attempt's directory
    detail: str  # a sentence

    @property
    def fatal(self) -> bool:
        """Whether the checkpoint cannot be used because of it."""
        return self.kind is not FindingKind.STRANGER

    def __str__(self) -> str:
        return f"{self.path}: {self.kind.value}: {self.detail}"


def verify_attempt(
    attempt_dir: Path, manifest: Manifest, shards: Sequence[ShardRecord] | None = None, threads: int = DEFAULT_THREADS
) -> list[Finding]:
    """Compares every byte of the shards with the manifest; an empty list means whole.

    `shards` are those that should lie here (a node has only its own); all by default. Reads each file once.
    """
    owed = manifest.shards if shards is None else shards
    findings = []
    for shard in owed:
        finding = _verify_shard(attempt_dir, shard, manifest.shards, threads)
        if finding:
            findings.append(finding)
    return findings + _strangers(attempt_dir, {shard.path for shard in manifest.shards})


def read_verified(path: Path, digests: BlockDigests, into: memoryview | None = None) -> memoryview:
    """Reads a shard and checks every block; answers the bytes (in `into` when given, exactly digests.nbytes long).

    Raises IntegrityError naming what is wrong, before anybody has used a byte; OSError when it cannot be read.
    """
    target = memoryview(bytearray(digests.nbytes)) if into is None else memoryview(into).cast("B")
    if len(target) != digests.nbytes:
        raise ValueError(f"a buffer of {len(target)} bytes for a shard of {digests.nbytes}")
    try:
        fd = files.open_regular(path)
    except FileNotFoundError as error:
        raise _broken(str(path), "it is missing") from error
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes != digests.nbytes or files.read_range_into(fd, target, 0) != nbytes:
            raise _broken(str(path), f"it has {nbytes} bytes instead of {digests.nbytes}")
    finally:
        os.close(fd)
    wrong = digests.wrong_blocks(digest_blocks(target, digests.block_bytes))
    if wrong:
        raise _broken(str(path), f"{_blocks(wrong, digests)} other bytes than were committed")
    return target


def _verify_shard(
    attempt_dir: Path, shard: ShardRecord, everything: Sequence[ShardRecord], threads: int
) -> Finding | None:
    def found(kind: FindingKind, detail: str) -> Finding:
        return Finding(kind, shard.path, detail)

    try:
        place = layout.confine(attempt_dir, shard.path)
        for parent in place.relative_to(attempt_dir).parents:
            if (attempt_dir / parent).is_symlink() and parent != Path():
                return found(FindingKind.NOT_A_FILE, f"its directory {parent} is a symbolic link")
        fd = files.open_regular(place)
    except IntegrityError as error:
        return found(FindingKind.NOT_A_FILE, str(error))
    except (FileNotFoundError, NotADirectoryError):
        return found(FindingKind.MISSING, f"{shard.nbytes} bytes were committed")
    except OSError as error:
        return found(FindingKind.UNREADABLE, str(error))
    try:
        nbytes = os.fstat(fd).st_size
        digests = files.digest_file(fd, nbytes, shard.block_bytes, threads)
        if digests.digest == shard.digest and nbytes == shard.nbytes:
            return None
        owner = _whose(fd, digests, shard, everything, threads)
    except OSError as error:
        return found(FindingKind.UNREADABLE, str(error))
    finally:
        os.close(fd)
    if owner:
        return found(FindingKind.SWAPPED, f"it holds the bytes of {owner}")
    if nbytes != shard.nbytes:
        return found(FindingKind.LENGTH, f"it has {nbytes} bytes, {shard.nbytes} were committed")
    wrong = BlockDigests.of_record(shard).wrong_blocks(digests)
    return found(FindingKind.FLIPPED, f"{_blocks(wrong, digests)} other bytes than were committed")


def _whose(
    fd: int, found: BlockDigests, shard: ShardRecord, everything: Sequence[ShardRecord], threads: int
) -> str | None:
    """The path of another shard whose bytes these are."""
    known = {found.block_bytes: found}
    for other in everything:
        if other.path == shard.path or other.nbytes != found.nbytes:
            continue
        if other.block_bytes not in known:
            known[other.block_bytes] = files.digest_file(fd, found.nbytes, other.block_bytes, threads)
        if known[other.block_bytes].digest == other.digest:
            return other.path
    return None


def _blocks(wrong: Sequence[int], digests: BlockDigests) -> str:
    first = wrong[0] * digests.block_bytes
    end = min(first + digests.block_bytes, digests.nbytes)
    more = f" and {len(wrong) - 1} more blocks hold" if len(wrong) > 1 else " holds"
    return f"block {wrong[0]} (bytes {first} to {end}){more}"


def _strangers(attempt_dir: Path, listed: set[str]) -> list[Finding]:
    known = listed | layout.RESERVED
    found = []
    for folder, folders, names in os.walk(attempt_dir):  # does not follow links
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            relative = (Path(folder) / name).relative_to(attempt_dir).as_posix()
            if relative not in known:
                found.append(Finding(FindingKind.STRANGER, relative, "no manifest lists it; it is ignored"))
    return sorted(found, key=lambda finding: finding.path)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint as it lies in a directory. Its shards are not yet verified."""

    completed: Completed
    manifest: Manifest
    path: Path  # of the attempt's directory
    passed_over: tuple[Reject, ...] = ()  # what is wrong and newer, or may be: set by open_checkpoint

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, sequence): the order of checkpoints."""
        return (self.completed.epoch, self.completed.sequence)


class RejectKind(enum.Enum):
    """Why a directory does not count as a checkpoint."""

    UNCOMMITTED = "uncommitted"  # no COMPLETED: an attempt that is under way, or died
    COLLECTED = "collected"  # a tombstone stands there
    BROKEN = "broken"  # COMPLETED or manifest are not what was written
    VERSION = "version"  # written by another format version


@dataclass(frozen=True)
class Reject:
    """A directory that does not count, and why."""

    path: Path
    kind: RejectKind
    reason: str  # a sentence
    order: tuple[int, int] | None = None  # (epoch, sequence), if its COMPLETED tells

    @property
    def wrong(self) -> bool:
        """Whether somebody damaged it, or another lastgood wrote it; one that died or was collected is as it should."""
        return self.kind in (RejectKind.BROKEN, RejectKind.VERSION)


def passed_over(rejected: Iterable[Reject], newest: Committed) -> tuple[Reject, ...]:
    """Those that whoever takes `newest` must be told of: a checkpoint stood there that is newer, or may be.

    A file or a link in a directory's place never was one.
    """
    return tuple(
        one
        for one in rejected
        if one.wrong
        and (one.order is None or one.order > newest.order)
        and one.path.is_dir()
        and not one.path.is_symlink()
    )


@dataclass(frozen=True)
class Found:
    """What a run's directory holds."""

    committed: tuple[Committed, ...]  # newest first
    rejected: tuple[Reject, ...]  # by path


def read_attempt(attempt_dir: Path) -> Committed:
    """The checkpoint in an attempt's directory, if COMPLETED, manifest and directory names agree.

    Raises NotACheckpointError when nothing was committed there (or it was collected), IntegrityError when COMPLETED
    or the manifest are not what was written, OSError when they cannot be read.
    """
    completed = _read_marker(attempt_dir)
    where = attempt_dir / layout.MANIFEST
    try:
        data = files.read_regular(where)
    except FileNotFoundError as error:
        raise _broken(str(where), "it is missing, and COMPLETED stands beside it") from error
    if hashlib.sha256(data).hexdigest() != completed.manifest_sha256:
        raise _broken(str(where), "its digest is not the one in COMPLETED")
    manifest = Manifest.from_bytes(data, where=str(where))
    if Completed.of(manifest, data, completed.committed_at) != completed:
        raise _broken(str(where), "COMPLETED beside it tells another story")
    return Committed(completed, manifest, attempt_dir)


def _read_marker(attempt_dir: Path) -> Completed:
    """The COMPLETED of a directory, which must be that attempt's. Raises as read_attempt does."""
    place = attempt_dir / layout.COMPLETED
    try:
        completed = read_completed(files.read_regular(place), where=str(place))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_checkpoint(attempt_dir, "it holds no COMPLETED, so nothing was committed there") from error
    if isinstance(completed, Tombstone):
        raise _no_checkpoint(
            attempt_dir, f"it was collected at {completed.deleted_at}: {completed.reason}", collected=True
        )
    named = (attempt_dir.parent.parent.name, attempt_dir.parent.name, attempt_dir.name)
    if named != (completed.run, layout.step_name(completed.step), completed.attempt):
        raise _broken(
            str(place),
            f"it is that of run {completed.run}, step {completed.step}, attempt {completed.attempt}, and stands "
            "elsewhere",
        )
    return completed


def find_committed(run_dir: Path) -> Found:
    """All committed checkpoints of a run's directory (staging or file store), newest first, and what was rejected.

    Pointers and latest.json are not asked: truth is the attempts' COMPLETEDs. Raises NotACheckpointError when
    `run_dir` is no directory, OSError when it cannot be read.
    """
    if not run_dir.is_dir():
        raise _no_checkpoint(run_dir, "there is no such directory")
    committed, rejected = [], []
    for step_dir in sorted(run_dir.iterdir()):
        if layout.parse_step_name(step_dir.name) is None:
            continue
        if step_dir.is_symlink() or not step_dir.is_dir():
            rejected.append(Reject(step_dir, RejectKind.BROKEN, "it is not a plain directory"))
            continue
        for found in _look_into(step_dir):
            (committed if isinstance(found, Committed) else rejected).append(found)
    committed.sort(key=lambda one: (one.order, one.completed.attempt), reverse=True)
    return Found(tuple(committed), tuple(rejected))


def _look_into(step_dir: Path) -> list[Committed | Reject]:
    return [
        _look_at(attempt_dir)
        for attempt_dir in sorted(step_dir.iterdir())
        if attempt_dir.name != layout.COMPLETED and not files.is_temporary(attempt_dir.name)
    ]


def _look_at(attempt_dir: Path) -> Committed | Reject:
    if attempt_dir.is_symlink() or not attempt_dir.is_dir():
        return Reject(attempt_dir, RejectKind.BROKEN, "it is not a plain directory")
    try:
        return read_attempt(attempt_dir)
    except NotACheckpointError as error:
        kind = RejectKind.COLLECTED if error.facts.get("collected") else RejectKind.UNCOMMITTED
        return Reject(attempt_dir, kind, str(error))
    except FormatVersionError as error:
        return Reject(attempt_dir, RejectKind.VERSION, str(error), _order(attempt_dir))
    except (LastgoodError, OSError) as error:
        return Reject(attempt_dir, RejectKind.BROKEN, str(error), _order(attempt_dir))


def _order(attempt_dir: Path) -> tuple[int, int] | None:
    """Where an attempt stands whose COMPLETED is whole, though the rest is not."""
    try:
        completed = _read_marker(attempt_dir)
    except (LastgoodError, OSError):
        return None
    return (completed.epoch, completed.sequence)


def open_checkpoint(path: Path) -> Committed:
    """The checkpoint that a path means: an attempt's directory, a step's (its pointer), or a run's (the newest).

    With what it passes over there: what is wrong, and newer or of unknown age. Raises NotACheckpointError saying what
    is missing and what was rejected, IntegrityError when what is there is not what was written.
    """
    if not path.is_dir():
        raise _no_checkpoint(path, "there is no such directory")
    if layout.parse_step_name(path.name) is not None:
        return _follow_pointer(path)
    if layout.parse_step_name(path.parent.name) is not None:
        return read_attempt(path)
    found = find_committed(path)
    if not found.committed:
        raise _no_checkpoint(path, f"it holds no committed checkpoint{_why(found.rejected)}")
    newest = found.committed[0]
    return replace(newest, passed_over=passed_over(found.rejected, newest))


def _follow_pointer(step_dir: Path) -> Committed:
    """The attempt that the step's pointer names, or the step's newest one when the pointer is missing or broken."""
    place = step_dir / layout.COMPLETED
    try:
        pointer = read_completed(files.read_regular(place), where=str(place))
    except (OSError, IntegrityError):
        pointer = None  # a pointer is a convenience; truth is the attempts' COMPLETEDs
    found = None
    if isinstance(pointer, Completed) and layout.step_name(pointer.step) == step_dir.name:
        attempt_dir = step_dir / pointer.attempt
        with contextlib.suppress(NotACheckpointError):  # it was collected, or never came to be
            found = read_attempt(attempt_dir)
    here = _look_into(step_dir)
    rejected = [one for one in here if isinstance(one, Reject)]
    if found is None:
        whole = [one for one in here if isinstance(one, Committed)]
        if not whole:
            raise _no_checkpoint(step_dir, f"none of its attempts is committed and whole{_why(rejected)}")
        found = max(whole, key=lambda one: one.order)
    return replace(found, passed_over=passed_over(rejected, found))


def _why(rejected: Sequence[Reject]) -> str:
    told = sorted(rejected, key=lambda one: not one.wrong)[:3]
    return f" ({'; '.join(f'{one.path.name}: {one.reason}' for one in told)})" if told else ""


def _no_checkpoint(path: Path, why: str, *, collected: bool = False) -> NotACheckpointError:
    return NotACheckpointError(
        f"{path} is no checkpoint: {why}. Nothing was touched; `lastgood latest` on the run's directory shows what "
        "there is.",
        path=str(path),
        collected=collected,
    )


def _broken(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is not what was committed: {why}. It was left as it is and is not used; take this checkpoint from "
        "another copy, or an earlier checkpoint.",
        path=where,
    )
