"""Restore of one member: every byte is verified, changes are told by name, and nothing live is touched on failure."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastgood.storage.digest import digest_blocks
from lastgood.storage.errors import FingerprintError, IntegrityError, OptionsError, ResumeError, UsageError
from lastgood.storage.fingerprint import compare
from lastgood.storage.manifest import Manifest, ShardRecord
from lastgood.storage.tree import ShardedPiece
from lastgood.workers import load
from lastgood.workers.component import Component, LoadContext
from lastgood.workers.member import Member
from lastgood.workers.pieces import SavedTensor
from lastgood.workers.rng_state import RNG
from lastgood.workers.shard_reader import ShardCopy, ShardReader
from lastgood.workers.small_state import Value
from tests.unit.checkpoints import BLOCK_BYTES, bits, checkpoint, image_of, locate_in, manifest_of, save
from tests.unit.storage_samples import shard_record


class Run:
    """A member with a module, an optimizer and a cursor."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.cursor = {"seed": seed}
        self.member = Member.of(
            "actor", 0, 1, {"model": self.model, "optimizer": self.optimizer, "cursor": self.cursor, "rng": RNG()}
        )
        self.model(torch.ones(1, 40)).sum().backward()
        self.optimizer.step()

    def bits(self) -> list[Any]:
        moments = [bits(value) for state in self.optimizer.state.values() for value in state.values()]
        return [*map(bits, self.model.parameters()), *moments, dict(self.cursor), bits(torch.get_rng_state())]


def test_a_flipped_byte_anywhere_in_any_shard_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Run().member)
    live = Run(seed=2)
    before = live.bits()
    for shard in manifest.shards:
        place = tmp_path / shard.path
        whole = place.read_bytes()
        for at in range(11, shard.nbytes, BLOCK_BYTES):
            content = bytearray(whole)
            content[at] ^= 0x10
            place.write_bytes(content)
            with pytest.raises(IntegrityError) as refused:
                load.prepare(live.member, manifest, locate_in(tmp_path))
            assert (refused.value.path, refused.value.member) == (str(place), "actor:0")
            assert f"digest of block {at // BLOCK_BYTES}" in str(refused.value)
        place.write_bytes(whole)
    assert live.bits() == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda place: place.unlink(), "cannot be opened"),
        (lambda place: place.write_bytes(place.read_bytes()[:-1]), "bytes, and the manifest says"),
        (lambda place: place.write_bytes(place.read_bytes() + b"\0"), "bytes, and the manifest says"),
        (lambda place: place.write_bytes(b""), "it has 0 bytes"),
    ],
    ids=["missing", "truncated", "longer", "empty"],
)
def test_missing_truncated_and_longer_shards_are_found(
    damage: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    manifest = checkpoint(tmp_path, Run().member)
    damage(tmp_path / "actor" / "rank_00000.optimizer.safetensors")
    live = Run(seed=2)
    before = live.bits()
    with pytest.raises(IntegrityError, match=words):
        load.prepare(live.member, manifest, locate_in(tmp_path))
    assert live.bits() == before


def test_a_shard_in_anothers_place_is_found(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Run().member)
    model = tmp_path / "actor" / "rank_00000.model.safetensors"
    rng = tmp_path / "actor" / "rank_00000.rng.safetensors"
    content = model.read_bytes()
    model.write_bytes(rng.read_bytes())
    rng.write_bytes(content)
    with pytest.raises(IntegrityError):
        load.prepare(Run(seed=2).member, manifest, locate_in(tmp_path))


def test_prepare_touches_nothing_and_apply_restores_all(tmp_path: Path) -> None:
    saved = Run()
    manifest = checkpoint(tmp_path, saved.member, step=7)
    expected = saved.bits()
    live = Run(seed=2)
    before = live.bits()
    prepared = load.prepare(live.member, manifest, locate_in(tmp_path))
    assert live.bits() == before
    assert (prepared.step, prepared.updates, prepared.fresh) == (7, 1, ())
    assert prepared.bytes_read == sum(shard.nbytes for shard in manifest.shards)
    thread = threading.Thread(target=prepared.apply)  # as the agent does
    thread.start()
    thread.join()
    assert live.bits() == expected
    assert all(tensor.requires_grad for tensor in live.model.parameters())


def test_restored_state_shares_no_memory_with_the_checkpoint(tmp_path: Path) -> None:
    saved = Run()
    manifest = checkpoint(tmp_path, saved.member)
    live = Run(seed=2)
    prepared = load.prepare(live.member, manifest, locate_in(tmp_path))
    for shard in manifest.shards:
        place = tmp_path / shard.path
        place.write_bytes(bytes(shard.nbytes))
        place.unlink()
    prepared.apply()
    assert [bits(tensor) for tensor in live.model.parameters()] == [bits(t) for t in saved.model.parameters()]


def test_a_component_that_only_one_side_has_is_refused_unless_allowed(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Member.of("trainer", 0, 1, {"cursor": {"n": 1}, "old": {"n": 1}}))
    live = {"cursor": {"n": 2}, "new": {"n": 2}}
    member = Member.of("trainer", 0, 1, live)
    with pytest.raises(FingerprintError, match=r"new is only in the run, trainer.old is only in the checkpoint"):
        load.prepare(member, manifest, locate_in(tmp_path))
    prepared = load.prepare(member, manifest, locate_in(tmp_path), None, ["trainer.new", "trainer.old"])
    assert prepared.fresh == ("new",)
    prepared.apply()
    assert live == {"cursor": {"n": 1}, "new": {"n": 2}}


def test_a_role_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Member.of("trainer", 0, 1, {"cursor": {}}))
    with pytest.raises(FingerprintError, match=r"holds no role critic \(it holds trainer\)"):
        load.prepare(Member.of("critic", 0, 1, {"cursor": {}}), manifest, locate_in(tmp_path))


def test_another_kind_of_state_under_the_same_name_is_refused(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, Member.of("actor", 0, 1, {"optimizer": {"n": 1}}))
    live = Run()
    member = Member.of("actor", 0, 1, {"model": live.model, "optimizer": live.optimizer})
    with pytest.raises(FingerprintError, match=r"as actor.optimizer is not state of the kind optimizer"):
        load.prepare(member, manifest, locate_in(tmp_path), None, ["actor.model", *member.fingerprint()])


def test_a_failing_apply_says_that_live_state_is_mixed(tmp_path: Path) -> None:
    def refuse(value: Any) -> None:
        raise RuntimeError("no")

    member = Member.of("trainer", 0, 1, {"value": Value(lambda: 1, refuse)})
    prepared = load.prepare(member, checkpoint(tmp_path, member), locate_in(tmp_path))
    with pytest.raises(ResumeError, match=r"trainer:0: component value .* partly restored"):
        prepared.apply()


def test_unknown_policies_are_refused(tmp_path: Path) -> None:
    member = Member.of("trainer", 0, 1, {"cursor": {}})
    with pytest.raises(OptionsError, match=r"'copy'; it may be error, fresh, rank0"):
        load.prepare(member, checkpoint(tmp_path, member), locate_in(tmp_path), {"rng": "copy"})


class Ranked(Component):
    """A hand-made sharded component: one row of a matrix per rank, and whatever else it is given."""

    kind = "ranked"
    on_reshard = load.Reshard.BOXES

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def capture(self) -> Any:
        return self.tree

    def prepare(self, loaded: Any, context: LoadContext) -> Any:
        return loaded

    def apply(self, prepared: Any) -> None:
        self.tree = prepared


def save_ranks(folder: Path, trees: list[Any]) -> Manifest:
    members = [Member("actor", rank, len(trees), {"part": Ranked(tree)}) for rank, tree in enumerate(trees)]
    records: list[ShardRecord] = []
    for member in members:
        member.mark(1)
        records += save(folder, member, 1)
    return manifest_of(1, members, records)


def load_whole(folder: Path, manifest: Manifest) -> Any:
    member = Member("actor", 0, 1, {"part": Ranked(None)})
    load.prepare(member, manifest, locate_in(folder)).apply()
    component = member.components["part"]
    assert isinstance(component, Ranked)
    return component.tree


def rows(*values: list[float]) -> list[ShardedPiece]:
    """One row for each rank; an empty list is a rank whose piece is empty."""
    return [
        ShardedPiece(torch.tensor(row).reshape(-1, 2), (len(values), 2), (rank, 0)) for rank, row in enumerate(values)
    ]


def test_boxes_of_all_members_make_up_the_tensor(tmp_path: Path) -> None:
    pieces = rows([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
    tree = load_whole(tmp_path, save_ranks(tmp_path, [{"w": piece, "n": 3, "c": torch.ones(2)} for piece in pieces]))
    assert isinstance(tree["w"], SavedTensor)
    assert tree["w"].whole().tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tree["w"].box((1, 1), (2, 1)).tolist() == [[4], [6]]
    assert tree["w"].box((0, 0), (0, 2)).shape == (0, 2)
    assert (tree["n"], tree["c"].whole().tolist()) == (3, [1, 1])


def test_a_member_with_an_empty_piece_is_no_hole(tmp_path: Path) -> None:
    empty = ShardedPiece(torch.empty(0, 2), (1, 2), (1, 0))
    tree = load_whole(tmp_path, save_ranks(tmp_path, [{"w": rows([1.0, 2.0])[0]}, {"w": empty}]))
    assert tree["w"].whole().tolist() == [[1, 2]]


def test_a_hole_between_boxes_is_an_error(tmp_path: Path) -> None:
    pieces = rows([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
    manifest = save_ranks(tmp_path, [{"w": pieces[0]}, {"w": pieces[2]}])
    with pytest.raises(IntegrityError, match=r"actor\.part\.w: the saved boxes hold 4 elements.*actor:0, actor:1"):
        load_whole(tmp_path, manifest)


def test_equal_boxes_of_replicas_count_once_and_different_ones_are_an_error(tmp_path: Path) -> None:
    first, second = rows([1.0, 2.0], [3.0, 4.0])
    trees = [{"w": first, "id": 0}, {"w": second, "id": 0}, {"w": first, "id": 0}, {"w": second, "id": 0}]
    assert load_whole(tmp_path / "a", save_ranks(tmp_path / "a", trees))["w"].whole().tolist() == [[1, 2], [3, 4]]
    trees[3] = {"w": ShardedPiece(torch.tensor([[3.0, 5.0]]), (2, 2), (1, 0)), "id": 0}
    with pytest.raises(UsageError, match=r"actor\.part\.w .* members actor:1 and actor:3: the box .* not the same"):
        load_whole(tmp_path / "b", save_ranks(tmp_path / "b", trees))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"step": 1}, {"step": 2}, r"actor\.part\.step .* actor:0 and actor:1: 1 and 2"),
        ({"step": 1}, {"step": 1.0}, r"an int and a float|a int and a float"),
        ({"step": 0.0}, {"step": -0.0}, r"0\.0 and -0\.0"),
        ({"g": [1]}, {"g": [1, 2]}, r"actor\.part\.g .* 1 and 2 entries"),
        ({"a": 1}, {"b": 1}, r"actor\.part\.a .* only one of them has it"),
        ({"t": torch.zeros(2)}, {"t": torch.tensor([0.0, -0.0])}, r"actor\.part\.t .* is not the same"),
        ({"t": torch.zeros(2)}, {"t": torch.zeros(3)}, r"float32\[2\] and torch\.float32\[3\]"),
    ],
)
def test_what_ranks_should_agree_on_and_do_not_names_both(
    one: dict[str, Any], other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        load_whole(tmp_path, save_ranks(tmp_path, [one, other]))


def test_nan_agrees_with_itself(tmp_path: Path) -> None:
    tree = {"loss": float("nan"), "t": torch.tensor([float("nan")]), "rank": None}
    assert load_whole(tmp_path, save_ranks(tmp_path, [tree, {**tree}]))["t"].whole().isnan().all()


def test_a_box_of_another_rank_reads_only_the_blocks_it_needs(tmp_path: Path) -> None:
    height = 4 * BLOCK_BYTES // 8
    pieces = [
        ShardedPiece(torch.full((height, 2), float(rank)), (2 * height, 2), (rank * height, 0)) for rank in (0, 1)
    ]
    manifest = save_ranks(
        tmp_path,
        [{"w": piece, "small": ShardedPiece(torch.ones(1), (2,), (rank,))} for rank, piece in enumerate(pieces)],
    )
    record = manifest.shards[1]
    reader = ShardReader(ShardCopy(tmp_path / record.path), record)
    tree = reader.tree(whole=False)
    before = reader.bytes_read
    reader.fetch(tree["small"].tensor)
    assert before <= reader.bytes_read < record.nbytes
    reader.fetch(tree["w"].tensor)
    assert reader.bytes_read == record.nbytes
    assert tree["w"].tensor.unique().tolist() == [1.0]
    reader.close()


def test_a_scheduler_loads_on_another_world_size_when_the_ranks_agree(tmp_path: Path) -> None:
    def member(rank: int, world_size: int, steps: int) -> tuple[Member, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        for _ in range(steps):
            scheduler.step()
        return Member.of("actor", rank, world_size, {"scheduler": scheduler}), scheduler

    def saved(folder: Path, steps: list[int]) -> Manifest:
        members = [member(rank, len(steps), count)[0] for rank, count in enumerate(steps)]
        records: list[ShardRecord] = []
        for one in members:
            one.mark(1)
            records += save(folder, one, 1)
        return manifest_of(1, members, records)

    live, scheduler = member(0, 1, 0)
    load.prepare(live, saved(tmp_path / "a", [3, 3]), locate_in(tmp_path / "a")).apply()
    assert scheduler.last_epoch == 3
    with pytest.raises(UsageError, match=r"actor\.scheduler\..* actor:0 and actor:1"):
        load.prepare(live, saved(tmp_path / "b", [3, 4]), locate_in(tmp_path / "b"))


def test_changes_are_refused_with_both_values_unless_allowed_by_name() -> None:
    saved = {"actor.world_size": 2, "trainer.dataloader.batch_size": 8, "actor.optimizer.class": "AdamW"}
    now = {"actor.world_size": 4, "trainer.dataloader.batch_size": 8, "actor.optimizer.class": "SGD"}
    compare(saved, dict(saved))
    with pytest.raises(FingerprintError) as refused:
        compare(saved, now, allow=["actor.world_size"])
    assert refused.value.changes == {"actor.optimizer.class": ("AdamW", "SGD")}
    assert "saved 'AdamW', now 'SGD'" in str(refused.value)
    assert "allow_changes=['actor.optimizer.class']" in str(refused.value)
    compare(saved, now, allow=["actor.world_size", "actor.optimizer.class"])
    compare(saved, now, allow=["actor"])  # and all below it
    with pytest.raises(FingerprintError):
        compare(saved, now, allow=["actor.opt", "act"])


def test_images_of_the_same_state_are_the_same_bytes() -> None:
    run = Run()
    run.member.mark(1)
    first = {name: image_of(tree) for name, tree in run.member.capture(1).items()}
    assert {name: image_of(tree) for name, tree in run.member.capture(1).items()} == first


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 4096 + 7])
@pytest.mark.parametrize("refused", [None, "at the open", "at the read"])
def test_a_shard_that_is_read_past_the_page_cache_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, refused: str | None
) -> None:
    content = bytes(i * 7 % 251 for i in range(nbytes))
    (tmp_path / "shard").write_bytes(content)
    block_bytes = 2 * BLOCK_BYTES
    digests = digest_blocks(content, block_bytes)
    record = shard_record(content, block_bytes=block_bytes, blocks=digests.blocks, digest=digests.digest)
    really_open, really_read, direct = os.open, os.preadv, set()

    def opens(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT and refused == "at the open":
            raise OSError(errno.EINVAL, "refused")
        descriptor = really_open(path, flags, *rest, **more)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def reads(descriptor: int, *rest: Any) -> int:
        if descriptor in direct and refused == "at the read":
            raise OSError(errno.EINVAL, "refused")
        return really_read(descriptor, *rest)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    reader = ShardReader(ShardCopy(tmp_path / "shard", direct=True), record)
    reader._need([(0, nbytes)])
    assert bytes(reader._memory) == content
    assert reader.bytes_read == nbytes
    assert bool(direct) == (refused != "at the open")
    reader.close()
    with (tmp_path / "shard").open("r+b") as file:
        file.seek(nbytes - 1)
        file.write(bytes([content[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="not what was committed"):
        ShardReader(ShardCopy(tmp_path / "shard", direct=True), record)._need([(0, nbytes)])
