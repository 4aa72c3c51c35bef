"""Bugs that are planted by a flag in the world, to show that the net catches fish.

overwritten_record   a stager writes over a record that stands (nodes.py)
one_vote             any one node's accept is taken for the commit
deleted_unheard      files are deleted while a participant is unheard
reused_ids           a restarted coordinator hands out the same attempt ids again (world.py)
completed_is_a_vote  COMPLETED is taken for its own node's vote, not for the proof of the commit; shows only when a disk
                     is lost, so it has a scene of its own
"""

from __future__ import annotations

from lastgood.coordinator.attempt import Attempt
from lastgood.coordinator.messages import RecordState
from lastgood.coordinator.moves import UNDONE
from lastgood.coordinator.protocol import Protocol

PLANTS = ("overwritten_record", "one_vote", "deleted_unheard", "reused_ids")


class OneVote(Protocol):
    """Takes one accept for all."""

    def is_committed(self, attempt: Attempt) -> bool:
        return RecordState.ACCEPT in attempt.records.values()


class HastyAttempt(Attempt):
    """Lets files go as soon as the attempt is given up."""

    def may_delete(self, everyone_heard: bool) -> bool:
        return self.phase in UNDONE


class Hasty(Protocol):
    attempt_type = HastyAttempt


class CompletedIsAVote(Protocol):
    """Looks at records alone."""

    def judge(self, attempt: Attempt) -> None:
        attempt.proof = None
        super().judge(attempt)


CORES: dict[str | None, type[Protocol]] = {
    "one_vote": OneVote,
    "deleted_unheard": Hasty,
    "completed_is_a_vote": CompletedIsAVote,
}
