"""What a coordinator takes from the store that a dead writer or a dead coordinator has left there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lastgood.coordinator.messages import AttemptHead
from lastgood.coordinator.options import Options
from lastgood.coordinator.ownership import Identity
from lastgood.coordinator.retention import collect_remotely
from lastgood.coordinator.service import Notice, Service, StagerPort
from lastgood.storage.errors import StoreError, StoreUnavailableError
from lastgood.storage.files import temporary_beside
from lastgood.storage.lanes import Lane
from lastgood.storage.manifest import Completed
from lastgood.storage.store import ABANDONED_S, FileStore
from tests.unit.memory_world import PATHS


async def until(done: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


async def alone(root: Path) -> Service:
    """A coordinator without any stager, started."""

    async def nobody() -> Sequence[StagerPort]:
        return ()

    async def shut_down() -> None:
        return None

    async def nothing() -> Sequence[Notice]:
        return ()

    options = Options(run="run", store=str(root / "store"), staging=str(root / "staging"), heartbeat_s=0.05)
    store = FileStore(root / "store")
    lane = Lane(store.url, 1, StoreUnavailableError)
    service = Service(options, store, lane, Identity("cluster", "token", "here"), nobody, shut_down, nothing)
    await service.boot()
    return service


def test_a_coordinator_takes_unfinished_writes_from_the_store_once_nobody_can_be_writing_them(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.create_exclusive(PATHS.latest, b"{}")
    old, young = (temporary_beside(store.place(PATHS.latest)) for _ in range(2))
    for path in (old, young):
        path.write_bytes(b"half")
    at = old.stat().st_mtime - ABANDONED_S - 1
    os.utime(old, (at, at))

    async def scene() -> None:
        service = await alone(tmp_path)
        await until(lambda: not old.exists())
        assert young.exists()
        await service.end()
        assert not young.exists()  # the run is over: nobody writes any more

    asyncio.run(scene())
    assert store.get(PATHS.latest) == b"{}"


def test_a_coordinator_finishes_a_collection_that_an_earlier_one_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, head = FileStore(tmp_path / "store"), AttemptHead("A3", 3, 1, 3)
    completed = Completed(
        run="run",
        attempt="A3",
        step=3,
        epoch=1,
        sequence=3,
        manifest_sha256="0" * 64,
        kind="scheduled",
        participants=("n",),
        committed_at="2031-05-06T07:08:09.123Z",
    )
    store.create_exclusive(PATHS.shard(3, "A3", "actor/rank_00000.model.safetensors"), b"x")
    store.create_exclusive(PATHS.completed(3, "A3"), completed.to_bytes())

    def dies(*_: object) -> None:
        raise StoreError("the coordinator is gone")

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete_many", dies)
        with pytest.raises(StoreError):
            collect_remotely(store, PATHS, head, "retention")
    assert len(store.list(f"{PATHS.step_dir(3)}/")) == 2

    async def scene() -> None:
        service = await alone(tmp_path)
        service._has_committed = True  # retention begins after the first commit
        await until(lambda: len(store.list(f"{PATHS.step_dir(3)}/")) == 1)
        await service.end()

    asyncio.run(scene())
    assert list(store.list(f"{PATHS.step_dir(3)}/")) == [PATHS.completed(3, "A3")]
