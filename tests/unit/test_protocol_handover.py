"""What passes on: requests to an attempt that was found, a snapshot in memory to the next, a copy to a window."""

from __future__ import annotations

import asyncio

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator import events as ev
from lastgood.coordinator.messages import Blame, RecordState, SaveKind, SaveRequest, SaveState
from lastgood.coordinator.outcomes import COMMITTED_OR_BEYOND
from lastgood.coordinator.policies import Decision
from tests.unit.memory_world import Scene, manual, run
from tests.unit.protocol_bench import ACTOR0, Bench, found
from tests.unit.test_protocol_memory import committed_steps, held, keep, told

DUE, NOT_DUE = Decision(True, "due"), Decision(False, "not due")


def restarted(*heard: str) -> Bench:
    """A new coordinator; the one before was asked for "r" and died after these nodes had accepted."""
    bench = Bench(hear=())
    bench.feed(ev.ServedBefore("old", ("r",)))
    for node in heard:
        bench.hear(node, found(node, RecordState.ACCEPT))
    bench.feed(ev.RecoveryBegun(frozenset({"n1", "n2"})))
    bench.ask("r", kind=SaveKind.FINAL)
    return bench


def test_a_request_that_is_sent_again_hears_what_becomes_of_the_attempt_that_was_found() -> None:
    bench = restarted("n1", "n2")
    bench.to_the_end()
    assert told(bench, "r").state is SaveState.DURABLE


def test_a_request_that_is_sent_again_hears_that_the_attempt_is_in_doubt_and_what_came_of_it() -> None:
    bench = restarted("n1")
    assert told(bench, "r").in_doubt
    assert "n2 is not heard" in str(told(bench, "r").blame)
    bench.hear("n2", found("n2", RecordState.ACCEPT))
    bench.to_the_end()
    assert told(bench, "r").state is SaveState.DURABLE
    assert not told(bench, "r").in_doubt


def test_closing_goes_on_over_a_coordinator_that_died_between_the_last_record_and_completed() -> None:
    request = SaveRequest("close", SaveKind.FINAL, "the run was closed")

    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        for port in s.ports.values():
            port.gates["publish"] = asyncio.Event()
        await driver.save(request)
        while not all(port.records.get("e1-1") for port in s.ports.values()):
            await asyncio.sleep(0.01)
        await driver.stop()
        for port in s.ports.values():
            port.gates["publish"].set()
        new = await s.ready()
        assert await new.settle(100)
        await new.save(request)
        assert (await new.wait("close", SaveState.COMMITTED, 4500)).committed
        await new.stop()

    run(scene())


def test_waiting_for_durable_goes_on_over_a_coordinator_restart() -> None:
    async def scene() -> None:
        s = Scene()
        driver = await s.ready()
        await driver.open_window(1, None, NOT_DUE)
        s.store.down = True
        await driver.save(manual("r"))
        assert (await driver.wait("r", SaveState.COMMITTED, 30)).committed
        await driver.stop()
        s.store.down = False
        new = await s.ready()
        await new.save(manual("r"))
        assert (await new.wait("r", SaveState.DURABLE, 900)).state is SaveState.DURABLE
        await new.stop()

    run(scene())


def copied_once(bench: Bench) -> cmd.Snapshot:
    """The next snapshot for memory is under way and one node has voted; the order of the other one."""
    bench.feed(ev.WindowClosed())
    bench.open(2, memory=True)
    orders = {order.node: order for order in bench.until(cmd.Snapshot)}
    bench.answer(orders["n1"])
    return orders["n2"]


def test_a_member_that_dies_between_its_nodes_vote_and_the_last_one_has_its_snapshot_saved() -> None:
    bench = held(1)
    last = copied_once(bench)
    bench.feed(ev.MemberDropped(ACTOR0, "SIGKILL"))
    bench.answer(last)
    bench.to_the_end()
    assert committed_steps(bench) == [2]


def test_a_request_for_what_is_in_memory_moves_to_the_snapshot_that_takes_its_place() -> None:
    bench = held(1)
    last = copied_once(bench)
    bench.ask("r", from_memory=True)
    bench.answer(last)
    bench.to_the_end()
    assert committed_steps(bench) == [2]
    assert told(bench, "r").state in COMMITTED_OR_BEYOND


@pytest.mark.parametrize("on_failure", ["abort", "continue"])
def test_a_copy_that_met_an_update_is_no_failure(on_failure: str) -> None:
    bench = Bench(on_failure=on_failure)
    bench.open(1)
    bench.ask("r")
    bench.until(cmd.Snapshot)
    bench.feed(ev.SnapshotWindowClosed(bench.attempt.id, "n1", "an update", ACTOR0))
    assert not [each for each in bench.now(cmd.Announce) if each.blame is not None or each.stop]
    assert bench.core.failures == 0


def test_a_snapshot_in_memory_that_is_dropped_does_not_stop_training() -> None:
    bench = Bench(on_failure="abort")
    keep(bench, 1)
    bench.open(2, due=True)
    bench.until(cmd.Snapshot)
    bench.ask("r", from_memory=True)
    bench.feed(ev.MemoryDropped("the actors were replaced"))
    assert told(bench, "r").state is SaveState.ABORTED
    assert not told(bench, "r").stop


def test_failed_snapshots_for_memory_do_not_add_up_to_a_stop() -> None:
    bench = Bench()
    for step in range(1, 13):
        bench.feed(ev.WindowClosed())
        bench.open(step, memory=True)
        if step % 2:
            bench.until(cmd.Snapshot)
            bench.feed(ev.SnapshotFailed(bench.attempt.id, "n1", "slow", ACTOR0))
        bench.to_the_end()
    assert bench.core.failures == 0
    assert not bench.core.stop


def test_a_commit_that_comes_late_does_not_forget_what_has_failed_since_it_was_begun() -> None:
    bench = Bench(max_consecutive_failures=2)
    bench.open(1, due=True)
    stages = bench.until(cmd.Stage)  # training goes on, the save is still being written
    bench.feed(ev.WindowClosed())
    bench.feed(ev.WindowOpened(2, {}, {"n1": Blame("window", "late", "n1")}, DUE))
    assert bench.core.failures == 1
    for stage in stages:
        bench.answer(stage)
    bench.to_the_end()
    assert committed_steps(bench) == [1]
    assert bench.core.failures == 1
    bench.feed(ev.WindowOpened(3, {}, {"n1": Blame("window", "late", "n1")}, DUE))
    assert bench.core.stop
    bench.feed(ev.WindowClosed())
    bench.open(4, due=True)
    bench.to_the_end()
    assert bench.core.failures == 0  # this one was begun after them


def test_a_window_that_is_told_of_again_fails_once_and_not_at_all_when_it_opens_then() -> None:
    bench = Bench(max_consecutive_failures=2)
    late = {"n1": Blame("window", "late", "n1")}
    for _ in range(2):  # a stager was restarted in between
        bench.feed(ev.WindowOpened(1, {}, late, DUE))
    assert bench.core.failures == 1
    bench.open(1, due=True)
    assert bench.core.failures == 0
    bench.to_the_end()
    bench.feed(ev.WindowClosed())
    bench.feed(ev.WindowOpened(2, {}, late, DUE))
    bench.open(2)
    bench.feed(ev.WindowClosed())
    bench.feed(ev.WindowOpened(3, {}, late, DUE))
    bench.feed(ev.WindowOpened(4, {}, late, DUE))
    assert bench.core.stop
