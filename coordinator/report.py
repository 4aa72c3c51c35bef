"""What a coordinator says of itself: status for people and monitoring, and what a close still waits for. Pure."""

from __future__ import annotations

from typing import Any

from .attempt import Attempt
from .moves import BEFORE_COMMIT, PROVEN, Phase
from .protocol import Protocol


def report(core: Protocol) -> dict[str, Any]:
    """The state of the core as JSON values."""
    window = core.requests.window
    return {
        "epoch": core.settings.epoch,
        "fenced": core.fenced,
        "recovering": core.recovering,
        "window": None if window is None else window.step,
        "membership_problems": list(core.membership.problems()),
        "nodes_heard": sorted(core.heard),
        "nodes_lost": sorted(core.incarnations.keys() - core.heard.keys()),
        "highest_sequence": core.highest_sequence,
        "parent": None if core.parent is None else core.parent.attempt,
        "failures_in_a_row": core.failures,
        "waiting": [
            {
                "request": pending.request.request_id,
                "kind": pending.request.kind.value,
                "reason": pending.request.reason,
                "seconds_left": round(pending.deadline_s - core.now_s, 3),
            }
            for pending in core.requests.waiting
        ],
        "in_memory": None if core.memory.held is None else core.memory.held.head.step,
        "in_memory_failures": 0 if core.memory.held is None else core.memory.held.staging_failures,
        "foreground": None if core.foreground is None else _attempt(core.foreground),
        "background": [_attempt(a) for a in core.active.values() if a is not core.foreground],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.id,
        "step": attempt.head.step,
        "epoch": attempt.head.epoch,
        "sequence": attempt.head.sequence,
        "phase": attempt.phase.value,
        "kind": attempt.kind.value,
        "tag": attempt.tag,
        "participants": list(attempt.participants),
        "bytes": {str(r.member): r.nbytes for at in attempt.snapshots.values() for r in at.members},
        "uploaded": sorted(attempt.uploaded),
        "blame": None if attempt.blame is None else str(attempt.blame),
        "story": [[when, sentence] for when, sentence in attempt.story[-20:]],
    }


def settled(core: Protocol) -> bool:
    """Whether every decision that can be made with the nodes heard is made, and published there."""
    for attempt in core.active.values():
        if attempt.phase in (Phase.HELD, Phase.STAGING) and not core.memory.is_hopeful(attempt):
            continue  # it has failed too often to be waited for
        saving = attempt.phase is Phase.HELD and core.memory.saving
        if attempt.phase in BEFORE_COMMIT or attempt.phase is Phase.FOUND or saving:
            return False
        if attempt is core.foreground:  # not announced yet
            return False
        if attempt.phase is Phase.ABORTING and not attempt.aborted:
            return False
        if attempt.phase in PROVEN and attempt.manifest is not None and _some_lack(core, attempt, attempt.published):
            return False
    return True


def improving(core: Protocol) -> bool:
    """Whether waiting may still make something as safe as it will be."""
    for attempt in core.active.values():
        if attempt.phase in BEFORE_COMMIT or (attempt.phase is Phase.HELD and core.memory.wanted):
            return True
        if attempt.phase is Phase.DURABLE:
            waits = _some_lack(core, attempt, attempt.noted)
        elif attempt.phase in PROVEN and not core.settings.upload:
            waits = _some_lack(core, attempt, attempt.published)
        else:
            waits = attempt.phase in PROVEN and attempt.given_up is None and not attempt.lost_at
        if waits:
            return True
    return core.requests.window is not None and bool(core.requests.waiting)


def _some_lack(core: Protocol, attempt: Attempt, done: set[str]) -> bool:
    """Whether a holder that is heard is not in `done`. Asked after every event: the last ones answer last, mostly."""
    return any(node not in done and node in core.heard for node in reversed(attempt.holders))


def lagging(core: Protocol) -> list[str]:
    """What is not as safe as it should be, one sentence each."""
    left = []
    for attempt in core.active.values():
        name = f"step {attempt.head.step} (attempt {attempt.id})"
        if attempt.phase in BEFORE_COMMIT or (attempt.phase is Phase.HELD and core.memory.wanted):
            left.append(f"{name} is {attempt.phase.value}")
        elif attempt.phase in PROVEN:
            why = _not_durable(core, attempt)
            if why:
                left.append(f"{name} {why}")
    left += [f"request {p.request.request_id} has not been served" for p in core.requests.waiting]
    return left


def _not_durable(core: Protocol, attempt: Attempt) -> str | None:
    if attempt.phase is Phase.DURABLE:
        return None
    if not core.settings.upload:
        behind = [n for n in attempt.holders if n not in attempt.published and n in core.heard]
        return f"is committed and not published on {', '.join(behind)}" if behind else None
    if attempt.given_up is not None:
        return f"is committed and will not be uploaded: {attempt.given_up}"
    if attempt.lost_at:
        return f"is committed, but {', '.join(sorted(attempt.lost_at))} came back without its part"
    why = next((sentence for _, sentence in reversed(attempt.story) if "failed" in sentence or "again" in sentence), "")
    return f"is committed and not durable yet{': ' + why if why else ''}"
