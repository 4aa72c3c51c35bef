"""Resume, in two phases: every member reads and verifies, all vote, and only then live state is touched.

No rank falls back alone: a checkpoint that one member cannot read whole is rejected for all, loudly, and the next
older one is tried. What a person got wrong (another run, a changed fingerprint) is an error, never a reason to fall
back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..storage.errors import IntegrityError, ResumeError, WrongRunError
from ..storage.fingerprint import compare
from ..storage.manifest import Manifest
from .messages import AttemptHead, LoadRequest, MemberId

log = logging.getLogger("lastgood.coordinator")

RETRY_S = 0.2  # until a stager that was away is asked again


class RestorePort(Protocol):
    """What a resume needs of one node's stager. This is the whole surface."""

    async def load(
        self, epoch: int, head: AttemptHead, request: LoadRequest, deadline_s: float, members: Sequence[MemberId]
    ) -> None: ...

    async def apply(self, epoch: int, head: AttemptHead, deadline_s: float, members: Sequence[MemberId]) -> None: ...

    async def forget(self, epoch: int) -> None: ...


@dataclass(frozen=True)
class Candidate:
    """One checkpoint that a resume may use. `source`: a directory outside staging and store that holds it."""

    manifest: bytes
    where: str  # for people
    source: str | None = None


@dataclass(frozen=True)
class Restored:
    """What the run continues from."""

    step: int
    attempt: str
    epoch: int
    sequence: int
    tag: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()  # newer checkpoints that were not whole, a sentence each
    lost: tuple[str, ...] = ()  # commits known to have happened that nothing holds any more

    @property
    def head(self) -> AttemptHead:
        return AttemptHead(self.attempt, self.step, self.epoch, self.sequence)


@dataclass(frozen=True)
class ResumeTerms:
    """How a resume is to be done."""

    run: str
    fingerprint: Mapping[str, Any]  # of the live members
    allow_changes: Collection[str]
    on_reshard: Mapping[str, str]


@dataclass(frozen=True)
class ResumeTermsOrder:
    """What a client says about a resume."""

    deadline_s: float
    allow_changes: tuple[str, ...] = ()
    on_reshard: Mapping[str, str] = field(default_factory=dict)
    memberships: Mapping[str, str] = field(default_factory=dict)  # as Progress has them


async def restore(
    candidates: Sequence[Candidate],
    terms: ResumeTerms,
    ports: Mapping[str, RestorePort],
    members: Mapping[str, Sequence[MemberId]],
    epoch: int,
    remaining_s: Callable[[], float],
    return_s: float = 0.0,
) -> Restored:
    """Restores the first candidate that every member can read whole; `remaining_s` is asked before every wait.

    `members`: those of each node in `ports`; each of them must be there. A stager that is being restarted may take
    `return_s` seconds until it is back with all of them: reading begins anew then.
    Raises WrongRunError or FingerprintError for what a person has to decide (nothing was touched), ResumeError when no
    candidate is whole or when writing live state failed.
    """
    rejected: list[str] = []
    for candidate in candidates:
        try:
            manifest = Manifest.from_bytes(candidate.manifest, where=candidate.where)
        except IntegrityError as error:
            rejected.append(str(error))
            continue
        _check(manifest, candidate, terms)
        head = AttemptHead(manifest.attempt, manifest.step, manifest.epoch, manifest.sequence)
        request = LoadRequest(candidate.manifest, dict(terms.on_reshard), candidate.source, tuple(terms.allow_changes))
        until = time.monotonic() + return_s
        while True:
            errors = await _everywhere(
                ports,
                lambda node, head=head, request=request: ports[node].load(
                    epoch, head, request, remaining_s(), members[node]
                ),
            )
            away = [error for error in errors if getattr(error, "facts", {}).get("away")]
            if not away or len(away) < len(errors) or time.monotonic() >= until:
                break
            log.warning("resume waits: %s", away[0])
            await asyncio.sleep(min(RETRY_S, remaining_s()))
        broken = [error for error in errors if isinstance(error, IntegrityError)]
        other = [error for error in errors if not isinstance(error, IntegrityError)]
        if other or broken:
            await _everywhere(ports, lambda node: ports[node].forget(epoch))
        if away:
            raise ResumeError(
                f"step {head.step} was not read everywhere: {away[0]}. No live state was touched; resume again.",
                step=head.step,
            ) from away[0]
        if other:
            raise other[0]
        if broken:
            sentence = f"step {head.step} (attempt {head.attempt}) was rejected: {broken[0]}"
            log.error("%s. Falling back to the next older checkpoint.", sentence)
            rejected.append(sentence)
            continue
        errors = await _everywhere(
            ports, lambda node, head=head: ports[node].apply(epoch, head, remaining_s(), members[node])
        )
        if errors:
            raise ResumeError(
                f"step {head.step} was read and verified by every member, but writing it into live state failed: "
                f"{errors[0]}. Live state may be mixed: end these actors, start new ones and resume again.",
                step=head.step,
            ) from errors[0]
        await _everywhere(ports, lambda node: ports[node].forget(epoch))
        return Restored(
            head.step,
            head.attempt,
            head.epoch,
            head.sequence,
            manifest.tag,
            dict(manifest.metrics),
            tuple(rejected),
        )
    tried = "".join(f"\n  - {sentence}" for sentence in rejected)
    raise ResumeError(
        f"no checkpoint of run {terms.run} could be restored. Nothing was touched and nothing was deleted. "
        f"Tried:{tried}\n"
        "Bring back a node that holds a copy, or resume from another path; resume='none' starts from scratch.",
        rejected=rejected,
    )


def _check(manifest: Manifest, candidate: Candidate, terms: ResumeTerms) -> None:
    if manifest.run != terms.run:
        raise WrongRunError(
            f"{candidate.where} is a checkpoint of run {manifest.run!r}, and this is run {terms.run!r}. Nothing was "
            "touched. Attach under that name to continue it.",
            saved=manifest.run,
            now=terms.run,
        )
    # A changed model structure is told key by key by the members, who know both sides.
    saved, now = (
        {name: value for name, value in facts.items() if not name.endswith(".structure")}
        for facts in (manifest.fingerprint, terms.fingerprint)
    )
    compare(saved, now, terms.allow_changes)


async def _everywhere(nodes: Iterable[str], call: Callable[[str], Awaitable[None]]) -> list[Exception]:
    """Asks all nodes at once and hears every one of them; returns what they raised."""
    results = await asyncio.gather(*(call(node) for node in nodes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return [result for result in results if isinstance(result, Exception)]
