"""Two clusters, one store: the second is refused while the first lives, and fences it when told to take over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.coordinator.epochs import claim_epoch
from lastgood.coordinator.ownership import Identity, Ownership
from lastgood.storage.errors import StoreUnavailableError, UsageError
from lastgood.storage.layout import RunPaths
from lastgood.storage.store import FileStore

PATHS = RunPaths("", "run")


class Clock:
    """A clock that other things happen on: `meanwhile` runs at every sleep."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now = 1_000_000.0
        self.meanwhile = meanwhile

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def ownership(root: Path, cluster: str, token: str, clock: Clock) -> Ownership:
    identity = Identity(cluster, token, f"host of {cluster}")
    return Ownership(FileStore(root), PATHS, identity, 5.0, clock, clock.sleep)


def test_a_fresh_owner_of_another_cluster_is_named_and_the_attach_refused(tmp_path: Path) -> None:
    clock = Clock()
    first, second = ownership(tmp_path, "a", "1", clock), ownership(tmp_path, "b", "2", clock)
    assert claim_epoch(FileStore(tmp_path), PATHS, "1", 0) == 1
    assert first.beat(1) is None

    def beats() -> None:
        assert first.beat(1) is None

    clock.meanwhile = beats
    with pytest.raises(UsageError, match="host of a"):
        second.check(takeover=False)
    second.check(takeover=True)


def test_a_silent_owner_is_not_waited_for_longer_than_its_beats(tmp_path: Path) -> None:
    clock = Clock()
    claim_epoch(FileStore(tmp_path), PATHS, "1", 0)
    ownership(tmp_path, "a", "1", clock).beat(1)
    began, told = clock.now, list[str]()
    ownership(tmp_path, "b", "2", clock).check(takeover=False, tell=told.append)
    assert clock.now - began == 15.0
    assert len(told) == 1
    assert "host of a" in told[0] and "within 15 s" in told[0]


def test_a_coordinator_restarted_in_its_own_cluster_does_not_wait(tmp_path: Path) -> None:
    clock = Clock()
    claim_epoch(FileStore(tmp_path), PATHS, "1", 0)
    ownership(tmp_path, "a", "1", clock).beat(1)
    told = list[str]()
    ownership(tmp_path, "a", "2", clock).check(takeover=False, tell=told.append)
    assert clock.now == 1_000_000.0
    assert not told


def test_the_one_taken_over_learns_it_from_the_epoch_and_leaves_the_new_owner_alone(tmp_path: Path) -> None:
    clock, store = Clock(), FileStore(tmp_path)
    first, second = ownership(tmp_path, "a", "1", clock), ownership(tmp_path, "b", "2", clock)
    one = claim_epoch(store, PATHS, "1", 0)
    assert first.beat(one) is None
    two = claim_epoch(store, PATHS, "2", 0)
    assert second.beat(two) is None
    told = first.beat(one)
    assert told is not None
    assert "host of b" in told
    first.leave()
    assert second.beat(two) is None
    assert b"host of b" in store.get(PATHS.owner)
    second.leave()
    assert store.find(PATHS.owner) is None


def test_a_heartbeat_is_not_written_where_the_store_is_no_longer_mounted(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="mounted"):
        ownership(tmp_path, "a", "1", Clock()).beat(1)
    assert not list(tmp_path.iterdir())


def test_garbage_in_owner_json_stops_nobody(tmp_path: Path) -> None:
    FileStore(tmp_path).replace(PATHS.owner, b"\x00 not json")
    ownership(tmp_path, "b", "2", Clock()).check(takeover=False)
