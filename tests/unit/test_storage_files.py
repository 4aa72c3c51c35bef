"""Files appear whole or not at all, one racer wins, and a process killed anywhere leaves the old or the new."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.storage import digest as digest_module
from lastgood.storage import failpoints, files
from lastgood.storage.digest import RunningDigest, digest_blocks
from lastgood.storage.errors import IntegrityError, StagingError
from tests.unit.storage_samples import run_child


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A failpoint directory for this process."""
    folder = tmp_path / "failpoints"
    folder.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, str(folder))
    return folder


@given(st.binary(max_size=300), st.integers(1, 64), st.lists(st.integers(0, 80), max_size=8))
def test_digests_do_not_depend_on_how_the_bytes_come(data: bytes, block_bytes: int, cuts: list[int]) -> None:
    expected = digest_blocks(data, block_bytes, threads=1)
    assert digest_blocks(data, block_bytes, threads=3) == expected
    running, at = RunningDigest(block_bytes), 0
    for cut in cuts:
        running.update(data[at : at + cut])
        at += cut
    running.update(data[at:])
    assert running.result() == expected


def test_the_digest_is_s3s_composite_of_the_parts() -> None:
    import hashlib

    parts = [b"a" * 10, b"b" * 10, b"c" * 3]
    composite = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    assert digest_blocks(b"".join(parts), 10).digest == composite


def test_create_once_creates_once(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert files.create_once(path, b"first")
    assert not files.create_once(path, b"second")
    assert path.read_bytes() == b"first" and leftovers(tmp_path) == ["record.json"]


def test_a_link_that_reports_exists_though_it_worked_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def sent_twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)  # what an NFS client does when the first answer is lost

    monkeypatch.setattr(os, "link", sent_twice)
    assert files.create_once(tmp_path / "x", b"mine")
    assert not files.create_once(tmp_path / "x", b"other")


def test_a_link_of_unknown_outcome_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def landed_but_failed(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(errno.EIO, "lost")

    def failed(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "link", landed_but_failed)
    assert files.create_once(tmp_path / "landed", b"mine")
    monkeypatch.setattr(os, "link", failed)
    with pytest.raises(StagingError, match="EIO"):
        files.create_once(tmp_path / "not", b"mine")
    assert leftovers(tmp_path) == ["landed"]


def test_a_file_system_without_links_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(StagingError, match="cannot link"):
        files.create_once(tmp_path / "x", b"")


def test_replace_leaves_the_old_content_when_it_fails(tmp_path: Path, armed: Path) -> None:
    path = tmp_path / "latest.json"
    files.replace_durably(path, b"old")
    failpoints.arm(armed, "storage.replace.before_rename", "raise")
    with pytest.raises(StagingError):
        files.replace_durably(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["latest.json"]
    files.replace_durably(path, b"new")
    assert path.read_bytes() == b"new"


def test_write_image_writes_hashes_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", 700)
    data = os.urandom(10_001)
    path = tmp_path / "x.safetensors"
    digests = files.write_image(memoryview(data), path, block_bytes=1000)
    assert path.read_bytes() == data and digests == digest_blocks(data, 1000)
    again = files.write_image(memoryview(b"other"), path, block_bytes=1000)
    assert path.read_bytes() == b"other" and again.nbytes == 5 and leftovers(tmp_path) == [path.name]


def test_write_image_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:13], at))
    data = os.urandom(1000)
    files.write_image(memoryview(data), tmp_path / "x", block_bytes=100)
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("point", ["begin", "middle", "before_fsync"])
def test_a_failed_write_removes_its_part_and_says_everything(tmp_path: Path, armed: Path, point: str) -> None:
    failpoints.arm(armed, f"storage.write_image.{point}", "raise")
    folder = tmp_path / "attempt"
    folder.mkdir()
    with pytest.raises(StagingError) as caught:
        files.write_image(memoryview(b"x" * 500), folder / "shard", block_bytes=100)
    assert failpoints.fired(armed, f"storage.write_image.{point}")
    assert leftovers(folder) == []
    error = caught.value
    assert error.path == str(folder / "shard") and error.nbytes == 500 and error.free_bytes > 0
    assert error.done_bytes == (500 if point == "before_fsync" else 0)
    assert "previous checkpoint stands" in str(error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_every_failure_of_the_disk_is_a_staging_error_with_its_errno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StagingError) as caught:
        files.write_image(memoryview(b"x" * 500), tmp_path / "shard", block_bytes=100)
    assert caught.value.errno == code and errno.errorcode[code] in str(caught.value)
    assert leftovers(tmp_path) == []


def test_a_disk_that_takes_no_bytes_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StagingError, match="no more bytes"):
        files.write_image(memoryview(b"x"), tmp_path / "shard")


def test_a_file_system_that_cannot_preallocate_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    files.write_image(memoryview(b"x"), tmp_path / "shard")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="ENOENT"):
        files.write_image(memoryview(b"x"), tmp_path / "not" / "there")


def test_every_new_directory_is_synced_in_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_dir", synced.append)
    files.make_dirs_durably(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    files.make_dirs_durably(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


def test_a_directory_that_another_process_may_have_just_made_is_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_dir", synced.append)
    (tmp_path / "a" / "b").mkdir(parents=True)
    trusted: set[tuple[int, int]] = set()
    files.make_dirs_durably(tmp_path / "a" / "b" / "c", trusted=trusted)
    assert synced == [tmp_path / "a", tmp_path / "a" / "b"]  # b's name, which stood; then c's
    files.make_dirs_durably(tmp_path / "a" / "b" / "c", trusted=trusted)
    assert len(synced) == 2
    (tmp_path / "a" / "b" / "c").rename(tmp_path / "a" / "b" / "old")
    (tmp_path / "a" / "b" / "c").mkdir()  # another one of that name
    files.make_dirs_durably(tmp_path / "a" / "b" / "c", trusted=trusted)
    assert synced[2:] == [tmp_path / "a" / "b"]


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
    for name in ("link", "pipe", "socket", "."):
        with pytest.raises(IntegrityError, match="not read"):
            files.open_regular(tmp_path / name)
    assert files.read_regular(tmp_path / "real") == b"x"
    with pytest.raises(IntegrityError, match="longer than"):
        files.read_regular(tmp_path / "real", limit_bytes=0)


def test_digest_file_reads_blocks_as_memory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_BYTES", 300)
    data = os.urandom(5003)
    (tmp_path / "x").write_bytes(data)
    fd = files.open_regular(tmp_path / "x")
    assert files.digest_file(fd, len(data), 1000) == digest_blocks(data, 1000)
    with pytest.raises(OSError, match="ends before"):
        files.digest_file(fd, len(data) + 1, 1000)
    os.close(fd)


def test_block_size_fits_s3_multipart() -> None:
    assert 5 << 20 <= digest_module.DEFAULT_BLOCK_BYTES <= 5 << 30


_KILLED = """
import sys
from pathlib import Path
from lastgood.storage import files
what, path = sys.argv[1], Path(sys.argv[2])
if what == "create":
    files.create_once(path, b"new" * 1000)
elif what == "replace":
    files.replace_durably(path, b"new" * 1000)
else:
    files.write_image(memoryview(b"new" * 1000), path, block_bytes=100)
"""


@pytest.mark.parametrize(
    ("what", "point", "stands_after"),
    [
        ("create", "storage.create_once.before_link", False),
        ("create", "storage.create_once.after_link", True),
        ("replace", "storage.replace.before_rename", False),
        ("image", "storage.write_image.begin", False),
        ("image", "storage.write_image.middle", False),
        ("image", "storage.write_image.before_fsync", False),
    ],
)
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_kill_leaves_the_old_content_or_the_new_never_a_part(
    tmp_path: Path, what: str, point: str, stands_after: bool, before: bytes | None
) -> None:
    points, folder = tmp_path / "points", tmp_path / "folder"
    points.mkdir()
    folder.mkdir()
    path = folder / "x"
    if before is not None:
        path.write_bytes(before)
    failpoints.arm(points, point, "kill")
    child = run_child(_KILLED, what, path, **{failpoints.VARIABLE: str(points)})
    assert child.returncode == -9 and failpoints.fired(points, point), child.stderr
    expected = b"new" * 1000 if stands_after and before is None else before
    assert (path.read_bytes() if path.exists() else None) == expected
    others = [name for name in leftovers(folder) if name != "x"]
    assert all(map(files.is_temporary, others))  # what a kill leaves has a name that means nothing
