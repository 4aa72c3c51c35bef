"""Ranks of a member-led run come together, and whoever does not fit is named."""

from __future__ import annotations

import pytest

from lastgood.coordinator.joining import CLAIM_S, Joining
from lastgood.coordinator.messages import RankClaim
from lastgood.storage.errors import MembershipError


def claim(rank: int, process: str = "", world_size: int = 2, components: tuple[str, ...] = ("model",)) -> RankClaim:
    name = process or f"p{rank}"
    return RankClaim(f"call of {name}", "actor", rank, world_size, components, name, f"pid of {name}")


def test_the_role_is_whole_when_every_rank_has_claimed() -> None:
    joining = Joining("actor", 10.0)
    joining.take(claim(1), 0.0)
    assert not joining.whole
    joining.take(claim(0), 1.0)
    assert joining.whole
    assert joining.processes == {"p0", "p1"}


def test_ranks_that_are_missing_at_the_deadline_are_named() -> None:
    joining = Joining("actor", 10.0)
    joining.take(claim(1, world_size=3), 0.0)
    with pytest.raises(MembershipError, match="actor:0, actor:2, which did not join"):
        joining.take(claim(1, world_size=3), 10.1)


def test_two_live_processes_with_one_rank_are_an_error_that_names_both() -> None:
    joining = Joining("actor", 100.0)
    joining.take(claim(0, "first"), 0.0)
    joining.take(claim(0, "second"), 1.0)
    assert not joining.whole
    joining.take(claim(0, "first"), 2.0)  # it lives; whether the second does is not known yet
    for process in ("second", "first"):
        with pytest.raises(MembershipError, match=r"actor:0: pid of \w+ and pid of \w+") as told:
            joining.take(claim(0, process), 3.0)
        assert "pid of first" in str(told.value)
        assert "pid of second" in str(told.value)


def test_the_claim_of_a_process_that_died_while_it_waited_is_dropped() -> None:
    joining = Joining("actor", 100.0)
    joining.take(claim(0, "dead"), 0.0)
    now_s = 1.0
    while now_s < CLAIM_S + 2:
        joining.take(claim(0, "alive"), now_s)
        joining.take(claim(1), now_s)
        now_s += 1.0
    assert joining.whole
    assert joining.processes == {"alive", "p1"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (claim(1, world_size=4), r"rank 1 \(pid of p1\) says world size 4, rank 0 \(pid of p0\) says 2"),
        (claim(1, components=("model", "rng")), r"names components \['model', 'rng'\], rank 0 .* names \['model'\]"),
    ],
)
def test_ranks_must_be_alike(other: RankClaim, words: str) -> None:
    joining = Joining("actor", 100.0)
    joining.take(claim(0), 0.0)
    joining.take(other, 1.0)
    assert not joining.whole
    joining.take(claim(0), 2.0)
    with pytest.raises(MembershipError, match=words):
        joining.take(other, 3.0)
    with pytest.raises(MembershipError, match=words):
        joining.take(claim(0), 4.0)
    assert not joining.places  # what they try next begins anew
