"""A stager and an agent without Ray: orders, images, staging, records, and what deaths and restarts do to them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import (
    Grant,
    Line,
    LoadRequest,
    MemberInfo,
    RecordState,
    RoleDeclaration,
    SnapshotOrder,
)
from lastgood.storage.errors import (
    DeadlineError,
    FencedError,
    FormatVersionError,
    IntegrityError,
    StagingError,
    StoreError,
    UsageError,
)
from lastgood.storage.image import read_image
from lastgood.storage.manifest import Completed, Manifest
from lastgood.workers import disk
from lastgood.workers import staging as staging_module
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from lastgood.workers.orders import Order, OrderKind
from lastgood.workers.processes import pid_namespace_of_this_process
from tests.unit.stager_world import ACTOR, LocalLink, Node, commit, head, manifest_of, snapshot, stage, training, update
from tests.unit.storage_samples import completed_of, sealed


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
    node.call("load", 1, head(), LoadRequest(manifest), 30.0, [ACTOR])
    assert not torch.equal(state["model"].weight, weights)  # read and verified, nothing touched
    node.call("apply", 1, head(), 30.0, [ACTOR])
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
        "load": (at, LoadRequest(b""), 1.0, ()),
        "apply": (at, 1.0, ()),
        "forget": (),
    }
    for method, arguments in calls.items():
        with pytest.raises(FencedError):
            node.call(method, 6, *arguments)
    assert [path.name for path in (node.root / "staging/run").iterdir() if path.is_dir() and "step" in path.name] == []


def test_nothing_is_uploaded_for_a_coordinator_beside_whose_epoch_the_store_has_a_higher_one(
    node: Node, agent: Agent
) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    node.claim(2)  # by a coordinator of another cluster, which says hello to its own stagers only
    with pytest.raises(FencedError, match="epoch 2 was claimed in the store"):
        node.call("upload", 1, head())
    assert not list((node.root / "store").rglob("*.safetensors"))


def test_a_write_that_runs_when_the_stager_closes_ends_before_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    refuse = node.stager._disk.refuse

    def slow(*arguments: Any) -> RecordState:
        begun.set()
        assert go_on.wait(60)
        return refuse(*arguments)

    monkeypatch.setattr(node.stager._disk, "refuse", slow)
    node.claim(1)
    asyncio.run_coroutine_threadsafe(node.stager.refuse(1, head(), "a test"), node.loop.loop)
    assert begun.wait(60)
    closing = asyncio.run_coroutine_threadsafe(node.stager.close(), node.loop.loop)
    with pytest.raises(TimeoutError):
        closing.result(0.05)
    go_on.set()
    closing.result(60)
    node.loop.stop()
    assert list((node.root / "staging/run/records").glob("*.json"))


def test_an_agent_refuses_orders_of_the_past(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 5, 1, 30.0)
    process = next(iter(node.stager._processes.hosts()))
    order = Order("late", OrderKind.MARK, 4, 30.0, (ACTOR,), 2)
    with pytest.raises(FencedError, match="epoch 5"):
        node.loop.run(node.stager._processes.ask(process, order))
    assert snapshot(node, head(epoch=5)).members[0].step == 1  # the late mark changed nothing


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


def test_a_new_coordinator_moves_pointers_that_a_death_left_behind_and_is_heard_when_the_disk_takes_none(
    node: Node, agent: Agent, monkeypatch: Any
) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    places = [node.root / "staging/run" / name for name in ("latest.json", "global_step_1/COMPLETED")]
    told = []
    for name, sequence in (("A1", 1), ("A2", 2)):
        node.call("mark", 1, 1, 30.0)
        snapshot(node, head(name, 1, 1, sequence))
        commit(node, head(name, 1, 1, sequence))
        told.append([place.read_bytes() for place in places])
    for place, data in zip(places, told[0], strict=True):  # as A2's publisher leaves them when it dies after COMPLETED
        place.write_bytes(data)
    full: list[Path] = []

    def refuse(path: Path, data: bytes) -> None:
        full.append(path)
        raise StagingError(f"cannot replace {path}", path=str(path))

    with monkeypatch.context() as patch:
        real = disk.replace_durably
        patch.setattr(disk, "replace_durably", lambda *a: real(*a) if a[0].name == "epoch.json" else refuse(*a))
        assert len(node.call("hello", 2, []).attempts) == 2
    assert full
    assert [place.read_bytes() for place in places] == told[0]
    node.call("hello", 3, [])
    assert [place.read_bytes() for place in places] == told[1]


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


def test_a_flipped_bit_in_completed_does_not_make_it_another_checkpoint(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    marker = node.root / "staging/run/global_step_1/A1/COMPLETED"
    whole = marker.read_bytes()
    flipped = whole.replace(b'"sequence":1', b'"sequence":5')
    assert sum((a ^ b).bit_count() for a, b in zip(whole, flipped, strict=True)) == 1
    marker.write_bytes(flipped)
    found = node.call("hello", 1, []).attempts[0]
    assert (found.sequence, found.record, found.completed) == (1, RecordState.ACCEPT, False)


@pytest.mark.parametrize("name", ["node.json", "epoch.json"])
def test_a_directory_that_another_lastgood_wrote_is_left_to_it(tmp_path: Path, name: str) -> None:
    first = disk.NodeDisk(tmp_path, "run", "me")
    first.note_epoch(3)
    first.close()
    path = next(tmp_path.rglob(name))
    other = sealed({**json.loads(path.read_bytes()), "format_version": 9})
    path.write_bytes(other)
    with pytest.raises(FormatVersionError, match="version 9, and this lastgood reads version 1 and 2"):
        disk.NodeDisk(tmp_path, "run", "me")
    assert path.read_bytes() == other


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


def committed_here(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    node.call("upload", 1, head())


def test_a_link_in_a_shards_place_is_passed_over_for_the_stores_copy(
    node: Node, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    committed_here(node, agent)
    records = node.stager._disk.read_staged(head())
    assert records
    place = node.root / "staging/run/global_step_1/A1" / records[0].path
    whole = place.read_bytes()
    place.rename(node.root / "elsewhere")
    place.symlink_to(node.root / "elsewhere")
    image = str(node.call("locate", head(), records[0], [], None)[0])
    found, tier = node.call("locate", head(), records[0], [image], None)
    assert tier == "store" and Path(found).read_bytes() == whole
    assert "outside of" in caplog.text


def test_strangers_among_the_attempts_are_ignored_and_told_once(
    node: Node, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    committed_here(node, agent)
    outside = node.root / "outside"
    outside.mkdir()
    (node.root / "staging/run/global_step_1/evil").symlink_to(outside)
    (node.root / "staging/run/global_step_7").symlink_to(outside)
    node.restart()
    for _ in range(2):
        assert [found.attempt for found in node.call("hello", 2, []).attempts] == ["A1"]
    assert sum("is a symbolic link" in line for line in caplog.messages) == 2
    assert outside.is_dir() and not list(outside.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 100])
def test_a_damaged_note_of_epoch_or_name_is_made_anew_from_what_lies_there(
    node: Node, agent: Agent, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    committed_here(node, agent)
    node.call("hello", 5, [])
    name = node.stager.node
    for note in ("epoch.json", "node.json"):
        (node.root / "staging/run" / note).write_bytes(content)
    node.restart()
    assert node.stager.node == name
    assert node.call("highest_epoch") == 1  # of the attempt: no lower one may speak
    assert "that counts" in caplog.text and f"say that this node is {name}" in caplog.text
    assert node.call("hello", 5, []).attempts[0].completed
    node.restart()
    assert node.call("highest_epoch") == 5 and node.stager.node == name


def test_a_member_that_has_not_registered_again_is_not_passed_over_by_a_resume(node: Node, agent: Agent) -> None:
    committed_here(node, agent)
    request = LoadRequest(manifest_of(node, head(), node.stager._disk.read_staged(head()) or ()))
    agent.close()
    node.restart()
    node.call("hello", 1, [])
    with pytest.raises(StagingError, match=r"actor:0 is not registered with the stager of node .* not asked to load"):
        node.call("load", 1, head(), request, 30.0, [ACTOR])
    with pytest.raises(StagingError, match="not asked to apply"):
        node.call("apply", 1, head(), 30.0, [ACTOR])
