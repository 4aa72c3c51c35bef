"""`python -m benchmarks.staging [--gb 1] [--rounds 5] [--json]`: how close staging a shard comes to the disk's speed.

Three ways to bring the same image from shared memory to the disk and fsync it, in turn, in another order each round:
as stagers do it (written directly and hashed), through the page cache and hashed, and written directly by as many
threads without hashing, which is what the disk can do. The first round warms up; then medians of throughput and of CPU
seconds of this process, all threads. What the kernel writes back on its own threads is not in them. Measure on a quiet
machine: hashing takes 0.7 seconds of a core per GB, and threads of low priority do not get them beside other work.
TMPDIR says which disk; it must not be a tmpfs.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lastgood.storage.digest import DEFAULT_BLOCK_BYTES, DEFAULT_THREADS, block_ranges, hash_block
from lastgood.storage.files import WRITE_BYTES, write_image
from lastgood.workers.images import SHARED_MEMORY, Image
from lastgood.workers.priority import lower_this_thread

from . import script

GB_BYTES = 10**9
RAW = "direct, not hashed"

Way = Callable[[memoryview, Path], object]


@dataclass(frozen=True)
class Staged:
    """What one way costs: medians of all rounds. `of_raw`: the median over the rounds of its throughput by raw's."""

    way: str
    gb_per_s: float
    of_raw: float
    cpu_s_per_gb: float


def as_stagers_do(payload: memoryview, place: Path) -> None:
    write_image(payload, place, start_thread=lower_this_thread)


def through_the_page_cache(payload: memoryview, place: Path) -> None:
    """As write_image was before it wrote directly."""
    with ThreadPoolExecutor(DEFAULT_THREADS) as pool, place.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, len(payload))
        hashes = [pool.submit(hash_block, payload, *part) for part in block_ranges(len(payload), DEFAULT_BLOCK_BYTES)]
        for begin, end in block_ranges(len(payload), WRITE_BYTES):
            _write(file.fileno(), payload[begin:end], begin)
        os.fsync(file.fileno())
        for future in hashes:
            future.result()


def raw(payload: memoryview, place: Path) -> None:
    """Raises OSError (EINVAL) where a file system takes no direct writes."""
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(payload))
        with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
            parts = block_ranges(len(payload), WRITE_BYTES)
            list(pool.map(lambda part: _write(fd, payload[part[0] : part[1]], part[0]), parts))
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, data: memoryview, at: int) -> None:
    written = os.pwrite(fd, data, at)
    assert written == len(data), "the disk is full"


WAYS: dict[str, Way] = {
    "as stagers do: direct, hashed": as_stagers_do,
    "page cache, hashed": through_the_page_cache,
    RAW: raw,
}


def measure(gb: float, rounds: int) -> list[Staged]:
    """Needs `gb` of shared memory, and of disk."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}  # wall and CPU seconds
    nbytes = int(gb * GB_BYTES)
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        image = Image.create(Path(memory, "image"), nbytes)
        payload = image.payload  # whole pages, as an image's file has
        noise = os.urandom(1 << 20)
        for begin, end in block_ranges(len(payload), len(noise)):
            payload[begin:end] = noise[: end - begin]
        for number in range(rounds + 1):
            turn = number % len(WAYS)
            for way in [*list(WAYS)[turn:], *list(WAYS)[:turn]]:
                place = Path(disk, "shard")
                began_s, cpu_s = time.perf_counter(), time.process_time()
                WAYS[way](payload, place)
                if number:
                    found[way].append((time.perf_counter() - began_s, time.process_time() - cpu_s))
                place.unlink()
        gb = len(payload) / GB_BYTES
        image.close()
    return [
        Staged(
            way,
            statistics.median(gb / wall_s for wall_s, _ in spent),
            statistics.median(base_s / wall_s for (wall_s, _), (base_s, _) in zip(spent, found[RAW], strict=True)),
            statistics.median(cpu_s / gb for _, cpu_s in spent),
        )
        for way, spent in found.items()
    ]


def text(found: list[Staged]) -> str:
    lines = ["| way | GB/s | of the disk's | CPU s per GB |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.way} | {one.gb_per_s:.2f} | {one.of_raw:.2f} | {one.cpu_s_per_gb:.2f} |" for one in found]
    cores = len(os.sched_getaffinity(0))
    lines += ["", f"{cores} cores ({platform.machine()}), {DEFAULT_THREADS} threads write and as many hash."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, gb=1.0, rounds=5))
