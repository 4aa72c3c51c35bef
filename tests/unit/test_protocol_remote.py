"""What the coordinator writes to the store: markers last, pointers only forward, nothing overwritten or assumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lastgood.coordinator import commands as cmd
from lastgood.coordinator.messages import AttemptHead, MemberId, RoleDeclaration, SaveKind
from lastgood.coordinator.remote import Remote
from lastgood.coordinator.runner import build_manifest
from lastgood.storage.errors import AlreadyExistsError, FencedError, StoreError
from lastgood.storage.manifest import Completed, Latest, Manifest, Tombstone
from lastgood.storage.store import FileStore, Store
from tests.unit.memory_world import PATHS, MemoryStore, content, shard

NOW = "2030-01-01T00:00:00Z"


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def checkpoint(step: int, sequence: int, attempt: str = "", epoch: int = 1) -> tuple[Completed, bytes]:
    head = AttemptHead(attempt or f"a{sequence}", step, epoch, sequence)
    members = (MemberId("actor", 0), MemberId("actor", 1))
    shards = tuple(shard(member, "model", f"n{member.rank + 1}") for member in members)
    draft = cmd.Draft(
        "run",
        head,
        SaveKind.MANUAL,
        None,
        "a test",
        "me",
        ("r1",),
        None,
        (RoleDeclaration("actor", 2, ("model",), "m1"),),
        tuple(cmd.MemberWord(member, f"n{member.rank + 1}", 1) for member in members),
        ("n1", "n2"),
        shards,
    )
    data = build_manifest(draft, NOW, {})
    return Completed.of(Manifest.from_bytes(data, where="here"), data, NOW), data


def upload(store: Store, manifest: bytes) -> None:
    content_of = Manifest.from_bytes(manifest, where="here")
    for record in content_of.shards:
        store.replace(PATHS.shard(content_of.step, content_of.attempt, record.path), content(record))


def test_a_missing_or_short_object_keeps_the_attempt_from_being_complete_and_names_its_node(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    completed, data = checkpoint(5, 1)
    upload(store, data)
    key = PATHS.shard(5, "a1", "actor/rank_00001.model.safetensors")
    for spoil in (lambda: store.delete_many([key]), lambda: store.replace(key, b"short")):
        spoil()
        with pytest.raises(StoreError) as caught:
            remote.complete(completed, data)
        assert caught.value.missing_nodes == ("n2",)
        assert store.find(PATHS.completed(5, "a1")) is None and store.find(PATHS.latest) is None


def test_pointers_only_move_forward_whatever_the_order_and_the_step(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    for step, sequence in ((5, 2), (5, 1), (3, 3), (5, 2)):
        completed, data = checkpoint(step, sequence)
        upload(store, data)
        remote.complete(completed, data)
    assert Completed.from_bytes(store.get(PATHS.pointer(5)), where="pointer").attempt == "a2"
    assert Latest.from_bytes(store.get(PATHS.latest), where="latest").attempt == "a3"
    assert [c.attempt for c in sorted(remote.survey().completed, key=lambda c: c.sequence)] == ["a1", "a2", "a3"]


def test_pointers_that_a_death_left_behind_are_moved_to_the_newest_commits_and_others_are_left(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    for step, sequence in ((5, 1), (5, 2), (3, 3)):
        completed, data = checkpoint(step, sequence)
        upload(store, data)
        remote.complete(completed, data)
    keys = (PATHS.pointer(5), PATHS.pointer(3), PATHS.latest)
    whole = [store.get(key) for key in keys]
    store.replace(keys[0], checkpoint(5, 1)[0].to_bytes())
    store.delete_many([keys[2]])
    left = store.head(keys[1])
    remote.forward_pointers(remote.survey().completed)
    assert [store.get(key) for key in keys] == whole
    assert store.head(keys[1]) == left


def test_a_pointer_that_cannot_be_read_is_replaced(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    store.replace(PATHS.latest, b"")
    completed, data = checkpoint(5, 1)
    upload(store, data)
    remote.complete(completed, data)
    assert Latest.from_bytes(store.get(PATHS.latest), where="latest").attempt == "a1"


def test_completing_again_keeps_what_stands_and_another_manifest_is_never_overwritten(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    completed, data = checkpoint(5, 1)
    upload(store, data)
    first = remote.complete(completed, data)
    later = completed.model_copy(update={"committed_at": "2031-01-01T00:00:00Z"})
    assert remote.complete(later, data) == first
    other, other_data = checkpoint(5, 2, attempt="a1")
    with pytest.raises(AlreadyExistsError):
        remote.complete(other, other_data)
    assert store.get(PATHS.manifest(5, "a1")) == data


def test_a_tombstone_stays_and_its_ledger_entry_is_no_loss(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    completed, data = checkpoint(5, 1)
    upload(store, data)
    remote.write_ledger(completed)
    tombstone = Tombstone(run="run", attempt="a1", step=5, epoch=1, sequence=1, reason="kept 3", deleted_at=NOW)
    store.replace(PATHS.completed(5, "a1"), tombstone.to_bytes())
    with pytest.raises(StoreError) as caught:
        remote.complete(completed, data)
    assert caught.value.collected
    survey = remote.survey()
    assert (survey.completed, survey.ledger, survey.collected) == ((), (), {"a1"})


def test_the_ledger_is_written_once_and_a_second_coordinator_of_the_epoch_is_noticed(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    completed, _ = checkpoint(5, 1)
    remote.write_ledger(completed)
    remote.write_ledger(completed)
    other, _ = checkpoint(6, 1, attempt="b1")
    with pytest.raises(AlreadyExistsError, match="two coordinators used one epoch"):
        remote.write_ledger(other)
    assert [entry.attempt for entry in remote.survey().ledger] == ["a1"]


def test_a_broken_object_is_told_and_does_not_hide_the_others(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW)
    completed, data = checkpoint(5, 1)
    upload(store, data)
    remote.write_ledger(completed)
    remote.complete(completed, data)
    store.replace(PATHS.ledger(1, 9), b"garbage")
    store.replace(PATHS.completed(7, "zz"), b"{}")
    store.replace(PATHS.completed(8, "moved"), completed.to_bytes())
    survey = remote.survey()
    assert [c.attempt for c in survey.completed] == ["a1"] and len(survey.problems) == 3
    assert remote.read_manifest(survey.completed[0]) == data


def test_votes_that_make_no_manifest_are_refused_by_the_model_too() -> None:
    completed, data = checkpoint(5, 1)
    manifest = Manifest.from_bytes(data, where="here")
    head = AttemptHead(completed.attempt, 5, 1, 1)
    draft = cmd.Draft(
        "run",
        head,
        SaveKind.MANUAL,
        None,
        "",
        "",
        (),
        None,
        (RoleDeclaration("actor", 2, ("model",), "m1"),),
        (),
        (),
        (),
    )
    with pytest.raises(ValueError, match="members"):
        build_manifest(dataclasses.replace(draft, shards=manifest.shards[:1], participants=("n1",)), NOW, {})


def test_beside_a_higher_epoch_nothing_is_written(store: Store) -> None:
    remote = Remote(store, "run", lambda: NOW, home=PATHS.epoch(2))
    completed, data = checkpoint(5, 1, epoch=2)
    upload(store, data)
    for epoch in (1, 2, 3):
        store.create_exclusive(PATHS.epoch(epoch), b"claimed")
    before = store.list("")
    for write in (lambda: remote.write_ledger(completed), lambda: remote.complete(completed, data)):
        with pytest.raises(FencedError, match="epoch 3 was claimed in the store by a newer coordinator"):
            write()
    assert store.list("") == before
    store.delete_many([PATHS.epoch(3)])
    remote.write_ledger(completed)
    remote.complete(completed, data)
