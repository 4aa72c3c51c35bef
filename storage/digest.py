"""Block digests: SHA-256 over fixed-size blocks, and over their concatenation. The rule: S3's composite is ours.

A shard of N bytes has ceil(N / block_bytes) blocks; its digest is SHA-256 over the concatenated *binary* block
digests, which is what S3 answers as composite checksum of a multipart upload with parts of block_bytes. hashlib
releases the GIL while it hashes, so blocks are hashed on several threads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .manifest import ShardRecord, blocks_in, digest_of_blocks

DEFAULT_BLOCK_BYTES = 64 << 20  # S3 parts may have 5 MiB to 5 GiB; 10,000 of these are 625 GiB
CORES_PER_THREAD = 8  # of those that this process may use: training needs the others
MIN_THREADS, MAX_THREADS = 2, 8  # a thread hashes 1.4 GB/s: two keep up with one disk, eight with a stripe of them


def threads_for(cores: int) -> int:
    """How many threads hash one file, and how many write it, on so many cores."""
    return min(MAX_THREADS, max(MIN_THREADS, cores // CORES_PER_THREAD))


DEFAULT_THREADS = threads_for(len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class BlockDigests:
    """The digests of one file's bytes; hex."""

    nbytes: int
    block_bytes: int
    blocks: tuple[str, ...]
    digest: str

    @classmethod
    def of_blocks(cls, nbytes: int, block_bytes: int, blocks: tuple[str, ...]) -> BlockDigests:
        """From the hex digests of all blocks. Raises ValueError when their count does not fit."""
        if len(blocks) != blocks_in(nbytes, block_bytes):
            raise ValueError(f"{len(blocks)} digests for {nbytes} bytes in blocks of {block_bytes}")
        return cls(nbytes, block_bytes, blocks, digest_of_blocks(blocks))

    @classmethod
    def of_record(cls, record: ShardRecord) -> BlockDigests:
        """What the manifest says of a shard."""
        return cls(record.nbytes, record.block_bytes, record.blocks, record.digest)

    def wrong_blocks(self, other: BlockDigests) -> list[int]:
        """Indices of the blocks in which `other` (same lengths) differs. Raises ValueError for other lengths."""
        if (self.nbytes, self.block_bytes) != (other.nbytes, other.block_bytes):
            raise ValueError("digests over other lengths cannot be compared block by block")
        return [i for i, (mine, theirs) in enumerate(zip(self.blocks, other.blocks, strict=True)) if mine != theirs]


def block_ranges(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of every block of a file of `nbytes`."""
    for begin in range(0, nbytes, block_bytes):
        yield begin, min(begin + block_bytes, nbytes)


def hash_block(buffer: memoryview, begin: int, end: int) -> str:
    """Hex SHA-256 of one range."""
    return hashlib.sha256(buffer[begin:end]).hexdigest()


def digest_blocks(
    buffer: memoryview | bytes,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    threads: int = DEFAULT_THREADS,
    start_thread: Callable[[], None] | None = None,
) -> BlockDigests:
    """Digests of bytes in memory, which must not change meanwhile. Each thread that hashes calls `start_thread` first;
    without it a single block is hashed by the caller's."""
    view = memoryview(buffer).cast("B")
    ranges = list(block_ranges(len(view), block_bytes))
    if start_thread is None and (len(ranges) <= 1 or threads <= 1):
        blocks = tuple(hash_block(view, begin, end) for begin, end in ranges)
    else:
        with ThreadPoolExecutor(max(1, threads), "lastgood-hash", start_thread) as pool:
            blocks = tuple(pool.map(lambda part: hash_block(view, *part), ranges))
    return BlockDigests.of_blocks(len(view), block_bytes, blocks)


class RunningDigest:
    """Block digests of bytes that come in order, in pieces of any length."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._nbytes = 0
        self._blocks: list[str] = []
        self._current = hashlib.sha256()

    def update(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            room = self._block_bytes - self._nbytes % self._block_bytes
            piece, view = view[:room], view[room:]
            self._current.update(piece)
            self._nbytes += len(piece)
            if self._nbytes % self._block_bytes == 0:
                self._blocks.append(self._current.hexdigest())
                self._current = hashlib.sha256()

    def result(self) -> BlockDigests:
        """The digests of all that came; call it once, at the end."""
        tail = (self._current.hexdigest(),) if self._nbytes % self._block_bytes else ()
        return BlockDigests.of_blocks(self._nbytes, self._block_bytes, (*self._blocks, *tail))
