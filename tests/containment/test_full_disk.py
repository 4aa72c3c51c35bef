"""A staging disk that takes no more: one attempt is lost, named and cleaned, and the next save commits."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lastgood.storage import files
from lastgood.storage.direct import PAGE_BYTES
from tests.containment.disks import ext4, frozen, full, immutable, read_only, tmpfs, without_inodes
from tests.containment.small_run import SmallRun, seconds_of, until


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallRun]:
    """A run whose node 1 stages on a small disk of the kind that the test names (tmpfs unless it says ext4)."""
    kind = getattr(request, "param", "tmpfs")
    with (tmpfs if kind == "tmpfs" else ext4)(tmp_path / "staging-1"):
        here = SmallRun(tmp_path)
        yield here
        here.close()


@pytest.mark.parametrize("preallocate", [True, False], ids=["known at once", "found while writing"])
def test_a_full_disk_costs_one_attempt_and_its_node_and_bytes_are_named(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, preallocate: bool
) -> None:
    if not preallocate:
        monkeypatch.setattr(files, "_preallocate", lambda *_: None)
        monkeypatch.setattr(files, "WRITE_BYTES", 100_000)
    run.commits(1)
    with full(run.nodes[1].staging):
        told = run.fails(
            2,
            "ENOSPC",
            r"rank_00001\.",
            r"after \d+ of \d+ bytes",
            "bytes are free",
            "free space",
            phase="staging",
            node=1,
            member=1,
        )
        assert seconds_of(told) < 20  # the deadline is 30
        run.clean()  # although the disk is still full: the refusal had its room
        run.stands(1)
    run.commits(3)


def test_where_snapshots_are_kept_in_memory_a_full_disk_costs_nothing_when_a_rank_dies(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "staging-1"):
        run = SmallRun(tmp_path, in_memory=True)
        run.commits(1)
        with full(run.nodes[1].staging):
            run.fails(2, "ENOSPC", "The snapshot stays in memory", phase="staging", node=1, member=1)
            run.nodes[0].agent.close()
            run.loop.run(run.driver.add_node(run.nodes[0].stager))  # the coordinator hears that rank 0 is gone

            def tries() -> int:
                held = run.driver.core.memory.held
                return 0 if held is None else held.staging_failures

            until(lambda: tries() >= 3, "saving it was tried again")
            run.stands(1)
        until(lambda: any(c.step == 2 and c.committed for c in run.checkpoints()), "step 2 is saved from memory")
        run.stands(2)
        run.clean()
        run.close()


def test_a_disk_without_inodes_costs_one_attempt(run: SmallRun) -> None:
    run.commits(1)
    with without_inodes(run.nodes[1].staging):
        run.fails(2, "ENOSPC", str(run.nodes[1].files), phase="staging", node=1, member=1)
        run.clean()
        run.stands(1)
    run.commits(3)


@pytest.mark.parametrize("run", ["ext4"], indirect=True)
@pytest.mark.parametrize("fault", [read_only, immutable])
def test_a_directory_that_may_not_be_written_costs_one_attempt(
    run: SmallRun, fault: Callable[[Path], AbstractContextManager[None]]
) -> None:
    run.commits(1)
    place = run.nodes[1].staging if fault is read_only else run.nodes[1].files
    with fault(place):
        told = run.fails(2, str(run.nodes[1].files), "write permission", phase="staging", node=1, member=1)
        assert "EROFS" in told or "EPERM" in told
        run.stands(1)
    run.commits(3)
    run.clean()


class Hits(list[Path]):
    """The files that an error happened to, and how many bytes of whole pieces went well."""

    done_bytes = 0


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, byte: Callable[[int], int]) -> Iterator[Hits]:
    """The disk answers EIO when rank 1's weights are written over a byte. Lists the files it happened to."""
    hit = Hits()
    one = threading.Lock()
    write_all = files.write_all

    def broken(fd: int, data: memoryview, at: int) -> None:
        place = Path(f"/proc/self/fd/{fd}").readlink()
        if "rank_00001.weights" in place.name and "staging-1" in str(place):
            bad = byte(os.fstat(fd).st_size)
            if at <= bad < at + len(data):
                hit.append(place)
                write_all(fd, data[: (bad - at) // PAGE_BYTES * PAGE_BYTES], at)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            with one:
                hit.done_bytes += len(data)
        write_all(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", broken)
        patch.setattr(files, "WRITE_BYTES", 100_000)
        yield hit


BYTES = {"first": lambda size: 0, "middle": lambda size: size // 2, "last": lambda size: size - 1}


@pytest.mark.parametrize("byte", BYTES)
def test_an_io_error_at_any_byte_costs_one_attempt(run: SmallRun, monkeypatch: pytest.MonkeyPatch, byte: str) -> None:
    run.commits(1)
    with failing(monkeypatch, BYTES[byte]) as hit:
        told = run.fails(
            2, "EIO", "rank_00001.weights", r"after \d+ of \d+ bytes", "dmesg", phase="staging", node=1, member=1
        )
    assert len(hit) == 1
    assert f"after {hit.done_bytes} of" in told  # several threads write: those of the other pieces count
    run.clean()
    run.stands(1)
    run.commits(3)


def test_a_disk_that_cannot_even_be_cleaned_is_blamed_for_the_write_that_failed(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.commits(1)

    def broken(_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch, failing(monkeypatch, BYTES["middle"]):
        patch.setattr(run.nodes[1].stager._disk, "discard", broken)
        run.fails(2, "EIO", r"rank_00001\.weights", r"after \d+ of \d+ bytes", phase="staging", node=1, member=1)
    run.commits(3)
    run.clean()


def test_a_disk_that_is_full_when_the_record_is_due_costs_one_attempt_at_once(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.commits(1)
    stack = contextlib.ExitStack()
    filled = _before_accepting(run, monkeypatch, lambda: stack.enter_context(full(run.nodes[1].staging)))
    with stack:
        told = run.fails(2, "ENOSPC", "records", phase="accepting", node=1)
        assert seconds_of(told) < 20  # the deadline is 30
        assert filled
        run.clean()  # the refusal needs room as well, and has it; only then may the staged files go
        run.stands(1)
    run.commits(3)


def test_what_another_node_failed_is_cleaned_on_a_full_disk(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 has staged, then its disk runs full, then node 0 fails: the staged files need a refusal to go."""
    run.commits(1)
    stack, write_all = contextlib.ExitStack(), files.write_all

    def broken(fd: int, data: memoryview, at: int) -> None:
        place = Path(f"/proc/self/fd/{fd}").readlink()
        if "rank_00000.weights" in place.name and "staging-0" in str(place):
            until(lambda: list(run.nodes[1].files.glob("global_step_2/*/staged.json")), "node 1 has staged")
            stack.enter_context(full(run.nodes[1].staging))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_all(fd, data, at)

    with stack, monkeypatch.context() as patch:
        patch.setattr(files, "write_all", broken)
        run.fails(2, "EIO", phase="staging", node=0, member=0)
        run.clean()
        run.stands(1)
    run.commits(3)


def _before_accepting(run: SmallRun, monkeypatch: pytest.MonkeyPatch, do: Callable[[], Any]) -> list[Any]:
    """Does something once, between node 1's staging and its record; answers the list that tells it was done."""
    done: list[Any] = []
    disk = run.nodes[1].stager._disk
    accept = disk.accept

    def first(*arguments: Any) -> Any:
        if not done:
            done.append(do())
        return accept(*arguments)

    monkeypatch.setattr(disk, "accept", first)
    return done


def test_a_stager_starts_again_on_a_full_disk_and_the_next_save_commits(run: SmallRun) -> None:
    run.commits(1)
    node = run.nodes[1]
    with full(node.staging):
        node.call("close")
        node.start()
        run.loop.run(run.driver.add_node(node.stager))
        until(lambda: node.stager._processes.count(), "the agent registers again")
        run.loop.run(run.driver.add_node(node.stager))
        run.fails(2, "ENOSPC", phase="staging", node=1, member=1)
        run.clean()
        run.stands(1)
    run.commits(3)


def test_a_new_coordinator_is_heeded_on_a_full_disk(run: SmallRun) -> None:
    run.commits(1)
    with full(run.nodes[1].staging):
        run.nodes[1].call("_heed", 2)
    run.nodes[1].call("close")
    run.nodes[1].start()
    assert run.nodes[1].call("highest_epoch") == 2


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[SmallRun]:
    """A run whose node 1 stages on a disk that can stand still."""
    with ext4(tmp_path / "staging-1"):
        here = SmallRun(tmp_path)
        yield here
        here.close()


def test_a_disk_that_stands_still_costs_its_deadline_and_the_stalled_shard_is_named(standing: SmallRun) -> None:
    run = standing
    run.commits(1)
    with frozen(run.nodes[1].staging), run.hurry(stage_s=2.0):
        for step, phase in ((2, "staging"), (3, "snapshotting")):  # then its images cannot be filled yet
            told = run.fails(step, r"rank_00001\.weights", r"\d+ of \d+ bytes", phase=phase, node=1, member=1)
            assert 1 <= seconds_of(told) < 20
    run.commits(4)  # at once: whatever stood still has let its images go
    run.clean()


def test_a_record_that_stands_still_costs_its_deadline(standing: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = standing
    run.commits(1)
    stack = contextlib.ExitStack()
    stopped = _before_accepting(run, monkeypatch, lambda: stack.enter_context(frozen(run.nodes[1].staging)))
    with stack, run.hurry(accept_s=2.0, call_s=1.0):
        outcome = run.save(2)
        assert outcome.blame is not None and stopped
        assert outcome.blame.phase == "accepting" and outcome.blame.node == run.nodes[1].node
    run.clean()
    run.commits(3)
