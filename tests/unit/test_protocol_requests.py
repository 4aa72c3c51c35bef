"""Windows and requests: when a save may be taken, who shares one, and what is told to whom. And when saves are due."""

from __future__ import annotations

import dataclasses

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import Blame, MemberId, MemberInfo, RoleDeclaration, SaveKind, SaveRequest, SaveState
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.policies import (
    AnyOf,
    AtSteps,
    Decision,
    EverySeconds,
    EverySteps,
    Moment,
    Never,
    SavePolicy,
    WhenBest,
)
from lastgood.coordinator.settings import Deadlines, Settings
from lastgood.storage.errors import OptionsError
from tests.unit.protocol_bench import ACTOR1, COMPONENTS, HOSTS, Bench


def verdict(bench: Bench) -> cmd.WindowVerdict:
    (found,) = bench.now(cmd.WindowVerdict)
    return found


# ---- membership


def test_a_save_without_complete_membership_fails_and_names_what_is_missing() -> None:
    bench = Bench(hear=("n1",))
    (announce,) = bench.ask("r1")
    assert isinstance(announce, cmd.Announce) and announce.state is SaveState.ABORTED
    assert "1 of 2 members of role actor are missing: actor:1" in str(announce.blame)


def test_no_declared_role_is_said_so() -> None:
    bench = Bench(hear=())
    bench.core.membership.declarations.clear()
    bench.feed(ev.RecoveryBegun())
    assert "no role has been declared" in bench.core.membership.problems()[0]


@pytest.mark.parametrize(
    ("role", "declaration", "says"),
    [
        ("actor", RoleDeclaration("actor", 3, COMPONENTS["actor"], "m1"), "actor:2"),
        ("actor", RoleDeclaration("actor", 2, ("model",), "m1"), "has undeclared optimizer"),
        ("actor", RoleDeclaration("actor", 2, ("model", "optimizer", "rng"), "m1"), "lacks rng"),
        ("actor", RoleDeclaration("actor", 2, COMPONENTS["actor"], "m2"), "2 of 2 members of role actor are missing"),
        ("critic", RoleDeclaration("critic", 1, ("model",), "m1"), "role critic"),
    ],
)
def test_every_rank_of_every_declared_role_is_needed_with_all_components(
    role: str, declaration: RoleDeclaration, says: str
) -> None:
    bench = Bench()
    assert bench.core.membership.problems() == ()
    bench.feed(ev.Declared(declaration))
    assert any(says in problem for problem in bench.core.membership.problems())


def test_a_member_registered_twice_is_said_so() -> None:
    bench = Bench()
    bench.feed(ev.MembersChanged("n3", bench.infos("n2")))
    assert bench.core.membership.problems() == ("member actor:1 is registered on n2 and n3",)


def test_a_node_that_is_gone_is_asked_for_nothing_once_its_members_were_replaced_elsewhere() -> None:
    bench = Bench()
    bench.feed(ev.NodeLost("n2", "its machine is gone"))
    assert bench.core.membership.nodes() == ("n1", "n2")  # it is missed
    later = RoleDeclaration("actor", 2, COMPONENTS["actor"], "m2")
    bench.feed(ev.Declared(later))
    moved = [MemberInfo(MemberId("actor", rank), 2, COMPONENTS["actor"], "m2", "new", 1) for rank in range(2)]
    stays = [info for info in bench.infos("n1") if info.member.role != "actor"]
    bench.feed(ev.MembersChanged("n1", (*stays, *moved)))
    assert not bench.core.membership.problems()
    assert bench.core.membership.nodes() == ("n1",)


def test_declarations_kept_by_stagers_are_learnt_and_those_made_here_stand() -> None:
    bench = Bench()
    newer = RoleDeclaration("actor", 9, ("model",), "m9")
    bench.core.membership.learn([newer, RoleDeclaration("reward", 1, ("model",), "m1")])
    assert bench.core.membership.declarations["actor"].world_size == 2
    assert "reward" in bench.core.membership.declarations


def test_the_first_role_of_another_driver_drops_those_that_the_driver_before_it_declared() -> None:
    bench = Bench()
    bench.feed(ev.Declared(RoleDeclaration("actor", 2, COMPONENTS["actor"], "m1", "second")))
    assert set(bench.core.membership.declarations) == {"actor"}
    assert bench.core.membership.problems() == ()
    kept_by_a_stager = RoleDeclaration("trainer", 1, COMPONENTS["trainer"], "m1", "first")
    bench.core.membership.learn([kept_by_a_stager])
    assert set(bench.core.membership.declarations) == {"actor"}


@pytest.mark.parametrize("stale_first", [True, False])
def test_after_a_restart_the_driver_that_more_members_registered_for_is_believed(stale_first: bool) -> None:
    bench = Bench(hear=())
    membership = bench.core.membership
    membership.declarations.clear()
    membership._declared_here.clear()
    for node in HOSTS:
        membership.register(node, bench.infos(node))
    stale = [RoleDeclaration("critic", 1, ("model",), "m0", "first"), RoleDeclaration("actor", 1, (), "m0", "first")]
    fresh = [RoleDeclaration("actor", 2, COMPONENTS["actor"], "m1", "second")]
    for kept in (stale, fresh) if stale_first else (fresh, stale):
        membership.learn(kept)
    assert list(membership.declarations.values()) == fresh


# ---- windows


@pytest.mark.parametrize(
    ("step", "updates", "says"),
    [(5, 4, "ended step 5, the run says step 4"), (4, 9, "counts 9 optimizer updates, actor:0 counts 4")],
)
def test_a_window_opens_only_when_every_report_agrees(step: int, updates: int, says: str) -> None:
    bench = Bench()
    reports = {"n1": bench.report("n1", 4), "n2": bench.report("n2", step, updates)}
    bench.feed(ev.WindowOpened(4, reports, due=Decision(True, "due")))
    blame = verdict(bench).blame
    assert not verdict(bench).opened and blame is not None and says in str(blame) and blame.member == ACTOR1
    assert bench.core.failures == 1 and not bench.said(cmd.Snapshot)


def test_a_missing_or_failed_mark_keeps_the_window_closed_and_names_the_node() -> None:
    bench = Bench()
    bench.feed(ev.WindowOpened(4, {"n1": bench.report("n1", 4)}, {"n2": Blame("window", "timeout", "n2")}))
    assert verdict(bench).blame is not None and verdict(bench).blame.node == "n2"  # type: ignore[union-attr]
    bench.feed(ev.WindowOpened(4, {"n1": bench.report("n1", 4)}))
    assert "member actor:1 did not report" in str(verdict(bench).blame)


def test_roles_may_count_their_updates_differently() -> None:
    bench = Bench()
    reports = {node: bench.report(node, 4, 8) for node in HOSTS}
    trainer = next(r for r in reports["n1"].members if r.member.role == "trainer")
    others = tuple(r for r in reports["n1"].members if r is not trainer)
    reports["n1"] = dataclasses.replace(reports["n1"], members=(*others, dataclasses.replace(trainer, updates=None)))
    bench.feed(ev.WindowOpened(4, reports))
    assert verdict(bench).opened


def test_a_request_in_a_window_starts_at_once_and_outside_it_waits_for_the_next() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("r1")
    assert bench.now(cmd.Snapshot)
    bench = Bench()
    (announce,) = bench.ask("r1")
    assert isinstance(announce, cmd.Announce) and announce.waits_for == "the update's end"
    bench.open(4)
    assert verdict(bench).request_ids == ("r1",) and bench.now(cmd.Snapshot)


def test_no_window_no_save_after_it_was_closed() -> None:
    bench = Bench()
    bench.open(4)
    bench.feed(ev.WindowClosed())
    bench.ask("r1")
    assert not bench.said(cmd.Snapshot)


def test_a_copy_that_met_an_update_costs_nobody_anything() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("r1")
    first, second = bench.now(cmd.Snapshot)
    bench.answer(first)
    bench.feed(ev.SnapshotWindowClosed(second.head.attempt, "n2", "an update runs"))
    (announce,) = [a for a in bench.now(cmd.Announce) if a.request_ids]
    assert announce.waits_for == "the update's end" and announce.blame is None
    assert bench.core.failures == 0 and bench.core.requests.window is None
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED
    bench.open(5)
    assert bench.attempt.head.step == 5 and bench.attempt.request_ids == ("r1",)


def test_the_next_window_takes_over_a_copy_that_never_ended() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.open(5)
    assert bench.attempt.head.step == 5 and len(bench.core.requests.waiting) == 0


def test_a_step_end_that_is_told_twice_is_saved_once() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.Stage)
    bench.open(4, due=True)
    assert verdict(bench).opened and verdict(bench).request_ids == ("scheduled-5-1",)
    bench.to_the_end()
    bench.open(4, due=True)
    assert len(bench.core.attempts) == 1 and bench.attempt.phase is Phase.DURABLE
    bench.feed(ev.Resumed(bench.attempt.head))
    bench.open(4, due=True)
    assert len(bench.core.attempts) == 2, "a resume makes it another window"


def test_a_process_that_was_replaced_since_it_reported_is_not_copied() -> None:
    bench = Bench()
    bench.open(4)
    bench.processes["n2"] += 1
    bench.feed(ev.MembersChanged("n2", bench.infos("n2")))
    announce = bench.ask("r1")[-1]
    assert isinstance(announce, cmd.Announce) and announce.waits_for is not None and not bench.said(cmd.Snapshot)


def test_a_save_needs_the_stager_of_every_member() -> None:
    bench = Bench()
    bench.open(4)
    bench.feed(ev.NodeLost("n2", "dark"))
    (announce,) = bench.ask("r1")
    assert isinstance(announce, cmd.Announce) and announce.blame is not None
    assert announce.blame.node == "n2" and "actor:1" in str(announce.blame)


# ---- sharing


def test_requests_of_one_window_share_the_attempt_that_is_under_way() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.Stage)
    bench.ask("r1")
    bench.ask("r2", tag="good")
    assert len(bench.core.attempts) == 1
    assert bench.attempt.request_ids == ("scheduled-5-1", "r1", "r2")
    assert (bench.attempt.tag, bench.attempt.kind) == ("good", SaveKind.MANUAL)
    assert bench.now(cmd.Announce)[0].state is SaveState.SNAPSHOT, "the one who joins is told how far it has come"


def test_another_tag_gets_an_attempt_of_its_own_in_the_same_window() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("r1", tag="a")
    bench.ask("r2", tag="b")
    assert bench.now(cmd.Announce)[0].waits_for == "the save that is under way"
    bench.until(cmd.WriteLedger)
    bench.answer(bench.now(cmd.WriteLedger)[0])
    assert (bench.attempt.tag, bench.attempt.head.step, bench.attempt.head.sequence) == ("b", 4, 2)


def test_a_tag_comes_too_late_once_the_manifest_is_drawn_up() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.BuildManifest)
    bench.ask("plain")
    bench.ask("tagged", tag="a")
    assert bench.attempt.request_ids[-1] == "plain" and len(bench.core.requests.waiting) == 1


def test_a_manual_request_after_the_commit_makes_a_new_attempt_and_a_final_one_does_not() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.to_the_end()
    bench.ask("f", kind=SaveKind.FINAL)
    assert len(bench.core.attempts) == 1 and bench.now(cmd.Announce)[0].state is SaveState.DURABLE
    bench.ask("r1")
    assert len(bench.core.attempts) == 2


def test_a_due_save_holds_training_until_the_one_before_is_committed_and_a_manual_one_does_not() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.Stage)
    stages = bench.said(cmd.Stage)
    bench.feed(ev.WindowClosed())
    bench.open(5)
    bench.ask("r1")
    assert not bench.core.holds_training
    bench.feed(ev.WindowClosed())
    bench.open(6, due=True)
    assert bench.core.holds_training and len(bench.core.attempts) == 1
    for stage in stages:
        bench.answer(stage)
    bench.to_the_end()
    assert not bench.core.holds_training
    assert [(a.head.step, len(a.requests)) for a in bench.core.attempts.values()] == [(4, 1), (6, 2)]


def test_each_request_keeps_its_own_deadline_and_the_attempt_ends_with_the_last() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("long", deadline_s=8)
    bench.ask("short", deadline_s=2)
    bench.feed(ev.Tick(), after_s=2.1)
    (announce,) = bench.now(cmd.Announce)
    assert announce.request_ids == ("short",) and announce.state is SaveState.ABORTED
    assert bench.attempt.phase is Phase.SNAPSHOTTING
    bench.feed(ev.Tick(), after_s=6)
    assert bench.now(cmd.Announce)[0].request_ids == ("long",) and bench.attempt.phase is Phase.ABORTING


def test_a_request_is_served_once_however_often_it_is_sent() -> None:
    bench = Bench()
    bench.ask("r1")
    assert bench.ask("r1") == []
    bench.open(4)
    bench.ask("r1")
    bench.to_the_end()
    (announce,) = bench.ask("r1")
    assert isinstance(announce, cmd.Announce) and announce.state is SaveState.DURABLE
    assert len(bench.core.attempts) == 1


def test_a_request_that_ended_is_told_the_same_again() -> None:
    bench = Bench()
    bench.ask("r1", deadline_s=1)
    (first,) = bench.feed(ev.Tick(), after_s=2)
    assert bench.ask("r1") == [first]


# ---- policies


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (EverySteps(5), Moment(10), True),
        (EverySteps(5), Moment(11), False),
        (EverySteps(5), Moment(10, last_saved_step=10), False),
        (EverySeconds(60), Moment(1, now_s=59), False),
        (EverySeconds(60), Moment(1, now_s=100, last_saved_s=30), True),
        (AtSteps(frozenset({3})), Moment(3), True),
        (AtSteps(frozenset({3})), Moment(4), False),
        (WhenBest("reward", 0.5), Moment(1, metrics={"reward": 0.6}), True),
        (WhenBest("loss", 0.5, higher_is_better=False), Moment(1, metrics={"loss": 0.6}), False),
        (WhenBest("reward"), Moment(1, metrics={"reward": float("nan")}), False),
        (WhenBest("reward"), Moment(1), False),
        (Never(), Moment(1), False),
        (AnyOf((EverySteps(5), AtSteps(frozenset({3})))), Moment(3), True),
        (AnyOf((EverySteps(5), Never())), Moment(3), False),
        (AnyOf(()), Moment(3), False),
    ],
)
def test_a_policy_decides_and_says_why(policy: SavePolicy, moment: Moment, due: bool) -> None:
    decision = policy.decide(moment)
    assert decision.due is due and len(decision.reason) > 5


def test_settings_that_make_no_sense_are_refused() -> None:
    for make in (
        lambda: EverySteps(0),
        lambda: EverySeconds(0),
        lambda: Deadlines(stage_s=0),
        lambda: Settings(run="r", epoch=1, on_failure="panic"),
        lambda: Settings(run="r", epoch=1, max_consecutive_failures=0),
    ):
        with pytest.raises(OptionsError):
            make()


def test_members_print_as_people_write_them() -> None:
    assert str(MemberId("actor", 3)) == "actor:3"


def test_a_deadline_counts_from_when_somebody_asked_however_late_it_arrives() -> None:
    bench = Bench()
    bench.open(1)

    def ask(name: str, *, ago_s: float) -> cmd.Announce:
        request = SaveRequest(name, SaveKind.MANUAL, "by hand", None, "me", 5.0, asked_at=1_000_000.0 - ago_s)
        bench.feed(ev.Asked(request, wall_s=1_000_000.0))
        return next(announce for announce in bench.now(cmd.Announce) if name in announce.request_ids)

    late = ask("late", ago_s=12.0)
    assert late.state is SaveState.ABORTED and "12.0 s after it was asked for, 7.0 s too late" in str(late.blame)
    assert not bench.said(cmd.Snapshot)
    ask("in time", ago_s=2.0)
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=2.9)
    assert bench.attempt.phase is Phase.STAGING
    bench.feed(ev.Tick(), after_s=0.2)
    assert bench.attempt.phase is Phase.ABORTING
    ask("of a clock that is ahead", ago_s=-100.0)  # no more than it asked for
    assert bench.attempt.deadline_s == bench.now_s + 5.0


def test_a_request_that_gives_up_takes_its_tag_along() -> None:
    bench = Bench()
    bench.open(1, due=True)
    bench.ask("soon", tag="soon", deadline_s=3.0)
    assert bench.attempt.tag == "soon" and bench.attempt.kind is SaveKind.MANUAL
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=3.0)
    bench.to_the_end()
    draft = bench.said(cmd.BuildManifest)[-1].draft
    assert (draft.tag, draft.kind, draft.requested_by) == (None, SaveKind.SCHEDULED, "")
    assert "soon" not in draft.reason


def test_a_window_that_does_not_open_for_the_same_reason_as_the_last_is_no_further_failure() -> None:
    bench = Bench(max_consecutive_failures=2)
    blame = Blame("window", "actor:1 did not arrive", "n2", ACTOR1)
    due = Decision(True, "every step")

    def miss(step: int, *, again: bool) -> cmd.WindowVerdict:
        bench.feed(ev.WindowOpened(step, {}, {"n2": blame}, due, ends_waiting=True, again=again))
        return bench.now(cmd.WindowVerdict)[-1]

    assert not miss(1, again=False).stop
    assert not miss(2, again=True).stop and not miss(3, again=True).stop
    assert bench.core.failures == 1
    assert miss(4, again=False).stop
