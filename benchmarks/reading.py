"""`python -m benchmarks.reading [--gb 1] [--rounds 5] [--json]`: reading a shard for a resume, against the disk.

Medians of all rounds after one that warms up, in alternating order; the file's pages are dropped from the page cache
before each read.

as a resume does  verified block by block, past the page cache (workers/shard_reader.py)
page cache        the same through the page cache
the disk          the same bytes read past the page cache by as many threads, into the same memory, not hashed
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lastgood.storage.digest import DEFAULT_BLOCK_BYTES, DEFAULT_THREADS, block_ranges, digest_blocks
from lastgood.storage.direct import PAGE_BYTES
from lastgood.storage.image import ImageLayout
from lastgood.storage.manifest import ShardRecord
from lastgood.storage.tree import flatten
from lastgood.workers.shard_reader import ShardCopy, ShardReader

from . import script

WARM_UP = 1


@dataclass(frozen=True)
class Way:
    """One way to read; `of_disk`: its speed over the raw disk's."""

    name: str
    gb_s: float
    least_gb_s: float
    most_gb_s: float
    of_disk: float
    cpu_s_per_gb: float


def image_of(nbytes: int) -> bytes:
    """A shard file with a tensor of so many random bytes in it."""
    flat = flatten({"weights": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)})
    layout = ImageLayout.of(flat)
    image = bytearray(layout.nbytes)
    layout.bind(image).write(flat)
    return bytes(image)


def record_of(path: Path) -> ShardRecord:
    data = path.read_bytes()
    digests = digest_blocks(data, DEFAULT_BLOCK_BYTES)
    return ShardRecord(
        role="actor",
        rank=0,
        component="model",
        path="actor/rank_00000.model.safetensors",
        nbytes=len(data),
        block_bytes=DEFAULT_BLOCK_BYTES,
        blocks=digests.blocks,
        digest=digests.digest,
        node="here",
    )


def read_as_a_resume(path: Path, record: ShardRecord, *, direct: bool) -> None:
    reader = ShardReader(ShardCopy(path, direct=direct), record)
    reader.tree(whole=True)
    reader.close()


def read_raw(path: Path, nbytes: int) -> None:
    memory = memoryview(mmap.mmap(-1, -(-nbytes // PAGE_BYTES) * PAGE_BYTES))  # a direct read takes whole pages
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(part: tuple[int, int]) -> None:
        begin, end = part[0], -(-part[1] // PAGE_BYTES) * PAGE_BYTES
        while begin < min(end, nbytes):
            begin += os.preadv(file, [memory[begin:end]], begin)

    with ThreadPoolExecutor(DEFAULT_THREADS) as pool:
        list(pool.map(read, block_ranges(nbytes, DEFAULT_BLOCK_BYTES)))
    os.close(file)


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure(gb: float, rounds: int) -> list[Way]:
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-") as folder:
        path = Path(folder) / "shard"
        path.write_bytes(image_of(int(gb * 1e9)))
        record = record_of(path)
        nbytes = record.nbytes
        ways: dict[str, Callable[[], None]] = {
            "as a resume does: direct, verified": lambda: read_as_a_resume(path, record, direct=True),
            "page cache, verified": lambda: read_as_a_resume(path, record, direct=False),
            "direct, not verified: the disk": lambda: read_raw(path, nbytes),
        }
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(rounds + WARM_UP):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                forget(path)
                began, cpu = time.perf_counter(), time.process_time()
                ways[name]()
                spent[name].append((time.perf_counter() - began, time.process_time() - cpu))
    kept = {name: values[WARM_UP:] for name, values in spent.items()}
    speed = {name: [nbytes / 1e9 / wall_s for wall_s, _ in values] for name, values in kept.items()}
    disk = statistics.median(list(speed.values())[-1])
    return [
        Way(
            name,
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            statistics.median(speeds) / disk,
            statistics.median(cpu_s for _, cpu_s in kept[name]) / (nbytes / 1e9),
        )
        for name, speeds in speed.items()
    ]


def text(found: list[Way]) -> str:
    lines = ["| way | GB/s | least to most | of the disk's | CPU s per GB |", "| --- | --- | --- | --- | --- |"]
    for way in found:
        spread = f"{way.least_gb_s:.2f} to {way.most_gb_s:.2f}"
        lines.append(f"| {way.name} | {way.gb_s:.2f} | {spread} | {way.of_disk:.2f} | {way.cpu_s_per_gb:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, gb=1.0, rounds=5))
