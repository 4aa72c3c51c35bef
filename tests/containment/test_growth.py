"""Two hundred saves leave the process as it was: no descriptor, thread, image or buffer more for any of them."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch

from tests.containment.small_run import SmallRun

SAVES = 200
VALUES = 50_000  # of each rank: 200 kB
ROOM_BYTES = SAVES * VALUES * 4 // 3  # a third of one rank's bytes for each save


def resident_bytes() -> int:
    """Anonymous memory of this process; files and shared memory are counted by name below."""
    gc.collect()
    told = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(told.split()[1]) << 10


def test_two_hundred_saves_leave_nothing_behind(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    for node in run.nodes:
        node.state["weights"].value = torch.zeros(VALUES)
    for step in range(1, 21):
        run.commits(step)
    run.durable(20)
    run.clean()
    before, threads, open_files, images = resident_bytes(), threading.active_count(), descriptors(), image_bytes(run)
    for step in range(21, 21 + SAVES):
        run.commits(step)
    run.durable(20 + SAVES)
    run.clean()
    grown = resident_bytes() - before
    assert image_bytes(run) == images
    assert descriptors() < open_files + SAVES // 10  # some work may be under way at either moment
    assert threading.active_count() < threads + SAVES // 10  # pools may still have had room
    assert grown < ROOM_BYTES, f"{grown / SAVES:.0f} bytes for each save"
    run.close()


def image_bytes(run: SmallRun) -> list[int]:
    """Bytes of images on each node."""
    return [node.image_bytes() for node in run.nodes]


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
