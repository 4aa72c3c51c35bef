"""Images: they outlive their processes, are used again, and a resume reads from them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.coordinator.messages import AttemptHead, Keepsake, LoadRequest, RecordState, SnapshotOrder
from lastgood.storage.errors import SnapshotError, StagingError
from lastgood.storage.manifest import Manifest
from lastgood.workers import staging
from lastgood.workers.agent import Agent
from lastgood.workers.images import ImageState
from lastgood.workers.member import Member
from lastgood.workers.staging import Staging
from tests.unit.stager_world import ACTOR, LocalLink, Node, commit, head, snapshot, stage, training, update


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
        node.call("load", 1, head(), LoadRequest(manifest), 30.0, [ACTOR])
        node.call("apply", 1, head(), 30.0, [ACTOR])
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
    node.call("load", 1, head(), LoadRequest(manifest), 30.0, [ACTOR])
    node.call("apply", 1, head(), 30.0, [ACTOR])
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


def test_a_new_coordinator_takes_over_what_stands_in_memory_under_a_name_of_its_own(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    keepsake = Keepsake((), {"reward": 1.0}, ())
    vote = node.call("snapshot", 1, SnapshotOrder(head(), (ACTOR,), 30.0, keepsake=keepsake))
    agent.close()
    (found,) = node.call("hello", 2, []).attempts
    assert found.held is not None and (found.held.keepsake, found.held.vote) == (keepsake, vote)
    assert [info.member for info in found.held.members] == [ACTOR] and found.held.origin == "A1"

    ours = head("B1", epoch=2, sequence=2)
    order = SnapshotOrder(ours, (ACTOR,), 30.0, keepsake=keepsake, origin="A1")
    assert node.call("snapshot", 2, order) == vote
    assert node.call("snapshot", 2, order) == vote  # asked again
    assert node.call("refuse", 2, head(), "taken over") is RecordState.REFUSE
    node.call("discard", 2, head())
    (found,) = node.call("hello", 2, []).attempts[-1:]
    assert found.attempt == "B1" and found.held is not None and found.held.origin == "A1"

    commit(node, ours)
    (place,) = (node.root / "staging/run/global_step_1/B1/actor").glob("*model*")
    assert torch.equal(load_file(place)["weight"], state["model"].weight)
    assert all(found.held is None for found in node.call("hello", 3, []).attempts)  # what is committed stays so
    with pytest.raises(SnapshotError, match="does not hold what was copied for attempt A7"):
        node.call("snapshot", 3, SnapshotOrder(head("C1", epoch=3, sequence=3), (ACTOR,), 30.0, origin="A7"))


@pytest.mark.parametrize("when", ["while it is written", "after it is staged"])
def test_what_is_staged_for_a_coordinator_that_died_is_taken_over_as_well(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    keepsake = Keepsake((), {}, ())
    node.call("snapshot", 1, SnapshotOrder(head(), (ACTOR,), 30.0, keepsake=keepsake))
    begun, go_on = threading.Event(), threading.Event()
    write = Staging._write_file

    def slow(staging: Staging, at: AttemptHead, *arguments: Any) -> Any:
        if at.attempt == "A1":
            begun.set()
            assert go_on.wait(60)
        return write(staging, at, *arguments)

    if when == "while it is written":
        monkeypatch.setattr(Staging, "_write_file", slow)
        asyncio.run_coroutine_threadsafe(node.stager.stage(1, head(), 30.0), node.loop.loop)
        assert begun.wait(60)
    else:
        stage(node, head())
    (found,) = node.call("hello", 2, []).attempts
    assert found.held is not None and found.held.origin == "A1"
    order = SnapshotOrder(head("B1", epoch=2, sequence=2), (ACTOR,), 30.0, keepsake=keepsake, origin="A1")
    taking = asyncio.run_coroutine_threadsafe(node.stager.snapshot(2, order), node.loop.loop)
    go_on.set()
    assert taking.result(60).members[0].member == ACTOR
    node.call("refuse", 2, head(), "taken over")
    node.call("discard", 2, head())
    commit(node, head("B1", epoch=2, sequence=2))
    (place,) = (node.root / "staging/run/global_step_1/B1/actor").glob("*model*")
    assert torch.equal(load_file(place)["weight"], state["model"].weight)
    assert not (node.root / "staging/run/global_step_1/A1").exists()


def test_what_was_filled_again_is_not_told_of(node: Node, agent: Agent) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    node.call("snapshot", 1, SnapshotOrder(head(), (ACTOR,), 30.0, keepsake=Keepsake((), {}, ())))
    stage(node, head())
    node.call("mark", 1, 2, 30.0)
    snapshot(node, head("A2", step=2, sequence=2))
    assert [found.held for found in node.call("hello", 2, []).attempts] == [None, None]


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


def test_an_image_that_grows_is_unmapped_before_the_larger_one_is_asked_for(node: Node, agent: Agent) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    commit(node, head())
    before = agent._images._paths[ACTOR, "cursor"]
    mapped_then: list[bool] = []
    provide = node.stager.provide

    async def watched(*arguments: Any) -> Any:
        mapped_then.append(before in agent._images._images)
        return await provide(*arguments)

    node.stager.provide = watched  # type: ignore[method-assign]
    state["cursor"]["more"] = torch.zeros(100_000)
    node.call("mark", 1, 2, 30.0)
    at = head("A2", 2, 1, 2)
    snapshot(node, at)
    commit(node, at)
    assert mapped_then == [False]


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


def test_what_the_disk_does_not_take_stays_whole_in_memory_until_it_is_refused(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training()
    agent.add(Member.of("actor", 0, 1, state), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())
    write = Staging._write_file

    def full(staging: Staging, at: AttemptHead, key: Any, *arguments: Any) -> Any:
        if key[1] == "optimizer":
            raise StagingError("no space left on device [ENOSPC]")
        return write(staging, at, key, *arguments)

    monkeypatch.setattr(Staging, "_write_file", full)
    for _ in range(2):
        with pytest.raises(StagingError, match="ENOSPC"):
            stage(node, head())
        assert not (node.root / "staging/run/global_step_1").exists()
        assert {image.state for _, image in node.stager._staging._slots.images()} == {ImageState.SEALED}
    agent.close()  # nobody but the stager is needed
    monkeypatch.setattr(Staging, "_write_file", write)
    commit(node, head())
    (place,) = (node.root / "staging/run/global_step_1/A1/actor").glob("*model*")
    assert torch.equal(load_file(place)["weight"], state["model"].weight)


def test_a_refused_attempt_lets_go_of_images_that_the_disk_did_not_take(
    node: Node, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    node.call("mark", 1, 1, 30.0)
    snapshot(node, head())

    def full(*_: Any) -> Any:
        raise StagingError("no space left on device [ENOSPC]")

    monkeypatch.setattr(Staging, "_write_file", full)
    with pytest.raises(StagingError, match="ENOSPC"):
        stage(node, head())
    node.call("refuse", 1, head(), "the disk is full")
    assert {image.state for _, image in node.stager._staging._slots.images()} == {ImageState.FREE}


def test_the_order_to_copy_may_overtake_the_word_that_an_older_snapshot_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path, images_per_component=2)
    agent = Agent("run", LocalLink(node))
    agent.add(Member.of("actor", 0, 1, training()), "m1")
    for number in (1, 2):
        node.call("mark", 1, number, 30.0)
        snapshot(node, head(f"A{number}", step=number, sequence=number))
    node.call("mark", 1, 3, 30.0)
    asked, provide = threading.Event(), node.stager.provide

    async def watched(*arguments: Any) -> Any:
        asked.set()
        return await provide(*arguments)

    node.stager.provide = watched  # type: ignore[method-assign]
    order = SnapshotOrder(head("A3", step=3, sequence=3), (ACTOR,), 30.0)
    copying = asyncio.run_coroutine_threadsafe(node.stager.snapshot(1, order), node.loop.loop)
    assert asked.wait(30)
    node.call("discard", 1, head("A1", step=1, sequence=1))
    assert copying.result(60).members[0].step == 3
    agent.close()
    node.close()


def test_a_snapshot_in_memory_outlives_the_next_copy_and_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LET_GO_S", 0.1)
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
