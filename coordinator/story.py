"""The whole story of a step's attempts, for a person: who asked, who copied how much where, what happened when. Pure.

Attempts of this coordinator have every move with its time. Of earlier ones what their manifests say is left, and what
this coordinator found on the disks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ..storage.errors import IntegrityError
from ..storage.manifest import Manifest
from .attempt import Attempt
from .catalog import Checkpoint
from .protocol import Protocol


@dataclass(frozen=True)
class MemberPart:
    """What one member gave to an attempt."""

    member: str
    node: str
    nbytes: int
    updates: int | None  # optimizer updates at the end of the step


@dataclass(frozen=True)
class Story:
    """One attempt from its request to its end. `events`: (UTC, sentence)."""

    step: int
    attempt: str
    epoch: int
    sequence: int
    state: str
    kind: str = ""
    tag: str | None = None
    reason: str = ""
    requested_by: str = ""
    blame: str | None = None
    members: tuple[MemberPart, ...] = ()
    events: tuple[tuple[str, str], ...] = ()


def stories(
    core: Protocol,
    checkpoints: Iterable[Checkpoint],
    step: int,
    utc: Callable[[float], str],
    collected: Collection[str] = (),
) -> tuple[Story, ...]:
    """Every attempt of a step that is remembered or lies somewhere, oldest first. `utc`: from the core's clock.

    `collected`: attempts that retention has deleted; whatever they were before, that is their state.
    """
    known = {found.attempt: found for found in checkpoints if found.step == step}
    attempts = {attempt.id: attempt for attempt in core.attempts.values() if attempt.head.step == step}
    told = [_story(attempts.get(name), known.get(name), utc) for name in {*known, *attempts}]
    told = [replace(story, state="collected") if story.attempt in collected else story for story in told]
    return tuple(sorted(told, key=lambda story: (story.epoch, story.sequence)))


def _story(attempt: Attempt | None, checkpoint: Checkpoint | None, utc: Callable[[float], str]) -> Story:
    manifest = _manifest(checkpoint)
    head = attempt.head if attempt is not None else checkpoint.head if checkpoint is not None else None
    assert head is not None, "a story is of an attempt or of a checkpoint"
    events = [(manifest.created_at, "the manifest was drawn up")] if manifest is not None and attempt is None else []
    if attempt is not None:
        events += [(utc(when_s), sentence) for when_s, sentence in attempt.story]
    state = attempt.phase.value if attempt is not None else checkpoint.state.value if checkpoint is not None else ""
    own = attempt if attempt is not None and attempt.mine else None
    return Story(
        step=head.step,
        attempt=head.attempt,
        epoch=head.epoch,
        sequence=head.sequence,
        state=state,
        kind=own.kind.value if own else manifest.kind if manifest else "",
        tag=own.tag if own else manifest.tag if manifest else None,
        reason=own.reason if own else manifest.reason if manifest else "",
        requested_by=own.requested_by if own else manifest.requested_by if manifest else "",
        blame=str(attempt.blame) if attempt is not None and attempt.blame is not None else None,
        members=_members(attempt, manifest),
        events=tuple(events),
    )


def _members(attempt: Attempt | None, manifest: Manifest | None) -> tuple[MemberPart, ...]:
    if manifest is not None:
        sizes: dict[tuple[str, int], int] = {}
        for shard in manifest.shards:
            key = (shard.role, shard.rank)
            sizes[key] = sizes.get(key, 0) + shard.nbytes
        return tuple(
            MemberPart(f"{m.role}:{m.rank}", m.node, sizes.get((m.role, m.rank), 0), m.updates)
            for m in manifest.members
        )
    if attempt is None:
        return ()
    return tuple(
        MemberPart(str(report.member), node, report.nbytes, report.updates)
        for node, snapshot in sorted(attempt.snapshots.items())
        for report in snapshot.members
    )


def _manifest(checkpoint: Checkpoint | None) -> Manifest | None:
    if checkpoint is None or checkpoint.manifest is None:
        return None
    try:
        return Manifest.from_bytes(checkpoint.manifest, where=str(checkpoint))
    except IntegrityError:
        return None
