"""What is special about a store in a directory: permissions, links, unreachable mounts, kills, races, full disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.storage import failpoints, files
from lastgood.storage.digest import digest_blocks
from lastgood.storage.errors import IntegrityError, OptionsError, StagingError, StoreError, StoreUnavailableError
from lastgood.storage.store import FileStore, open_store


@pytest.fixture
def files_store(tmp_path: Path) -> FileStore:
    (tmp_path / "store").mkdir()
    return FileStore(tmp_path / "store")


@pytest.mark.parametrize("url", ["ckpts", "./ckpts", "", "~/ckpts"])
def test_a_relative_root_is_refused(url: str) -> None:
    with pytest.raises(OptionsError, match="not an absolute path"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket", "file://host/x", "file:///x?y=1", "memory://"])
def test_other_stores_are_refused_saying_which_work(url: str) -> None:
    with pytest.raises(OptionsError, match="Nothing was touched"):
        open_store(url)


def test_a_file_system_says_that_replacing_is_a_hint(files_store: FileStore) -> None:
    assert not files_store.guarantees.conditional_replace
    assert "hint" in files_store.guarantees.sentence


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_store(tmp_path / "later")
    assert not (tmp_path / "later").exists()


def test_a_root_that_is_not_there_is_not_made_since_a_mount_may_be_lost(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"does not exist on .* Mount it; for a new store: mkdir -p"):
        open_store(tmp_path / "mnt" / "ckpts").probe("run")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "file").probe("run")
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)


_AS_NOBODY = """
import os, sys
from lastgood.storage.store import open_store
from lastgood.storage.errors import StoreError
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    open_store(sys.argv[1]).probe("run")
except StoreError as error:
    print(type(error).__name__, error)
"""


def test_an_unwritable_root_is_refused_by_the_probe_with_advice(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    root = tmp_path / "root"
    root.mkdir(mode=0o555)
    child = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stdout.startswith("StoreError"), child.stdout + child.stderr
    assert "EACCES" in child.stdout and "write permission" in child.stdout and str(root) in child.stdout


def test_a_link_inside_the_store_that_leads_outside_is_refused(files_store: FileStore, tmp_path: Path) -> None:
    files_store.create_exclusive("run/x", b"1")
    (tmp_path / "secret").write_bytes(b"secret")
    (files_store.root / "run" / "link").symlink_to(tmp_path / "secret")
    (files_store.root / "away").symlink_to(tmp_path)
    for key in ("run/link", "away/secret"):
        with pytest.raises(IntegrityError):
            files_store.get(key)
    assert list(files_store.list("")) == ["run/x"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN])
def test_a_mount_that_went_away_is_unavailable_with_unknown_outcome(
    files_store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    files_store.probe("run")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    for call in (lambda: files_store.find("x"), lambda: files_store.create_exclusive("x", b"")):
        with pytest.raises(StoreUnavailableError, match=errno.errorcode[code]) as caught:
            call()
        assert caught.value.errno == code and "unknown" in str(caught.value)


def test_a_full_store_says_how_much_is_free(files_store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreError, match="free space") as caught:
        files_store.create_exclusive("x", b"1")
    assert not isinstance(caught.value, StoreUnavailableError) and caught.value.free_bytes > 0
    assert list(files_store.root.iterdir()) == []


def test_bytes_that_do_not_land_are_found_by_reading_them_back(
    files_store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shard"
    source.write_bytes(b"x" * 5000)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(len(data)), at))  # a disk that lies
    with pytest.raises(StoreError, match="does not read back"):
        files_store.put_file("k", source, digest_blocks(source.read_bytes(), 1000))
    assert list(files_store.list("")) == []


def test_unfinished_writes_are_not_listed(files_store: FileStore) -> None:
    files_store.create_exclusive("run/x", b"1")
    (files_store.root / "run" / ".y.01JD.tmp").write_bytes(b"half")
    assert list(files_store.list("")) == ["run/x"]


def test_a_sweep_takes_unfinished_writes_and_empty_directories_that_are_old_enough(files_store: FileStore) -> None:
    files_store.create_exclusive("run/x", b"1")
    folder = files_store.root / "run" / "A1" / "actor"
    folder.mkdir(parents=True)
    (folder / ".shard.01JD.tmp").write_bytes(b"half")
    (files_store.root / "other").mkdir()
    assert files_store.sweep("run/", 3600.0) == 0 and (folder / ".shard.01JD.tmp").exists()
    assert files_store.sweep("run/A1/", 0.0) == 1
    assert files_store.sweep("run/", 0.0) == 0  # the file is gone, the directory too now
    assert sorted(path.name for path in files_store.root.rglob("*")) == ["other", "run", "x"]


def test_a_write_that_is_swept_while_it_is_under_way_begins_again(
    files_store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shard"
    source.write_bytes(os.urandom(5000))
    real, swept = os.link, []

    def link(temporary: Path, path: Path) -> None:
        if not swept:
            swept.append(files_store.sweep("", 0.0))
        real(temporary, path)

    monkeypatch.setattr(os, "link", link)
    files_store.put_file("run/A1/shard", source, digest_blocks(source.read_bytes(), 1000))
    assert swept == [1] and files_store.get("run/A1/shard") == source.read_bytes()
    assert list(files_store.root.rglob(".*")) == []


def test_an_object_that_stands_is_told_only_once_its_name_is_durable(
    files_store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shard"
    source.write_bytes(b"x" * 5000)
    digests = digest_blocks(source.read_bytes(), 1000)
    files_store.put_file("run/shard", source, digests)
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_dir", synced.append)
    FileStore(files_store.root).put_file("run/shard", source, digests)
    assert synced == [files_store.root / "run"]


def test_deleting_leaves_no_empty_directories_and_keeps_the_root(files_store: FileStore) -> None:
    files_store.create_exclusive("a/b/c/d", b"")
    files_store.delete_many(["a/b/c/d"])
    assert list(files_store.root.iterdir()) == []


def test_what_cannot_be_deleted_is_named_and_the_rest_is_deleted(files_store: FileStore) -> None:
    for key in ("a/x", "b/x"):
        files_store.create_exclusive(key, b"")
    (files_store.root / "a" / "dir").mkdir()
    with pytest.raises(StoreError, match="a/dir"):
        files_store.delete_many(["a/dir", "b/x"])
    assert list(files_store.list("")) == ["a/x"]


_PUT = """
import sys
from pathlib import Path
from lastgood.storage.store import FileStore
from lastgood.storage.digest import digest_blocks
path = Path(sys.argv[2])
FileStore(sys.argv[1]).put_file("run/shard", path, digest_blocks(path.read_bytes(), 1000))
"""


@pytest.mark.parametrize("point", ["storage.put_file.middle", "storage.put_file.before_link"])
def test_a_kill_while_copying_leaves_nothing_and_the_next_try_finishes(tmp_path: Path, point: str) -> None:
    points, source, store = tmp_path / "points", tmp_path / "shard", FileStore(tmp_path / "store")
    points.mkdir()
    source.write_bytes(os.urandom(5000))
    failpoints.arm(points, point, "kill")
    environment = {**os.environ, failpoints.VARIABLE: str(points)}
    command = [sys.executable, "-c", _PUT, str(store.root), str(source)]
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert killed.returncode == -9 and failpoints.fired(points, point)
    assert list(store.list("")) == []
    subprocess.run(command, env=environment, timeout=60, check=True)
    assert store.get("run/shard") == source.read_bytes()


_RACER = """
import sys
from lastgood.storage.store import FileStore
store, name, rounds = FileStore(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
won = [r for r in range(rounds) if store.create_exclusive(f"round/{r:04d}", f"{name} {r}".encode() * 50)]
print(*won)
"""


@pytest.fixture
def racers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(tmp_path / "store"), f"racer-{number}", "60"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_of_racing_processes_exactly_one_wins_every_round(tmp_path: Path, racers: list[subprocess.Popen[str]]) -> None:
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    wins = [set(map(int, racer.communicate(timeout=120)[0].split())) for racer in racers]
    assert sum(map(len, wins)) == 60 and set.union(*wins) == set(range(60))
    store = FileStore(tmp_path / "store")
    for number, won in enumerate(wins):
        for one in won:
            assert store.get(f"round/{one:04d}") == f"racer-{number} {one}".encode() * 50
    assert len(list(store.list(""))) == 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one mebibyte."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("preallocate", [True, False], ids=["preallocated", "found-out-while-writing"])
def test_a_disk_that_is_really_full_costs_the_attempt_and_nothing_else(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, preallocate: bool
) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", 100_000)
    if not preallocate:
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    kept = files.write_image(memoryview(b"k" * 300_000), small_disk / "kept", block_bytes=100_000)
    with pytest.raises(StagingError) as caught:
        files.write_image(memoryview(b"n" * 900_000), small_disk / "new", block_bytes=100_000)
    error = caught.value
    assert error.errno == errno.ENOSPC and error.path == str(small_disk / "new")
    assert error.done_bytes == 0 if preallocate else 0 < error.done_bytes < 900_000
    assert "partial file was removed" in str(error) and "free space" in str(error)
    assert [path.name for path in small_disk.iterdir()] == ["kept"]
    assert digest_blocks((small_disk / "kept").read_bytes(), 100_000) == kept
    files.write_image(memoryview(b"n" * 300_000), small_disk / "new", block_bytes=100_000)


def test_a_full_store_keeps_what_it_has_and_takes_the_rest_later(small_disk: Path, tmp_path: Path) -> None:
    store = FileStore(small_disk / "store")
    source = tmp_path / "shard"
    source.write_bytes(os.urandom(700_000))
    digests = digest_blocks(source.read_bytes(), 100_000)
    store.put_file("run/a", source, digests)
    with pytest.raises(StoreError, match="ENOSPC"):
        store.put_file("run/b", source, digests)
    assert list(store.list("")) == ["run/a"] and store.get("run/a") == source.read_bytes()
    store.delete_many(["run/a"])
    store.put_file("run/b", source, digests)
    assert store.get("run/b") == source.read_bytes()


def test_a_record_cannot_be_created_on_a_full_disk_and_none_stands_then(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"f" * (1 << 20))
    with pytest.raises(StagingError, match="ENOSPC"):
        files.create_once(small_disk / "record", b"r" * 9000)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
