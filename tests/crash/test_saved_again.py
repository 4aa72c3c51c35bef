"""A step that is committed and saved again has two commits: a kill leaves both whole or the first, and true pointers.

Kills and power losses at all operations of this chapter are in test_crashes.py; here everything starts again after
each that makes a commit visible, or moves a pointer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.storage.layout import COMPLETED
from tests.crash.campaign import Campaign, Found, Recorded
from tests.crash.cluster import DISKS, PATHS
from tests.crash.operations import Operation
from tests.crash.plants import AGAIN_PLANTS
from tests.crash.story import AGAIN, CHAPTERS, SAVED_AGAIN, SECOND

NUMBER = list(CHAPTERS).index(SAVED_AGAIN) + 1
# What the judge says of each planted bug (part of one of its sentences).
SAYS = {
    "pointers move before COMPLETED stands": "leads to A4, which is no commit there",
    "a step that is saved again replaces what stood": "['A3'] was committed before, and is no whole checkpoint",
    "a step's pointer never moves again": "the step's pointer of A4 was told and is gone",
}


def points(operation: Operation) -> bool:
    """Whether it gives its final name to COMPLETED, or to a pointer."""
    return operation.kind in ("link", "rename") and operation.other.endswith((f"/{COMPLETED}", f"/{PATHS.latest}"))


def test_a_step_saved_again_keeps_its_first_commit_and_its_pointers_lead_to_the_second(
    chapters: dict[str, Recorded],
) -> None:
    before = chapters[SAVED_AGAIN].standing
    after = chapters[list(CHAPTERS)[NUMBER]].standing
    assert SECOND.step == AGAIN.step
    for disk in DISKS:
        assert SECOND.attempt in before.committed[disk] and AGAIN.attempt not in before.committed[disk]
        assert {SECOND.attempt, AGAIN.attempt} <= after.committed[disk]
        for place in (PATHS.pointer(AGAIN.step), PATHS.latest):
            assert before.pointers[disk][place].attempt == SECOND.attempt
            assert after.pointers[disk][place].attempt == AGAIN.attempt


def test_a_kill_as_a_committed_step_is_saved_again_leaves_its_first_commit_and_no_pointer_to_what_is_not_committed(
    folder: Path,
) -> None:
    campaign = Campaign(folder, every=1)
    (chapter,) = (one for one in campaign.record() if one.chapter == SAVED_AGAIN)
    campaign.kill(chapter, NUMBER, points)
    assert not campaign.tally.broken, "\n".join(campaign.tally.broken[:3])
    places = {operation.other.partition("/")[0] for operation in chapter.operations if points(operation)}
    assert places == set(DISKS)
    assert campaign.tally.kills == campaign.tally.recoveries == sum(map(points, chapter.operations)) >= 3 * len(DISKS)


@pytest.mark.parametrize("plant", AGAIN_PLANTS)
def test_a_planted_bug_in_saving_a_step_again_is_found(folder: Path, plant: str) -> None:
    campaign = Campaign(folder, every=1_000_000, plant=plant, until=SAYS[plant])
    chapter = next(one for one in campaign.record() if one.chapter == SAVED_AGAIN)
    with pytest.raises(Found):
        campaign.kill(chapter, NUMBER, points)
