"""What must always hold in the protocol core, after every event; tests and the simulation call it each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .attempt import Attempt
from .moves import BEFORE_COMMIT, PROVEN, UNDONE, Phase

if TYPE_CHECKING:
    from .protocol import Protocol


def check(core: Protocol) -> None:
    """Raises AssertionError naming the first invariant that does not hold. Callable after every event."""
    if core.fenced is not None:
        return
    front = core.foreground
    assert front is None or (front.mine and front.id in core.active), f"{front and front.id} leads, yet is finished"
    uploading = 0
    for attempt in core.active.values():
        phase = attempt.phase
        if phase in BEFORE_COMMIT:
            assert attempt is front, f"{_at(attempt)}: a second attempt in the foreground"
            _check_votes(attempt)
        elif phase is Phase.HELD:
            assert attempt is core.memory.held, f"{_at(attempt)}: two snapshots in memory"
            _check_votes(attempt)
        elif phase in PROVEN:
            assert not attempt.refused, f"{_at(attempt)}: a record says refuse"
            assert attempt.proof is not None or attempt.all_accept, f"{_at(attempt)}: not every record says accept"
            if phase is Phase.DURABLE:
                assert attempt.in_store, f"{_at(attempt)}: durable without COMPLETED in the store"
            elif phase is Phase.UPLOADING:
                uploading += 1
                assert attempt is core.uploading, f"{_at(attempt)}: two attempts upload at once"
        elif phase in UNDONE:
            all_accept = attempt.may_be_accepted and attempt.all_accept
            assert not all_accept, f"{_at(attempt)}: every record says accept"
            assert not attempt.discarded or attempt.aborted, f"{_at(attempt)}: deleted before it was decided"
        if attempt.mine:
            assert attempt.head.epoch == core.settings.epoch, f"{_at(attempt)}: of another epoch"
        assert attempt.head.sequence <= core.highest_sequence, f"{_at(attempt)}: a sequence beyond the highest"
    assert uploading == (core.uploading is not None), "the upload slot is held by nobody"
    core.requests.invariants()


def _check_votes(attempt: Attempt) -> None:
    """An attempt before its commit has the votes of the phases that it has passed, and no accept before all of them."""
    phase, nodes = attempt.phase, len(attempt.participants)
    assert not attempt.refused, f"{_at(attempt)}: refused, yet it goes on"
    if phase is not Phase.ACCEPTING:
        assert not attempt.may_be_accepted, f"{_at(attempt)}: an accept before all votes"
        assert not attempt.drafted, f"{_at(attempt)}: a manifest before all votes"
    if phase in (Phase.HELD, Phase.STAGING, Phase.ACCEPTING):
        assert len(attempt.snapshots) == nodes, f"{_at(attempt)}: a snapshot vote is missing"
    if phase is Phase.ACCEPTING:
        assert len(attempt.shards) == nodes, f"{_at(attempt)}: a staging vote is missing"


def _at(attempt: Attempt) -> str:
    return f"attempt {attempt.id} in {attempt.phase.value}"
