"""What retention may delete, and in which order it deletes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from lastgood.coordinator.catalog import Checkpoint, Standing
from lastgood.coordinator.messages import AttemptHead
from lastgood.coordinator.remote import Remote
from lastgood.coordinator.retention import collect_remotely, to_collect
from lastgood.storage.errors import StoreError
from lastgood.storage.layout import RunPaths
from lastgood.storage.manifest import Completed, Tombstone, read_completed
from lastgood.storage.store import FileStore
from tests.unit.storage_samples import completed_of

PATHS = RunPaths("", "run")


def checkpoints(*states: Standing) -> list[Checkpoint]:
    """Newest first; the step is the sequence."""
    count = len(states)
    return [Checkpoint(count - i, f"A{count - i}", 1, count - i, state) for i, state in enumerate(states)]


D, C, DOUBT = Standing.DURABLE, Standing.COMMITTED, Standing.IN_DOUBT


@pytest.mark.parametrize(
    ("states", "keep", "protected", "gone"),
    [
        ((D, D, D, D), 2, (), ["A1", "A2"]),  # oldest first
        ((D, D, D, D), None, (), []),
        ((D, D, D, D), 2, ("A1",), ["A2"]),  # resumed from
        ((C, D, D, D), 1, (), ["A1", "A2"]),  # the newest durable stays although a newer one is committed
        ((D, C, D, D), 1, (), ["A1", "A2"]),  # A3 is not durable: its upload is pending
        ((C, C, C), 1, (), []),
        ((DOUBT, D, D), 1, (), ["A1"]),  # what is in doubt does not count
    ],
)
def test_only_durable_checkpoints_beyond_the_newest_go(
    states: tuple[Standing, ...], keep: int | None, protected: tuple[str, ...], gone: list[str]
) -> None:
    assert [c.attempt for c, _ in to_collect(checkpoints(*states), keep, protected)] == gone


class Recorder(FileStore):
    """A store that notes what is changed, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.changes: list[tuple[str, str]] = []

    def replace(self, key: str, data: bytes) -> None:
        self.changes.append(("replace", key))
        super().replace(key, data)

    def delete_many(self, keys) -> None:
        keys = list(keys)
        self.changes.extend(("delete", key) for key in keys)
        super().delete_many(keys)


def durable(store: FileStore, step: int) -> AttemptHead:
    head = AttemptHead(f"A{step}", step, 1, step)
    completed = completed_of(step, head.attempt)
    store.create_exclusive(f"{PATHS.attempt_dir(step, head.attempt)}/actor/rank_00000.model.safetensors", b"x")
    store.create_exclusive(PATHS.manifest(step, head.attempt), b"{}")
    store.create_exclusive(PATHS.completed(step, head.attempt), completed.to_bytes())
    store.replace(PATHS.pointer(step), completed.to_bytes())
    return head


def test_the_tombstone_stands_before_any_file_goes_and_stays(tmp_path: Path) -> None:
    store = Recorder(tmp_path)
    head = durable(store, 3)
    store.changes.clear()
    collect_remotely(store, PATHS, head, "because")
    completed = PATHS.completed(3, "A3")
    assert store.changes[0] == ("replace", completed)
    assert ("delete", PATHS.pointer(3)) in store.changes
    assert store.list(f"{PATHS.step_dir(3)}/") == [completed]
    tombstone = read_completed(store.get(completed), where=completed)
    assert isinstance(tombstone, Tombstone)
    collect_remotely(store, PATHS, head, "again")  # a crash in between: the same once more
    assert store.list(f"{PATHS.step_dir(3)}/") == [completed]


def test_a_pointer_to_another_attempt_of_the_step_stays(tmp_path: Path) -> None:
    store = Recorder(tmp_path)
    old = durable(store, 3)
    newer = Completed.from_bytes(store.get(PATHS.pointer(3)), where="pointer").model_copy(
        update={"attempt": "B3", "sequence": 9}
    )
    store.replace(PATHS.pointer(3), newer.to_bytes())
    collect_remotely(store, PATHS, old, "because")
    assert Completed.from_bytes(store.get(PATHS.pointer(3)), where="pointer").attempt == "B3"


class Stumbling(Recorder):
    """Dies after the tombstone: nothing is deleted."""

    def delete_many(self, keys: Iterable[str]) -> None:
        raise StoreError("the coordinator is gone")


def test_a_collection_that_a_death_cut_short_is_found_and_finished(tmp_path: Path) -> None:
    head = durable(Recorder(tmp_path), 3)
    with pytest.raises(StoreError):
        collect_remotely(Stumbling(tmp_path), PATHS, head, "because")
    store = Recorder(tmp_path)
    remote = Remote(store, "run", lambda: "2031-05-06T07:08:09.123Z")
    (half,) = remote.survey().half_collected
    assert half.attempt == "A3"
    collect_remotely(store, PATHS, AttemptHead("A3", 3, 1, 3), "again")
    assert store.changes[0] == ("replace", PATHS.completed(3, "A3"))  # durable before anything goes
    assert store.list(f"{PATHS.step_dir(3)}/") == [PATHS.completed(3, "A3")]
    assert remote.survey().half_collected == ()
