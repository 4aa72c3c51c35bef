"""Where the campaign's disks lie: in memory when there is room, for then an fsync costs nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

NEEDED_BYTES = 32 << 20
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """An empty directory of its own, removed afterwards."""
    roomy = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > NEEDED_BYTES
    folder = Path(tempfile.mkdtemp(prefix="lastgood-crash-", dir=SHARED_MEMORY if roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
