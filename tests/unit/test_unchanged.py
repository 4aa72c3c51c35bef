"""A shard that is as it was in the save before is linked, locally and in the store; whatever changed is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lastgood.storage.digest import digest_blocks
from lastgood.storage.errors import StagingError
from lastgood.storage.files import WriteProgress, link_image
from lastgood.storage.layout import STAGED
from lastgood.workers.agent import Agent
from lastgood.workers.member import Member
from lastgood.workers.unchanged import Unchanged
from tests.crash.operations import Layer, Operation
from tests.unit.stager_world import ACTOR, Node, commit, head, snapshot, training, update


class Saver:
    """Saves one step after the other, each to its end: the model never changes, the rest of the state does."""

    def __init__(self, node: Node, agent: Agent, *, alone: bool = False) -> None:
        """`alone`: there is nothing but what never changes."""
        self.node = node
        self.frozen = torch.nn.Linear(64, 64)
        self.state = {"frozen": self.frozen} if alone else {**training(), "frozen": self.frozen}
        self.step = 0
        agent.add(Member.of("actor", 0, 1, self.state), "m1")

    def begin(self) -> Any:
        self.step += 1
        if "model" in self.state:
            update(self.state)
        self.node.call("mark", 1, self.step, 30.0)
        at = head(f"A{self.step}", self.step, 1, self.step)
        snapshot(self.node, at)
        return at

    def save(self) -> None:
        at = self.begin()
        commit(self.node, at)
        self.node.call("upload", 1, at)

    def shard(self, step: int, component: str = "frozen", root: str = "staging") -> Path:
        (place,) = self.node.root.glob(f"{root}/run/global_step_{step}/A{step}/actor/*{component}*")
        return place

    def same(self, first: int, second: int, **where: Any) -> bool:
        return self.shard(first, **where).samefile(self.shard(second, **where))


@pytest.fixture
def saver(node: Node, agent: Agent) -> Saver:
    return Saver(node, agent)


@pytest.fixture
def operations(node: Node) -> Iterator[list[Operation]]:
    """What happens to the files of the node from now on."""
    seen: list[Operation] = []

    def watch(operation: Operation, perform: Any, half: Any) -> Any:
        seen.append(operation)
        return perform()

    layer = Layer(node.root, watch)
    layer.install()
    yield seen
    layer.remove()


def test_the_third_save_of_a_shard_that_never_changed_writes_no_byte_of_it(
    saver: Saver, operations: list[Operation]
) -> None:
    saver.save()
    saver.save()
    assert not saver.same(1, 2)
    operations.clear()
    saver.save()
    for root in ("staging", "store"):
        assert saver.same(2, 3, root=root)
        assert not saver.same(2, 3, component="model", root=root)
    assert not [o for o in operations if o.kind in ("write", "allocate") and "frozen" in o.path]
    assert [o for o in operations if o.kind == "write" and "model" in o.path]


def test_its_name_is_durable_before_the_list_of_shards_says_that_it_is_there(
    node: Node, agent: Agent, operations: list[Operation]
) -> None:
    saver = Saver(node, agent, alone=True)
    saver.save()
    saver.save()
    operations.clear()
    saver.save()
    number = {str(o): i for i, o in reversed(list(enumerate(operations)))}
    (link,) = (o for o in operations if o.kind == "link" and "frozen" in o.other and o.other.startswith("staging/"))
    (listed,) = (o for o in operations if o.kind == "link" and o.other.endswith(f"A3/{STAGED}"))
    folder = str(Path(link.other).parent)
    synced = [i for i, o in enumerate(operations) if (o.kind, o.path) == ("fsync", folder)]
    assert any(number[str(link)] < i < number[str(listed)] for i in synced)


def test_a_shard_that_changes_again_is_written_and_old_ones_stay_as_they_were(saver: Saver) -> None:
    for _ in range(3):
        saver.save()
    before = saver.shard(3).read_bytes()
    with torch.no_grad():
        saver.frozen.weight.add_(1.0)
    saver.save()
    saver.save()
    assert saver.shard(1).read_bytes() == before == saver.shard(3).read_bytes()
    assert torch.equal(load_file(saver.shard(4))["weight"], saver.frozen.weight)
    assert not saver.same(3, 4) and not saver.same(4, 5)
    saver.save()
    assert saver.same(5, 6)


def test_what_retention_takes_leaves_the_later_ones_whole(saver: Saver) -> None:
    for _ in range(3):
        saver.save()
    whole = saver.shard(3).read_bytes()
    saver.node.call("collect", 1, head("A2", 2, 1, 2), "retention")
    assert saver.shard(3).read_bytes() == whole
    saver.save()
    assert saver.same(3, 4)
    saver.node.call("collect", 1, head("A4", 4, 1, 4), "retention")  # the one that would be linked to
    saver.save()
    assert saver.shard(5).read_bytes() == whole and not saver.same(3, 5)


@pytest.mark.parametrize("root", ["staging", "store"])
def test_a_file_that_was_cut_short_or_rotted_in_the_store_is_not_linked(saver: Saver, root: str) -> None:
    for _ in range(2):
        saver.save()
    whole, place = saver.shard(2).read_bytes(), saver.shard(2, root=root)
    rotten = whole[:-1] if root == "staging" else bytes([whole[0] ^ 1]) + whole[1:]
    place.write_bytes(rotten)
    saver.save()
    assert saver.shard(3, root=root).read_bytes() == whole
    assert place.read_bytes() == rotten


def test_where_nothing_can_be_linked_it_is_written(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        saver.save()
    link, refused = os.link, []

    def none(source: Any, target: Any, **named: Any) -> None:
        if "frozen" in str(target) and not Path(source).name.startswith("."):
            refused.append(target)
            raise OSError(errno.EMLINK, "too many links")
        link(source, target, **named)

    monkeypatch.setattr(os, "link", none)
    saver.save()
    assert len(refused) == 2  # on the disk and in the store
    for root in ("staging", "store"):
        assert not saver.same(2, 3, root=root)
        assert saver.shard(3, root=root).read_bytes() == saver.shard(2).read_bytes()


def test_a_save_that_is_given_up_while_it_is_hashed_links_nothing(tmp_path: Path) -> None:
    first, unchanged = tmp_path / "first", Unchanged(2, lambda: None)
    payload = memoryview(bytes(10_000))
    first.write_bytes(payload)
    key, progress = (ACTOR, "frozen"), WriteProgress()
    assert unchanged.link(key, payload, tmp_path / "second", progress) is None
    for _ in range(2):
        unchanged.note(key, first, digest_blocks(payload, 4096))
    assert unchanged.link(key, payload, tmp_path / "second", progress) is not None
    assert progress.done_bytes == len(payload)
    progress.give_up()
    with pytest.raises(StagingError, match="given up"):
        unchanged.link(key, payload, tmp_path / "third", progress)
    assert not (tmp_path / "third").exists()


def test_only_a_plain_file_with_these_bytes_gets_a_second_name(tmp_path: Path) -> None:
    whole, image = tmp_path / "whole", memoryview(b"x" * 100)
    whole.write_bytes(image)
    assert link_image(whole, tmp_path / "second", image) and whole.samefile(tmp_path / "second")
    assert not link_image(whole, tmp_path / "second", image)  # something stands there
    assert not link_image(whole, tmp_path / "third", image[1:])
    assert not link_image(whole, tmp_path / "third", memoryview(b"x" * 99 + b"y"))
    assert not link_image(tmp_path / "gone", tmp_path / "third", image)
    (tmp_path / "pointer").symlink_to(whole)
    assert not link_image(tmp_path / "pointer", tmp_path / "third", image)
    assert not (tmp_path / "third").exists()


def test_a_file_that_has_rotted_is_not_the_next_checkpoints_as_well(saver: Saver) -> None:
    for _ in range(3):
        saver.save()
    assert saver.same(2, 3)
    with saver.shard(3).open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    saver.save()
    assert not saver.same(3, 4)
    assert torch.equal(load_file(saver.shard(4))["weight"], saver.frozen.weight)
