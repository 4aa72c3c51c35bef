"""Sees every operation that this process makes on the files below one root: for tests that die in mid-operation.

The rule: an operation that would change what lies below the root goes through here or raises. The functions of `os`
are replaced (pathlib and shutil use them), and `io.open` for files that are written. What only reads is let through.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lastgood.storage.direct import PAGE_BYTES

DELETED = " (deleted)"  # how /proc shows an open file without a name


@dataclass(frozen=True)
class Operation:
    """One change of one file system. Paths are relative to the root.

    create   a file appears, empty          allocate  `size` bytes of it are reserved (it grows with zeros)
    write    `data` at offset `at`          truncate  it has `size` bytes from now on
    fsync    file or directory              rename    `path` becomes `other`
    link     `other` is a second name       unlink, mkdir, rmdir
    """

    kind: str
    path: str
    other: str = ""
    at: int = 0
    data: bytes = b""
    size: int = 0
    direct: bool = False  # a write past the page cache: no more durable than another, before an fsync

    def __str__(self) -> str:
        facts = f" -> {self.other}" if self.other else f" [{len(self.data)} bytes at {self.at}]" if self.data else ""
        return f"{self.kind} {self.path}{facts}"


Perform = Callable[[], Any]
Watch = Callable[[Operation, Perform, Perform | None], Any]  # (what, do it, do half of it: writes only) -> its answer

_AUDITED = {
    "open": "create",
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "unlink",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
}
_UNKNOWN = ("writev", "pwritev", "sendfile", "copy_file_range", "splice", "symlink", "mkfifo", "mknod", "truncate")
_KNOWN = (
    "open",
    "write",
    "pwrite",
    "posix_fallocate",
    "ftruncate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "link",
    "unlink",
    "remove",
    "mkdir",
    "rmdir",
)


class Layer:
    """Between this process and the files below `root`. `install` once; a process that dies needs no `remove`."""

    def __init__(self, root: Path, watch: Watch) -> None:
        self.root = os.path.realpath(root)
        self.tried: list[str] = []  # changes of names and lengths, those too that failed; in the words of `audited`
        self.audited: list[str] = []  # what Python's own audit events tell of the same; see `audit`
        self._watch = watch
        self._real = {name: getattr(os, name) for name in (*_KNOWN, *_UNKNOWN)}
        self._open_file = io.open
        self._one = threading.RLock()  # operations have one order

    def install(self) -> None:
        for name in _KNOWN:
            setattr(os, name, getattr(self, f"_{name}"))
        for name in _UNKNOWN:
            setattr(os, name, self._refusing(name))
        io.open = builtins.open = self._io_open

    def remove(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        io.open = builtins.open = self._open_file

    def audit(self) -> None:
        """From now on Python itself tells too of what changes below the root; for good, and only for comparison."""

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _AUDITED and (place := self._audited_place(event, arguments)) is not None:
                self.audited.append(f"{_AUDITED[event]} {place}")

        sys.addaudithook(hear)

    def _audited_place(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "open" and not (arguments[2] or 0) & (os.O_CREAT | os.O_TRUNC):
            return None
        if event == "os.truncate" or isinstance(arguments[0], int):
            return self.inside(arguments[0])
        at_fd = arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
        return self.inside(arguments[0], at_fd if isinstance(at_fd, int) and at_fd >= 0 else None)

    # -- names

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path below the root; None when it is elsewhere (or an open file that has no name any more)."""
        if isinstance(path, int):
            text = _name_of(path)
        else:
            text = os.fsdecode(path)
            if dir_fd is not None and not text.startswith("/"):
                text = f"{_name_of(dir_fd)}/{text}"
            text = os.path.abspath(text)  # noqa: PTH100 - Path.resolve would follow the last link
        if not text.startswith(self.root + "/") or text.endswith(DELETED):
            return None
        return text[len(self.root) + 1 :]

    def _see(self, operation: Operation, perform: Perform, half: Perform | None = None) -> Any:
        with self._one:
            if operation.kind in _AUDITED.values():
                self.tried.append(f"{operation.kind} {operation.path}")
            return self._watch(operation, perform, half)

    def _refusing(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def refuse(*arguments: Any, **named: Any) -> Any:
            for one in (*arguments, *named.values()):
                if isinstance(one, (str, bytes, os.PathLike)) and self.inside(one) is not None:
                    raise AssertionError(f"os.{name} on {one!r}: teach tests/crash/operations.py to see it")
                if type(one) is int and one > 2 and _is_open(one) and self.inside(one) is not None:
                    raise AssertionError(f"os.{name} on fd {one}: teach tests/crash/operations.py to see it")
            return real(*arguments, **named)

        return refuse

    # -- what changes files

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def perform() -> int:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)

        place = self.inside(path, dir_fd)
        if place is None or not flags & (os.O_CREAT | os.O_TRUNC):
            return perform()
        exists = Path(self.root, place).exists()
        if not exists and flags & os.O_CREAT:
            return self._see(Operation("create", place), perform)
        if flags & os.O_TRUNC and exists:
            return self._see(Operation("truncate", place), perform)
        self.tried.append(f"create {place}")  # it stands already
        return perform()

    def _write(self, fd: int, data: Any) -> int:
        return self._some(fd, data, os.lseek(fd, 0, os.SEEK_CUR) if _seeks(fd) else 0, self._real["write"])

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        return self._some(fd, data, at, lambda fd, data: self._real["pwrite"](fd, data, at))

    def _some(self, fd: int, data: Any, at: int, write: Callable[[int, Any], int]) -> int:
        place = self.inside(fd)
        if place is None:
            return write(fd, data)
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and (
            np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES or at % PAGE_BYTES or len(data) % PAGE_BYTES
        ):
            raise AssertionError(f"a direct write of {len(data)} bytes at {at}, not of whole pages: a disk refuses it")

        def half() -> int:
            part = memoryview(data)[: len(data) // 2]
            if len(part) % PAGE_BYTES:  # no direct write does this: the process must end, or the write fail, after it
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return write(fd, part)

        return self._see(
            Operation("write", place, at=at, data=bytes(data), direct=direct), lambda: write(fd, data), half
        )

    def _posix_fallocate(self, fd: int, at: int, size: int) -> None:
        self._on_fd("allocate", fd, lambda: self._real["posix_fallocate"](fd, at, size), size=at + size)

    def _ftruncate(self, fd: int, size: int) -> None:
        self._on_fd("truncate", fd, lambda: self._real["ftruncate"](fd, size), size=size)

    def _fsync(self, fd: int) -> None:
        self._on_fd("fsync", fd, lambda: self._real["fsync"](fd))

    def _fdatasync(self, fd: int) -> None:
        self._on_fd("fsync", fd, lambda: self._real["fdatasync"](fd))

    def _on_fd(self, kind: str, fd: int, perform: Perform, size: int = 0) -> None:
        place = self.inside(fd)
        if place is None:
            perform()
        else:
            self._see(Operation(kind, place, size=size), perform)

    def _rename(self, source: Any, target: Any, **named: Any) -> None:
        self._two("rename", source, target, lambda: self._real["rename"](source, target, **named), named)

    def _replace(self, source: Any, target: Any, **named: Any) -> None:
        self._two("rename", source, target, lambda: self._real["replace"](source, target, **named), named)

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        self._two("link", source, target, lambda: self._real["link"](source, target, **named), named)

    def _two(self, kind: str, source: Any, target: Any, perform: Perform, named: dict[str, Any]) -> None:
        first, second = self.inside(source, named.get("src_dir_fd")), self.inside(target, named.get("dst_dir_fd"))
        if first is None and second is None:
            perform()
            return
        if first is None or second is None:
            raise AssertionError(f"{kind} {source} -> {target} crosses the root of the test's disk")
        self._see(Operation(kind, first, second), perform)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._on_name("unlink", path, dir_fd, lambda: self._real["unlink"](path, dir_fd=dir_fd))

    _remove = _unlink

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._on_name("mkdir", path, dir_fd, lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._on_name("rmdir", path, dir_fd, lambda: self._real["rmdir"](path, dir_fd=dir_fd))

    def _on_name(self, kind: str, path: Any, dir_fd: int | None, perform: Perform) -> None:
        place = self.inside(path, dir_fd)
        if place is None:
            perform()
        else:
            self._see(Operation(kind, place), perform)

    def _io_open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(file, int) or self.inside(file) is None or not set(mode) & set("wax+"):
            return self._open_file(file, mode, *arguments, **named)
        if mode != "wb":
            raise AssertionError(f"open({file!r}, {mode!r}): teach tests/crash/operations.py to see it")
        return io.BufferedWriter(_Raw(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)))


class _Raw(io.RawIOBase):
    """A file whose writes go through `os`, so that they are seen."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def _name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - a Path would lose what is no path


def _seeks(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()
