"""One test per sentence of the protocol text (DESIGN section 4): the way of one save, and what may go wrong on it."""

from __future__ import annotations

import dataclasses

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.answers import failure
from lastgood.coordinator.messages import MemberReport, NodeSnapshot, RecordState, SaveKind, SaveState
from lastgood.coordinator.moves import EXPECTED, MOVES, Cause, Phase
from lastgood.coordinator.report import settled
from lastgood.storage.errors import IllegalMoveError, StagingError
from tests.unit.protocol_bench import ACTOR1, MANIFEST, TRAINER, Bench


def states(bench: Bench) -> list[SaveState]:
    return [announce.state for announce in bench.said(cmd.Announce)]


def test_a_save_climbs_the_ladder_and_each_state_is_announced_when_it_is_true() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.to_the_end()
    assert states(bench) == [
        SaveState.REQUESTED,
        SaveState.SNAPSHOT,
        SaveState.STAGED,
        SaveState.COMMITTED,
        SaveState.UPLOADING,
        SaveState.DURABLE,
    ]
    assert bench.attempt.phase is Phase.DURABLE and not bench.core.active


def test_when_all_have_answered_the_snapshot_training_may_go_on() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.now(cmd.Snapshot)
    bench.answer(first)
    assert bench.core.holds_training and not bench.now(cmd.Stage)
    bench.answer(second)
    assert not bench.core.holds_training and len(bench.now(cmd.Stage)) == 2


def test_an_overlapped_copy_does_not_hold_training_and_a_save_that_cannot_begin_does() -> None:
    bench = Bench(overlapped=True)
    bench.open(4, due=True)
    assert all(snapshot.order.overlapped for snapshot in bench.now(cmd.Snapshot))
    assert not bench.core.holds_training and bench.core.copying
    bench.until(cmd.Stage)
    bench.feed(ev.WindowClosed())
    bench.open(5, due=True)  # the one before is not committed yet
    assert bench.core.holds_training and not bench.core.copying
    bench.to_the_end()
    assert not bench.core.holds_training
    assert [attempt.head.step for attempt in bench.core.attempts.values()] == [4, 5]


def test_only_nodes_with_something_pausable_are_paused_before_and_released_after_every_copy() -> None:
    bench = Bench(pausing=["n2"])
    bench.open(4, due=True)
    (pause,) = bench.now(cmd.Pause)
    assert pause.node == "n2" and not bench.now(cmd.Snapshot)
    bench.answer(pause)
    first, second = bench.now(cmd.Snapshot)
    bench.answer(second)
    assert not bench.said(cmd.Release)
    bench.answer(first)
    assert [release.node for release in bench.now(cmd.Release)] == ["n2"]


def test_a_release_is_repeated_until_it_is_answered() -> None:
    bench = Bench(pausing=["n2"])
    bench.open(4, due=True)
    (release,) = bench.until(cmd.Release)
    bench.feed(ev.ReleaseFailed(release.head.attempt, "n2", "timeout"))
    bench.feed(ev.Tick(), after_s=1)
    assert bench.now(cmd.Release)


def test_what_was_paused_is_released_when_the_copy_fails() -> None:
    bench = Bench(pausing=["n2"])
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Snapshot)
    bench.feed(ev.SnapshotFailed(first.head.attempt, "n1", "no memory"))
    assert [release.node for release in bench.now(cmd.Release)] == ["n2"]


def test_the_trainers_may_die_once_everything_is_copied() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.Stage)
    for member in (ACTOR1, TRAINER):
        bench.feed(ev.MemberDropped(member, "SIGKILL"))
    for stage in bench.said(cmd.Stage):
        bench.answer(stage)
    bench.to_the_end()
    assert bench.attempt.phase is Phase.DURABLE


def test_a_member_that_dies_before_its_copy_is_blamed_at_once() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    (announce,) = bench.now(cmd.Announce)
    assert announce.state is SaveState.ABORTED and announce.blame is not None
    assert (announce.blame.member, announce.blame.node) == (ACTOR1, "n2")


def test_nothing_is_accepted_before_every_vote_is_in() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Stage)
    bench.answer(first)
    assert not bench.said(cmd.BuildManifest)
    bench.answer(second)
    (build,) = bench.now(cmd.BuildManifest)
    assert len(build.draft.shards) == 5 and build.draft.participants == ("n1", "n2")
    assert not bench.said(cmd.Accept)
    bench.answer(build)
    assert [accept.manifest for accept in bench.now(cmd.Accept)] == [MANIFEST, MANIFEST]


def test_the_attempt_is_committed_if_and_only_if_every_record_says_accept() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    assert bench.attempt.phase is Phase.ACCEPTING and not bench.said(cmd.Publish)
    bench.answer(second)
    assert bench.attempt.phase is Phase.COMMITTED and len(bench.now(cmd.Publish)) == 2


def test_the_save_is_announced_after_publish_and_a_first_try_of_the_ledger() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Publish)
    bench.answer(first)
    assert not bench.said(cmd.WriteLedger)
    bench.answer(second)
    (ledger,) = bench.now(cmd.WriteLedger)
    assert SaveState.COMMITTED not in states(bench) and ledger.participants == ("n1", "n2")
    bench.feed(ev.LedgerFailed(ledger.head.attempt, "the store is down"))
    assert SaveState.COMMITTED in states(bench)
    bench.feed(ev.Tick(), after_s=1)
    assert bench.now(cmd.WriteLedger), "the ledger is tried again"


def test_a_participant_lost_after_all_accepted_does_not_hold_the_commit_and_is_published_to_when_heard() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Publish)
    bench.feed(ev.NodeLost("n2", "dark"))
    bench.answer(first)
    bench.answer(bench.now(cmd.WriteLedger)[0])
    assert SaveState.COMMITTED in states(bench) and not bench.said(cmd.Upload)
    bench.hear("n2")
    (publish,) = bench.now(cmd.Publish)
    bench.answer(publish)
    assert len(bench.now(cmd.Upload)) == 2


def test_the_marker_in_the_store_comes_after_every_node_s_upload_and_nodes_are_told_last() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Upload)
    bench.answer(first)
    assert not bench.said(cmd.CompleteRemotely)
    bench.answer(second)
    (complete,) = bench.now(cmd.CompleteRemotely)
    assert not bench.said(cmd.NoteDurable)
    bench.answer(complete)
    assert len(bench.now(cmd.NoteDurable)) == 2 and SaveState.DURABLE in states(bench)


def test_an_upload_failure_leaves_it_committed_and_is_retried() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Upload)
    bench.feed(ev.UploadFailed(first.head.attempt, "n1", "reset"))
    assert bench.attempt.phase is Phase.COMMITTED
    bench.answer(second)
    bench.feed(ev.Tick(), after_s=1)
    assert [upload.node for upload in bench.now(cmd.Upload)] == ["n1"]
    bench.to_the_end()
    assert bench.attempt.phase is Phase.DURABLE


def test_objects_found_missing_are_uploaded_again_by_their_node() -> None:
    bench = Bench()
    bench.open(4, due=True)
    (complete,) = bench.until(cmd.CompleteRemotely)
    bench.feed(ev.RemoteFailed(complete.head.attempt, "one is missing", ("n2",)))
    bench.feed(ev.Tick(), after_s=1)
    assert [upload.node for upload in bench.now(cmd.Upload)] == ["n2"]


def test_several_committed_attempts_upload_oldest_first_one_at_a_time() -> None:
    bench = Bench()
    bench.open(1, due=True)
    first = bench.until(cmd.Upload)
    bench.open(2, due=True)
    while later := [command for command in bench.pending if command.head.step == 2]:
        bench.answer(later[0])
    assert bench.attempt.phase is Phase.COMMITTED and {c.head.step for c in bench.said(cmd.Upload)} == {1}
    for upload in first:
        bench.answer(upload)
    bench.answer(bench.now(cmd.CompleteRemotely)[0])
    assert {upload.head.step for upload in bench.now(cmd.Upload)} == {2}


# ---- votes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 5}, "copied step 5, the attempt saves step 4"),
        ({"updates": 5}, "after 5 optimizer updates"),
        ({"components": ("model",)}, "copied components"),
    ],
)
def test_a_snapshot_vote_that_does_not_fit_aborts_and_names_its_owner(change: dict[str, object], says: str) -> None:
    bench = Bench()
    bench.open(4, due=True)
    _, second = bench.now(cmd.Snapshot)
    (report,) = bench.report("n2", 4).members
    wrong = dataclasses.replace(report, **change)  # type: ignore[arg-type]
    bench.feed(ev.SnapshotTaken(second.head.attempt, "n2", NodeSnapshot("n2", (wrong,))))
    (announce,) = bench.now(cmd.Announce)
    assert announce.blame is not None and announce.blame.member == ACTOR1 and says in announce.blame.reason


@pytest.mark.parametrize("members", [(), (ACTOR1, ACTOR1), (ACTOR1, TRAINER)])
def test_every_member_votes_exactly_once(members: tuple[object, ...]) -> None:
    bench = Bench()
    bench.open(4, due=True)
    _, second = bench.now(cmd.Snapshot)
    reports = tuple(MemberReport(m, 4, 4, ("model", "optimizer")) for m in members)  # type: ignore[arg-type]
    bench.feed(ev.SnapshotTaken(second.head.attempt, "n2", NodeSnapshot("n2", reports)))
    assert bench.attempt.phase is Phase.ABORTING and bench.attempt.blame is not None
    assert bench.attempt.blame.node == "n2" and bench.attempt.blame.member is not None


def test_a_dropped_shard_names_its_owner_and_a_doubled_or_foreign_one_too() -> None:
    for change, says in ((-1, "was not staged"), (0, "twice"), (1, "was staged on n1")):
        bench = Bench()
        bench.open(4, due=True)
        _, second = bench.until(cmd.Stage)
        shards = bench.shards("n2")
        sent = {-1: shards[1:], 0: (*shards, shards[0]), 1: (shards[0].model_copy(update={"node": "n1"}), shards[1])}
        bench.feed(ev.Staged(second.head.attempt, "n2", sent[change]))
        assert bench.attempt.phase is Phase.ABORTING and bench.attempt.blame is not None
        assert says in bench.attempt.blame.reason and bench.attempt.blame.member == ACTOR1


# ---- deadlines


@pytest.mark.parametrize(
    ("kind", "after_s", "phase"),
    [
        (cmd.Pause, 5, "pausing"),
        (cmd.Snapshot, 10, "snapshotting"),
        (cmd.Stage, 20, "staging"),
        (cmd.Accept, 5, "accepting"),
    ],
)
def test_a_phase_that_lasts_too_long_names_members_nodes_and_phase(
    kind: type[cmd.NodeCommand], after_s: float, phase: str
) -> None:
    bench = Bench(pausing=["n1", "n2"])
    bench.open(4, due=True)
    asked = bench.until(kind)
    bench.answer(next(command for command in asked if command.node == "n1"))
    bench.feed(ev.Tick(), after_s=after_s + 0.1)
    blame = bench.attempt.blame
    assert blame is not None and (blame.phase, blame.node, blame.member) == (phase, "n2", ACTOR1)
    assert "n2 (actor:1)" in str(blame)


def test_a_save_with_a_deadline_of_its_own_ends_with_it_and_leaves_everything_as_it_was() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("r1", deadline_s=3)
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=3.1)
    (announce,) = bench.now(cmd.Announce)
    assert announce.state is SaveState.ABORTED and "the deadline of the save passed" in str(announce.blame)
    bench.to_the_end()
    assert [discard.node for discard in bench.said(cmd.Discard)] == ["n1", "n2"]
    assert bench.attempt.phase is Phase.ABORTED


def test_nodes_are_given_a_little_less_than_what_is_left() -> None:
    bench = Bench()
    bench.open(4)
    bench.ask("r1", deadline_s=3)
    assert [round(snapshot.order.deadline_s, 3) for snapshot in bench.now(cmd.Snapshot)] == [2.7, 2.7]


def test_the_core_says_when_it_wants_to_be_woken() -> None:
    bench = Bench()
    assert bench.core.next_wakeup_s() == float("inf")
    bench.open(4)
    bench.ask("r1", deadline_s=3)
    assert bench.core.next_wakeup_s() == bench.now_s + 3


# ---- aborts


def test_files_go_only_after_every_participant_has_told_its_record_once_accepts_were_sent() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    attempt = first.head.attempt
    bench.feed(ev.Accepted(attempt, "n1", RecordState.REFUSE))
    (refuse,) = bench.now(cmd.Refuse)
    assert refuse.node == "n2" and not bench.said(cmd.Discard)
    bench.feed(ev.Refused(attempt, "n2", RecordState.REFUSE))
    assert [discard.node for discard in bench.now(cmd.Discard)] == ["n1", "n2"]


def test_nothing_is_deleted_while_a_participant_is_unheard_and_the_next_save_does_not_wait_for_it() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    bench.feed(ev.Accepted(first.head.attempt, "n1", RecordState.REFUSE))
    bench.feed(ev.NodeLost("n2", "dark"))
    bench.feed(ev.Tick(), after_s=50)
    assert bench.attempt.phase is Phase.ABORTING and not bench.said(cmd.Discard)
    assert bench.core.foreground is None
    bench.hear("n2")
    assert [refuse.node for refuse in bench.now(cmd.Refuse)] == ["n2"]
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED


def test_an_attempt_that_failed_before_any_accept_is_cleaned_node_by_node() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Stage)
    bench.feed(ev.NodeLost("n2", "dark"))
    assert bench.attempt.phase is Phase.ABORTING
    (refuse,) = bench.now(cmd.Refuse)
    assert refuse.node == "n1" == first.node
    bench.answer(refuse)
    assert [discard.node for discard in bench.now(cmd.Discard)] == ["n1"]


def test_refusing_that_finds_every_accept_on_disk_goes_forward() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    bench.feed(ev.AcceptFailed(second.head.attempt, "n2", "timeout"))
    bench.feed(ev.Tick(), after_s=5.1)
    (refuse,) = bench.now(cmd.Refuse)
    bench.feed(ev.Refused(refuse.head.attempt, "n2", RecordState.ACCEPT))
    assert bench.attempt.phase is Phase.COMMITTED and bench.core.failures == 0
    bench.to_the_end()
    assert SaveState.ABORTED not in states(bench) and SaveState.DURABLE in states(bench)


def test_time_up_with_an_unheard_participant_is_told_as_in_doubt_and_neither_refused_nor_deleted() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    bench.answer(first)
    bench.feed(ev.NodeLost("n2", "dark"))
    bench.feed(ev.Tick(), after_s=5.1)
    (announce,) = bench.now(cmd.Announce)
    assert announce.in_doubt and bench.attempt.phase is Phase.IN_DOUBT
    assert not bench.said(cmd.Refuse) and not bench.said(cmd.Discard)


def test_an_accept_of_unknown_outcome_is_asked_again_while_there_is_time() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    bench.feed(ev.AcceptFailed(first.head.attempt, "n1", "timeout"))
    bench.feed(ev.Tick(), after_s=1)
    assert [accept.node for accept in bench.now(cmd.Accept)] == ["n1"]


def test_an_accept_that_the_node_s_own_disk_refused_ends_the_attempt_at_once_and_is_told() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    full = StagingError("no space left", path="/local/records/a", errno=28)
    bench.feed(failure(second, full), after_s=0.5)
    assert bench.attempt.phase is Phase.ABORTING
    assert [refuse.node for refuse in bench.now(cmd.Refuse)] == ["n2"]
    blame = bench.attempt.blame
    assert blame is not None and (blame.node, blame.waited_s) == ("n2", 0.5) and "no space left" in blame.reason
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED


def test_an_accept_that_failed_and_had_landed_all_the_same_is_found_by_the_refusal() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    bench.feed(failure(second, StagingError("the directory could not be synced", errno=5)))
    (refuse,) = bench.now(cmd.Refuse)
    bench.feed(ev.Refused(refuse.head.attempt, "n2", RecordState.ACCEPT))
    assert bench.attempt.phase is Phase.COMMITTED


def test_a_deadline_tells_what_the_late_node_said_last() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    bench.feed(failure(second, StagingError("the stager does not answer")))
    bench.feed(ev.Tick(), after_s=5.1)
    assert "n2 said last: StagingError: the stager does not answer" in str(bench.attempt.blame)


def test_a_node_that_no_longer_has_what_it_staged_never_accepts() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.until(cmd.Accept)
    bench.answer(first)
    bench.feed(ev.Accepted(second.head.attempt, "n2", RecordState.UNKNOWN))
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED and bench.attempt.blame is not None
    assert bench.attempt.blame.node == "n2"


def test_failures_in_a_row_say_stop_by_policy_and_a_commit_forgets_them() -> None:
    bench = Bench(max_consecutive_failures=2)
    stops = []
    for step, fails in ((1, True), (2, False), (3, True), (4, True)):
        bench.open(step, due=True)
        if fails:
            bench.feed(ev.SnapshotFailed(bench.attempt.id, "n1", "no"))
            stops.append(bench.now(cmd.Announce)[0].stop)
        bench.to_the_end()
    assert stops == [False, False, True]
    bench = Bench(on_failure="abort")
    bench.open(1, due=True)
    bench.feed(ev.SnapshotFailed(bench.attempt.id, "n1", "no"))
    assert bench.now(cmd.Announce)[0].stop


# ---- illegal moves


def test_an_illegal_event_raises_changes_nothing_and_tells_the_story() -> None:
    bench = Bench()
    bench.open(4, due=True)
    attempt = bench.attempt.id
    before = (bench.attempt.phase, list(bench.attempt.story), dict(bench.attempt.calls), bench.core.now_s)
    for event in (
        ev.Accepted(attempt, "n1", RecordState.ACCEPT),
        ev.ManifestBuilt(attempt, b""),
        ev.Published(attempt, "n1"),
        ev.SnapshotTaken(attempt, "n9", bench.report("n1", 4)),
        ev.Paused("never started", "n1"),
    ):
        with pytest.raises(IllegalMoveError) as caught:
            bench.core.handle(event, bench.now_s + 50)
        assert "Nothing was changed" in str(caught.value) or "Nothing was" in str(caught.value)
        after = (bench.attempt.phase, list(bench.attempt.story), dict(bench.attempt.calls), bench.core.now_s)
        assert after == before
    with pytest.raises(IllegalMoveError, match="requested -> snapshotting"):
        bench.core.handle(ev.Accepted(attempt, "n1", RecordState.ACCEPT), 0.0)


def test_a_write_once_record_that_changes_is_a_defect_and_not_believed() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    bench.answer(first)
    with pytest.raises(IllegalMoveError, match="write-once"):
        bench.core.handle(ev.Accepted(first.head.attempt, "n1", RecordState.REFUSE), bench.now_s)
    assert bench.attempt.records == {"n1": RecordState.ACCEPT}


def test_no_move_outside_of_the_table() -> None:
    bench = Bench()
    bench.open(4, due=True)
    with pytest.raises(IllegalMoveError, match="there is no move"):
        bench.attempt.move(Cause.ALL_ACCEPT, 0.0, "too early")
    assert bench.attempt.phase is Phase.SNAPSHOTTING


def test_every_phase_can_be_reached_and_all_but_the_last_can_be_left() -> None:
    reached = {Phase.REQUESTED, Phase.FOUND, *MOVES.values()}
    left = {phase for phase, _ in MOVES}
    assert reached == set(Phase) and left == set(Phase) - {Phase.DURABLE}
    assert {kind for _, kind in EXPECTED} >= {ev.Staged, ev.Accepted, ev.Discarded}


def test_a_late_answer_is_noted_and_changes_nothing() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, second = bench.now(cmd.Snapshot)
    bench.feed(ev.SnapshotFailed(first.head.attempt, "n1", "no"))
    out = bench.answer(second)
    assert out == [] and bench.attempt.story[-1][1] == "late: SnapshotTaken n2"


# ---- what the manifest is told


def test_the_draft_names_members_parent_metrics_and_who_asked() -> None:
    bench = Bench(fingerprint={"run.batch": 8})
    bench.open(3, due=True)
    bench.to_the_end()
    bench.open(4)
    bench.ask("r1", tag="good")
    (build,) = bench.until(cmd.BuildManifest)
    draft = build.draft
    assert draft.parent is not None and draft.parent.step == 3 and draft.head.sequence == 2
    assert (draft.kind, draft.tag, draft.requested_by) == (SaveKind.MANUAL, "good", "me")
    assert [(str(word.member), word.node, word.updates) for word in draft.members] == [
        ("actor:0", "n1", 4),
        ("actor:1", "n2", 4),
        ("trainer:0", "n1", 4),
    ]
    assert draft.fingerprint == {"run.batch": 8}


def test_votes_that_make_no_manifest_abort() -> None:
    bench = Bench()
    bench.open(4, due=True)
    (build,) = bench.until(cmd.BuildManifest)
    bench.feed(ev.ManifestFailed(build.head.attempt, "ValueError: two shards"))
    assert bench.attempt.phase is Phase.ABORTING and "two shards" in str(bench.attempt.blame)


def test_the_same_events_give_the_same_commands() -> None:
    runs = []
    for _ in range(2):
        bench = Bench(pausing=["n2"])
        bench.open(4, due=True)
        bench.to_the_end()
        runs.append(bench.all)
    assert runs[0] == runs[1]


def test_a_commit_that_only_waits_for_its_ledger_entry_is_not_settled() -> None:
    """A close that did not wait for it was told that its last save waits for the one under way."""
    bench = Bench()
    bench.open(4, due=True)
    (ledger,) = bench.until(cmd.WriteLedger)
    for command in [c for c in bench.pending if c is not ledger]:
        bench.answer(command)
    assert bench.core.foreground is bench.attempt and bench.attempt.phase is Phase.COMMITTED
    assert not settled(bench.core)
    bench.answer(ledger)
    assert bench.core.foreground is None and settled(bench.core)
