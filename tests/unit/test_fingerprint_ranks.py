"""Ranks of a role that are not alike: each is compared with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastgood.storage.errors import FingerprintError
from lastgood.storage.fingerprint import merged, of_rank
from lastgood.workers import load
from lastgood.workers.member import Member
from tests.unit.checkpoints import locate_in, manifest_of, save

STEP = 1


def test_what_ranks_share_is_said_once_and_what_they_do_not_by_rank() -> None:
    ranks = [{"a.size": 2, "a.class": "SGD"}, {"a.size": 2, "a.class": "AdamW", "a.only": 1}]
    assert merged(ranks) == {
        "a.size": 2,
        "a.class": {"by_rank": ["SGD", "AdamW"]},
        "a.only": {"by_rank": [None, 1]},
    }
    assert of_rank(merged(ranks), 0) == {"a.size": 2, "a.class": "SGD", "a.only": None}
    assert of_rank(merged(ranks), 1) == ranks[1]
    assert of_rank(merged(ranks), 2)["a.class"] == {"by_rank": ["SGD", "AdamW"]}  # fits no third rank


def members(kinds: tuple[Any, ...]) -> list[Member]:
    """Ranks of one role, each with an optimizer of its own kind."""
    made = []
    for rank, kind in enumerate(kinds):
        torch.manual_seed(rank)
        model = nn.Linear(2, 2)
        made.append(
            Member.of("actor", rank, len(kinds), {"model": model, "optimizer": kind(model.parameters(), lr=0.1)})
        )
    return made


def test_a_role_whose_ranks_have_different_optimizers_is_resumed_and_a_swap_is_refused(tmp_path: Path) -> None:
    saved = members((torch.optim.AdamW, torch.optim.SGD))
    shards = []
    for member in saved:
        member.mark(STEP)
        shards += save(tmp_path, member, STEP)
    manifest = manifest_of(STEP, saved, shards, merged([member.fingerprint() for member in saved]))
    for member in members((torch.optim.AdamW, torch.optim.SGD)):
        load.prepare(member, manifest, locate_in(tmp_path)).apply()
    swapped = members((torch.optim.SGD, torch.optim.AdamW))
    with pytest.raises(FingerprintError, match=r"actor.optimizer.class: saved 'AdamW', now 'SGD'"):
        load.prepare(swapped[0], manifest, locate_in(tmp_path))
