"""Shards go to the disk directly where it takes that, and through the page cache where it does not: the same bytes."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lastgood.storage import crew, direct, failpoints, files
from lastgood.storage.digest import digest_blocks, threads_for
from lastgood.storage.direct import PAGE_BYTES
from lastgood.storage.errors import StagingError
from lastgood.storage.files import WriteProgress, write_image
from tests.unit.storage_samples import run_child

PIECE_BYTES = 64 << 10
BLOCK_BYTES = 100_000  # no multiple of a page, as nothing demands one
WAIT_S = 30.0
THREADS = 4


def memory(nbytes: int, offset: int = 0) -> memoryview:
    """Random bytes that begin `offset` bytes after the begin of a page."""
    mapping = mmap.mmap(-1, offset + nbytes + PAGE_BYTES)
    mapping[offset : offset + nbytes] = os.urandom(nbytes)
    return memoryview(mapping)[offset : offset + nbytes]


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@dataclass
class Disk:
    """Every write in this process goes through here. `before(number)` may raise; numbers are those of the pieces."""

    before: Callable[[int, int], None] = lambda number, fd: None
    begun: list[int] = field(default_factory=list)
    direct: list[tuple[int, int]] = field(default_factory=list)  # (begin, bytes)
    plain: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        number = at // PIECE_BYTES
        self.begun.append(number)
        self.threads.add(threading.get_native_id())
        self.before(number, fd)
        how = self.direct if is_direct(fd) else self.plain
        written = _PWRITE(fd, data, at)
        how.append((at, written))
        return written

    @property
    def written_bytes(self) -> int:
        return sum(nbytes for _, nbytes in (*self.direct, *self.plain))


_PWRITE = os.pwrite


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Skips where the disk below the tests takes no direct writes."""
    monkeypatch.setattr(direct, "_told_devices", set())
    monkeypatch.setattr(files, "WRITE_BYTES", PIECE_BYTES)
    fd = os.open(tmp_path, os.O_WRONLY | os.O_TMPFILE)
    try:
        if not direct.DirectMode(fd, tmp_path / "x").turn_on():
            pytest.skip(f"the file system of {tmp_path} refuses direct writes")
    finally:
        os.close(fd)
    watched = Disk()
    monkeypatch.setattr(os, "pwrite", watched.pwrite)
    return watched


def write(buffer: memoryview, place: Path, threads: int = THREADS, **options: Any) -> None:
    """Writes an image and holds it against what one thread makes of the same bytes in memory."""
    digests = write_image(buffer, place, block_bytes=BLOCK_BYTES, threads=threads, **options)
    assert digests == digest_blocks(buffer, BLOCK_BYTES, threads=1)
    assert place.read_bytes() == bytes(buffer)
    assert [path.name for path in place.parent.iterdir()] == [place.name]


SIZES = (0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, PIECE_BYTES, 3 * PIECE_BYTES - 1, (2 << 20) + 13)


@pytest.mark.parametrize("threads", [1, THREADS])
@pytest.mark.parametrize("nbytes", SIZES)
def test_whole_pages_are_written_directly_and_the_tail_is_not(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, nbytes: int, threads: int
) -> None:
    write(memory(nbytes), tmp_path / "x", threads)
    assert not warnings(caplog)  # nothing was tried that the disk refuses
    tail_bytes = nbytes % PAGE_BYTES
    assert sum(count for _, count in disk.direct) == nbytes - tail_bytes
    assert disk.plain == ([(nbytes - tail_bytes, tail_bytes)] if tail_bytes else [])


@pytest.mark.parametrize("offset", [1, 512, PAGE_BYTES - 1])
@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, (2 << 20) + 13])
def test_memory_that_begins_within_a_page_is_not_written_directly(
    tmp_path: Path, disk: Disk, nbytes: int, offset: int
) -> None:
    write(memory(nbytes, offset), tmp_path / "x")
    assert not disk.direct and disk.written_bytes == nbytes


def test_pieces_that_are_no_whole_pages_become_so(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", PAGE_BYTES + 700)
    write(memory(10 * PAGE_BYTES), tmp_path / "x")
    assert sorted(disk.direct) == [(at * PAGE_BYTES, PAGE_BYTES) for at in range(10)]
    monkeypatch.setattr(files, "WRITE_BYTES", 700)
    write(memory(10 * PAGE_BYTES), tmp_path / "x")
    assert sorted(disk.direct[10:]) == [(at * PAGE_BYTES, PAGE_BYTES) for at in range(10)]


REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lastgood.storage"]


@pytest.mark.parametrize("code", REFUSALS)
def test_a_file_system_that_refuses_the_mode_is_written_through_the_page_cache_and_told_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real, refused = fcntl.fcntl, []

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append(fd)
            raise OSError(code, os.strerror(code))
        return real(fd, command, argument)

    monkeypatch.setattr(direct.fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING):
        for name in ("x", "y"):
            write(memory((2 << 20) + 13), tmp_path / name)
            (tmp_path / name).unlink()
    assert len(refused) == 2 and not disk.direct
    (told,) = warnings(caplog)
    assert errno.errorcode[code] in told and str(tmp_path) in told and "page cache" in told


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("first", [0, 7])
def test_a_direct_write_that_is_refused_is_written_through_the_page_cache_and_told_once(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, first: int, code: int
) -> None:
    """`first`: the first piece that is refused."""
    refused = []

    def refuse(number: int, fd: int) -> None:
        if number >= first and is_direct(fd):
            refused.append(number)
            raise OSError(code, os.strerror(code))

    disk.before = refuse
    with caplog.at_level(logging.WARNING):
        write(memory((2 << 20) + 13), tmp_path / "x")
    assert 1 <= len(refused) <= THREADS  # those that had begun
    assert sum(nbytes for _, nbytes in disk.direct) <= first * PIECE_BYTES
    (told,) = warnings(caplog)
    assert errno.errorcode[code] in told


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of this kernel that truly refuses direct writes."""
    place = tmp_path / "ramfs"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "ramfs", "ramfs", place], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a ramfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_real_file_system_that_refuses_direct_writes_takes_shards(
    disk: Disk, ramfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        write(memory((2 << 20) + 13), ramfs / "x")
    assert not disk.direct and len(warnings(caplog)) == 1


def test_what_is_refused_through_the_page_cache_too_is_an_error(tmp_path: Path, disk: Disk) -> None:
    def refuse(number: int, fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    disk.before = refuse
    with pytest.raises(StagingError, match="EINVAL") as caught:
        write_image(memory(PIECE_BYTES), tmp_path / "x")
    assert caught.value.done_bytes == 0 and disk.begun == [0, 0] and not list(tmp_path.iterdir())


def test_short_direct_writes_go_on_where_they_ended(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = disk.pwrite
    for short_bytes in (PAGE_BYTES, 100):  # 100: what follows is refused, and goes through the page cache
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at, most=short_bytes: watched(fd, data[:most], at))
        write(memory(3 * PAGE_BYTES), tmp_path / "x")
    assert disk.direct[:3] == [(at * PAGE_BYTES, PAGE_BYTES) for at in range(3)]


class Meeting:
    """All threads are in a piece each; then one does something, and the others go on once the work has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, acts: dict[int, Callable[[], None]], last: int = -1) -> None:
        """`acts`: what happens in which piece; in piece `last` only after the work has failed."""
        self.all_there = threading.Barrier(THREADS)
        self.failed = threading.Event()
        self.acted: list[int] = []
        self._acts = acts
        self._last = last
        real = crew.Crew._fail

        def fail(of: crew.Crew, error: BaseException) -> None:
            real(of, error)
            self.failed.set()

        monkeypatch.setattr(crew.Crew, "_fail", fail)

    def __call__(self, number: int, fd: int) -> None:
        if number < THREADS:
            self.all_there.wait(WAIT_S)
        if number not in self._acts or number == self._last:
            assert self.failed.wait(WAIT_S)
        if number in self._acts:
            self.acted.append(number)
            self._acts[number]()


def disk_error(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_the_first_error_of_a_thread_ends_the_others_and_its_bytes_are_named(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.before = meeting = Meeting(monkeypatch, {1: disk_error(errno.ENOSPC), 2: disk_error(errno.EIO)}, last=2)
    with pytest.raises(StagingError) as caught:
        write_image(memory(16 * PIECE_BYTES), tmp_path / "x", threads=THREADS)
    assert meeting.acted == [1, 2]
    assert caught.value.errno == errno.ENOSPC  # what came later was not told
    assert caught.value.done_bytes == disk.written_bytes == 2 * PIECE_BYTES
    assert f"after {2 * PIECE_BYTES} of {16 * PIECE_BYTES} bytes" in str(caught.value)
    assert sorted(disk.begun) == [0, 1, 2, 3]  # no piece after the error
    assert not list(tmp_path.iterdir())


def test_a_write_that_is_given_up_ends_all_threads_at_their_next_piece(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = WriteProgress()
    disk.before = meeting = Meeting(monkeypatch, {1: progress.give_up})
    with pytest.raises(StagingError, match="given up after") as caught:
        write_image(memory(16 * PIECE_BYTES), tmp_path / "x", threads=THREADS, progress=progress)
    assert meeting.acted == [1] and "errno" not in caught.value.facts
    assert progress.done_bytes == disk.written_bytes == 4 * PIECE_BYTES
    assert sorted(disk.begun) == [0, 1, 2, 3]
    assert not list(tmp_path.iterdir())


def test_a_file_is_closed_only_when_no_thread_writes_into_it(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls is interrupted (Ctrl-C) while all threads write."""
    real_close, writing_at_close = os.close, []
    disk.before = meeting = Meeting(monkeypatch, {})
    writers: list[Future[None]] = []

    def interrupted(waiting: list[Future[None]]) -> None:
        writers.extend(waiting)
        raise KeyboardInterrupt

    def close(fd: int) -> None:
        writing_at_close.append(sum(not writer.done() for writer in writers))
        real_close(fd)

    monkeypatch.setattr(crew, "wait", interrupted)
    monkeypatch.setattr(files.os, "close", close)
    with pytest.raises(KeyboardInterrupt):
        write_image(memory(16 * PIECE_BYTES), tmp_path / "x", threads=THREADS)
    assert len(writers) == THREADS and writing_at_close == [0] and meeting.failed.is_set()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [None, errno.ENOSPC])
def test_an_error_of_close_is_told_and_hides_no_other(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    real, closed = os.close, []

    def close(fd: int) -> None:
        real(fd)
        closed.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    if first is not None:
        disk.before = lambda number, fd: disk_error(first)()
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StagingError) as caught:
        write_image(memory(PIECE_BYTES), tmp_path / "x")
    assert len(closed) == 1 and not list(tmp_path.iterdir())
    assert caught.value.errno == (first or errno.EIO)
    if first is not None:
        assert "EIO" in caught.value.__cause__.__notes__[0]  # type: ignore[union-attr]


def test_every_thread_that_works_on_a_file_is_started_as_told(tmp_path: Path, disk: Disk) -> None:
    started: set[int] = set()
    write(memory(16 * PIECE_BYTES), tmp_path / "x", start_thread=lambda: started.add(threading.get_native_id()))
    assert disk.threads and disk.threads <= started and threading.get_native_id() not in started


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (16, 2), (32, 4), (64, 8), (256, 8)])
def test_more_cores_give_more_threads_up_to_a_limit(cores: int, threads: int) -> None:
    assert threads_for(cores) == threads


_KILLED = """
import mmap, sys
from pathlib import Path
from lastgood.storage import files
files.WRITE_BYTES = 64 << 10
files.write_image(memoryview(mmap.mmap(-1, 4 << 20)), Path(sys.argv[1]), threads=4)
"""


def test_a_kill_among_several_threads_leaves_what_stood_before(tmp_path: Path) -> None:
    points, folder = tmp_path / "points", tmp_path / "folder"
    points.mkdir()
    folder.mkdir()
    (folder / "x").write_bytes(b"old")
    failpoints.arm(points, "storage.write_image.middle", "kill")
    child = run_child(_KILLED, folder / "x", **{failpoints.VARIABLE: str(points)})
    assert child.returncode == -9 and failpoints.fired(points, "storage.write_image.middle"), child.stderr
    assert (folder / "x").read_bytes() == b"old"
    others = [path for path in folder.iterdir() if path.name != "x"]
    assert len(others) == 1 and files.is_temporary(others[0].name)
