"""The net catches fish: every bug that is planted breaks a promise, and the campaign says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, Found
from tests.crash.plants import PLANTS

# What the judge says of each (part of one of its sentences).
SAYS = {
    "no fsync of a file before its name": "is visible and not whole",
    "no fsync of the directory after a link": "was told and is gone",
    "no fsync of the directory after a rename": "the highest epoch, 1, was told and is gone",
    "no fsync of a shard": "was told and is gone",
    "no fsync of a shard's directory": "shard actor/rank_00000.model.safetensors of A1 was told and is gone",
    "no fsync of a new directory's parent": "was told and is gone",
    "a record is written over": "the record accept of A1 was told and is gone",
    "a file is written in place": "epoch.json is visible and not whole",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(folder: Path, plant: str) -> None:
    campaign = Campaign(folder, every=1_000_000, samples=0, plant=plant, until=SAYS[plant])
    with pytest.raises(Found):
        campaign.run()
