"""What every store must do, whatever it is made of."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from lastgood.storage.digest import BlockDigests, digest_blocks
from lastgood.storage.errors import AlreadyExistsError, IntegrityError, StoreError
from lastgood.storage.store import Store

KEY = "qwen/global_step_400/A1/actor/rank_00003.model.safetensors"


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, BlockDigests]:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(10_001))
    return path, digest_blocks(path.read_bytes(), 1000)


def test_a_store_is_empty_until_something_is_written(store: Store) -> None:
    assert store.find(KEY) is None and store.head(KEY) is None
    assert list(store.list("")) == [] == list(store.list("qwen/"))
    with pytest.raises(StoreError, match="there is no object") as caught:
        store.get(KEY)
    assert caught.value.missing


def test_the_probe_leaves_nothing_behind_and_can_be_repeated(store: Store) -> None:
    store.probe("run")
    store.probe("run")
    assert list(store.list("")) == []


def test_sweeping_takes_no_object(store: Store, shard: tuple[Path, BlockDigests]) -> None:
    store.put_file(KEY, *shard)
    store.create_exclusive("qwen/latest.json", b"{}")
    assert store.sweep("", 0.0) == 0 == store.sweep("qwen/", 0.0)
    assert list(store.list("")) == [KEY, "qwen/latest.json"]


def test_a_store_says_what_it_promises(store: Store) -> None:
    assert store.guarantees.exclusive_create
    assert store.guarantees.sentence
    assert isinstance(store, Store)


def test_exclusive_create_keeps_the_first(store: Store) -> None:
    assert store.create_exclusive(KEY, b"first")
    assert not store.create_exclusive(KEY, b"second")
    assert store.get(KEY) == b"first"


def test_replace_and_conditional_replace(store: Store) -> None:
    assert store.replace_if("qwen/latest.json", b"1", None)
    assert not store.replace_if("qwen/latest.json", b"2", None)
    first = store.head("qwen/latest.json")
    assert first is not None and first[0] == 1
    assert store.replace_if("qwen/latest.json", b"22", first[1])
    assert not store.replace_if("qwen/latest.json", b"333", first[1])
    assert store.get("qwen/latest.json") == b"22"
    store.replace("qwen/latest.json", b"4")
    assert store.get("qwen/latest.json") == b"4"
    assert not store.replace_if("qwen/not-there", b"5", first[1])


def test_an_etag_changes_with_every_replacement_by_equal_bytes_too(store: Store) -> None:
    store.replace("x", b"same")
    before = store.head("x")
    store.replace("x", b"same")
    assert before is not None and not store.replace_if("x", b"late", before[1])


def test_put_file_copies_verifies_and_is_idempotent(store: Store, shard: tuple[Path, BlockDigests]) -> None:
    path, digests = shard
    store.put_file(KEY, path, digests)
    assert store.get(KEY) == path.read_bytes()
    before = store.head(KEY)
    store.put_file(KEY, path, digests)
    assert store.head(KEY) == before
    assert before is not None and before[0] == digests.nbytes
    assert list(store.list("")) == [KEY]


def test_put_file_never_overwrites_other_bytes(store: Store, shard: tuple[Path, BlockDigests]) -> None:
    path, digests = shard
    store.create_exclusive(KEY, b"somebody else's")
    with pytest.raises(AlreadyExistsError, match="other bytes stand"):
        store.put_file(KEY, path, digests)
    store.create_exclusive(KEY + "2", b"z" * digests.nbytes)
    with pytest.raises(AlreadyExistsError):
        store.put_file(KEY + "2", path, digests)
    assert store.get(KEY) == b"somebody else's"


def test_put_file_of_bytes_that_stand_under_another_key_makes_an_object_of_its_own(
    store: Store, shard: tuple[Path, BlockDigests]
) -> None:
    path, digests = shard
    store.put_file(KEY, path, digests)
    store.put_file(KEY + "2", path, digests, same_as=KEY)
    store.delete_many([KEY])
    assert store.get(KEY + "2") == path.read_bytes()
    store.put_file(KEY + "3", path, digests, same_as=KEY)  # it is gone
    store.replace(KEY, b"z" * digests.nbytes)
    store.put_file(KEY + "4", path, digests, same_as=KEY)  # it is another now
    assert store.get(KEY + "3") == store.get(KEY + "4") == path.read_bytes()
    with pytest.raises(IntegrityError):
        store.put_file(KEY + "5", path, digests, same_as="../out")


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove", "empty"])
def test_a_local_file_that_is_not_what_was_staged_never_appears(
    store: Store, shard: tuple[Path, BlockDigests], damage: str
) -> None:
    path, digests = shard
    good = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        changed = {
            "flip": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
            "truncate": good[:-1],
            "grow": good + b"x",
            "empty": b"",
        }
        path.write_bytes(changed[damage])
    with pytest.raises(IntegrityError, match="not what was staged"):
        store.put_file(KEY, path, digests)
    assert store.find(KEY) is None and list(store.list("")) == []


def test_ranges_read_exactly_what_was_asked_for(store: Store) -> None:
    store.create_exclusive("x", b"0123456789")
    assert store.read_range("x", 2, 5) == b"234" and store.read_range("x", 3, 3) == b""
    with pytest.raises(IntegrityError, match="ends at byte 10"):
        store.read_range("x", 5, 11)
    with pytest.raises(StoreError):
        store.read_range("not there", 0, 1)


def test_listing_is_by_text_prefix_and_sorted(store: Store) -> None:
    keys = ["qwen/ledger/00000001-00000002.json", "qwen/ledger/00000001-00000010.json", "qwen/latest.json", "qwen2/x"]
    for key in keys:
        store.create_exclusive(key, b"")
    assert list(store.list("qwen/ledger/")) == keys[:2]
    assert list(store.list("qwen/l")) == sorted(keys[:3])
    assert list(store.list("qwen")) == sorted(keys)
    assert list(store.list("")) == sorted(keys)
    assert list(store.list("qwen/ledger/00000001-00000010")) == keys[1:2]
    assert list(store.list("nothing/at/all")) == []


def test_deleting_is_idempotent_and_leaves_the_rest(store: Store) -> None:
    for key in ("qwen/a/b/c", "qwen/a/d"):
        store.create_exclusive(key, b"x")
    store.delete_many(["qwen/a/b/c", "qwen/never/there"])
    store.delete_many(["qwen/a/b/c"])
    assert list(store.list("")) == ["qwen/a/d"]
    assert store.create_exclusive("qwen/a/b/c", b"again")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_keys_cannot_leave_the_root(store: Store, key: str, shard: tuple[Path, BlockDigests]) -> None:
    for attempt in (
        lambda: store.create_exclusive(key, b"x"),
        lambda: store.replace(key, b"x"),
        lambda: store.put_file(key, *shard),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.delete_many([key]),
    ):
        with pytest.raises(IntegrityError):
            attempt()


def test_a_store_crosses_processes(store: Store) -> None:
    store.create_exclusive("x", b"1")
    assert pickle.loads(pickle.dumps(store)).get("x") == b"1"  # noqa: S301 - our own handle, as Ray sends it
