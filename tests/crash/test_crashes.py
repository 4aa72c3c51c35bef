"""Every file operation is a crash point: a kill or a power loss there leaves whole checkpoints, and nothing else."""

from __future__ import annotations

import pytest

from tests.crash.campaign import NAMES, Campaign, Recorded
from tests.crash.story import CHAPTERS

NUMBERS = {chapter: number for number, chapter in enumerate(CHAPTERS, 1)}


def nothing_broken(campaign: Campaign) -> None:
    broken, campaign.tally.broken = campaign.tally.broken, []
    assert not broken, f"{len(broken)} broken promises, the first:\n" + "\n".join(broken[:3])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_power_loss_after_any_operation_takes_nothing_that_was_told(
    campaign: Campaign, chapters: dict[str, Recorded], chapter: str
) -> None:
    before = campaign.tally.images
    campaign.lose_power(chapters[chapter])
    nothing_broken(campaign)
    assert campaign.tally.images - before > 2 * len(chapters[chapter].operations)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_goes_on_after_a_kill_is_as_durable_as_if_nobody_had_died(
    campaign: Campaign, chapters: dict[str, Recorded], chapter: str
) -> None:
    before = campaign.tally.gone_on
    campaign.go_on(chapters[chapter], NUMBERS[chapter])
    nothing_broken(campaign)
    names = sum(operation.kind in NAMES for operation in chapters[chapter].operations)
    assert campaign.tally.gone_on - before >= names > 0


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_kill_at_any_operation_leaves_whole_checkpoints_and_nothing_else(
    campaign: Campaign, chapters: dict[str, Recorded], chapter: str
) -> None:
    before = campaign.tally.kills
    campaign.kill(chapters[chapter], NUMBERS[chapter])
    nothing_broken(campaign)
    operations = chapters[chapter].operations
    assert campaign.tally.kills - before == len(operations) + sum(one.kind == "write" for one in operations)
