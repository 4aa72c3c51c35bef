"""Grants: all ranks stop at the same step, none passes what it was granted, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from lastgood.coordinator.grants import AHEAD_STEPS, CutAt, GiveUp, Grants, GrantTo
from lastgood.coordinator.messages import MemberId

A, B = MemberId("actor", 0), MemberId("actor", 1)
GATHER_S = 10.0


def never(step: int) -> bool:
    return False


def every(steps: int) -> Callable[[int], bool]:
    return lambda step: step % steps == 0


def begun(step: int = 0, *members: MemberId) -> Grants:
    """Grants of a line that began after `step`, with every member there."""
    grants = Grants(members or (A, B), step, GATHER_S)
    for member in grants.members:
        grants.report(member, step, None, 0.0)
    return grants


def both(grants: Grants, step: int, now_s: float = 0.0, step_s: float | None = None) -> None:
    for member in grants.members:
        grants.report(member, step, step_s, now_s)


def test_two_steps_ahead_at_least_and_a_seconds_worth_when_steps_are_short() -> None:
    grants = begun()
    assert grants.decide(0.0, never, False) == GrantTo(2, 1)
    assert grants.decide(0.0, never, False) is None
    both(grants, 1, step_s=0.1)
    assert grants.decide(0.0, never, False) == GrantTo(11, 6)
    both(grants, 6, step_s=1e-9)
    told = grants.decide(0.0, never, False)
    assert isinstance(told, GrantTo)
    assert told.step == 6 + AHEAD_STEPS[1]


def test_the_pace_of_the_slowest_counts() -> None:
    grants = begun()
    grants.report(A, 1, 0.001, 0.0)
    grants.report(B, 1, 0.5, 0.0)
    assert grants.decide(0.0, never, False) == GrantTo(3, 2)


def test_no_grant_reaches_a_step_at_which_a_save_is_due() -> None:
    grants = begun()
    both(grants, 1, step_s=0.01)
    assert grants.decide(0.0, every(5), False) == GrantTo(4, -46)  # they arrive at 5 by themselves
    grants.report(A, 5, 0.01, 0.0)
    assert grants.decide(0.0, every(5), False) is None
    grants.report(B, 5, 0.01, 0.0)
    assert grants.decide(0.0, every(5), False) == CutAt(5)
    grants.cut_done(5)
    told = grants.decide(0.0, every(5), False)
    assert isinstance(told, GrantTo)
    assert told.step == 9


def test_a_request_is_cut_one_step_beyond_the_highest_grant() -> None:
    grants = begun()
    grants.decide(0.0, never, False)
    both(grants, 1)
    assert grants.decide(0.0, never, True) is None  # 2 is granted: they stop at 3
    grants.report(A, 3, None, 0.0)
    assert grants.decide(0.0, never, True) is None
    grants.report(B, 3, None, 0.0)
    assert grants.decide(0.0, never, True) == CutAt(3)
    grants.cut_done(3)
    assert grants.decide(0.0, never, True) == GrantTo(3, 2)  # another request: at 4
    both(grants, 4)
    assert grants.decide(0.0, never, True) == CutAt(4)


def test_who_does_not_arrive_costs_one_cut_and_is_named_and_nobody_waits_for_it_again() -> None:
    grants = begun()
    grants.decide(0.0, every(2), False)
    grants.report(B, 1, None, 0.5)
    grants.report(A, 2, None, 1.0)
    assert grants.decide(1.0 + GATHER_S - 0.1, every(2), False) is None
    assert grants.decide(1.0 + GATHER_S, every(2), False) == GiveUp(2, {B: 1}, GATHER_S)
    assert grants.decide(12.0, every(2), False) == GrantTo(3, 0)  # it shall report at its next end_step
    assert grants.decide(12.5, every(2), False) is None  # nobody has come to 4: it is not missed yet
    grants.report(A, 4, None, 13.0)
    assert grants.decide(13.0, every(2), False) == GiveUp(4, {B: 1}, None)
    assert grants.decide(13.0, every(2), False) == GrantTo(5, 0)
    grants.report(B, 2, None, 14.0)  # it is back
    assert not grants.absent
    both(grants, 6, 15.0)
    assert grants.decide(15.0, every(2), False) == CutAt(6)
    grants.cut_done(6)
    assert grants.decide(15.0, every(2), False) == GrantTo(7, 6)
    both(grants, 8, 16.0)
    assert grants.decide(16.0, every(2), False) == CutAt(8)


def test_a_request_is_not_waited_with_for_a_member_that_is_known_to_be_absent() -> None:
    grants = begun()
    grants.decide(0.0, every(2), False)
    grants.report(A, 2, None, 1.0)
    assert isinstance(grants.decide(20.0, every(2), False), GiveUp)
    assert grants.decide(21.0, never, True) == GrantTo(2, 0)
    grants.report(A, 3, None, 22.0)
    assert grants.decide(22.0, never, True) == GiveUp(3, {B: 0}, None)


def test_a_report_that_comes_twice_does_not_bring_an_absent_member_back() -> None:
    grants = begun()
    grants.decide(0.0, every(2), False)
    grants.report(B, 1, None, 0.5)
    grants.report(A, 2, None, 1.0)
    assert isinstance(grants.decide(20.0, every(2), False), GiveUp)
    grants.report(B, 1, None, 21.0)
    assert list(grants.absent) == [B]


def test_a_member_that_passed_its_grant_is_caught_up_with() -> None:
    grants = begun()
    grants.decide(0.0, every(5), False)
    grants.report(A, 12, None, 1.0)  # it went on while nobody led
    assert grants.decide(1.0, every(5), False) == GrantTo(11, 11)
    assert grants.decide(1.0, every(5), False) == GrantTo(14, 13)
    both(grants, 15, 2.0)
    assert grants.decide(2.0, every(5), False) == CutAt(15)


def test_a_new_coordinator_starts_at_the_highest_grant_and_cuts_beyond_it() -> None:
    grants = Grants((A, B), 9, GATHER_S)
    assert grants.decide(0.0, every(10), True) is None
    grants.report(A, 4, None, 0.0)
    assert grants.decide(0.0, every(10), False) is None
    both(grants, 10, 1.0)
    assert grants.decide(1.0, every(10), False) == CutAt(10)


@dataclasses.dataclass
class _Rank:
    """One rank in the simulation: what it was granted, the last step it ended, whether it waits."""

    granted: int = 0
    ended: int = 0
    waits: bool = False
    inbox: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (epoch, grant)
    epoch: int = 0


class _World:
    """Ranks, stagers that remember, and coordinators that die; messages are late, lost and reordered."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.members = [MemberId("actor", rank) for rank in range(self.random.randint(1, 5))]
        self.ranks = {member: _Rank() for member in self.members}
        nodes = self.random.randint(1, 3)
        self.node_of = {member: self.random.randrange(nodes) for member in self.members}
        self.remembered = [0] * nodes  # by each node's stager
        self.reports: list[tuple[MemberId, int]] = []
        self.save_freq = self.random.choice([3, 7, 1000])
        self.now_s = 0.0
        self.epoch = 1
        self.asked = False
        self.cuts: list[int] = []
        self.lost = 0
        self.restarts = 0
        self.grants = Grants(self.members, 0, 1e9)
        for member in self.members:
            self.grants.report(member, 0, None, 0.0)

    def restart_coordinator(self) -> None:
        """What it had decided and not told is lost; the reports on their way to it too."""
        self.restarts += 1
        self.epoch += 1
        self.reports.clear()
        self.grants = Grants(self.members, self.highest(), 1e9)

    def highest(self) -> int:
        """What a new coordinator is told: by the stagers, and by agents that register with a restarted one."""
        return max([*self.remembered, *(rank.granted for rank in self.ranks.values())])

    def restart_stager(self) -> None:
        """It forgets; its agents tell it what they have heard. Orders that they did not fetch are gone."""
        node = self.random.randrange(len(self.remembered))
        here = [rank for member, rank in self.ranks.items() if self.node_of[member] == node]
        for rank in here:
            rank.inbox.clear()
        self.remembered[node] = max((rank.granted for rank in here), default=0)

    def pass_on(self, step: int) -> None:
        """A grant goes to every stager; the coordinator may die after some of them have it."""
        dies_after = self.random.choice([None] * 9 + [self.random.randrange(len(self.remembered) + 1)])
        for number, node in enumerate(self.random.sample(range(len(self.remembered)), len(self.remembered))):
            if number == dies_after:
                self.restart_coordinator()
                return
            if self.random.random() < 0.05:
                self.lost += 1
                continue  # this stager did not take it; the next beat brings it
            self.remembered[node] = max(self.remembered[node], step)
            for member, rank in self.ranks.items():
                if self.node_of[member] == node:
                    rank.inbox.append((self.epoch, step))

    def rank_acts(self, member: MemberId) -> None:
        rank = self.ranks[member]
        if rank.inbox and self.random.random() < 0.5:
            epoch, step = rank.inbox.pop(self.random.randrange(len(rank.inbox)))
            if epoch >= rank.epoch:  # an agent refuses lower epochs
                rank.epoch = epoch
                rank.granted = max(rank.granted, step)
        if rank.waits and rank.ended <= rank.granted:
            rank.waits = False
        if not rank.waits:
            assert rank.ended <= rank.granted, "a rank trained beyond its grant"
            rank.ended += 1
            rank.waits = rank.ended > rank.granted
        if rank.waits or self.random.random() < 0.3:
            self.reports.append((member, rank.ended))

    def coordinator_acts(self) -> None:
        self.random.shuffle(self.reports)
        while self.reports and self.random.random() < 0.8:
            member, step = self.reports.pop()
            if self.random.random() < 0.9:
                self.grants.report(member, step, self.random.choice([None, 0.1, 0.4]), self.now_s)
        for _ in range(10):
            grants = self.grants
            decision = grants.decide(self.now_s, lambda step: step % self.save_freq == 0, self.asked)
            if decision is None:
                if self.random.random() < 0.3:
                    self.pass_on(grants.granted)  # a beat
                return
            if isinstance(decision, GrantTo):
                self.pass_on(decision.step)
                if self.grants is not grants:
                    return
            else:
                assert isinstance(decision, CutAt)
                self.cut(decision.step)
                if self.random.random() < 0.1:
                    self.restart_coordinator()  # after the copy, before anybody was let go on
                    return
                grants.cut_done(decision.step)

    def cut(self, step: int) -> None:
        stands = {str(member): (rank.ended, rank.waits) for member, rank in self.ranks.items()}
        assert all(stand == (step, True) for stand in stands.values()), f"cut at {step}, but {stands}"
        self.cuts.append(step)
        self.asked = False

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.now_s += 0.01
            if self.random.random() < 0.02:
                self.asked = True
            if self.random.random() < 0.01:
                self.restart_coordinator()
            if self.random.random() < 0.01:
                self.restart_stager()
            self.rank_acts(self.random.choice(self.members))
            if self.random.random() < 0.5:
                self.coordinator_acts()


def test_all_ranks_stop_at_every_cut_and_none_passes_a_grant_over_restarts_and_lost_messages() -> None:
    cuts = restarts = lost = steps = 0
    for seed in range(60):
        world = _World(seed)
        world.run(1500)
        assert world.cuts == sorted(world.cuts)
        cuts, restarts, lost = cuts + len(world.cuts), restarts + world.restarts, lost + world.lost
        steps += min(rank.ended for rank in world.ranks.values())
        before = min(rank.ended for rank in world.ranks.values())
        world.run(1000)
        assert min(rank.ended for rank in world.ranks.values()) > before, f"seed {seed}: nobody went on"
    assert cuts > 600
    assert restarts > 300
    assert lost > 300
    assert steps > 3000


@pytest.mark.parametrize("fault", ["forgets", "grants_past_the_cut"])
def test_the_simulation_sees_a_coordinator_that_breaks_the_rules(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "forgets":
        monkeypatch.setattr(_World, "highest", lambda world: min(rank.ended for rank in world.ranks.values()))
    else:
        decide = Grants.decide

        def early(self: Grants, now_s: float, due: Callable[[int], bool], asked: bool) -> object:
            step = self.granted + 1
            if asked and self.front is not None and self.front >= step:
                return CutAt(step)  # not all of them have arrived
            return decide(self, now_s, due, asked)

        monkeypatch.setattr(Grants, "decide", early)
    with pytest.raises(AssertionError, match="cut at"):
        for seed in range(50):
            _World(seed).run(1500)
