"""Copies of live state: what they wait for, what waits for them, and what makes them void."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import AttemptHead, LoadRequest, MemberId, NodeSnapshot, SnapshotOrder
from lastgood.storage import failpoints
from lastgood.storage.errors import SnapshotError, WindowClosedError
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from tests.unit.stager_world import ACTOR, Node, commit, head, snapshot, stage, training, update


@pytest.fixture
def paused_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The next copy pauses before its first byte. Answers the folder of the failpoints."""
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, str(points))
    failpoints.arm(points, "member.copy", "pause")
    return points


def test_a_snapshot_after_the_next_update_has_begun_is_refused_and_copies_nothing(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    update(state)
    with pytest.raises(WindowClosedError):
        snapshot(node, head())
    node.call("mark", 1, 2, 30.0)
    assert snapshot(node, head("A2", 2)).members[0].step == 2


def test_an_overlapped_copy_tells_when_updates_wait_for_it(node: Node, agent: Agent, paused_copy: Path) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    order = SnapshotOrder(head(), (ACTOR,), 30.0, overlapped=True)
    with ThreadPoolExecutor(2) as pool:
        vote = pool.submit(node.call, "snapshot", 1, order)
        node.call("copying", 1, head(), 30.0)
        assert not vote.done()
        before = state["model"].weight.detach().clone()
        updating = pool.submit(update, state)
        with pytest.raises(TimeoutError):
            updating.result(0.3)
        assert torch.equal(state["model"].weight, before)
        failpoints.release(paused_copy, "member.copy")
        vote.result(30.0)
        updating.result(30.0)
    assert not torch.equal(state["model"].weight, before)
    node.call("copying", 1, head(), 30.0)  # it is over: nothing to wait for
    manifest = commit(node, head())
    node.call("load", 1, head(), LoadRequest(manifest), 30.0, [ACTOR])
    node.call("apply", 1, head(), 30.0, [ACTOR])
    assert torch.equal(state["model"].weight, before)


def overlapped(node: Node, at: AttemptHead, *members: MemberId) -> NodeSnapshot:
    return node.call("snapshot", at.epoch, SnapshotOrder(at, members, 30.0, overlapped=True))


def hooked(monkeypatch: pytest.MonkeyPatch, agent: Agent, hook: Callable[[], None]) -> None:
    """Calls `hook` in the moment from which on end_step may return."""
    tell = agent._link.copying

    def copying(process: str, attempt: str) -> None:
        hook()
        tell(process, attempt)

    monkeypatch.setattr(agent._link, "copying", copying)


def test_a_write_as_soon_as_end_step_may_return_is_noticed(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)

    def write() -> None:
        with torch.no_grad():
            state["model"].weight.add_(1)

    hooked(monkeypatch, agent, write)
    with pytest.raises(SnapshotError, match="was written to while it was copied"):
        overlapped(node, head(), ACTOR)


def test_an_update_that_waits_for_the_copy_of_several_members_closes_the_window_of_none(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {role: training() for role in ("actor", "critic")}
    members = {role: Member.of(role, 0, 1, state) for role, state in states.items()}
    for member in members.values():
        agent.add(member, "m1")
    node.call("mark", 1, 1, 30.0)
    before = states["critic"]["model"].weight.detach().clone()
    with ThreadPoolExecutor(1) as pool:
        updates: list[Any] = []

        def update_critic() -> None:
            updates.append(pool.submit(update, states["critic"]))
            until = time.monotonic() + 30.0
            while members["critic"].gate.open_step is not None and time.monotonic() < until:
                time.sleep(0.001)

        hooked(monkeypatch, agent, update_critic)
        vote = overlapped(node, head(), ACTOR, MemberId("critic", 0))
        updates[0].result(30.0)
    assert [report.step for report in vote.members] == [1, 1]
    assert not torch.equal(states["critic"]["model"].weight, before)
    manifest = commit(node, head())
    node.call("load", 1, head(), LoadRequest(manifest), 30.0, [ACTOR])
    node.call("apply", 1, head(), 30.0, [ACTOR])
    assert torch.equal(states["critic"]["model"].weight, before)


def test_what_is_written_to_while_it_is_copied_is_void_and_named(node: Node, agent: Agent, paused_copy: Path) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    with ThreadPoolExecutor(1) as pool:
        vote = pool.submit(snapshot, node, head())
        while not failpoints.fired(paused_copy, "member.copy"):
            assert not vote.done()
            time.sleep(0.005)
        with torch.no_grad():
            state["model"].weight.add_(1)
        failpoints.release(paused_copy, "member.copy")
        with pytest.raises(SnapshotError, match=r"actor:0\.model\.weight was written to while it was copied"):
            vote.result(30.0)
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head("A2", 2))  # the next one is well


def test_an_update_that_wants_to_begin_waits_until_the_agent_has_copied(node: Node, agent: Agent) -> None:
    state = training()
    update(state)
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    before = state["model"].weight.detach().clone()
    provide, copying, updated = node.stager.provide, threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        copying.set()
        await asyncio.to_thread(updated.wait, 0.3)  # the update must not get through meanwhile
        return await provide(*arguments)

    node.stager.provide = slow  # type: ignore[method-assign]

    def updates() -> None:
        copying.wait(30)
        update(state)
        updated.set()

    thread = threading.Thread(target=updates)
    thread.start()
    snapshot(node, head())
    thread.join(30)
    stage(node, head())
    file = node.root / "staging/run/global_step_1/A1/actor/rank_00000.model.safetensors"
    assert torch.equal(load_file(file)["weight"], before)
    assert not torch.equal(state["model"].weight, before)


def test_a_copy_that_ends_after_its_attempt_was_given_up_blocks_nothing(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    provide, copying, go_on = node.stager.provide, threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        copying.set()
        await asyncio.to_thread(go_on.wait, 30)
        return await provide(*arguments)

    for number, give_up in enumerate(("refuse", "epoch"), start=1):
        node.stager.provide = slow  # type: ignore[method-assign]
        at = head(f"A{number}", epoch=number)
        copy = asyncio.run_coroutine_threadsafe(
            node.stager.snapshot(number, SnapshotOrder(at, (ACTOR,), 30.0)), node.loop.loop
        )
        assert copying.wait(30)
        if give_up == "refuse":
            node.call("refuse", 1, at, "another node failed")
            node.call("discard", 1, at)
        else:
            node.call("hello", 3, [])
        go_on.set()
        with pytest.raises(SnapshotError, match="given up"):
            copy.result(30)
        node.stager.provide = provide  # type: ignore[method-assign]
        copying.clear()
        go_on.clear()
        node.call("mark", number + 1, 1, 30.0)
        fresh = head(f"B{number}", epoch=number + 1)
        assert snapshot(node, fresh).members[0].step == 1
        commit(node, fresh)
