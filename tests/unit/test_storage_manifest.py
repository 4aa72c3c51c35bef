"""A manifest that can be constructed is whole, and what is read back is exactly what was written or refused."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lastgood.storage.errors import FormatVersionError, IntegrityError
from lastgood.storage.manifest import (
    Chunk,
    Completed,
    EpochNote,
    FileModel,
    Latest,
    LedgerEntry,
    Manifest,
    MemberRecord,
    NodeIdentity,
    Owner,
    Parent,
    Record,
    RoleRecord,
    ShardRecord,
    StagedList,
    Tombstone,
    read_completed,
)
from tests.unit.storage_samples import CREATED, manifest_of, sealed, shard_record


def whole() -> Manifest:
    chunk = Chunk(fqn="w", dtype="float32", global_shape=(4, 2), offsets=(2, 0), sizes=(2, 2), begin=8, end=24)
    shards = [
        shard_record(bytes([rank]) * 2500, rank=rank, component=name, node=f"node-{rank}", chunks=(chunk,))
        for rank in (0, 1)
        for name in ("model", "optimizer")
    ]
    return manifest_of(
        [*shards, shard_record(b"x", role="trainer", component="cursor", node="node-0")],
        tag="before_eval",
        parent=Parent(attempt="attempt-0", step=300, epoch=2, sequence=16),
        metrics={"reward": 0.5, "loss": float("nan"), "kl": float("-inf")},
        fingerprint={"dataset": {"length": 1000, "names": ["a", None]}},
        versions={"torch": "2.13.0"},
    )


HARD_NAMES = ["w", 'a "quoted" \\ name', "tab\tnew\nline\x00\x1f\x7f", "größe.权重.🙂", "\u2028</script>", "/"]


@given(st.lists(st.one_of(st.sampled_from(HARD_NAMES), st.text()), min_size=1, max_size=4), st.integers(0, 2**63 - 1))
def test_the_fast_way_of_writing_a_manifest_gives_the_canonical_bytes(names: list[str], offset: int) -> None:
    chunks = tuple(
        Chunk(fqn=name, dtype=name, global_shape=(offset, 1), offsets=(offset, 0), sizes=(0, 1), begin=0, end=rank)
        for rank, name in enumerate(names)
    )
    node = names[0]
    shards = [shard_record(b"x" * 2500, rank=rank, node=node, chunks=chunks) for rank in (0, 1)]
    manifest = manifest_of(shards, tag="t", fingerprint={"b": 1, "a": [names[-1], None]})
    canonical = json.dumps(
        manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    assert manifest.to_bytes() == f"{canonical}\n".encode()
    assert Manifest.from_bytes(manifest.to_bytes(), where="x") == manifest


def test_models_that_are_written_the_fast_way_declare_their_fields_in_the_order_of_names() -> None:
    for model in (Chunk, ShardRecord, MemberRecord):
        assert list(model.model_fields) == sorted(model.model_fields), model


def test_a_record_that_was_given_the_manifest_still_refuses_another_attempt_s() -> None:
    manifest = whole()
    other = manifest.head.model_copy(update={"attempt": "another"})
    with pytest.raises(ValidationError, match="another attempt's"):
        Record.accept(other, manifest.to_bytes(), manifest)
    record = Record.accept(manifest.head, manifest.to_bytes(), manifest)
    assert record.read_manifest(where="x") is manifest
    again = Record.from_bytes(record.to_bytes(), where="x").read_manifest(where="x")
    assert again.to_bytes() == manifest.to_bytes()


@pytest.mark.parametrize("collecting", [True, False])
def test_reading_leaves_garbage_collection_as_it_was(collecting: bool) -> None:
    was_on = gc.isenabled()
    try:
        gc.enable() if collecting else gc.disable()
        Manifest.from_bytes(whole().to_bytes(), where="x")
        with pytest.raises(IntegrityError):
            Manifest.from_bytes(b"{", where="x")
        assert gc.isenabled() is collecting
    finally:
        gc.enable() if was_on else gc.disable()


def json_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def examples() -> list[FileModel]:
    manifest = whole()
    completed = Completed.of(manifest, manifest.to_bytes(), CREATED)
    head = manifest.head
    return [
        manifest,
        completed,
        Tombstone(run="qwen", reason="retention", deleted_at=CREATED, **head.model_dump()),
        Latest.of(completed, CREATED),
        Record.accept(head, manifest.to_bytes()),
        Record(state="refuse", head=head, reason="never staged"),
        StagedList(run="qwen", head=head, node="node-0", shards=manifest.shards_of("node-0")),
        LedgerEntry(
            run="qwen",
            nodes=("node-0",),
            manifest_sha256=completed.manifest_sha256,
            committed_at=CREATED,
            **head.model_dump(),
        ),
        NodeIdentity(node="node-0"),
        EpochNote(epoch=3, owner="token"),
        Owner(run="qwen", owner="token", epoch=3, address="host", heartbeat_at=CREATED, interval_s=5.0),
    ]


@pytest.mark.parametrize("model", examples(), ids=lambda model: type(model).__name__)
class TestEveryFile:
    def test_reads_back_equal_and_writes_the_same_bytes(self, model: FileModel) -> None:
        data = model.to_bytes()
        assert type(model).from_bytes(data, where="x").to_bytes() == data
        assert json.loads(data)["format_version"] == 2

    def test_refuses_another_format_version_naming_both(self, model: FileModel) -> None:
        for version in (0, 3, "1", True, None, 2.0):
            content = {**json.loads(model.to_bytes()), "format_version": version, "new_field": 1}
            changed = json.dumps(content).encode() if isinstance(model, Manifest) else sealed(content)
            with pytest.raises(FormatVersionError) as caught:
                type(model).from_bytes(changed, where="/root/file")
            text = str(caught.value)
            assert "/root/file" in text and f"version {version!r}" in text and "reads version 1 and 2" in text

    def test_cannot_be_made_with_another_format_version(self, model: FileModel) -> None:
        with pytest.raises(FormatVersionError):
            type(model)(**{**dict(model), "format_version": 3})

    def test_refuses_unknown_and_missing_fields(self, model: FileModel) -> None:
        content = json.loads(model.to_bytes())
        write = json_bytes if isinstance(model, Manifest) else sealed
        with pytest.raises(IntegrityError, match="surprise"):
            type(model).from_bytes(write({**content, "surprise": 1}), where="x")
        del content["format_version"]
        with pytest.raises(IntegrityError, match="no format version"):
            type(model).from_bytes(write(content), where="x")

    def test_reads_version_1_which_had_no_digest(self, model: FileModel) -> None:
        content = {**json.loads(model.to_bytes()), "format_version": 1}
        digest = content.pop("sha256", None)
        back = type(model).from_bytes(json_bytes(content), where="x")
        if isinstance(model, Manifest):
            assert json.loads(back.to_bytes())["format_version"] == 1  # its bytes' digest stands elsewhere
            return

        assert back.to_bytes() == model.to_bytes()
        for wrong in ({**content, "sha256": digest}, {**content, "format_version": 2}):
            with pytest.raises(IntegrityError, match="/root/file is not a whole"):
                type(model).from_bytes(json_bytes(wrong), where="/root/file")
        with pytest.raises(IntegrityError, match="a digest, which files of format version 1 do not"):
            type(model).from_bytes(sealed(content), where="x")

    def test_any_flipped_bit_is_damage_and_no_other_version(self, model: FileModel) -> None:
        data = model.to_bytes()
        if isinstance(model, Manifest):
            return
        for at in range(0, len(data), 1 + len(data) // 400):
            for bit in range(8):
                flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                with pytest.raises(IntegrityError, match="/root/file is not a whole") as caught:
                    type(model).from_bytes(flipped, where="/root/file")
                assert not isinstance(caught.value, FormatVersionError)

    @pytest.mark.parametrize("junk", [b"", b"\0" * 40, b"[]", b"5", b"{", b"\xff{}", b"[" * 100_000, b'{"a":1,"a":2}'])
    def test_refuses_garbage_naming_the_place(self, model: FileModel, junk: bytes) -> None:
        with pytest.raises(IntegrityError, match="/root/file is not a whole"):
            type(model).from_bytes(junk, where="/root/file")

    def test_refuses_every_truncation(self, model: FileModel) -> None:
        data = model.to_bytes()
        for cut in {1, len(data) // 3, len(data) // 2, len(data) - 2}:
            with pytest.raises(IntegrityError):
                type(model).from_bytes(data[:cut], where="x")

    def test_is_frozen(self, model: FileModel) -> None:
        with pytest.raises(ValidationError):
            model.format_version = 1


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_flipped_byte_gives_an_error_or_another_valid_manifest_never_a_crash(data: st.DataObject) -> None:
    content = bytearray(whole().to_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        Manifest.from_bytes(bytes(content), where="x")
    except IntegrityError:
        return


def test_metrics_keep_nan_and_infinity() -> None:
    back = Manifest.from_bytes(whole().to_bytes(), where="x")
    assert back.metrics["loss"] != back.metrics["loss"] and back.metrics["kl"] == float("-inf")


def _without(manifest: Manifest, index: int) -> dict[str, Any]:
    return {**dict(manifest), "shards": manifest.shards[:index] + manifest.shards[index + 1 :]}


@pytest.mark.parametrize("index", range(5))
def test_a_manifest_without_one_of_its_shards_cannot_be_made(index: int) -> None:
    with pytest.raises(ValidationError, match="shards: the roles' declaration lacks"):
        Manifest(**_without(whole(), index))


def test_a_manifest_with_a_doubled_or_foreign_shard_cannot_be_made() -> None:
    manifest = whole()
    with pytest.raises(ValidationError, match="stand in it twice: actor:0:model"):
        Manifest(**{**dict(manifest), "shards": (*manifest.shards, manifest.shards[0])})
    stranger = shard_record(b"y", rank=2, node="node-0")
    with pytest.raises(ValidationError, match="does not expect actor:2:model"):
        Manifest(**{**dict(manifest), "shards": (*manifest.shards, stranger)})


def test_a_manifest_without_one_of_its_members_cannot_be_made() -> None:
    manifest = whole()
    with pytest.raises(ValidationError, match="2 members for roles of 3 ranks"):
        Manifest(**{**dict(manifest), "members": manifest.members[1:]})
    with pytest.raises(ValidationError, match="stand in it twice"):
        Manifest(**{**dict(manifest), "members": (*manifest.members[1:], manifest.members[1])})


def test_an_absurd_world_size_is_refused_at_once() -> None:
    with pytest.raises(ValidationError, match="members for roles of"):
        Manifest(**{**dict(whole()), "roles": {"actor": RoleRecord(world_size=10**9, components=("model",))}})


def test_participants_are_exactly_the_nodes_that_hold_shards() -> None:
    for wrong in (("node-0",), ("node-0", "node-1", "node-2"), ("node-0", "node-0")):
        with pytest.raises(ValidationError, match="participants"):
            Manifest(**{**dict(whole()), "participants": wrong})


def test_shards_that_differ_only_in_case_are_refused() -> None:
    shards = [shard_record(b"x", component="model"), shard_record(b"y", component="Model")]
    with pytest.raises(ValidationError, match="case"):
        manifest_of(shards)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "../rank_00000.model.safetensors"},
        {"path": "/etc/passwd"},
        {"path": "actor/rank_00001.model.safetensors"},
        {"role": ".."},
        {"role": "COMPLETED"},
        {"role": "a/b"},
        {"component": "m\n"},
        {"rank": -1},
        {"rank": 10**9},
        {"rank": True},
        {"nbytes": 2001},
        {"block_bytes": 0},
        {"block_bytes": 100},
        {"blocks": ()},
        {"digest": "0" * 64},
        {"digest": "XYZ"},
    ],
    ids=str,
)
def test_a_shard_record_that_contradicts_itself_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        shard_record(b"x" * 2000, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"offsets": (3, 0)}, {"sizes": (2,)}, {"begin": 30}, {"end": 3000}, {"offsets": (-1, 0)}],
    ids=str,
)
def test_a_chunk_outside_of_its_tensor_or_file_cannot_be_made(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "fqn": "w",
        "dtype": "float32",
        "global_shape": (4, 2),
        "offsets": (2, 0),
        "sizes": (2, 2),
        "begin": 8,
        "end": 24,
    }
    with pytest.raises(ValidationError):
        shard_record(b"x" * 2000, chunks=(Chunk(**{**fields, **changes}),))


def test_text_that_is_no_unicode_is_refused_before_it_is_written() -> None:
    with pytest.raises(ValidationError):
        Manifest(**{**dict(whole()), "reason": "\ud800"})
    with pytest.raises(ValidationError):
        Manifest(**{**dict(whole()), "fingerprint": {"a": ["\ud800"]}})


def test_an_accept_holds_the_manifest_of_its_own_attempt() -> None:
    manifest = whole()
    text = manifest.to_bytes().decode()
    record = Record.from_bytes(Record.accept(manifest.head, text.encode()).to_bytes(), where="x")
    assert record.read_manifest(where="x").to_bytes().decode() == text
    other = manifest.head.model_copy(update={"attempt": "attempt-2"})
    for wrong in (
        {"state": "accept", "head": manifest.head},
        {"state": "accept", "head": other, "manifest": text},
        {"state": "refuse", "head": manifest.head},
        {"state": "refuse", "head": manifest.head, "reason": "x", "manifest": text},
        {"state": "maybe", "head": manifest.head},
    ):
        with pytest.raises(ValidationError):
            Record(**wrong)


def test_an_accept_whose_manifest_was_damaged_is_an_integrity_error() -> None:
    manifest = whole()
    record = Record.accept(manifest.head, manifest.to_bytes())
    damaged = record.to_bytes().replace(b'\\"rank\\":1', b'\\"rank\\":7', 1)
    assert damaged != record.to_bytes()
    with pytest.raises(IntegrityError):
        Record.from_bytes(damaged, where="records/x.json")


def test_a_tombstone_is_told_from_completed() -> None:
    _, completed, tombstone, *_ = examples()
    assert isinstance(read_completed(completed.to_bytes(), where="x"), Completed)
    assert isinstance(read_completed(tombstone.to_bytes(), where="x"), Tombstone)
    with pytest.raises(IntegrityError):
        Completed.from_bytes(tombstone.to_bytes(), where="x")


def test_a_shard_record_survives_a_dump() -> None:
    record = shard_record(b"x" * 2500)
    assert ShardRecord.model_validate_json(record.model_dump_json()) == record
