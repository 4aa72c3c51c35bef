"""What a rank that died has trained lies in memory only: no deadline, record or silence of others costs it."""

from __future__ import annotations

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.memory import PATIENCE_S
from lastgood.coordinator.messages import RecordState, SaveState
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.outcomes import COMMITTED_OR_BEYOND
from lastgood.coordinator.report import settled
from lastgood.coordinator.timings import ENOUGH
from tests.unit.protocol_bench import ACTOR1, Bench
from tests.unit.test_protocol_memory import committed_steps, keep, told


def bereaved() -> Bench:
    """Step 1 is kept in memory, and a rank has died."""
    bench = Bench(in_memory=True)
    keep(bench, 1)
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    return bench


def fail_accept(bench: Bench, command: cmd.Accept) -> None:
    bench.feed(ev.AcceptFailed(command.head.attempt, command.node, "no space left [ENOSPC]", known=True))


def fail_staging(bench: Bench) -> None:
    for command in bench.until(cmd.Stage):
        bench.feed(ev.StageFailed(command.head.attempt, command.node, "no space left [ENOSPC]"))


def test_a_record_that_cannot_be_written_costs_the_attempt_and_not_the_snapshot() -> None:
    bench = bereaved()
    first = bench.attempt
    fail_accept(bench, bench.until(cmd.Accept)[0])
    heir = bench.core.foreground
    assert first.phase is Phase.ABORTING and heir is not None and heir.origin == first.id and heir.head.step == 1
    taken = bench.until(cmd.Snapshot)
    assert {command.order.origin for command in taken} == {first.id}
    bench.answer(taken[0])
    assert not [c for c in bench.said(cmd.Discard) if c.head == first.head]  # its images are not the heir's everywhere
    bench.answer(taken[1])
    assert heir.phase is Phase.HELD and bench.core.memory.not_before_s > bench.now_s  # not at once: the disk was full
    bench.feed(ev.Tick(), after_s=1.0)
    bench.to_the_end()
    assert committed_steps(bench) == [1] and heir.commit_told and first.phase is Phase.ABORTED
    assert {c.node for c in bench.said(cmd.Discard) if c.head == first.head} == {"n1", "n2"}


def test_when_every_record_stands_after_all_the_heir_has_nothing_to_save() -> None:
    bench = bereaved()
    first = bench.attempt
    accepts = bench.until(cmd.Accept)
    for command in accepts:  # they land, and their answers are lost
        bench.records[command.head.attempt, command.node] = RecordState.ACCEPT
    fail_accept(bench, accepts[0])
    for taken in bench.until(cmd.Snapshot):
        bench.answer(taken)
    heir = bench.core.memory.held
    assert heir is not None and heir.origin == first.id
    bench.pending = [command for command in bench.pending if not isinstance(command, cmd.Accept)]
    bench.to_the_end()
    assert first.commit_told and committed_steps(bench) == [1] and heir.phase is Phase.ABORTED


def test_records_that_fail_again_and_again_are_tried_with_pauses_and_a_resume_waits_no_longer() -> None:
    bench = bereaved()
    for _ in range(5):
        assert not settled(bench.core)
        fail_accept(bench, bench.until(cmd.Accept)[0])
        bench.until(cmd.Discard)
        bench.feed(ev.Tick(), after_s=10.0)
    assert settled(bench.core)


def test_without_the_memory_tier_an_attempt_whose_record_cannot_be_written_is_given_up() -> None:
    bench = Bench()
    bench.open(1, due=True)
    fail_accept(bench, bench.until(cmd.Accept)[0])
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED and len(bench.core.attempts) == 1 and bench.core.foreground is None


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.ACCEPTING])
def test_the_deadline_of_somebody_who_asked_for_it_does_not_end_what_is_needed(phase: Phase) -> None:
    bench = bereaved()
    bench.until(cmd.Stage)
    bench.ask("r", deadline_s=3.0, from_memory=True)
    if phase is Phase.ACCEPTING:
        bench.answer(bench.until(cmd.Accept)[0])
    bench.feed(ev.Tick(), after_s=3.1)
    assert bench.attempt.phase is phase and not bench.said(cmd.Refuse)
    assert told(bench, "r").in_doubt is (phase is Phase.ACCEPTING)
    bench.to_the_end()
    assert committed_steps(bench) == [1] and len(bench.core.attempts) == 1


def test_whoever_asks_does_not_wait_for_the_pause_after_a_failure() -> None:
    bench = bereaved()
    for _ in range(7):
        fail_staging(bench)
        bench.feed(ev.Tick(), after_s=max(0.0, bench.core.memory.not_before_s - bench.now_s))
    fail_staging(bench)
    assert bench.core.memory.not_before_s > bench.now_s + 20.0
    bench.ask("r", deadline_s=20.0, from_memory=True)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND and committed_steps(bench) == [1]


@pytest.mark.parametrize("when", ["held", "staging"])
def test_a_stager_that_is_silent_for_a_while_costs_nothing(when: str) -> None:
    bench = Bench(in_memory=True)
    keep(bench, 1)
    if when == "staging":
        bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
        bench.until(cmd.Stage)
    bench.feed(ev.NodeLost("n2", "5 heartbeats in a row"))
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    assert bench.core.memory.held is bench.attempt and settled(
        bench.core
    )  # nobody waits for a node that may never come
    assert "n2" in str(bench.core.memory.unsaved)
    bench.hear("n2")
    bench.feed(ev.Tick(), after_s=1.0)
    bench.to_the_end()
    assert committed_steps(bench) == [1]


def test_a_resume_waits_no_longer_for_a_disk_that_hangs() -> None:
    bench = bereaved()
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=20.0)  # stage_s: nobody has answered
    assert not settled(bench.core)
    bench.feed(ev.Tick(), after_s=PATIENCE_S / 2)
    bench.until(cmd.Stage)
    assert not settled(bench.core)
    while not settled(bench.core):
        bench.feed(ev.Tick(), after_s=bench.core.next_wakeup_s() - bench.now_s)
    assert bench.now_s == pytest.approx(20.0 + PATIENCE_S)  # the core asks to be woken then
    assert "lies whole in memory" in str(bench.core.memory.unsaved)


def test_a_tag_that_the_snapshot_cannot_bear_any_more_is_refused() -> None:
    bench = Bench(in_memory=True)
    keep(bench, 1)
    bench.ask("one", from_memory=True, tag="a")
    bench.ask("two", from_memory=True, tag="b")
    assert told(bench, "two").state is SaveState.ABORTED and "under the tag 'a'" in str(told(bench, "two").blame)
    bench.until(cmd.Accept)
    bench.ask("three", from_memory=True, tag="c")
    assert told(bench, "three").state is SaveState.ABORTED
    bench.to_the_end()
    assert told(bench, "one").state in COMMITTED_OR_BEYOND and told(bench, "one").tag == "a"


def test_a_deadline_that_staging_has_never_met_is_refused_at_once() -> None:
    bench = Bench(in_memory=True)
    for _ in range(ENOUGH):
        bench.core.timings.note({Phase.STAGING: 15.0})
    keep(bench, 1)
    bench.ask("r", from_memory=True, deadline_s=1.0)
    assert "staging" in str(told(bench, "r").blame) and not bench.said(cmd.Stage)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_deadline_that_somebody_sets_too_short_is_no_failure_of_the_run(in_memory: bool) -> None:
    bench = Bench(on_failure="abort", in_memory=in_memory)
    bench.open(1)
    bench.ask("r", deadline_s=2.0)
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=2.5)
    assert told(bench, "r").state is SaveState.ABORTED and not told(bench, "r").stop and bench.core.failures == 0
    bench.to_the_end()
    bench.open(2, due=True)
    for command in bench.until(cmd.Snapshot):
        bench.feed(ev.SnapshotFailed(command.head.attempt, command.node, "it raised"))
        break
    assert bench.now(cmd.Announce)[-1].stop  # one of the run's own is


def test_who_joined_a_save_and_is_late_after_its_manifest_was_drawn_up_is_in_doubt_and_hears_the_end() -> None:
    bench = Bench()
    bench.open(1, due=True)
    bench.ask("r", tag="before", deadline_s=3.0)
    bench.answer(bench.until(cmd.Accept)[0])
    bench.feed(ev.Tick(), after_s=3.5)
    assert told(bench, "r").in_doubt and "the deadline of the request" in str(told(bench, "r").blame)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND
    assert told(bench, "r").tag == "before" and not told(bench, "r").in_doubt
