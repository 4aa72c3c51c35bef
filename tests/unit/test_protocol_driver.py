"""The driver at work on nodes in memory: what a training run and its neighbours see of the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lastgood.coordinator.catalog import Standing
from lastgood.coordinator.driver import Driver
from lastgood.coordinator.messages import AttemptHead, MemberId, RecordState, SaveKind, SaveRequest, SaveState
from lastgood.coordinator.policies import Decision
from lastgood.storage.errors import FencedError, SnapshotError, StagingError, UsageError
from lastgood.storage.failpoints import VARIABLE, arm, fired
from lastgood.storage.manifest import Latest, LedgerEntry, Manifest, Tombstone, read_completed
from tests.unit.memory_world import PATHS, Scene, count, manual, run

DUE = Decision(True, "every step")
NOT_DUE = Decision(False, "not now")


def ended(driver: Driver) -> None:
    """What must hold at the end of every scene."""
    driver.core.invariants()
    assert driver.faults == []


def test_end_step_with_a_due_save_returns_once_copied_and_the_rest_goes_on_behind() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n2"].gates["stage"] = asyncio.Event()
        outcome = await driver.open_window(1, {"reward": 0.5}, DUE)
        assert outcome.opened and not outcome.stop
        (save,) = outcome.saves
        assert (save.state, save.step, save.kind, save.stall_s) == (SaveState.SNAPSHOT, 1, SaveKind.SCHEDULED, 0.25)
        s.ports["n2"].gates["stage"].set()
        done = await driver.wait(save.request_id, SaveState.DURABLE, 50)
        assert done.state is SaveState.DURABLE and done.attempt == "e1-1"
        assert (await driver.drain(10)).drained
        for port in s.ports.values():
            assert port.records["e1-1"][0] is RecordState.ACCEPT and "e1-1" in port.completed and "e1-1" in port.durable
        ended(driver)
        await driver.stop()

    run(scene())


def test_the_store_s_completed_comes_after_all_objects_and_before_the_pointers() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, {"reward": 0.5}, DUE)
        await driver.drain(50)
        keys = s.store.writes
        manifest = Manifest.from_bytes(s.store.get(PATHS.manifest(1, "e1-1")), where="store")
        assert manifest.participants == ("n1", "n2") and manifest.metrics == {"reward": 0.5}
        assert manifest.fingerprint == {"actor.size": 2, "trainer.size": 1} and manifest.parent is None
        order = [
            *(PATHS.shard(1, "e1-1", record.path) for record in manifest.shards),
            PATHS.manifest(1, "e1-1"),
            PATHS.completed(1, "e1-1"),
            PATHS.pointer(1),
            PATHS.latest,
        ]
        positions = [keys.index(key) for key in order]
        assert max(positions[:-4]) < positions[-4] < positions[-3] < positions[-2] < positions[-1]
        entry = LedgerEntry.from_bytes(s.store.get(PATHS.ledger(1, 1)), where="ledger")
        assert (entry.attempt, entry.nodes) == ("e1-1", ("n1", "n2"))
        latest = Latest.from_bytes(s.store.get(PATHS.latest), where="latest")
        assert latest.attempt == "e1-1" and latest.durable_at is not None
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_save_is_committed_and_announced_while_the_store_is_down_and_durable_when_it_is_back() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.store.down = True
        (save,) = (await driver.open_window(1, None, DUE)).saves
        assert (await driver.wait(save.request_id, SaveState.COMMITTED, 10)).committed
        lagging = await driver.drain(5)
        assert not lagging.drained and "not durable" in lagging.lagging[0]
        s.store.down = False
        assert (await driver.wait(save.request_id, SaveState.DURABLE, 20)).state is SaveState.DURABLE
        ended(driver)
        await driver.stop()

    run(scene())


def test_without_a_store_a_save_ends_at_committed() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready(store=None)
        await driver.open_window(1, None, DUE)
        assert (await driver.drain(10)).drained
        assert [c.state for c in driver.checkpoints()] == [Standing.COMMITTED]
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_request_in_mid_rollout_saves_the_last_finished_step_at_once() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(7, None, NOT_DUE)
        outcome = await driver.save(manual("r1", tag="before_risk"))
        assert outcome.attempt is not None and outcome.step == 7 and outcome.waits_for is None
        done = await driver.wait("r1", SaveState.COMMITTED, 10)
        assert done.committed and done.tag == "before_risk"
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_request_in_an_update_waits_for_its_end() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        await driver.close_window()
        outcome = await driver.save(manual("r1"))
        assert outcome.attempt is None and outcome.waits_for == "the update's end"
        window = await driver.open_window(2, None, NOT_DUE)
        assert [(save.request_id, save.step) for save in window.saves] == [("r1", 2)]
        assert (await driver.wait("r1", SaveState.COMMITTED, 10)).step == 2
        ended(driver)
        await driver.stop()

    run(scene())


def test_an_end_step_that_is_sent_again_while_it_runs_is_saved_once() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n1"].slow_s["snapshot"] = 3.0
        first = asyncio.ensure_future(driver.open_window(1, None, DUE))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(driver.open_window(1, None, DUE))
        outcomes = [await first, await second]
        assert [save.attempt for outcome in outcomes for save in outcome.saves] == ["e1-1", "e1-1"]
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_copy_that_met_an_update_is_taken_at_the_next_window() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        s.ports["n2"].updating = True  # its optimizer was faster than the word of it
        await driver.save(manual("r1"))
        waiting = await driver.wait("r1", SaveState.COMMITTED, 1)
        assert waiting.waits_for == "the update's end" and not waiting.failed
        await driver.open_window(2, None, NOT_DUE)
        done = await driver.wait("r1", SaveState.COMMITTED, 10)
        assert done.committed and done.step == 2
        assert s.ports["n1"].images == {} and len(s.ports["n1"].staged) == 1
        assert driver.core.failures == 0
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_deferred_request_whose_deadline_passes_is_told_so() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.save(manual("r1", deadline_s=3))
        outcome = await driver.wait("r1", SaveState.COMMITTED, 100)
        assert outcome.state is SaveState.ABORTED and "no update ended before the deadline" in str(outcome.blame)
        ended(driver)
        await driver.stop()

    run(scene())


def test_requests_of_one_step_share_an_attempt_and_another_tag_gets_its_own() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n1"].gates["stage"] = asyncio.Event()
        await driver.open_window(1, None, DUE)
        joined = await driver.save(manual("r1"))
        named = await driver.save(manual("r2", tag="a"))
        other = await driver.save(manual("r3", tag="b"))
        assert joined.attempt == named.attempt == "e1-1" and other.attempt is None
        s.ports["n1"].gates["stage"].set()
        outcomes = [await driver.wait(f"r{i}", SaveState.COMMITTED, 20) for i in (1, 2, 3)]
        assert [(o.committed, o.attempt, o.tag) for o in outcomes] == [
            (True, "e1-1", "a"),
            (True, "e1-1", "a"),
            (True, "e1-2", "b"),
        ]
        ended(driver)
        await driver.stop()

    run(scene())


def test_the_same_request_sent_again_is_served_once() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        for _ in range(3):
            await driver.save(manual("r1"))
        await driver.drain(20)
        assert (await driver.save(manual("r1"))).state is SaveState.DURABLE
        assert len(driver.core.attempts) == 1
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_due_save_waits_for_the_one_in_the_foreground_and_end_step_waits_with_it() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n1"].gates["stage"] = asyncio.Event()
        await driver.open_window(1, None, DUE)
        await driver.close_window()
        second = asyncio.ensure_future(driver.open_window(2, None, DUE))
        await asyncio.sleep(1)
        assert not second.done()
        s.ports["n1"].gates["stage"].set()
        outcome = await second
        assert outcome.saves[0].step == 2 and outcome.saves[0].state is not SaveState.ABORTED
        ended(driver)
        await driver.stop()

    run(scene())


@pytest.mark.parametrize(
    ("method", "error", "phase"),
    [
        ("snapshot", SnapshotError("the copy failed", member="actor:1"), "snapshotting"),
        ("stage", StagingError("no space left on /local"), "staging"),
    ],
)
def test_a_failing_node_costs_one_attempt_names_its_owner_and_leaves_nothing(
    method: str, error: Exception, phase: str
) -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n2"].fail[method] = error
        (save,) = (await driver.open_window(1, None, DUE)).saves
        outcome = await driver.wait(save.request_id, SaveState.COMMITTED, 20)
        assert outcome.state is SaveState.ABORTED and outcome.blame is not None and not outcome.stop
        assert (outcome.blame.phase, outcome.blame.node) == (phase, "n2") and str(error) in str(outcome.blame)
        assert outcome.blame.member == (MemberId("actor", 1) if method == "snapshot" else None)
        await driver.settle(5)
        await asyncio.sleep(1)
        assert all(not port.images and not port.staged for port in s.ports.values())
        await driver.close_window()
        (save,) = (await driver.open_window(2, None, DUE)).saves
        assert (await driver.wait(save.request_id, SaveState.COMMITTED, 20)).committed
        ended(driver)
        await driver.stop()

    run(scene())


@pytest.mark.parametrize("method", ["pause", "snapshot", "stage", "accept"])
def test_a_node_that_does_not_answer_is_named_when_the_deadline_passes(method: str) -> None:
    async def scene() -> None:
        s = Scene()
        s.ports["n2"].pausable = True
        driver = await s.ready()
        s.ports["n2"].hang.add(method)
        (save,) = (await driver.open_window(1, None, DUE)).saves
        outcome = await driver.wait(save.request_id, SaveState.COMMITTED, 90)
        assert outcome.state is SaveState.ABORTED and outcome.blame is not None
        assert outcome.blame.node == "n2" and "actor:1" in str(outcome.blame)
        s.ports["n2"].hang.clear()
        await driver.close_window()
        (save,) = (await driver.open_window(2, None, DUE)).saves
        assert (await driver.wait(save.request_id, SaveState.COMMITTED, 20)).committed
        await driver.drain(20)
        ended(driver)
        await driver.stop()

    run(scene())


def test_an_accept_that_landed_unheard_is_found_by_the_refusal_and_the_save_is_committed_after_all() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        n2 = s.ports["n2"]
        true_accept = n2.accept

        async def lands_but_never_answers(*args: Any) -> RecordState:
            await true_accept(*args)
            return await asyncio.get_running_loop().create_future()

        n2.accept = lands_but_never_answers  # type: ignore[method-assign]
        (save,) = (await driver.open_window(1, None, DUE)).saves
        outcome = await driver.wait(save.request_id, SaveState.COMMITTED, 90)
        assert outcome.committed and driver.core.failures == 0
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_node_lost_between_accept_and_answer_leaves_the_save_in_doubt_until_it_is_heard() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        n2 = s.ports["n2"]
        n2.gates["accept"] = asyncio.Event()
        (save,) = (await driver.open_window(1, None, DUE)).saves
        await asyncio.sleep(1)
        driver.lose_node("n2", "its host went dark")
        outcome = await driver.wait(save.request_id, SaveState.COMMITTED, 90)
        assert outcome.in_doubt and "n2 is not heard" in str(outcome.blame)
        assert [c.state for c in driver.checkpoints()] == [Standing.IN_DOUBT]
        assert s.ports["n1"].staged, "nothing is deleted while a participant is unheard"
        n2.records["e1-1"] = (RecordState.ACCEPT, s.ports["n1"].records["e1-1"][1])
        await driver.add_node(n2)
        assert (await driver.drain(20)).drained
        assert (await driver.wait(save.request_id, SaveState.DURABLE, 0)).state is SaveState.DURABLE
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_member_that_dies_while_copying_fails_the_save_at_once_and_later_it_does_not_matter() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n2"].hang.add("snapshot")
        opening = asyncio.ensure_future(driver.open_window(1, None, DUE))
        await asyncio.sleep(1)
        driver.drop_member(MemberId("actor", 1), "SIGKILL")
        outcome = await opening
        assert outcome.saves[0].blame is not None and outcome.saves[0].blame.member == MemberId("actor", 1)
        refused = await driver.save(manual("r1"))
        assert refused.failed and "actor:1" in str(refused.blame)
        s.ports["n2"].hang.clear()
        s.ports["n2"].process += 1
        driver.register("n2", s.ports["n2"].infos())
        s.ports["n2"].gates["stage"] = asyncio.Event()
        (save,) = (await driver.open_window(2, None, DUE)).saves
        driver.drop_member(MemberId("actor", 1), "SIGKILL while its shards are being staged")
        s.ports["n2"].gates["stage"].set()
        assert (await driver.wait(save.request_id, SaveState.COMMITTED, 20)).committed
        ended(driver)
        await driver.stop()

    run(scene())


def test_a_window_opens_only_when_all_members_agree_on_step_and_updates() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n2"].updates = 3
        outcome = await driver.open_window(1, None, DUE)
        assert not outcome.opened and "counts 3 optimizer updates" in str(outcome.blame)
        s.ports["n2"].updates = 0
        s.ports["n2"].fail["mark"] = RuntimeError("no")
        outcome = await driver.open_window(1, None, DUE)
        assert not outcome.opened and outcome.blame is not None and outcome.blame.node == "n2"
        assert (await driver.open_window(1, None, DUE)).opened
        ended(driver)
        await driver.stop()

    run(scene())


def test_failures_in_a_row_stop_training_by_policy() -> None:
    async def scene(on_failure: str, expected: list[bool]) -> None:
        s = Scene(on_failure=on_failure, max_consecutive_failures=2)
        driver = await s.ready()
        stops = []
        for step in (1, 2):
            s.ports["n1"].fail["snapshot"] = SnapshotError("no")
            stops.append((await driver.open_window(step, None, DUE)).stop)
            await driver.close_window()
        assert stops == expected
        await driver.stop()

    run(scene("continue", [False, True]))
    run(scene("abort", [True, True]))


def test_a_new_coordinator_knows_every_checkpoint_and_goes_on_numbering() -> None:
    async def scene() -> None:
        s = Scene()
        first = await s.ready()
        for step in (1, 2):
            await first.open_window(step, None, DUE)
            await first.close_window()
        await first.drain(20)
        await first.stop()
        second = s.new_driver()  # learns the roles from the stagers
        for port in s.ports.values():
            await second.add_node(port)
        await second.recover()
        assert [(c.step, c.attempt, c.state) for c in second.checkpoints()] == [
            (2, "e1-2", Standing.DURABLE),
            (1, "e1-1", Standing.DURABLE),
        ]
        second.resumed_from(second.checkpoints()[0].head)
        await second.open_window(3, None, DUE)
        await second.drain(20)
        newest = second.checkpoints()[0]
        assert (newest.epoch, newest.sequence) == (2, 3)
        manifest = Manifest.from_bytes(s.store.get(PATHS.manifest(3, newest.attempt)), where="store")
        assert manifest.parent is not None and manifest.parent.attempt == "e1-2"
        ended(second)
        await second.stop()

    run(scene())


def test_a_new_coordinator_takes_over_a_window_that_is_still_open_and_no_other() -> None:
    async def scene() -> None:
        s = Scene()
        first = await s.ready()
        await first.open_window(4, None, NOT_DUE)
        await first.stop()
        second = await s.ready()
        assert (await second.reopen_window(4)).opened
        assert (await second.save(manual("r1"))).step == 4
        assert (await second.wait("r1", SaveState.COMMITTED, 20)).committed
        await second.close_window()
        third = await s.ready()
        assert not (await third.reopen_window(4)).opened
        assert "mark" not in s.ports["n1"].log[s.ports["n1"].log.index("reopen") :]
        for driver in (second, third):
            await driver.stop()

    run(scene())


def test_the_older_coordinator_is_fenced_and_says_so() -> None:
    async def scene() -> None:
        s = Scene()
        first = await s.ready()
        await first.open_window(1, None, NOT_DUE)
        second = await s.ready()
        await first.save(manual("r1"))
        with pytest.raises(FencedError):
            await first.wait("r1", SaveState.COMMITTED, 20)
        with pytest.raises(FencedError):
            await first.open_window(2, None, DUE)
        with pytest.raises(FencedError):
            await first.save(manual("r2"))
        assert (await second.open_window(2, None, DUE)).opened
        await second.drain(20)
        assert [c.attempt for c in second.checkpoints()] == ["e2-1"]
        await first.stop()
        await second.stop()

    run(scene())


def test_recovery_finishes_what_was_accepted_and_refuses_what_was_not() -> None:
    async def scene(accepted: tuple[str, ...], committed: bool) -> None:
        s = Scene()
        first = await s.ready()
        for node in s.ports:
            if node not in accepted:
                s.ports[node].hang.add("accept")
        for port in s.ports.values():
            port.hang.add("publish")
        await first.open_window(1, None, DUE)
        await asyncio.sleep(1)
        await first.stop()
        for port in s.ports.values():
            port.hang.clear()
        second = await s.ready()
        assert await second.settle(10)
        assert [c.step for c in second.checkpoints() if c.committed] == ([1] if committed else [])
        await second.drain(20)
        await asyncio.sleep(1)
        for port in s.ports.values():
            assert ("e1-1" in port.completed) is committed and ("e1-1" in port.staged) is committed
        ended(second)
        await second.stop()

    run(scene(("n1", "n2"), True))
    run(scene(("n1",), False))
    run(scene((), False))


def test_resume_is_offered_what_is_whole_and_told_what_is_lost() -> None:
    async def scene() -> None:
        s = Scene()
        first = await s.ready()
        await first.open_window(1, None, DUE)
        await first.drain(20)
        await first.close_window()
        s.ports["n1"].hang.add("upload")
        await first.open_window(2, None, DUE)
        await first.settle(10)
        await asyncio.sleep(2)
        await first.stop()
        second = s.new_driver()
        await second.add_node(s.ports["n1"])
        await second.recover()
        candidates, lost = await second.candidates("auto")
        assert [Manifest.from_bytes(c.manifest, where=c.where).step for c in candidates] == [1]
        assert len(lost) == 1 and "step 2" in lost[0] and "n2" in lost[0]
        s.ports["n1"].hang.clear()
        await second.add_node(s.ports["n2"])
        candidates, lost = await second.candidates("latest")
        assert [Manifest.from_bytes(c.manifest, where=c.where).step for c in candidates] == [2, 1] and not lost
        assert [Manifest.from_bytes(c.manifest, where=c.where).step for c in (await second.candidates(1))[0]] == [1]
        await second.stop()

    run(scene())


def test_a_collected_attempt_is_not_completed_again() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n1"].gates["upload"] = asyncio.Event()
        await driver.open_window(1, None, DUE)
        await driver.settle(10)
        key = PATHS.completed(1, "e1-1")
        tombstone = Tombstone(
            run="run", attempt="e1-1", step=1, epoch=1, sequence=1, reason="kept 3", deleted_at="2030-01-01T00:00:00Z"
        )
        s.store.replace(key, tombstone.to_bytes())
        s.ports["n1"].gates["upload"].set()
        outcome = await driver.drain(20)
        assert not outcome.drained and "collected" in outcome.lagging[0]
        assert isinstance(read_completed(s.store.get(key), where=key), Tombstone)
        ended(driver)
        await driver.stop()

    run(scene())


def test_what_retention_collected_is_neither_listed_nor_called_lost_and_leftovers_are_named() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        for step in (1, 2):
            await driver.open_window(step, None, DUE)
            await driver.drain(20)
            await driver.close_window()
        oldest = driver.checkpoints()[-1].head
        tombstone = Tombstone(
            run="run", attempt="e1-1", step=1, epoch=1, sequence=1, reason="kept 1", deleted_at="2030-01-01T00:00:00Z"
        )
        s.store.replace(PATHS.completed(1, "e1-1"), tombstone.to_bytes())
        n1 = s.ports["n1"]
        for held in (n1.heads, n1.records, n1.staged, n1.completed):
            held.pop("e1-1", None)  # n2 was away
        driver.collected(oldest)
        assert [c.step for c in driver.checkpoints()] == [2]
        await driver.stop()
        second = await s.ready()
        assert [c.step for c in second.checkpoints()] == [2] and second.leftovers() == {"n2": [oldest]}
        candidates, lost = await second.candidates("auto")
        assert len(candidates) == 1 and lost == []
        assert (await second.drain(5)).drained
        ended(second)
        await second.stop()

    run(scene())


def test_an_upload_that_fails_is_tried_again_and_training_sees_nothing_of_it() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n2"].fail["upload"] = OSError("connection reset")
        await driver.open_window(1, None, DUE)
        assert (await driver.drain(30)).drained
        assert count(s.ports["n2"].log, "upload") == 2
        ended(driver)
        await driver.stop()

    run(scene())


def test_pause_comes_before_the_copy_and_release_after_it_where_asked() -> None:
    async def scene() -> None:
        s = Scene()
        s.ports["n2"].pausable = True
        driver = await s.ready()
        await driver.open_window(1, None, DUE)
        await driver.drain(20)
        log = [name for name in s.ports["n2"].log if name in ("pause", "snapshot", "release")]
        assert log == ["pause", "snapshot", "release"]
        assert "pause" not in s.ports["n1"].log and "release" not in s.ports["n1"].log
        ended(driver)
        await driver.stop()

    run(scene())


def test_close_window_waits_for_a_copy_that_runs() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        s.ports["n1"].slow_s["snapshot"] = 3.0
        await driver.save(manual("r1"))
        await driver.close_window()
        assert (await driver.wait("r1", SaveState.SNAPSHOT, 0)).attempt is not None
        assert s.ports["n1"].log.index("snapshot") < s.ports["n1"].log.index("close_window")
        assert (await driver.wait("r1", SaveState.COMMITTED, 20)).committed
        ended(driver)
        await driver.stop()

    run(scene())


def test_the_final_save_is_served_by_a_commit_of_the_same_window() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, DUE)
        await driver.drain(20)
        await driver.save(SaveRequest("final", SaveKind.FINAL, "close"))
        assert (await driver.wait("final", SaveState.DURABLE, 5)).attempt == "e1-1"
        await driver.save(manual("r1"))
        assert (await driver.wait("r1", SaveState.COMMITTED, 20)).attempt == "e1-2"
        ended(driver)
        await driver.stop()

    run(scene())


def test_whoever_waits_when_the_coordinator_ends_is_told_so() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.ports["n1"].gates["stage"] = asyncio.Event()
        (save,) = (await driver.open_window(1, None, DUE)).saves
        waiting = asyncio.ensure_future(driver.wait(save.request_id, SaveState.COMMITTED, 50))
        await asyncio.sleep(1)
        await driver.stop()
        with pytest.raises(UsageError, match="has ended"):
            await waiting

    run(scene())


def test_recovery_tells_only_what_was_not_over() -> None:
    async def scene() -> None:
        s = Scene()
        first = await s.ready()
        await first.open_window(1, None, DUE)
        await first.drain(20)
        await first.close_window()
        s.ports["n2"].hang.add("accept")
        await first.open_window(2, None, DUE)
        await asyncio.sleep(1)
        await first.stop()
        s.ports["n2"].hang.clear()
        second = s.new_driver()
        for port in s.ports.values():
            await second.add_node(port)
        (sentence,) = await second.recover()
        assert "step 2" in sentence and "n2 was heard and has no record" in sentence
        await second.stop()

    run(scene())


def test_waiting_for_an_unknown_request_says_what_to_do() -> None:
    async def scene() -> None:
        driver = await Scene().ready()
        with pytest.raises(UsageError, match="Send the save again"):
            await driver.wait("never", SaveState.COMMITTED, 1)
        assert driver.status()["waiting"] == [] and driver.status()["faults"] == []
        await driver.stop()

    run(scene())


def test_the_status_is_json_and_a_lost_disk_is_told(tmp_path: Any) -> None:
    import json

    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        s.store.down = True
        await driver.open_window(1, None, DUE)
        await driver.settle(10)
        await asyncio.sleep(3)
        n2 = s.ports["n2"]
        s.restart("n2")
        for held in (n2.staged, n2.records, n2.completed, n2.heads):
            held.clear()
        s.store.down = False
        await driver.add_node(n2)
        assert "came back without" in (await driver.drain(3)).lagging[0]
        json.dumps(driver.status())
        assert [(c.state, c.missing, c.whole) for c in driver.checkpoints()] == [(Standing.COMMITTED, ("n2",), False)]
        ended(driver)
        await driver.stop()

    run(scene())


def test_failpoints_stand_before_each_kind_of_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    points = ["staged", "snapshot", "stage", "accept", "publish", "write_ledger", "upload", "complete_remotely"]

    async def scene() -> None:
        s = Scene()
        s.settings["max_consecutive_failures"] = 100
        driver = await s.ready()
        for step, point in enumerate(points, 1):
            arm(tmp_path, f"coordinator.{point}", "raise")
            await driver.open_window(step, None, DUE)
            await driver.drain(60)
            await driver.close_window()
            assert fired(tmp_path, f"coordinator.{point}"), point
        failed = [a.head.step for a in driver.core.attempts.values() if a.blame is not None]
        assert failed == [1, 2, 3], "a failure after the votes costs nothing"
        ended(driver)
        await driver.stop()

    asyncio.run(scene())


def test_a_checkpoint_head_names_its_place() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(4, None, DUE)
        await driver.drain(20)
        assert driver.checkpoints()[0].head == AttemptHead("e1-1", 4, 1, 1)
        await driver.stop()

    run(scene())
