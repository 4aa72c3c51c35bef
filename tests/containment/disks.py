"""Small real disks that run full, turn read-only or stand still. They need root; without it the test is skipped.

A disk that cannot be mounted here skips the test and says why; nothing else does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _system(*command: str | Path) -> str | None:
    """Runs a command; answers why it failed, None when it did not. Tools of the system need not be on the PATH."""
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    arguments = [str(part) for part in command]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")


def must(*command: str | Path) -> None:
    """Runs a command of the test itself; a failure is the test's."""
    why = _system(*command)
    assert why is None, f"{' '.join(map(str, command))}: {why}"


@contextlib.contextmanager
def tmpfs(place: Path, size: str = "4m", inodes: int = 1000) -> Iterator[Path]:
    """A tmpfs of its own at `place`, with a limit of bytes and of inodes."""
    place.mkdir(parents=True, exist_ok=True)
    why = _system("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", place)
    if why is not None:
        pytest.skip(f"a tmpfs cannot be mounted here: {why}")
    try:
        yield place
    finally:
        must("umount", "--lazy", place)


@contextlib.contextmanager
def ext4(place: Path, mib: int = 24) -> Iterator[Path]:
    """An ext4 in a file, at `place`. It can be frozen (see `frozen`) and knows immutable directories (`chattr`)."""
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_name(f"{place.name}.ext4")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    for command in (("mkfs.ext4", "-q", "-m", "0", image), ("mount", "-o", "loop", image, place)):
        why = _system(*command)
        if why is not None:
            pytest.skip(f"an ext4 in a file cannot be mounted here: {why}")
    try:
        yield place
    finally:
        must("umount", "--lazy", place)
        image.unlink()


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Every write to the file system at `place` stands still in the kernel; reads go on."""
    why = _system("fsfreeze", "--freeze", place)
    if why is not None:
        pytest.skip(f"a file system cannot be frozen here: {why}")
    try:
        yield
    finally:
        must("fsfreeze", "--unfreeze", place)


@contextlib.contextmanager
def full(place: Path) -> Iterator[None]:
    """Somebody else's file takes every byte that is left."""
    filler = place / "filler"
    with filler.open("wb") as file:
        for piece in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), b"\0" * piece)
    with pytest.raises(OSError, match="No space left"):  # the fault is there
        (place / "one more").write_bytes(b"\1" * 4096)
    (place / "one more").unlink()
    yield
    filler.unlink()


@contextlib.contextmanager
def without_inodes(place: Path) -> Iterator[None]:
    """Somebody else's empty files take every name that is left; there is room for bytes."""
    folder = place / "many"
    folder.mkdir()
    made = []
    try:
        while True:
            one = folder / str(len(made))
            one.touch()
            made.append(one)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    yield
    for one in made:
        one.unlink()
    folder.rmdir()


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[None]:
    """The directory turns read-only, as a mount does after an error of its disk. What is open stays open."""
    why = _system("mount", "--bind", place, place)
    if why is not None:
        pytest.skip(f"a directory cannot be mounted over itself here: {why}")
    must("mount", "-o", "remount,bind,ro", place)
    with pytest.raises(OSError, match="Read-only"):
        (place / "x").touch()
    try:
        yield
    finally:
        must("umount", "--lazy", place)


@contextlib.contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """No name can be made in the directory: permission is denied, even to root."""
    why = _system("chattr", "+i", folder)
    if why is not None:
        pytest.skip(f"a directory cannot be made immutable here: {why}")
    yield
    must("chattr", "-i", folder)
