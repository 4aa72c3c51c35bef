"""Writing past the page cache (O_DIRECT) where a file system can. The rule: a refusal costs speed, never the write.

A shard is read once more at most before it is collected, so copying it through the page cache only takes memory and
CPU from training. Direct writes need memory, offset and length in whole pages. The mode is one of the open file: it
is turned on for the pages of an image, and off for a tail that fills no page, or as soon as it is refused.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

PAGE_BYTES = 4096
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})

log = logging.getLogger("lastgood.storage")
_told_devices: set[int] = set()  # of which people know


def whole_pages_bytes(view: memoryview) -> int:
    """How many bytes at its beginning can be written directly: whole pages; none where it begins within a page."""
    if len(view) < PAGE_BYTES or np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES:
        return 0
    return len(view) - len(view) % PAGE_BYTES


class DirectMode:
    """O_DIRECT of one file that is open for writing. Any thread may use it; `path` is for people."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._on = False

    def turn_on(self) -> bool:
        """Answers whether the file system takes the mode (it may still refuse the first write). Raises OSError."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags() | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._tell(error)
            return False
        self._on = True
        return True

    def turn_off(self) -> None:
        """From here on writes go through the page cache; those under way end as they began. May be repeated."""
        if self._on:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags() & ~os.O_DIRECT)
            self._on = False  # last: who sees it off must never write directly

    def attempt(self, write: Callable[[], None]) -> None:
        """Runs a write of whole pages; one that is refused for being direct is run again through the page cache.

        Raises what `write` raises otherwise (a full or broken disk is no refusal).
        """
        direct = self._on
        try:
            write()
        except OSError as error:
            if not direct or error.errno not in _REFUSED:
                raise
            self._tell(error)
            self.turn_off()
            write()

    def _flags(self) -> int:
        return fcntl.fcntl(self._fd, fcntl.F_GETFL)

    def _tell(self, error: OSError) -> None:
        device = os.fstat(self._fd).st_dev
        if device not in _told_devices:
            _told_devices.add(device)
            log.warning(
                "the file system of %s refuses direct writes (O_DIRECT: %s): shards are staged through the page cache, "
                "which costs memory and CPU and nothing else. Said once for this file system.",
                self._path.parent,
                errno.errorcode.get(error.errno or 0, error.errno),
            )
