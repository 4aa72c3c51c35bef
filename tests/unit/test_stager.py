"""A stager and an agent without Ray: orders, images, staging, records, and what deaths and restarts do to them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import (
    AttemptHead,
    Grant,
    Line,
    LoadRequest,
    MemberId,
    MemberInfo,
    NodeSnapshot,
    RecordState,
    RoleDeclaration,
    SnapshotOrder,
)
from lastgood.storage import failpoints
from lastgood.storage.errors import (
    DeadlineError,
    FencedError,
    IntegrityError,
    SnapshotError,
    StagingError,
    StoreError,
    UsageError,
    WindowClosedError,
)
from lastgood.storage.image import read_image
from lastgood.storage.layout import RunPaths
from lastgood.storage.manifest import Completed, EpochNote, Manifest, MemberRecord, RoleRecord, ShardRecord
from lastgood.storage.store import FileStore
from lastgood.workers import disk
from lastgood.workers import staging as staging_module
from lastgood.workers.agent import Agent
from lastgood.workers.images import ImageState
from lastgood.workers.member import Member
from lastgood.workers.orders import Order, OrderKind
from lastgood.workers.processes import pid_namespace_of_this_process
from lastgood.workers.ray_link import RayStagerLink
from lastgood.workers.stager import Stager, StagerConfig
from tests.unit.storage_samples import completed_of

ACTOR = MemberId("actor", 0)


class Loop:
    """An event loop in a thread of its own, as an actor has it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class LocalLink(RayStagerLink):
    """An agent's link to a stager in this process: introduced without Ray, then over the socket."""

    def __init__(self, node: Any) -> None:
        super().__init__("run", "here")
        self._node = node

    def _find(self, method: str, *arguments: Any) -> Any:
        return self._node.call(method, *arguments)


class Node:
    """One node: a stager with its directories, on its own loop."""

    def __init__(self, root: Path, images_per_component: int = 1) -> None:
        self.root = root
        self.images_per_component = images_per_component
        self.loop = Loop()
        self.changes = 0
        self.stager = self.open()

    def open(self) -> Stager:
        store = FileStore(self.root / "store")
        for epoch in range(1, 10):  # as coordinators claim them
            store.create_exclusive(RunPaths("", "run").epoch(epoch), EpochNote(epoch=epoch).to_bytes())

        async def build() -> Stager:
            holder, images = f"pid {os.getpid()}", self.images_per_component
            config = StagerConfig("run", self.root / "staging", self.root, holder, "here", 5 << 20, images)
            return Stager(config, store, self.no_peer, self.changed)

        return self.loop.run(build())

    def restart(self) -> None:
        self.call("close")
        self.stager = self.open()

    def changed(self) -> None:
        self.changes += 1

    async def no_peer(self, node: str, head: AttemptHead, path: str) -> AsyncIterator[bytes]:
        if node:
            raise StagingError(f"no node {node}")
        yield b""

    def call(self, method: str, *arguments: Any) -> Any:
        return self.loop.run(getattr(self.stager, method)(*arguments))

    def close(self) -> None:
        self.call("close")
        self.loop.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    here = Node(tmp_path)
    yield here
    here.close()


@pytest.fixture
def agent(node: Node) -> Iterator[Agent]:
    here = Agent("run", LocalLink(node))
    yield here
    here.close()


def training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "cursor": {"seen": 5}}


def update(state: dict[str, Any]) -> None:
    state["model"](torch.randn(2, 4)).sum().backward()
    state["optimizer"].step()


def head(name: str = "A1", step: int = 1, epoch: int = 1, sequence: int = 1) -> AttemptHead:
    return AttemptHead(name, step, epoch, sequence)


def snapshot(node: Node, at: AttemptHead) -> Any:
    return node.call("snapshot", at.epoch, SnapshotOrder(at, (ACTOR,), 30.0))


def stage(node: Node, at: AttemptHead) -> tuple[ShardRecord, ...]:
    return tuple(node.call("stage", at.epoch, at, 30.0))


def manifest_of(node: Node, at: AttemptHead, shards: tuple[ShardRecord, ...]) -> bytes:
    components = {
        role: tuple(sorted(s.component for s in shards if s.role == role)) for role in {s.role for s in shards}
    }
    return Manifest(
        run="run",
        attempt=at.attempt,
        step=at.step,
        epoch=at.epoch,
        sequence=at.sequence,
        kind="scheduled",
        created_at="2031-05-06T07:08:09.123Z",
        roles={role: RoleRecord(world_size=1, components=names) for role, names in sorted(components.items())},
        members=tuple(MemberRecord(role=role, rank=0, node=node.stager.node, updates=1) for role in sorted(components)),
        participants=(node.stager.node,),
        shards=shards,
    ).to_bytes()


def commit(node: Node, at: AttemptHead) -> bytes:
    manifest = manifest_of(node, at, stage(node, at))
    assert node.call("accept", at.epoch, at, manifest) is RecordState.ACCEPT
    completed = Completed.of(Manifest.from_bytes(manifest, where="m"), manifest, "2031-05-06T07:08:10.000Z")
    node.call("publish", at.epoch, completed, manifest)
    return manifest


def test_a_marked_step_is_copied_staged_accepted_published_and_loaded_back(node: Node, agent: Agent) -> None:
    state = training()
    update(state)
    agent.add(Member.of("actor", 0, 1, state), "m1")
    report = node.call("mark", 1, 1, 30.0).members[0]
    assert (report.member, report.step, report.updates) == (ACTOR, 1, 0)
    vote = snapshot(node, head())
    assert vote.members[0].nbytes > 0
    weights = state["model"].weight.detach().clone()
    manifest = commit(node, head())
    assert node.call("hello", 1, []).attempts[0].completed
    node.call("upload", 1, head())
    update(state)
    state["cursor"]["seen"] = 99
    assert not torch.equal(state["model"].weight, weights)
    node.call("load", 1, head(), LoadRequest(manifest), 30.0)
    assert not torch.equal(state["model"].weight, weights)  # read and verified, nothing touched
    node.call("apply", 1, head(), 30.0)
    assert torch.equal(state["model"].weight, weights)
    assert state["cursor"] == {"seen": 5}
    node.call("forget", 1)


def test_the_staged_file_is_the_image_and_every_library_reads_it(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 0, 30.0)
    at = head(step=0)
    snapshot(node, at)
    stage(node, at)
    file = node.root / "staging/run/global_step_0/A1/actor/rank_00000.model.safetensors"
    assert torch.equal(load_file(file)["weight"], state["model"].weight)
    assert torch.equal(read_image(file.read_bytes())["weight"], state["model"].weight)


def test_a_snapshot_after_the_next_update_has_begun_is_refused_and_copies_nothing(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    update(state)
    with pytest.raises(WindowClosedError):
        snapshot(node, head())
    node.call("mark", 1, 2, 30.0)
    assert snapshot(node, head("A2", 2)).members[0].step == 2


def test_an_overlapped_copy_tells_when_updates_wait_for_it(
    node: Node, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, str(points))
    failpoints.arm(points, "member.copy", "pause")
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
        failpoints.release(points, "member.copy")
        vote.result(30.0)
        updating.result(30.0)
    assert not torch.equal(state["model"].weight, before)
    node.call("copying", 1, head(), 30.0)  # it is over: nothing to wait for
    manifest = commit(node, head())
    node.call("load", 1, head(), LoadRequest(manifest), 30.0)
    node.call("apply", 1, head(), 30.0)
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
    node.call("load", 1, head(), LoadRequest(manifest), 30.0)
    node.call("apply", 1, head(), 30.0)
    assert torch.equal(states["critic"]["model"].weight, before)


def test_what_is_written_to_while_it_is_copied_is_void_and_named(
    node: Node, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, str(points))
    failpoints.arm(points, "member.copy", "pause")
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    with ThreadPoolExecutor(1) as pool:
        vote = pool.submit(snapshot, node, head())
        while not failpoints.fired(points, "member.copy"):
            assert not vote.done()
            time.sleep(0.005)
        with torch.no_grad():
            state["model"].weight.add_(1)
        failpoints.release(points, "member.copy")
        with pytest.raises(SnapshotError, match=r"actor:0\.model\.weight was written to while it was copied"):
            vote.result(30.0)
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head("A2", 2))  # the next one is well


def died_after_sealing(node: Node, agent: Agent) -> tuple[torch.Tensor, bytes]:
    """A member dies when its copy is whole; the attempt commits. Answers its weights and the manifest."""
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    agent.close()
    assert node.call("hello", 1, []).members == ()
    return state["model"].weight.detach().clone(), commit(node, head())


def rot(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def resumed(node: Node, manifest: bytes) -> torch.Tensor:
    """The weights that a new process of the member is given."""
    state = training()
    update(state)
    new = Agent("run", LocalLink(node))
    new.add(Member.of("actor", 0, 1, state), "m2")
    try:
        node.call("load", 1, head(), LoadRequest(manifest), 30.0)
        node.call("apply", 1, head(), 30.0)
        node.call("forget", 1)
    finally:
        new.close()
    return state["model"].weight.detach().clone()


SHARD = "staging/run/global_step_1/A1/actor/rank_00000.model.safetensors"


def test_images_outlive_their_process_and_a_resume_reads_from_them(node: Node, agent: Agent) -> None:
    weights, manifest = died_after_sealing(node, agent)
    rot(node.root / SHARD, -1 + (node.root / SHARD).stat().st_size)  # so it cannot be from there
    assert torch.equal(resumed(node, manifest), weights)
    assert node.stager._staging._room.nbytes() == 0  # nobody needs them after it


def test_a_damaged_image_is_passed_over_for_the_file(node: Node, agent: Agent) -> None:
    weights, manifest = died_after_sealing(node, agent)
    for _, image in node.stager._staging._slots.images():
        rot(image.path, 4096 + 20)
    assert torch.equal(resumed(node, manifest), weights)


def test_an_image_that_was_filled_again_is_not_read(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    manifest, weights = commit(node, head()), state["model"].weight.detach().clone()
    update(state)
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head("A2", 2, 1, 2))
    node.call("load", 1, head(), LoadRequest(manifest), 30.0)
    node.call("apply", 1, head(), 30.0)
    assert torch.equal(state["model"].weight, weights)


def test_a_new_coordinator_hears_of_images_that_nobody_staged_and_can_discard_them(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    found = node.call("hello", 2, []).attempts
    assert [(a.attempt, a.record, a.staged) for a in found] == [("A1", RecordState.NONE, False)]
    assert node.call("refuse", 2, head(), "its coordinator is gone") is RecordState.REFUSE
    node.call("discard", 2, head())
    node.call("mark", 2, 2, 30.0)
    assert snapshot(node, head("A2", 2, 2, 2)).members[0].step == 2  # the images are free again


def test_images_are_reused_from_save_to_save(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    sizes = set()
    for step in range(1, 6):
        node.call("mark", 1, step, 30.0)
        at = head(f"A{step}", step, 1, step)
        snapshot(node, at)
        commit(node, at)
        sizes.add((node.stager._staging._room.nbytes(), node.stager._staging._room._count))
    assert len(sizes) == 1


def test_an_attempt_staged_before_a_restart_can_still_be_accepted(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    shards = stage(node, head())
    agent.close()
    node.restart()
    assert node.call("accept", 1, head(), manifest_of(node, head(), shards)) is RecordState.ACCEPT


def test_an_attempt_whose_images_died_with_the_stager_is_never_accepted(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    agent.close()
    node.restart()
    with pytest.raises(StagingError, match="no images"):
        stage(node, head())
    assert node.call("accept", 1, head(), b"{}") is RecordState.UNKNOWN
    assert list(node.root.glob("lastgood.*/image-*")) == []


def test_an_agent_registers_again_by_itself_when_its_stager_is_restarted(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    agent._link = LocalLink(node)
    node.restart()
    # An order for a process that this stager does not know yet is asked until the agent has registered again.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not node.call("hello", 1, []).members:
        threading.Event().wait(0.01)
    assert node.call("mark", 1, 1, 30.0).members[0].member == ACTOR


def test_records_are_written_once(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    shards = stage(node, head())
    assert node.call("refuse", 1, head(), "changed my mind") is RecordState.REFUSE
    assert node.call("accept", 1, head(), manifest_of(node, head(), shards)) is RecordState.REFUSE
    node.call("discard", 1, head())
    assert not (node.root / "staging/run/global_step_1").exists()
    assert node.call("hello", 1, []).attempts[0].record is RecordState.REFUSE


def test_a_committed_attempt_is_not_discarded(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    with pytest.raises(UsageError, match="not discarded"):
        node.call("discard", 1, head())


class Queue:
    """A component that keeps moving on its own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load")

    def pause(self) -> None:
        self.calls.append("pause")

    def release(self) -> None:
        self.calls.append("release")


def test_what_is_paused_is_released_once_also_by_a_new_coordinator(node: Node, agent: Agent) -> None:
    queue = Queue()
    agent.add(Member.of("actor", 0, 1, {"queue": queue}), "m1")
    node.call("hello", 1, [])
    node.call("pause", 1, head(), 30.0)
    node.call("release", 1, head())
    node.call("release", 1, head())
    node.call("pause", 1, head(), 30.0)  # overtaken by the release
    assert queue.calls == ["pause", "release"]
    node.call("pause", 1, head("A2"), 30.0)
    node.call("hello", 2, [])
    assert queue.calls == ["pause", "release", "pause", "release"]


def test_a_manifest_with_other_shards_than_were_staged_is_not_accepted(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    shards = stage(node, head())
    node.call("mark", 1, 2, 30.0)
    other = head("A2", 2, 1, 2)
    snapshot(node, other)
    stage(node, other)
    changed = tuple(s.model_copy(update={"chunks": ()}) for s in shards)
    with pytest.raises(IntegrityError, match="other shards"):
        node.call("accept", 1, head(), manifest_of(node, head(), changed))


def test_a_store_that_is_another_place_on_this_node_is_refused(node: Node) -> None:
    with pytest.raises(StoreError, match="not the same place on every node"):
        node.call("hello", 77, [])


def test_every_call_of_a_coordinator_refuses_the_past(node: Node) -> None:
    node.call("hello", 7, [])
    at = head(epoch=6)
    completed = completed_of(1, "A1", epoch=6, participant=node.stager.node)
    calls: dict[str, tuple[Any, ...]] = {
        "hello": ([],),
        "mark": (1, 1.0),
        "reopen": (1, 1.0),
        "close_window": (1.0,),
        "grant": (Grant(Line(6, 1, (), 0), 3, 2),),
        "pause": (at, 1.0),
        "copying": (at, 1.0),
        "release": (at,),
        "snapshot": (SnapshotOrder(at, (), 1.0),),
        "stage": (at, 1.0),
        "accept": (at, b""),
        "refuse": (at, "no"),
        "publish": (completed, b"{}"),
        "upload": (at,),
        "note_durable": (at,),
        "discard": (at,),
        "collect": (at, "no"),
        "load": (at, LoadRequest(b""), 1.0),
        "apply": (at, 1.0),
        "forget": (),
    }
    for method, arguments in calls.items():
        with pytest.raises(FencedError):
            node.call(method, 6, *arguments)
    assert [path.name for path in (node.root / "staging/run").iterdir() if path.is_dir() and "step" in path.name] == []


def test_an_agent_refuses_orders_of_the_past(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 5, 1, 30.0)
    process = next(iter(node.stager._processes.hosts()))
    order = Order("late", OrderKind.MARK, 4, 30.0, (ACTOR,), 2)
    with pytest.raises(FencedError, match="epoch 5"):
        node.loop.run(node.stager._processes.ask(process, order))
    assert snapshot(node, head(epoch=5)).members[0].step == 1  # the late mark changed nothing


def test_an_image_that_was_not_sealed_for_the_attempt_is_never_staged(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    shard = node.stager._staging._snapshots["A1"].shards[0]
    image = node.stager._staging._slots.find((shard.member, shard.component), shard.image)
    assert image is not None
    used = image.used_bytes
    for state, attempt, nbytes in (
        (ImageState.FILLING, "A1", used),
        (ImageState.SEALED, "A0", used),
        (ImageState.SEALED, "A1", used - 4096),
    ):
        image._store(state, nbytes, attempt)
        with pytest.raises(SnapshotError, match="not sealed for A1"):
            node.stager._staging.checked(head(), shard)
    image._store(ImageState.SEALED, used, "A1")
    assert node.stager._staging.checked(head(), shard) == shard


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


def test_a_manifest_of_another_attempt_is_not_accepted(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    shards = stage(node, head())
    for other in (head("A9"), head(step=2), head(epoch=2), head(sequence=2)):
        with pytest.raises(IntegrityError):
            node.call("accept", 1, head(), manifest_of(node, other, shards))
    assert node.call("accept", 1, head(), manifest_of(node, head(), shards)) is RecordState.ACCEPT


def test_pointers_come_after_completed_and_never_go_back(node: Node, agent: Agent, monkeypatch: Any) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    changed: list[str] = []

    def noted(write: Any) -> Any:
        def call(path: Path, data: bytes) -> Any:
            changed.append("/".join(path.relative_to(node.root / "staging/run").parts[:]))
            return write(path, data)

        return call

    for name in ("create_once", "replace_durably"):
        monkeypatch.setattr(disk, name, noted(getattr(disk, name)))
    manifests = {}
    for name, sequence in (("A1", 1), ("A2", 2)):
        node.call("mark", 1, 1, 30.0)
        at = head(name, 1, 1, sequence)
        snapshot(node, at)
        manifests[name] = commit(node, at)
    publish = [name for name in changed if "A1" in name or name in ("latest.json", "global_step_1/COMPLETED")][:6]
    order = ["manifest.json", "A1/COMPLETED", "global_step_1/COMPLETED", "latest.json"]
    places = [next(i for i, name in enumerate(publish) if name.endswith(end)) for end in order]
    assert places == sorted(places), publish
    old = Manifest.from_bytes(manifests["A1"], where="m")
    node.call("publish", 1, Completed.of(old, manifests["A1"], "2031-05-06T07:08:10.000Z"), manifests["A1"])
    for name in ("latest.json", "global_step_1/COMPLETED"):
        assert b'"attempt":"A2"' in (node.root / "staging/run" / name).read_bytes()


def test_noting_a_durable_checkpoint_never_moves_latest_back(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    for name, sequence in (("A1", 1), ("A2", 2)):
        node.call("mark", 1, sequence, 30.0)
        at = head(name, sequence, 1, sequence)
        snapshot(node, at)
        if name == "A1":
            commit(node, at)
    second = head("A2", 2, 1, 2)
    manifest = manifest_of(node, second, stage(node, second))
    assert node.call("accept", 1, second, manifest) is RecordState.ACCEPT
    completed = Completed.of(Manifest.from_bytes(manifest, where="m"), manifest, "2031-05-06T07:08:10.000Z")
    publish = threading.Thread(target=lambda: node.call("publish", 1, completed, manifest))
    replace = disk.replace_durably

    def between(path: Path, data: bytes) -> None:
        if b"durable_at" in data and publish.ident is None:
            publish.start()
            publish.join(0.3)  # the next commit is published just now, if anybody lets it
        replace(path, data)

    monkeypatch.setattr(disk, "replace_durably", between)
    node.call("note_durable", 1, head())
    publish.join(60)
    assert b'"attempt":"A2"' in (node.root / "staging/run/latest.json").read_bytes()


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


def test_only_the_threads_that_stage_have_low_priority(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: set[str] = set()
    monkeypatch.setattr(staging_module, "lower_this_thread", lambda: lowered.add(threading.current_thread().name))
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    stage(node, head())
    assert lowered and all(name.startswith("lastgood-stage") for name in lowered)


def test_a_failed_write_gives_the_space_back_before_anybody_asks(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    write = staging_module.write_image

    def full(payload: Any, place: Path, **options: Any) -> Any:
        if "optimizer" in place.name:
            raise StagingError("the disk is full", path=str(place))
        return write(payload, place, **options)

    monkeypatch.setattr(staging_module, "write_image", full)
    with pytest.raises(StagingError, match="full"):
        stage(node, head())
    assert list((node.root / "staging/run").rglob("*.safetensors")) == []
    assert node.call("refuse", 1, head(), "full") is RecordState.REFUSE


def test_an_image_that_grows_is_unmapped_before_the_larger_one_is_asked_for(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    before = agent._paths[ACTOR, "cursor"]
    mapped_then: list[bool] = []
    provide = node.stager.provide

    async def watched(*arguments: Any) -> Any:
        mapped_then.append(before in agent._images)
        return await provide(*arguments)

    node.stager.provide = watched  # type: ignore[method-assign]
    state["cursor"]["more"] = torch.zeros(100_000)
    node.call("mark", 1, 2, 30.0)
    at = head("A2", 2, 1, 2)
    snapshot(node, at)
    commit(node, at)
    assert mapped_then == [False]


def test_a_changed_manifest_counts_as_absent_wherever_it_lies(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    run = node.root / "staging/run"
    manifest, record = run / "global_step_1/A1/manifest.json", run / "records/A1.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"updates":1', b'"updates":7'))
    found = node.call("hello", 1, []).attempts[0]
    assert found.completed
    assert b'"updates":1' in found.manifest  # the record still has it
    record.write_bytes(record.read_bytes().replace(b'\\"updates\\":1', b'\\"updates\\":7'))
    found = node.call("hello", 1, []).attempts[0]
    assert (found.record, found.manifest) == (RecordState.UNKNOWN, None)


def test_the_latest_add_members_call_wins_whoever_registers_last(node: Node) -> None:
    def info(process: str, membership: str) -> MemberInfo:
        return MemberInfo(ACTOR, 1, ("model",), membership, process, os.getpid())

    here = pid_namespace_of_this_process()
    node.call("register", "new", os.getpid(), here, [info("new", "02")])
    node.call("register", "old", os.getpid(), here, [info("old", "01")])
    assert [member.process for member in node.call("hello", 1, []).members] == ["new"]


def test_members_of_an_earlier_add_members_call_are_not_counted_once_a_later_one_is_declared(node: Node) -> None:
    info = MemberInfo(ACTOR, 1, ("model",), "01", "old", os.getpid())
    node.call("register", "old", os.getpid(), pid_namespace_of_this_process(), [info])
    later = RoleDeclaration("actor", 1, ("model",), "02")  # its process registered on another node
    assert node.call("hello", 1, [later]).members == ()
    assert node.call("mark", 1, 1, 0.1).members == ()


def test_a_death_between_tombstone_and_files_is_finished_by_the_next_stager(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    node.stager._disk._bury(head(), "retention")
    folder = node.root / "staging/run/global_step_1/A1"
    assert (folder / "manifest.json").exists()
    agent.close()
    node.restart()
    assert [path.name for path in folder.iterdir()] == ["COMPLETED"]
    assert node.call("hello", 1, []).attempts == ()


def test_a_rejected_copy_is_not_offered_again(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    node.call("upload", 1, head())
    staged = node.stager._disk.read_staged(head())
    assert staged
    record = staged[0]
    image, tier = node.call("locate", head(), record, [], None)
    assert tier == "memory"
    local, tier = node.call("locate", head(), record, [image], None)
    assert tier == "local"
    fetched, tier = node.call("locate", head(), record, [image, local], None)
    assert tier == "store"
    assert Path(fetched).read_bytes() == Path(local).read_bytes()
    assert node.call("locate", head(), record, [image, local, fetched], None) is None


def test_the_past_is_refused_even_after_a_restart(node: Node) -> None:
    node.call("hello", 7, [])
    node.restart()
    with pytest.raises(FencedError):
        node.call("hello", 6, [])
    assert node.call("highest_epoch") == 7


def test_a_second_stager_on_the_directory_is_refused_by_name(node: Node) -> None:
    with pytest.raises(StagingError, match=f"pid {os.getpid()}"):
        node.open()


def test_a_dead_process_is_noticed_and_named(node: Node) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    info = MemberInfo(ACTOR, 1, ("model",), "m1", "p1", child.pid)
    node.call("register", "p1", child.pid, pid_namespace_of_this_process(), [info])
    work = asyncio.run_coroutine_threadsafe(node.stager.mark(1, 1, 30.0), node.loop.loop)
    assert node.call("poll", "p1", None, 30.0).kind is OrderKind.MARK  # delivered, never answered
    child.kill()
    with pytest.raises(Exception, match=r"actor:0.*died during mark"):
        work.result(30)
    child.wait()
    assert node.call("hello", 1, []).members == ()


def test_a_silent_process_is_named_by_its_deadline(node: Node) -> None:
    info = MemberInfo(ACTOR, 1, ("model",), "m1", "p1", os.getpid())
    node.call("register", "p1", os.getpid(), pid_namespace_of_this_process(), [info])
    with pytest.raises(DeadlineError, match="actor:0"):
        node.call("mark", 1, 1, 0.05)


def test_a_snapshot_in_memory_outlives_the_next_copy_and_its_process(tmp_path: Path) -> None:
    node = Node(tmp_path, images_per_component=2)
    agent = Agent("run", LocalLink(node))
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    names = ("A1", "A2", "A3", "A4")
    for number, name in enumerate(names, start=1):  # each is kept until the next one is whole
        update(state)
        node.call("mark", 1, number, 30.0)
        snapshot(node, head(name, step=number, sequence=number))
        if number > 1:
            node.call("discard", 1, head(names[number - 2], step=number - 1, sequence=number - 1))
    folder = next(tmp_path.glob("lastgood.*"))
    assert len(list(folder.glob("image-*"))) == 2 * 3  # two for each component, used in turn
    agent.close()
    other = Agent("run", LocalLink(node))  # a new process of the same member finds room, not the old one's image
    other.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 4, 30.0)
    snapshot(node, head("A5", step=4, sequence=5))
    with pytest.raises(SnapshotError, match="still waits to be staged for attempt A4, A5"):
        snapshot(node, head("A6", step=4, sequence=6))
    manifest = Manifest.from_bytes(commit(node, head("A4", step=4, sequence=4)), where="m")
    (place,) = (tmp_path / "staging/run/global_step_4/A4/actor").glob("*model*")
    saved = load_file(place)
    assert torch.equal(saved["weight"], state["model"].weight)
    assert manifest.step == 4
    other.close()
    node.close()
