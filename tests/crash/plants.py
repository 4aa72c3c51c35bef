"""Bugs that are planted in a child, to show that the net catches fish. Each leaves out what makes something durable."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgood.storage import files, store
from lastgood.storage.errors import StagingError
from lastgood.storage.layout import COMPLETED
from lastgood.storage.manifest import Completed
from lastgood.workers import disk, staging


def _without(function: str, module: Any, *lost: str) -> Callable[[], None]:
    """`function` of `module` runs with these functions doing nothing."""

    def plant() -> None:
        real = getattr(module, function)

        def careless(*arguments: Any, **named: Any) -> Any:
            with _nothing(*lost):
                return real(*arguments, **named)

        for user in (files, store, disk, staging):
            if getattr(user, function, None) is real:
                setattr(user, function, careless)

    return plant


@contextlib.contextmanager
def _nothing(*names: str) -> Any:
    """os.fsync or files.fsync_dir do nothing meanwhile."""
    real_fsync, real_dir = os.fsync, files.fsync_dir
    if "fsync" in names:
        os.fsync = lambda fd: None if not Path(f"/proc/self/fd/{fd}").is_dir() else real_fsync(fd)
    if "fsync_dir" in names:
        files.fsync_dir = lambda path: None
    try:
        yield
    finally:
        os.fsync, files.fsync_dir = real_fsync, real_dir


def _overwrites() -> None:
    """create_once of the nodes replaces what stands."""

    def careless(path: Path, data: bytes) -> bool:
        files.replace_durably(path, data)
        return True

    disk.create_once = careless


def _in_place() -> None:
    """replace_durably writes the file itself."""

    def careless(path: Path, data: bytes, on_error: Any = None) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
        files.fsync_dir(path.parent)

    for user in (files, store, disk):
        if hasattr(user, "replace_durably"):
            vars(user)["replace_durably"] = careless


PLANTS: dict[str, Callable[[], None]] = {
    "no fsync of a file before its name": _without("_write_temporary", files, "fsync"),
    "no fsync of the directory after a link": _without("link_into_place", files, "fsync_dir"),
    "no fsync of the directory after a rename": _without("replace_durably", files, "fsync_dir"),
    "no fsync of a shard": _without("write_image", files, "fsync"),
    "no fsync of a shard's directory": _without("write_image", files, "fsync_dir"),
    "no fsync of a new directory's parent": _without("make_dirs_durably", files, "fsync_dir"),
    "a record is written over": _overwrites,
    "a file is written in place": _in_place,
}


def _swallows() -> None:
    """Whether a directory was synced is not looked at."""
    real = files.fsync_dir

    def careless(path: Path) -> None:
        with contextlib.suppress(OSError):
            real(path)

    files.fsync_dir = disk.fsync_dir = careless


def _bare() -> None:
    """Errors of the operating system come as they are."""

    @contextlib.contextmanager
    def careless(action: str, path: Path, on_error: Any) -> Any:
        yield

    files.translated = disk.translated = careless


def _keeps_temporaries() -> None:
    """What a write that failed has made stays."""
    real = files._write_temporary

    def careless(path: Path, data: bytes) -> Path:
        removing, files.remove_quietly = files.remove_quietly, lambda path: False
        try:
            return real(path, data)
        finally:
            files.remove_quietly = removing

    files._write_temporary = careless


def _keeps_attempts() -> None:
    """An attempt that failed is not cleaned."""
    disk.NodeDisk.discard = lambda self, head: None


def _no_names() -> None:
    """The error of a shard's write does not say which."""
    real = staging.write_image

    def careless(buffer: memoryview, path: Path, **named: Any) -> Any:
        try:
            return real(buffer, path, **named)
        except StagingError as error:
            raise StagingError(f"the disk says {errno.errorcode[error.errno]}", errno=error.errno) from error

    staging.write_image = careless


ERROR_PLANTS: dict[str, Callable[[], None]] = {
    "an error of a directory's fsync is swallowed": _swallows,
    "an error of the operating system is told as it comes": _bare,
    "the temporary file of a failed write stays": _keeps_temporaries,
    "the files of a failed attempt stay": _keeps_attempts,
    "a failed write of a shard does not say which": _no_names,
}


def _points_first() -> None:
    """A node's pointers move before COMPLETED stands there."""
    real = disk.NodeDisk.publish

    def careless(self: disk.NodeDisk, completed: Completed, manifest: bytes) -> None:
        self._publish_pointers(completed)
        real(self, completed, manifest)

    disk.NodeDisk.publish = careless


def _replaces() -> None:
    """A step that is saved again takes the place of what stood."""
    real = disk.NodeDisk.publish

    def careless(self: disk.NodeDisk, completed: Completed, manifest: bytes) -> None:
        mine = self.paths.place(self.paths.attempt_dir(completed.step, completed.attempt))
        for folder in sorted(mine.parent.iterdir()):
            if folder != mine and folder.is_dir():
                shutil.rmtree(folder)
        real(self, completed, manifest)

    disk.NodeDisk.publish = careless


def _points_once() -> None:
    """The pointer of a step never moves to another commit of it."""
    real = disk.replace_durably

    def careless(path: Path, data: bytes) -> None:
        if path.name != COMPLETED or not path.exists():
            real(path, data)

    disk.replace_durably = careless


AGAIN_PLANTS: dict[str, Callable[[], None]] = {
    "pointers move before COMPLETED stands": _points_first,
    "a step that is saved again replaces what stood": _replaces,
    "a step's pointer never moves again": _points_once,
}


def plant(name: str | None) -> None:
    """Plants a bug in this process, for good."""
    if name is not None:
        (PLANTS | ERROR_PLANTS | AGAIN_PLANTS)[name]()
