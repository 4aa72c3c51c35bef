"""What the command line asks of checkpoints at rest: a store or one node's staging directory, without Ray.

Finds out what a path means (a run, one of its steps, one attempt), reads it through storage/verify.py, and answers in
plain dataclasses whose fields are the keys of the JSON output. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..coordinator.roots import plain_path
from ..storage.errors import NotACheckpointError
from ..storage.layout import RunPaths, parse_step_name, step_name
from ..storage.manifest import Manifest, NodeIdentity, ShardRecord
from ..storage.verify import Committed, Reject, RejectKind, find_committed, passed_over, verify_attempt


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint."""

    run: str
    step: int
    attempt: str
    epoch: int
    sequence: int
    kind: str
    tag: str | None
    committed_at: str
    nbytes: int  # of all its shards, on whatever node they lie
    path: str  # of the attempt's directory


@dataclass(frozen=True)
class RejectedInfo:
    """What looks like a checkpoint but does not count."""

    path: str
    kind: str  # uncommitted (under way, or died), collected, broken, version
    reason: str

    @property
    def wrong(self) -> bool:
        """Whether somebody damaged it; an attempt that is under way or was collected is as it should be."""
        return self.kind in (RejectKind.BROKEN.value, RejectKind.VERSION.value)


@dataclass(frozen=True)
class Newest:
    """The newest committed checkpoint, and what is wrong and stands before it, or may."""

    checkpoint: CheckpointInfo
    passed_over: tuple[RejectedInfo, ...]


@dataclass(frozen=True)
class Listing:
    """Committed checkpoints, newest first by (epoch, sequence), and what was rejected."""

    found: tuple[CheckpointInfo, ...]
    rejected: tuple[RejectedInfo, ...]


@dataclass(frozen=True)
class FindingInfo:
    """One thing that is wrong with a checkpoint's files."""

    kind: str  # missing, length, flipped, swapped, "not a plain file", unreadable, stranger
    path: str  # inside the attempt's directory
    detail: str
    fatal: bool  # whether the checkpoint cannot be used because of it; a stranger is ignored


@dataclass(frozen=True)
class VerifiedInfo:
    """A checkpoint all of whose shards here were read and hashed again."""

    checkpoint: CheckpointInfo
    ok: bool  # no finding is fatal
    shards: int  # files that must be here
    nbytes: int  # bytes that must be here
    findings: tuple[FindingInfo, ...]


@dataclass(frozen=True)
class RoleInfo:
    """One role of a checkpoint."""

    role: str
    world_size: int
    component_nbytes: dict[str, int]  # over all ranks


@dataclass(frozen=True)
class ShownInfo:
    """A manifest in short."""

    run: str
    step: int
    attempt: str
    epoch: int
    sequence: int
    kind: str
    tag: str | None
    reason: str
    requested_by: str
    created_at: str
    committed_at: str
    parent_step: int | None
    parent_attempt: str | None
    nbytes: int
    shards: int
    participants: list[str]
    roles: list[RoleInfo]
    metrics: dict[str, float]
    fingerprint: dict[str, Any]
    versions: dict[str, str]
    path: str


@dataclass(frozen=True)
class _Place:
    """A run's directory, and the one step or attempt in it that was asked for."""

    run_dir: Path
    step: int | None = None
    attempt: str | None = None

    def holds(self, path: Path) -> bool:
        """Whether `path` (of an attempt's directory, or of something in the place of one) was asked for."""
        parts = path.relative_to(self.run_dir).parts
        if self.step is not None and parts[0] != step_name(self.step):
            return False
        return self.attempt is None or len(parts) < 2 or parts[1] == self.attempt


def latest(text: str) -> Newest:
    """The newest committed checkpoint at a path. Raises NotACheckpointError when there is none."""
    newest, passed = _newest(_locate(text))
    return Newest(_info(newest), passed)


def listing(text: str) -> Listing:
    """All committed checkpoints at a path. Raises NotACheckpointError when it is no run's directory."""
    found, rejected = _committed(_locate(text))
    return Listing(tuple(map(_info, found)), _rejects(rejected))


def verify(text: str, attempt: str | None = None) -> tuple[list[VerifiedInfo], list[RejectedInfo]]:
    """Reads and hashes every shard of every committed checkpoint at a path (or of one attempt).

    In a node's staging directory only that node's shards are owed. Raises NotACheckpointError when nothing is there.
    """
    place = _locate(text, attempt)
    found, rejected = _committed(place)
    if not found and not any(one.wrong for one in rejected):
        raise _nothing(place, rejected)
    return [_verified(place, one) for one in found], list(_rejects(rejected))


def show(text: str, attempt: str | None = None) -> tuple[ShownInfo, tuple[RejectedInfo, ...]]:
    """The manifest of the newest committed checkpoint at a path (or of one attempt), and what stands before it.

    Raises NotACheckpointError.
    """
    newest, passed = _newest(_locate(text, attempt))
    manifest = newest.manifest
    roles = [
        RoleInfo(name, record.world_size, {part: _bytes_of(manifest, name, part) for part in record.components})
        for name, record in manifest.roles.items()
    ]
    shown = ShownInfo(
        run=manifest.run,
        step=manifest.step,
        attempt=manifest.attempt,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        kind=manifest.kind,
        tag=manifest.tag,
        reason=manifest.reason,
        requested_by=manifest.requested_by,
        created_at=manifest.created_at,
        committed_at=newest.completed.committed_at,
        parent_step=manifest.parent.step if manifest.parent else None,
        parent_attempt=manifest.parent.attempt if manifest.parent else None,
        nbytes=sum(shard.nbytes for shard in manifest.shards),
        shards=len(manifest.shards),
        participants=list(manifest.participants),
        roles=roles,
        metrics=dict(manifest.metrics),
        fingerprint=dict(manifest.fingerprint),
        versions=dict(manifest.versions),
        path=str(newest.path),
    )
    return shown, passed


def _locate(text: str, attempt: str | None = None) -> _Place:
    path = Path(plain_path("PATH", text)).absolute()
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise NotACheckpointError(
            f"{path} {what}, so no checkpoint is there. Give the directory of a run.", path=str(path)
        )
    step = parse_step_name(path.name)
    if step is not None:
        return _Place(path.parent, step, attempt)
    step = parse_step_name(path.parent.name)
    if step is not None:
        return _Place(path.parent.parent, step, attempt or path.name)
    runs = [] if _has_steps(path) else sorted(child.name for child in path.iterdir() if _has_steps(child))
    if runs:
        raise NotACheckpointError(
            f"{path} is a root that holds these runs: {', '.join(runs)}. Name one: {path / runs[0]}", path=str(path)
        )
    return _Place(path, None, attempt)


def _has_steps(path: Path) -> bool:
    return path.is_dir() and any(parse_step_name(child.name) is not None for child in path.iterdir())


def _committed(place: _Place) -> tuple[list[Committed], list[Reject]]:
    scan = find_committed(place.run_dir)
    return (
        [one for one in scan.committed if place.holds(one.path)],
        [one for one in scan.rejected if place.holds(one.path)],
    )


def _newest(place: _Place) -> tuple[Committed, tuple[RejectedInfo, ...]]:
    found, rejected = _committed(place)
    if not found:
        raise _nothing(place, rejected)
    return found[0], _rejects(passed_over(rejected, found[0]))


def _rejects(rejected: Sequence[Reject]) -> tuple[RejectedInfo, ...]:
    return tuple(RejectedInfo(str(one.path), one.kind.value, one.reason) for one in rejected)


def _nothing(place: _Place, rejected: Sequence[Reject]) -> NotACheckpointError:
    where = place.run_dir if place.step is None else place.run_dir / step_name(place.step)
    asked = f" with attempt {place.attempt}" if place.attempt else ""
    told = "".join(f"\nrejected, {one.kind.value}: {one.path}: {one.reason}" for one in rejected)
    return NotACheckpointError(f"no committed checkpoint{asked} at {where}.{told}", path=str(where))


def _verified(place: _Place, one: Committed) -> VerifiedInfo:
    owed = _owed(place, one.manifest)
    findings = verify_attempt(one.path, one.manifest, owed)
    return VerifiedInfo(
        checkpoint=_info(one),
        ok=not any(finding.fatal for finding in findings),
        shards=len(owed),
        nbytes=sum(shard.nbytes for shard in owed),
        findings=tuple(FindingInfo(each.kind.value, each.path, each.detail, each.fatal) for each in findings),
    )


def _owed(place: _Place, manifest: Manifest) -> tuple[ShardRecord, ...]:
    """All shards in a store; in a staging directory those of the node whose identity lies there."""
    identity = place.run_dir.parent / RunPaths(place.run_dir.parent, place.run_dir.name).node
    if not identity.exists():
        return manifest.shards
    return manifest.shards_of(NodeIdentity.from_bytes(identity.read_bytes(), where=str(identity)).node)


def _info(one: Committed) -> CheckpointInfo:
    completed = one.completed
    return CheckpointInfo(
        run=completed.run,
        step=completed.step,
        attempt=completed.attempt,
        epoch=completed.epoch,
        sequence=completed.sequence,
        kind=completed.kind,
        tag=completed.tag,
        committed_at=completed.committed_at,
        nbytes=sum(shard.nbytes for shard in one.manifest.shards),
        path=str(one.path),
    )


def _bytes_of(manifest: Manifest, role: str, component: str) -> int:
    return sum(shard.nbytes for shard in manifest.shards if (shard.role, shard.component) == (role, component))
