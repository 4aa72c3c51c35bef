"""The memory tier: the newest whole snapshot stays in memory, and is saved when a process dies or somebody asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import (
    AttemptHead,
    AttemptInventory,
    HeldSnapshot,
    Keepsake,
    RecordState,
    RoleDeclaration,
    SaveKind,
    SaveRequest,
    SaveState,
)
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.outcomes import COMMITTED_OR_BEYOND
from lastgood.coordinator.report import lagging, settled
from tests.unit.protocol_bench import ACTOR0, ACTOR1, COMPONENTS, HOSTS, MANIFEST, SIZES, TRAINER, Bench, found


def held(*steps: int) -> Bench:
    """A bench whose core has kept these steps in memory, one after the other."""
    bench = Bench()
    for step in steps:
        keep(bench, step)
    return bench


def keep(bench: Bench, step: int) -> None:
    bench.feed(ev.WindowClosed())
    bench.open(step, memory=True)
    bench.to_the_end()


def committed_steps(bench: Bench) -> list[int]:
    attempts = sorted(bench.core.attempts.values(), key=lambda a: a.order)
    return [a.head.step for a in attempts if a.commit_told]


def told(bench: Bench, request_id: str) -> cmd.Announce:
    return [announce for announce in bench.said(cmd.Announce) if request_id in announce.request_ids][-1]


def test_a_kept_snapshot_lets_training_go_on_and_touches_no_disk() -> None:
    bench = held(1)
    assert bench.attempt.phase is Phase.HELD and bench.core.memory.held is bench.attempt
    assert not bench.core.holds_training and bench.core.foreground is None
    assert not bench.said(cmd.Stage) and bench.core.failures == 0
    assert not lagging(bench.core) and settled(bench.core)


def test_the_next_snapshot_supersedes_it_once_it_is_whole_and_leaves_no_record() -> None:
    bench = held(1)
    bench.open(2, memory=True)
    first, second = bench.core.memory.held, bench.core.foreground
    assert first is not None and second is not None and first.head.step == 1
    snapshots = bench.until(cmd.Snapshot)
    bench.answer(snapshots[0])
    assert bench.core.memory.held is first  # the second is not whole yet
    bench.answer(snapshots[1])
    assert bench.core.memory.held is second and first.phase is Phase.ABORTING
    bench.to_the_end()
    assert first.phase is Phase.ABORTED and {c.node for c in bench.said(cmd.Discard)} == {"n1", "n2"}
    assert not bench.said(cmd.Refuse) and bench.core.failures == 0


def test_when_a_member_dies_the_snapshot_is_saved() -> None:
    bench = held(1, 2)
    bench.feed(ev.WindowClosed())
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    assert not settled(bench.core)  # a resume waits for it
    bench.to_the_end()
    assert committed_steps(bench) == [2] and bench.core.memory.held is None
    draft = bench.said(cmd.BuildManifest)[-1].draft
    assert draft.kind is SaveKind.MEMORY and "actor:1 is gone: SIGKILL" in draft.reason


def test_when_a_member_dies_during_the_next_copy_the_one_before_is_saved() -> None:
    bench = held(1)
    bench.open(2, memory=True)
    bench.answer(bench.until(cmd.Snapshot)[0])
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    bench.to_the_end()
    assert committed_steps(bench) == [1]


def test_a_save_that_is_due_supersedes_it_and_one_of_the_same_window_is_made_from_it() -> None:
    bench = held(1)
    bench.ask("r", tag="now")  # the window of step 1 is still open
    assert len(bench.core.attempts) == 1 and bench.core.foreground is bench.attempt
    bench.to_the_end()
    assert committed_steps(bench) == [1] and len(bench.said(cmd.Snapshot)) == 2
    assert bench.said(cmd.BuildManifest)[-1].draft.tag == "now"
    keep(bench, 2)
    bench.open(3, due=True, memory=True)
    bench.to_the_end()
    assert committed_steps(bench) == [1, 3]


def test_a_final_save_of_the_step_in_memory_copies_nothing_again() -> None:
    bench = held(1)
    bench.ask("close", kind=SaveKind.FINAL)
    bench.to_the_end()
    assert committed_steps(bench) == [1] and len(bench.said(cmd.Snapshot)) == 2


def test_no_snapshot_is_kept_while_a_save_is_under_way() -> None:
    bench = Bench()
    bench.open(1, due=True)
    bench.until(cmd.Stage)
    keep_open = len(bench.core.attempts)
    bench.feed(ev.WindowClosed())
    bench.open(2, memory=True)
    assert len(bench.core.attempts) == keep_open and not bench.core.holds_training
    bench.to_the_end()
    assert committed_steps(bench) == [1]


def test_what_is_in_memory_is_saved_on_request_whatever_the_members_do() -> None:
    bench = held(4)
    bench.feed(ev.WindowClosed())
    bench.ask("r", from_memory=True, tag="rescue")
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND
    assert committed_steps(bench) == [4]
    assert bench.said(cmd.BuildManifest)[-1].draft.reason == "every step; because of r"
    bench.ask("s", from_memory=True)
    assert "no snapshot is in memory" in str(told(bench, "s").blame)


def test_a_request_for_memory_joins_the_save_that_is_whole_in_memory_already() -> None:
    bench = Bench()
    bench.open(1, due=True)
    bench.ask("early", from_memory=True)
    assert told(bench, "early").state is SaveState.ABORTED  # still being copied
    bench.until(cmd.Stage)
    bench.ask("r", from_memory=True)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


def test_it_waits_for_the_save_under_way_and_a_request_for_it_keeps_its_deadline() -> None:
    bench = held(1)
    bench.open(2, due=True)
    snapshots = bench.until(cmd.Snapshot)
    bench.answer(snapshots[0])
    bench.ask("short", from_memory=True, deadline_s=1)
    bench.ask("long", from_memory=True, deadline_s=50)
    assert not settled(bench.core)
    bench.feed(ev.Tick(), after_s=1.1)
    assert "under way did not end" in str(told(bench, "short").blame)
    bench.answer(snapshots[1])  # the newer copy is whole: it serves the one that waits
    bench.to_the_end()
    assert committed_steps(bench) == [2]
    assert told(bench, "long").state in COMMITTED_OR_BEYOND


def test_a_failed_save_leaves_the_snapshot_in_memory_and_what_waits_for_it_goes_on() -> None:
    bench = held(1)
    bench.open(2, due=True)
    bench.until(cmd.Snapshot)
    bench.ask("r", from_memory=True)
    bench.feed(ev.SnapshotFailed(bench.attempt.id, "n1", "no", ACTOR0))
    bench.to_the_end()
    assert committed_steps(bench) == [1]
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


@pytest.mark.parametrize("how", ["restarted", "unheard", "resumed", "closed"])
def test_a_snapshot_that_is_lost_or_of_no_use_is_given_up_without_a_failure(how: str) -> None:
    bench = held(1)
    if how == "restarted":
        bench.incarnations["n1"] += 1
        bench.hear("n1")
    elif how == "unheard":
        bench.feed(ev.NodeLost("n1", "gone"))
        assert bench.core.memory.held is not None  # it may be heard again, with its images
        bench.ask("r", from_memory=True)
        assert "n1 is not heard" in str(told(bench, "r").blame)
        bench.incarnations["n1"] += 1
        bench.hear("n1")
    elif how == "resumed":
        bench.feed(ev.Resumed(None))
    else:
        bench.feed(ev.MemoryDropped("the run was closed"))
    assert bench.core.memory.held is None
    bench.to_the_end()
    assert committed_steps(bench) == [] and bench.core.failures == 0
    assert {c.node for c in bench.said(cmd.Discard)} == {"n1", "n2"}
    bench.open(2, due=True)
    bench.to_the_end()
    assert committed_steps(bench) == [2]


def still_held(
    node: str, *, step: int = 400, sequence: int = 7, origin: str = "old7", kind: SaveKind = SaveKind.MEMORY
) -> AttemptInventory:
    """What a node tells of a snapshot that an earlier coordinator held in its memory."""
    bench = Bench(hear=())
    roles = tuple(RoleDeclaration(role, SIZES[role], COMPONENTS[role], "m1") for role in SIZES)
    keepsake = Keepsake(roles, {"reward": 0.5}, (SaveRequest(f"{kind.value}-3-1", kind, "every step"),))
    held = HeldSnapshot(keepsake, bench.report(node, step), bench.infos(node), origin)
    none = RecordState.NONE
    return AttemptInventory(f"old{sequence}", step, 3, sequence, none, False, False, False, (), held=held)


def next_coordinator(**told: tuple[AttemptInventory, ...]) -> Bench:
    """A coordinator that has just heard its nodes. `told`: what they hold."""
    bench = Bench(hear=())
    for node in HOSTS:
        bench.hear(node, *told[node])
    bench.feed(ev.RecoveryBegun(frozenset(HOSTS)))
    return bench


def test_a_new_coordinator_takes_over_the_snapshot_that_every_node_still_holds() -> None:
    bench = next_coordinator(n1=(still_held("n1"),), n2=(still_held("n2"),))
    assert {command.order.origin for command in bench.now(cmd.Snapshot)} == {"old7"}
    assert not bench.said(cmd.Refuse)  # the images are not let go before they are taken over
    bench.hear("n1", still_held("n1"))  # a registration has changed meanwhile
    assert not bench.said(cmd.Refuse)
    bench.to_the_end()
    taken = bench.core.memory.held
    assert taken is not None and taken.head == AttemptHead("a5.8", 400, 5, 8)
    assert bench.core.attempts["old7"].phase is Phase.ABORTED and settled(bench.core)
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    bench.to_the_end()
    assert committed_steps(bench) == [400]
    draft = bench.said(cmd.BuildManifest)[-1].draft
    assert draft.metrics == {"reward": 0.5} and draft.participants == ("n1", "n2")
    assert {word.member: word.updates for word in draft.members} == {ACTOR0: 400, ACTOR1: 400, TRAINER: 400}


def test_what_it_takes_over_is_saved_at_once_when_those_that_made_it_are_gone() -> None:
    bench = Bench(hear=())
    bench.processes["n2"] = 2  # another process answers for actor:1 now
    for node in HOSTS:
        bench.hear(node, still_held(node))
    bench.feed(ev.RecoveryBegun(frozenset(HOSTS)))
    bench.feed(ev.MemberDropped(ACTOR0, "SIGKILL"))  # the copy was made long ago: nothing is asked of a member
    bench.to_the_end()
    assert committed_steps(bench) == [400]


def test_a_window_that_opens_meanwhile_and_a_request_for_memory_find_it() -> None:
    bench = next_coordinator(n1=(still_held("n1"),), n2=(still_held("n2"),))
    bench.open(400)  # as the new coordinator does when it takes the open window over
    bench.ask("r", from_memory=True)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND and committed_steps(bench) == [400]
    assert bench.core.requests.window is not None


def test_of_two_the_newest_whole_one_is_taken_over_and_the_rest_is_cleaned() -> None:
    newer = still_held("n1", step=401, sequence=8, origin="old8")
    bench = next_coordinator(n1=(still_held("n1"), newer), n2=(still_held("n2"),))  # n2 had not copied step 401 yet
    assert {command.order.origin for command in bench.now(cmd.Snapshot)} == {"old7"}
    bench.to_the_end()
    assert {(c.head.attempt, c.node) for c in bench.said(cmd.Discard)} >= {("old8", "n1")}


def test_what_a_coordinator_has_taken_over_half_way_the_next_one_takes_over() -> None:
    bench = next_coordinator(n1=(still_held("n1", sequence=8),), n2=(still_held("n2"),))  # n2 knows it as old7 still
    bench.to_the_end()
    assert bench.core.memory.held is not None


@pytest.mark.parametrize("how", ["not there", "filled again", "another step", "newer committed"])
def test_a_snapshot_that_is_not_whole_or_not_the_newest_is_not_taken_over(how: str) -> None:
    part = still_held("n2")
    at_n2: tuple[AttemptInventory, ...] = {
        "not there": (),
        "filled again": (replace(part, held=None),),
        "another step": (replace(still_held("n2", step=399), step=400),),
        "newer committed": (part, found("n2", RecordState.ACCEPT, sequence=9, completed=True)),
    }[how]
    bench = next_coordinator(n1=(still_held("n1"),), n2=at_n2)
    bench.to_the_end()
    assert bench.core.memory.held is None and not bench.said(cmd.Snapshot)
    assert bench.core.attempts["old7"].phase is Phase.ABORTED


def test_when_a_node_lets_go_before_it_is_taken_over_that_costs_the_snapshot_and_nothing_else() -> None:
    bench = next_coordinator(n1=(still_held("n1"),), n2=(still_held("n2"),))
    taken = bench.core.foreground
    assert taken is not None
    bench.feed(ev.SnapshotFailed(taken.id, "n1", "it is gone"))
    bench.to_the_end()
    assert bench.core.memory.held is None and bench.core.failures == 0
    assert bench.core.attempts["old7"].phase is Phase.ABORTED
    bench.open(401, due=True)
    bench.to_the_end()
    assert committed_steps(bench) == [401]


def test_a_save_that_was_under_way_is_taken_over_and_committed_once() -> None:
    due = SaveKind.SCHEDULED
    staged = replace(still_held("n1", kind=due), staged=True)
    accepted = replace(
        still_held("n2", kind=due), staged=True, record=RecordState.ACCEPT, participants=("n1", "n2"), manifest=MANIFEST
    )
    bench = next_coordinator(n1=(staged,), n2=(accepted,))  # it died between the first accept and the second
    taken = bench.core.foreground
    assert taken is not None and taken.kind is due
    bench.open(400, due=True)  # the driver repeats its end_step: the same step is not copied once more
    bench.to_the_end()
    assert committed_steps(bench) == [400] and len(bench.said(cmd.BuildManifest)) == 1
    assert bench.core.attempts["old7"].phase is Phase.ABORTED and bench.core.memory.held is None


def test_a_new_window_of_another_step_is_saved_by_itself() -> None:
    bench = next_coordinator(n1=(still_held("n1"),), n2=(still_held("n2"),))
    bench.open(401, due=True)
    bench.to_the_end()
    assert committed_steps(bench) == [401]


def test_what_a_snapshot_is_of_is_told_to_every_node() -> None:
    bench = held(1)
    bench.open(2, due=True)
    told = [command.order.keepsake for command in bench.said(cmd.Snapshot)]
    kinds = [[request.kind for request in keepsake.requests] for keepsake in told if keepsake is not None]
    assert kinds == [[SaveKind.MEMORY], [SaveKind.MEMORY], [SaveKind.SCHEDULED], [SaveKind.SCHEDULED]]


FULL = "no space left on device [ENOSPC]."


def full_disk(bench: Bench, node: str = "n2") -> list[cmd.Command]:
    """Answers until the node is asked to stage, and fails that."""
    asked = next(command for command in bench.until(cmd.Stage) if command.node == node)
    return bench.feed(ev.StageFailed(asked.head.attempt, node, FULL))


def saved_and_failed(**settings: Any) -> Bench:
    """A save of step 2 that is due fails on a full disk."""
    bench = Bench(**settings)
    keep(bench, 1)
    bench.feed(ev.WindowClosed())
    bench.open(2, due=True)
    full_disk(bench)
    return bench


def test_a_save_that_the_disk_does_not_take_stays_in_memory_and_is_saved_when_a_process_dies() -> None:
    bench = saved_and_failed(in_memory=True)
    attempt = bench.attempt
    assert bench.core.memory.held is attempt and attempt.head.step == 2 and bench.core.foreground is None
    (announce,) = bench.now(cmd.Announce)
    assert announce.state is SaveState.ABORTED and announce.kind is SaveKind.SCHEDULED and announce.request_ids
    blame = announce.blame
    assert blame is not None and blame.node == "n2" and "ENOSPC]. The snapshot stays in memory" in blame.reason
    assert bench.core.failures == 1 and not bench.said(cmd.Refuse)
    bench.to_the_end()  # the other node's answer is late, and what it has on the disk is asked for again
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    assert attempt.phase is Phase.STAGING
    bench.to_the_end()
    assert committed_steps(bench) == [2] and bench.core.failures == 0
    draft = bench.said(cmd.BuildManifest)[-1].draft
    assert (draft.kind, draft.tag) == (SaveKind.MEMORY, None) and draft.reason.startswith("member actor:1")


def test_it_is_tried_again_after_pauses_that_double_and_told_once() -> None:
    bench = saved_and_failed(in_memory=True, retry_s=1.0, retry_max_s=4.0)
    bench.feed(ev.MemberDropped(ACTOR1, "SIGKILL"))
    full_disk(bench)
    told_once = len(bench.said(cmd.Announce))
    for pause_s in (2.0, 4.0, 4.0):
        assert not settled(bench.core)  # a resume waits for it
        assert bench.core.next_wakeup_s() == bench.now_s + pause_s
        bench.feed(ev.Tick(), after_s=pause_s - 0.1)
        assert not bench.now(cmd.Stage)
        bench.feed(ev.Tick(), after_s=0.1)
        full_disk(bench)
    assert settled(bench.core) and "5 tries to save it failed" in str(bench.core.memory.unsaved)
    assert len(bench.said(cmd.Announce)) == told_once
    for _ in range(20):
        bench.feed(ev.Tick(), after_s=4.0)
        if bench.now(cmd.Stage):
            full_disk(bench)
    assert not bench.core.memory.wanted and bench.core.memory.held is not None  # until somebody asks
    bench.ask("r", from_memory=True)
    bench.to_the_end()
    assert told(bench, "r").state in COMMITTED_OR_BEYOND and committed_steps(bench) == [2]


def test_the_next_snapshot_supersedes_what_could_not_be_saved() -> None:
    bench = saved_and_failed(in_memory=True)
    failed = bench.attempt
    keep(bench, 3)
    assert failed.phase is Phase.ABORTED and bench.core.memory.held is bench.attempt
    assert {c.node for c in bench.said(cmd.Discard) if c.head == failed.head} == {"n1", "n2"}
    assert bench.core.failures == 1 and bench.core.memory.unsaved is None


@pytest.mark.parametrize("how", ["no memory tier", "its stager is gone", "its stager has restarted"])
def test_without_images_to_go_back_to_a_failed_save_is_given_up(how: str) -> None:
    if how == "no memory tier":
        bench = saved_and_failed(in_memory=False)
    else:
        bench = Bench(in_memory=True)
        bench.open(2, due=True)
        bench.until(cmd.Stage)
        if how == "its stager is gone":  # it may be only silent, until another one is there
            bench.feed(ev.NodeLost("n2", "SIGKILL"))
            assert bench.core.memory.held is bench.attempt
        bench.incarnations["n2"] = 2
        bench.hear("n2")
    assert bench.attempt.phase is Phase.ABORTING and bench.core.memory.held is None


def test_a_deadline_that_passes_while_it_is_staged_leaves_it_in_memory() -> None:
    bench = Bench(in_memory=True)
    bench.open(1)
    bench.ask("soon", deadline_s=15.0, tag="soon")
    bench.until(cmd.Stage)
    bench.feed(ev.Tick(), after_s=15.0)
    assert told(bench, "soon").state is SaveState.ABORTED
    assert bench.core.memory.held is bench.attempt and bench.attempt.tag is None
    bench.feed(ev.WindowClosed())
    bench.to_the_end()
    assert committed_steps(bench) == []


def test_a_snapshot_for_memory_that_fails_never_stops_training() -> None:
    bench = Bench(in_memory=True, on_failure="abort")
    bench.open(1, memory=True)
    asked = bench.until(cmd.Snapshot)[0]
    bench.feed(ev.SnapshotFailed(asked.head.attempt, asked.node, "it still waits to be staged"))
    (announce,) = bench.now(cmd.Announce)
    assert announce.state is SaveState.ABORTED and not announce.stop
    bench.to_the_end()
    bench.open(2, due=True)
    asked = bench.until(cmd.Snapshot)[0]
    bench.feed(ev.SnapshotFailed(asked.head.attempt, asked.node, "it raised"))
    assert bench.now(cmd.Announce)[-1].stop


def test_what_is_taken_over_for_a_request_whose_deadline_is_over_is_kept_without_it() -> None:
    late = SaveRequest("late", SaveKind.MANUAL, "by hand", "late", deadline_s=5.0, asked_at=1000.0)

    def of(node: str) -> AttemptInventory:
        held = still_held(node)
        assert held.held is not None
        keepsake = replace(held.held.keepsake, requests=(late,))
        return replace(held, held=replace(held.held, keepsake=keepsake))

    bench = Bench(hear=(), in_memory=True)
    for node in HOSTS:
        bench.hear(node, of(node))
    bench.feed(ev.RecoveryBegun(frozenset(HOSTS), wall_s=1006.0))
    assert told(bench, "late").state is SaveState.ABORTED and "6.0 s after it was asked for" in str(told(bench, "late"))
    bench.to_the_end()
    assert bench.core.memory.held is bench.attempt and bench.attempt.tag is None
