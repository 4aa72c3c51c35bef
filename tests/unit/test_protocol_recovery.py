"""The recovery table of DESIGN section 4, row by row; epochs; and what the catalog makes of disks, store and ledger."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.coordinator import catalog
from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.catalog import Standing
from lastgood.coordinator.messages import AttemptHead, Inventory, RecordState, SaveKind, SaveRequest, SaveState
from lastgood.coordinator.moves import PROVEN, Phase
from lastgood.coordinator.recovery import Verdict, decide
from lastgood.storage.errors import IllegalMoveError
from lastgood.storage.manifest import Completed, LedgerEntry
from tests.unit.protocol_bench import MANIFEST, Bench, found, head

ACCEPT, REFUSE, NONE, UNKNOWN = RecordState.ACCEPT, RecordState.REFUSE, RecordState.NONE, RecordState.UNKNOWN
BOTH = ("n1", "n2")
SHA = "0" * 64


@pytest.mark.parametrize(
    ("records", "proof", "heard", "verdict", "refuse_at"),
    [
        ({"n1": ACCEPT}, "COMPLETED stands at n1", ("n1",), Verdict.COMMITTED, ()),
        ({"n1": ACCEPT, "n2": ACCEPT}, None, BOTH, Verdict.COMMITTED, ()),
        ({"n1": ACCEPT, "n2": REFUSE}, None, BOTH, Verdict.ABORTED, ()),
        ({"n1": NONE, "n2": REFUSE}, None, BOTH, Verdict.ABORTED, ("n1",)),
        ({"n1": ACCEPT, "n2": NONE}, None, BOTH, Verdict.REFUSE_FIRST, ("n2",)),
        ({"n1": ACCEPT, "n2": UNKNOWN}, None, BOTH, Verdict.REFUSE_FIRST, ("n2",)),
        ({"n1": ACCEPT}, None, ("n1",), Verdict.IN_DOUBT, ()),
        ({"n2": REFUSE}, None, ("n2",), Verdict.ABORTED, ()),
    ],
)
def test_the_table_row_by_row(records, proof, heard, verdict, refuse_at) -> None:
    decision = decide(BOTH, records, proof, heard)
    assert (decision.verdict, decision.refuse_at) == (verdict, refuse_at)
    assert decision.reason and decision.reason[0] != " "


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([ACCEPT, REFUSE, NONE, UNKNOWN])),
    st.sets(st.sampled_from("abc")),
)
def test_no_two_coordinators_decide_differently_whatever_they_have_heard(records, heard) -> None:
    """What one decides from a part of the records, nobody can contradict from more of them."""
    certain = {node: record for node, record in records.items() if record in (ACCEPT, REFUSE)}
    part = decide("abc", {n: r for n, r in certain.items() if n in heard}, None, heard)
    whole = decide("abc", certain, None, set("abc"))
    if part.verdict is Verdict.COMMITTED:
        assert whole.verdict is Verdict.COMMITTED
    if part.verdict is Verdict.ABORTED:
        assert whole.verdict is Verdict.ABORTED
    if whole.verdict is Verdict.COMMITTED:
        assert part.verdict in (Verdict.COMMITTED, Verdict.IN_DOUBT, Verdict.REFUSE_FIRST)


def recovered(*at_n1, at_n2=None) -> Bench:
    """A new coordinator that has heard n1, and n2 when `at_n2` is given."""
    bench = Bench(hear=())
    bench.hear("n1", *at_n1)
    if at_n2 is not None:
        bench.hear("n2", *at_n2)
    bench.feed(ev.RecoveryBegun(frozenset(BOTH)))
    return bench


def test_completed_anywhere_is_rolled_forward_to_all() -> None:
    bench = recovered(found("n1", ACCEPT, completed=True), at_n2=[found("n2", ACCEPT)])
    assert [publish.node for publish in bench.now(cmd.Publish)] == ["n2"]
    bench.to_the_end()
    assert bench.attempt.phase is Phase.DURABLE and not bench.said(cmd.Refuse)


def test_all_accept_is_published() -> None:
    bench = recovered(found("n1", ACCEPT), at_n2=[found("n2", ACCEPT)])
    assert [publish.node for publish in bench.now(cmd.Publish)] == ["n1", "n2"]


def test_a_refuse_anywhere_is_told_to_all_and_then_files_go() -> None:
    bench = recovered(found("n1", REFUSE), at_n2=[found("n2", NONE)])
    assert [refuse.node for refuse in bench.now(cmd.Refuse)] == ["n2"] and not bench.said(cmd.Discard)
    bench.to_the_end()
    assert sorted(discard.node for discard in bench.said(cmd.Discard)) == ["n1", "n2"]


def test_a_reachable_participant_without_a_record_refuses_first() -> None:
    bench = recovered(found("n1", ACCEPT), at_n2=[found("n2", NONE)])
    assert [refuse.node for refuse in bench.now(cmd.Refuse)] == ["n2"]
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED


def test_a_stager_back_with_an_empty_disk_never_counts_as_accept() -> None:
    bench = recovered(found("n1", ACCEPT), at_n2=[])
    assert [refuse.node for refuse in bench.now(cmd.Refuse)] == ["n2"]


def test_an_unreachable_participant_leaves_it_in_doubt_until_it_is_heard() -> None:
    bench = recovered(found("n1", ACCEPT))
    assert bench.attempt.phase is Phase.IN_DOUBT and bench.out == []
    bench.hear("n2", found("n2", ACCEPT))
    assert bench.attempt.phase is Phase.COMMITTED
    bench = recovered(found("n1", ACCEPT))
    bench.hear("n2", found("n2", NONE))
    assert bench.attempt.phase is Phase.ABORTING and [r.node for r in bench.now(cmd.Refuse)] == ["n2"]


def test_an_attempt_without_any_record_waits_with_deletion_until_all_expected_nodes_are_heard() -> None:
    bench = recovered(found("n1", NONE))
    bench.to_the_end()
    assert bench.said(cmd.Refuse) and not bench.said(cmd.Discard)
    bench.hear("n2", found("n2", ACCEPT))
    bench.to_the_end()
    assert sorted(discard.node for discard in bench.said(cmd.Discard)) == ["n1", "n2"]


def test_an_aborted_attempt_that_turns_up_again_on_a_node_heard_later_is_cleaned_there() -> None:
    bench = Bench(hear=())
    bench.hear("n1", found("n1", NONE))
    bench.feed(ev.RecoveryBegun())
    bench.to_the_end()
    assert bench.attempt.phase is Phase.ABORTED
    bench.hear("n2", found("n2", NONE))
    bench.to_the_end()
    assert [discard.node for discard in bench.said(cmd.Discard)] == ["n1", "n2"]
    assert bench.attempt.phase is Phase.ABORTED


def test_the_store_s_word_and_the_ledger_s_prove_a_commit() -> None:
    for survey in (ev.StoreSurveyed(completed=(head(),)), ev.StoreSurveyed(ledger=(head(),))):
        bench = Bench(hear=())
        bench.hear("n1", found("n1", ACCEPT))
        bench.feed(survey)
        bench.feed(ev.RecoveryBegun(frozenset(BOTH)))
        assert bench.attempt.phase in (Phase.COMMITTED, Phase.DURABLE) and not bench.said(cmd.Refuse)


def test_what_is_durable_is_not_uploaded_again_and_every_node_is_told() -> None:
    bench = recovered(found("n1", ACCEPT, completed=True, durable=True), at_n2=[found("n2", ACCEPT, completed=True)])
    bench.to_the_end()
    assert not bench.said(cmd.Upload) and [note.node for note in bench.said(cmd.NoteDurable)] == ["n2"]


def test_attempts_are_decided_only_once_recovery_has_begun() -> None:
    bench = Bench(hear=())
    bench.hear("n1", found("n1", NONE))
    assert bench.attempt.phase is Phase.FOUND and bench.out == []


def test_sequences_go_on_from_the_highest_seen_anywhere() -> None:
    bench = recovered(found("n1", REFUSE, sequence=7), at_n2=[])
    bench.feed(ev.StoreSurveyed(ledger=(head("other", 2, 11),)))
    bench.open(401, due=True)
    assert (bench.attempt.head.epoch, bench.attempt.head.sequence) == (5, 12)


def test_the_parent_is_the_newest_commit_found_unless_a_resume_says_otherwise() -> None:
    def parent_of(bench: Bench) -> AttemptHead | None:
        bench.open(401, due=True)
        return next(c for c in bench.until(cmd.BuildManifest) if c.head.epoch == 5).draft.parent

    def durable() -> Bench:
        both = [found(node, ACCEPT, completed=True, durable=True) for node in BOTH]
        return recovered(both[0], at_n2=[both[1]])

    bench = durable()
    assert parent_of(bench) == head()
    bench = durable()
    older = AttemptHead("older", 300, 2, 3)
    bench.feed(ev.Resumed(older))
    assert parent_of(bench) == older
    bench = durable()
    bench.feed(ev.Resumed(None))
    assert parent_of(bench) is None


# ---- epochs


def test_a_fenced_coordinator_does_nothing_any_more_and_says_why() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.ask("r1", tag="x")
    bench.feed(ev.Fenced("n1 has seen epoch 6"))
    assert all(announce.in_doubt for announce in bench.now(cmd.Announce))
    assert bench.open(5, due=True)[0] == cmd.WindowVerdict(5, False, bench.now(cmd.WindowVerdict)[0].blame)
    (announce,) = bench.ask("r2")
    assert isinstance(announce, cmd.Announce) and "n1 has seen epoch 6" in str(announce.blame)
    assert bench.feed(ev.Tick(), after_s=100) == [] and bench.core.next_wakeup_s() == float("inf")


def test_a_node_that_has_seen_a_higher_epoch_or_holds_a_later_attempt_fences() -> None:
    for inventory in ({"epoch": 6}, {}):
        bench = Bench(hear=("n1",))
        attempts = () if inventory else (found("n2", NONE, attempt="newer", epoch=6),)
        bench.hear("n2", *attempts, **inventory)
        assert bench.core.fenced is not None and bench.out == []


def test_two_coordinators_of_one_epoch_are_noticed() -> None:
    bench = Bench(hear=("n1",))
    bench.hear("n2", found("n2", NONE, attempt="foreign", epoch=5))
    assert bench.core.fenced is not None and "made by another" in bench.core.fenced


def test_what_no_honest_disk_can_say_is_a_defect() -> None:
    bench = recovered(found("n1", REFUSE), at_n2=[found("n2", REFUSE)])
    bench.to_the_end()
    with pytest.raises(IllegalMoveError, match="though the attempt was refused"):
        bench.hear("n1", found("n1", ACCEPT, completed=True))
    bench = recovered(found("n1", ACCEPT, completed=True), at_n2=[found("n2", ACCEPT)])
    with pytest.raises(IllegalMoveError, match="changed to refuse"):
        bench.hear("n2", found("n2", REFUSE))


@pytest.mark.parametrize("record", [ACCEPT, REFUSE, NONE])
def test_a_node_that_gives_an_attempt_another_place_is_heard_and_only_its_word_on_that_one_does_not_count(
    record: RecordState,
) -> None:
    bench = Bench(hear=())
    bench.hear("n1", found("n1", ACCEPT))
    (alarm,) = [one for one in bench.hear("n2", found("n2", record, sequence=8)) if isinstance(one, cmd.Alarm)]
    assert "n2 holds attempt old as " in alarm.sentence
    assert bench.core.heard.keys() == {"n1", "n2"}
    out = bench.feed(ev.RecoveryBegun())
    asked = [one for one in out if isinstance(one, cmd.Refuse)]
    assert [(one.node, one.head.sequence) for one in asked] == [("n2", 7)]  # its write-once record decides
    assert not [one for one in out if isinstance(one, (cmd.Discard, cmd.Publish))]
    bench.hear("n2", found("n2", record, sequence=8))
    bench.feed(ev.Refused("old", "n2", record if record is not NONE else REFUSE))
    attempt = bench.core.attempts["old"]
    assert attempt.phase is (Phase.COMMITTED if record is ACCEPT else Phase.ABORTING)


def test_a_commit_that_is_proven_stays_so_whatever_a_node_with_a_damaged_file_calls_it() -> None:
    bench = recovered(found("n1", ACCEPT, completed=True), at_n2=[found("n2", ACCEPT)])
    out = bench.hear("n2", found("n2", REFUSE, sequence=8))
    assert not [one for one in out if isinstance(one, (cmd.Refuse, cmd.Discard))]
    assert bench.core.attempts["old"].phase in PROVEN
    told = {"n1": [found("n1", ACCEPT, sequence=8, completed=True)], "n2": [found("n2", ACCEPT)]}
    (checkpoint,) = catalog.merge(told, [completed("old", 400, 3, 7)])
    assert (checkpoint.sequence, checkpoint.where) == (7, ("n2", "store"))


# ---- restarts while an attempt is under way


@pytest.mark.parametrize("kind", [cmd.Pause, cmd.Snapshot, cmd.Stage])
def test_a_stager_that_restarts_before_its_vote_has_lost_its_images(kind: type[cmd.Command]) -> None:
    bench = Bench(pausing=["n1", "n2"])
    bench.open(4, due=True)
    bench.until(kind)
    bench.incarnations["n2"] += 1
    bench.hear("n2")
    assert bench.attempt.phase is Phase.ABORTING and bench.attempt.blame is not None
    assert bench.attempt.blame.node == "n2" and "images are gone" in bench.attempt.blame.reason


def test_a_stager_that_restarts_after_staging_can_still_accept() -> None:
    bench = Bench()
    bench.open(4, due=True)
    first, _ = bench.until(cmd.Accept)
    bench.answer(first)
    bench.incarnations["n2"] += 1
    own = found("n2", NONE, attempt=bench.attempt.id, epoch=5, sequence=1)
    bench.hear("n2", type(own)(**{**{f: getattr(own, f) for f in own.__dataclass_fields__}, "step": 4}))
    (accept,) = bench.now(cmd.Accept)
    assert accept.node == "n2"
    bench.answer(accept)
    assert bench.attempt.phase is Phase.COMMITTED


def test_an_inventory_asked_for_before_the_vote_does_not_contradict_it() -> None:
    bench = Bench()
    bench.open(4, due=True)
    asked_s = bench.now_s
    bench.now_s += 1
    bench.until(cmd.Publish)
    bench.incarnations["n2"] += 1
    old = Inventory("n2", str(bench.incarnations["n2"]), 5, bench.infos("n2"), ())
    bench.feed(ev.NodeHeard(old, asked_s))
    assert bench.attempt.lost_at == set() and bench.attempt.records["n2"] is ACCEPT


def test_a_disk_that_comes_back_empty_after_the_commit_is_told_and_not_published_to() -> None:
    bench = Bench()
    bench.open(4, due=True)
    bench.until(cmd.Upload)
    bench.now_s += 1
    bench.incarnations["n2"] += 1
    bench.hear("n2")
    assert bench.attempt.lost_at == {"n2"} and bench.attempt.phase is Phase.COMMITTED
    bench.feed(ev.Tick(), after_s=100)
    assert not bench.now(cmd.Upload) and not bench.now(cmd.Publish)


def test_a_request_of_an_earlier_incarnation_is_served_by_the_attempt_it_made() -> None:
    bench = Bench(hear=())
    bench.feed(ev.ServedBefore("old", ("r1",)))
    bench.hear("n1", found("n1", ACCEPT))
    bench.hear("n2", found("n2", ACCEPT))
    bench.feed(ev.RecoveryBegun())
    bench.to_the_end()
    (announce,) = bench.feed(ev.Asked(SaveRequest("r1", SaveKind.MANUAL, "again")))
    assert isinstance(announce, cmd.Announce)
    assert announce.state is SaveState.DURABLE and announce.head == head()


# ---- the catalog


def completed(attempt: str, step: int, epoch: int, sequence: int) -> Completed:
    return Completed(
        run="run",
        attempt=attempt,
        step=step,
        epoch=epoch,
        sequence=sequence,
        manifest_sha256=SHA,
        kind="manual",
        tag="t",
        participants=BOTH,
        committed_at="2030-01-01T00:00:00Z",
    )


def ledger(attempt: str, step: int, epoch: int, sequence: int) -> LedgerEntry:
    return LedgerEntry(
        run="run",
        attempt=attempt,
        step=step,
        epoch=epoch,
        sequence=sequence,
        nodes=BOTH,
        manifest_sha256=SHA,
        committed_at="2030-01-01T00:00:00Z",
    )


def test_the_catalog_orders_by_epoch_and_sequence_never_by_step() -> None:
    store = [completed("a", 900, 1, 5), completed("b", 100, 2, 6), completed("c", 500, 1, 4)]
    for listing in itertools.permutations(store):
        assert [c.attempt for c in catalog.merge({}, listing)] == ["b", "a", "c"]


def test_the_catalog_says_of_each_checkpoint_how_sure_it_is_and_where_it_is() -> None:
    inventories = {
        "n1": [
            found("n1", ACCEPT, attempt="whole", sequence=1, completed=True),
            found("n1", ACCEPT, attempt="stored", sequence=2, completed=True, durable=True),
            found("n1", ACCEPT, attempt="doubt", sequence=3, participants=("n1", "n3")),
            found("n1", REFUSE, attempt="refused", sequence=4),
            found("n1", NONE, attempt="under way", sequence=5),
            found("n1", ACCEPT, attempt="half", sequence=6, completed=True),
        ],
        "n2": [
            found("n2", ACCEPT, attempt="whole", sequence=1),
            found("n2", ACCEPT, attempt="refused", sequence=4),
        ],
    }
    merged = catalog.merge(inventories, [], [ledger("gone", 400, 3, 7)])
    assert {c.attempt: (c.state, c.where, c.missing, c.whole) for c in merged} == {
        "whole": (Standing.COMMITTED, ("n1", "n2"), (), True),
        "stored": (Standing.DURABLE, ("n1", "store"), ("n2",), True),
        "doubt": (Standing.IN_DOUBT, ("n1",), ("n3",), False),
        "half": (Standing.COMMITTED, ("n1",), ("n2",), False),
        "gone": (Standing.LOST, (), BOTH, False),
    }
    usable, told = catalog.candidates(merged, "auto")
    assert [c.attempt for c in usable] == ["stored", "whole"]
    assert len(told) == 3 and all("step 400" in sentence for sentence in told)
    assert ["n1, n2" in told[0], "n2" in told[1], "n3" in told[2]] == [True, True, True]


def test_a_resume_at_a_step_sees_only_that_step() -> None:
    store = [completed("a", 100, 1, 1), completed("b", 200, 1, 2), completed("c", 100, 1, 3)]
    merged = catalog.merge({}, store, [ledger("d", 200, 1, 4)])
    usable, told = catalog.candidates(merged, 100)
    assert [c.attempt for c in usable] == ["c", "a"] and told == []
    usable, told = catalog.candidates(merged, 200)
    assert [c.attempt for c in usable] == ["b"] and len(told) == 1
    assert catalog.candidates(merged, 300) == ([], [])


def test_an_unreadable_manifest_costs_a_tag_not_the_listing() -> None:
    (checkpoint,) = catalog.merge({"n1": [found("n1", ACCEPT, completed=True, participants=("n1",))]})
    assert (checkpoint.tag, checkpoint.kind, checkpoint.manifest) == (None, "", MANIFEST)
