"""What a coordinator takes from the store that a dead writer or a dead coordinator has left there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lastgood.coordinator import watch
from lastgood.coordinator.commands import Announce
from lastgood.coordinator.messages import AttemptHead, Blame, Progress, SaveState
from lastgood.coordinator.moves import Phase
from lastgood.coordinator.options import Options
from lastgood.coordinator.outcomes import DrainOutcome, WindowOutcome
from lastgood.coordinator.ownership import Identity
from lastgood.coordinator.policies import Decision
from lastgood.coordinator.ports import Notice, Notices, StagerPort
from lastgood.coordinator.retention import collect_remotely
from lastgood.coordinator.service import Service
from lastgood.coordinator.timings import ENOUGH
from lastgood.storage.errors import StoreError, StoreUnavailableError
from lastgood.storage.files import temporary_beside
from lastgood.storage.lanes import Lane
from lastgood.storage.store import ABANDONED_S, FileStore
from tests.unit.memory_world import PATHS
from tests.unit.storage_samples import completed_of


async def until(done: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


async def nothing() -> Sequence[Notice]:
    return ()


async def alone(
    root: Path, notices: Notices = nothing, ended: Callable[[], None] = lambda: None, linger_s: float = 600.0
) -> Service:
    """A coordinator without any stager, started. `ended` is called when it has shut down."""

    async def nobody() -> Sequence[StagerPort]:
        return ()

    async def shut_down() -> None:
        ended()

    options = Options(
        run="run", store=str(root / "store"), staging=str(root / "staging"), heartbeat_s=0.05, linger_s=linger_s
    )
    store = FileStore(root / "store")
    lane = Lane(store.url, 1, StoreUnavailableError)
    service = Service(options, store, lane, Identity("cluster", "token", "here"), nobody, shut_down, notices)
    await service.boot()
    return service


def test_retention_leaves_alone_what_the_run_continued_from_last_and_nothing_older(tmp_path: Path) -> None:
    async def scene() -> None:
        service = await alone(tmp_path)
        for number in (1, 2):
            service.heed(Progress(resumed=AttemptHead(f"A{number}", number, 1, number)))
        assert service._housekeeping is not None
        assert service._housekeeping._protected == {"A2"}
        await service.end()

    asyncio.run(scene())


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
    completed = completed_of(3, "A3")
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
        assert service._housekeeping is not None
        commit = AttemptHead("A4", 4, service.epoch, 4)  # retention begins after the first one
        service._housekeeping.hear(Announce(SaveState.COMMITTED, (), commit))
        await until(lambda: len(store.list(f"{PATHS.step_dir(3)}/")) == 1)
        await service.end()

    asyncio.run(scene())
    assert list(store.list(f"{PATHS.step_dir(3)}/")) == [PATHS.completed(3, "A3")]


@pytest.mark.parametrize(("epoch", "begins"), [(0, False), (1, True)], ids=["an earlier one's", "its own"])
def test_retention_begins_with_a_commit_of_this_incarnation(tmp_path: Path, epoch: int, begins: bool) -> None:
    async def scene() -> bool:
        service = await alone(tmp_path)
        assert service._housekeeping is not None
        service._housekeeping.hear(Announce(SaveState.COMMITTED, (), AttemptHead("A3", 3, epoch, 3)))
        has_committed = service._housekeeping._has_committed
        await service.end()
        return has_committed

    assert asyncio.run(scene()) is begins


def test_a_cluster_that_does_not_answer_holds_up_nothing_but_the_look_for_notices(tmp_path: Path) -> None:
    asked: list[str] = []
    ends: list[str] = []

    async def hang() -> Sequence[Notice]:
        asked.append("asked")
        await asyncio.Event().wait()
        return ()

    async def scene() -> None:
        await alone(tmp_path, hang, lambda: ends.append("ended"), linger_s=0.2)
        await until(lambda: bool(asked))
        await until(lambda: bool(ends))  # nobody is left: it ends by itself

    asyncio.run(scene())
    assert (asked, ends) == (["asked"], ["ended"])


def test_a_run_without_anybody_ends_only_once_what_is_committed_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []
    drains: list[bool] = []

    async def drain(timeout_s: float) -> DrainOutcome:
        assert not ends
        drains.append(len(drains) >= 2)  # the store is back for the third
        return DrainOutcome(drains[-1], () if drains[-1] else ("step 3 is committed and not durable yet",))

    async def scene() -> None:
        service = await alone(tmp_path, ended=lambda: ends.append("ended"), linger_s=0.1)
        assert service.driver is not None
        monkeypatch.setattr(service.driver, "drain", drain)
        monkeypatch.setattr(watch, "improving", lambda core: not drains[-1])
        await until(lambda: bool(ends))

    asyncio.run(scene())
    assert drains == [False, False, True]
    assert caplog.text.count("is not durable after 3600 s: step 3") == 2


def test_a_notice_that_leaves_too_little_time_is_heeded_all_the_same_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Notice] = []

    async def look() -> Sequence[Notice]:
        return told

    async def scene() -> None:
        service = await alone(tmp_path, look)
        assert service.driver is not None
        for _ in range(ENOUGH):
            service.driver.core.timings.note({Phase.STAGING: 100.0})
        told.append(Notice("node-1", "node 1 goes, 30 s are left", 30.0))
        await until(lambda: any(i.startswith("notice-") for i in service.driver._outcomes))  # type: ignore[union-attr]
        await service.end()

    asyncio.run(scene())
    assert "a save needs 110.0 s as a rule, so this one may be lost" in caplog.text


def test_a_notice_is_heeded_once_and_a_look_that_fails_is_repeated(tmp_path: Path) -> None:
    looks: list[str] = []
    service: list[Service] = []

    async def look() -> Sequence[Notice]:
        looks.append("look")
        if len(looks) == 1:
            raise ConnectionError("the cluster's head is away")
        return [Notice("node-1", "node 1 goes")]

    async def scene() -> None:
        service.append(await alone(tmp_path, look))
        await until(lambda: len(looks) >= 4)
        saves = [i for i in service[0].driver._outcomes if i.startswith("notice-")]  # type: ignore[union-attr]
        await service[0].end()
        assert saves == [f"notice-{service[0].epoch}-node-1"]

    asyncio.run(scene())


def test_what_earlier_coordinators_left_unsaved_is_told_in_one_sentence_unless_something_newer_is_saved(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        service = await alone(tmp_path)
        telling, newest = service.telling, (0, 9)
        telling._newest = lambda: newest
        refused = Blame("aborting", "the record of n1 says refuse")

        def left(*steps: int, epoch: int = 0) -> None:
            for step in steps:
                head = AttemptHead(f"A{step}", step, epoch, step)
                telling.hear(Announce(SaveState.ABORTED, (), head, blame=refused))

        left(3, 10, 12)
        left(11, epoch=1)
        told = telling.news(12)
        assert told is not None
        own, before = told.failures
        assert own.startswith("step 11: the record of n1 says refuse")
        assert before.startswith("steps 10, 12 were not saved: the coordinator before this one")
        assert telling.news(13) is None
        left(10, 12)
        newest = (1, 14)  # before anybody was told
        assert telling.news(14) is None
        left(15, epoch=0)
        newest = (0, 9)
        (again,) = telling.outcome(WindowOutcome(16, True), Decision(False, "none")).failures
        assert again.startswith("step 15 was not saved")
        await service.end()

    asyncio.run(scene())
