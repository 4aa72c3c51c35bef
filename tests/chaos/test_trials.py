"""A few trials of the campaign in CI; `make chaos` runs as many as you like."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.plan import Fault, Moment, Plan

# One for each kind of victim that a network of one's own is not needed for. At a named point each, so that it fires.
FAULTS = {
    "a stager dies while it writes a record, then the coordinator while it refuses": (
        Fault("stager", "kill", Moment("ended", 2, "stager.record.accept"), 1),
        Fault("coordinator", "kill", Moment("ended", 1, "coordinator.publish")),
    ),
    "a rank dies while it copies": (Fault("member", "kill", Moment("ended", 2, "member.copy")),),
    "the driver dies while the coordinator is stopped before the commit": (
        Fault("driver", "kill", Moment("ended", 2, "coordinator.staged")),
    ),
    "a raylet dies during an upload": (Fault("raylet", "kill", Moment("ended", 2, "stager.upload.shard"), 1),),
    "everything of the run dies between commit and COMPLETED": (
        Fault("run", "kill", Moment("ended", 2, "stager.publish.before_completed")),
    ),
    "the coordinator stands still while it completes an upload": (
        Fault("coordinator", "stop", Moment("ended", 2, "coordinator.complete_remotely"), hold_s=2.0),
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_whatever_dies_the_run_comes_back_exact_whole_and_clean(campaign: Campaign, what: str) -> None:
    number = list(FAULTS).index(what)
    plan = Plan(0, number, 2, FAULTS[what], mends_itself=True, witnessed=True, save_total_limit=(None, 2)[number % 2])
    record = campaign.run(plan)
    assert record["ok"], f"{record['why']}\nkept: {record['kept']}"
    assert all(fault["fired"] for fault in record["faults"]), record["faults"]
