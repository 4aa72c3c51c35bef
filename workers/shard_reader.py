"""Reading one shard file back. The rule: bytes are hashed in the memory they are used from, before they are used.

The file is read into anonymous memory block by block, and every block is compared with its digest in the manifest; a
tree over that memory is built without copies. Blocks that nobody asks for are neither read nor hashed, so a rank that
needs a part of another rank's shard pays for that part.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..storage.digest import DEFAULT_THREADS
from ..storage.direct import PAGE_BYTES
from ..storage.errors import IntegrityError
from ..storage.image import read_image
from ..storage.manifest import ShardRecord


@dataclass(frozen=True)
class ShardCopy:
    """A file that should hold a shard: all of it, or from byte `begin` on (an image in memory has a header page).

    `direct`: it lies on a disk and is not in the page cache, as what a stager has written.
    """

    path: Path
    begin: int = 0
    direct: bool = False


class ShardReader:
    """One shard, verified as far as it was asked for. Its memory lives as long as a tensor of it does."""

    def __init__(self, copy: ShardCopy, record: ShardRecord) -> None:
        """Raises IntegrityError when the file is missing, truncated or longer than the manifest says.

        An image may be longer: it was used for larger states, and has whole pages.
        """
        self.path = path = copy.path
        self.record = record
        self._begin = copy.begin
        self._direct = -1
        self.member = f"{record.role}:{record.rank}"
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._broken(f"it cannot be opened ({error.strerror})") from error
        try:
            found = os.fstat(self._file).st_size - copy.begin
            if found < record.nbytes or (found > record.nbytes and not copy.begin) or not found:
                raise self._broken(f"it has {found} bytes, and the manifest says {record.nbytes}")
            self._memory = mmap.mmap(-1, record.nbytes)
        except BaseException:
            os.close(self._file)
            raise
        if copy.direct and not copy.begin and record.block_bytes % PAGE_BYTES == 0:
            with contextlib.suppress(OSError):  # the file system refuses it
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._view = memoryview(self._memory)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._lock = threading.Lock()
        self._verified: set[int] = set()
        self._tree: Any = None

    @property
    def bytes_read(self) -> int:
        """How many bytes were read and verified."""
        return sum(min((i + 1) * self._block, self.record.nbytes) - i * self._block for i in self._verified)

    def tree(self, *, whole: bool) -> Any:
        """The state tree of the shard; its tensors lie in verified memory, to be read only.

        Without `whole`, tensors that the manifest lists as chunks may be unread: pass each to `fetch` before use.
        Raises IntegrityError for any byte that is not what was committed.
        """
        self._need([(0, self.record.nbytes)] if whole else self._outside_chunks())
        if self._tree is None:
            self._tree = read_image(self._memory, where=str(self.path))
        return self._tree

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reads and verifies the bytes of a tensor of `tree`; answers the tensor."""
        if tensor.numel():
            steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr() - self._base
            end = begin + (steps + 1) * tensor.element_size()
            if not 0 <= begin < end <= self.record.nbytes:
                raise self._broken(f"a tensor in it lies at bytes {begin} to {end}")
            self._need([(begin, end)])
        return tensor

    def close(self) -> None:
        """Closes the file; what was read stays."""
        for descriptor in (self._file, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._direct = -1

    @property
    def _block(self) -> int:
        return self.record.block_bytes

    def _outside_chunks(self) -> list[tuple[int, int]]:
        """Header, arrays, long bytes and skeleton: all that read_image looks at, and tensors that are no chunks."""
        ranges: list[tuple[int, int]] = []
        at = 0
        for begin, end in sorted((chunk.begin, chunk.end) for chunk in self.record.chunks):
            if begin > at:
                ranges.append((at, begin))
            at = max(at, end)
        return [*ranges, (at, self.record.nbytes)]

    def _need(self, ranges: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            wanted = {
                index
                for begin, end in ranges
                if end > begin
                for index in range(begin // self._block, (end - 1) // self._block + 1)
            }
            missing = sorted(wanted - self._verified)
            if len(missing) > 1:
                with ThreadPoolExecutor(DEFAULT_THREADS, "lastgood-read") as pool:
                    list(pool.map(self._read_block, missing))
            else:
                for index in missing:
                    self._read_block(index)
            self._verified.update(missing)

    def _read_block(self, index: int) -> None:
        begin = index * self._block
        end = min(begin + self._block, self.record.nbytes)
        part = self._view[begin:end]
        try:
            self._read(begin + self._read_directly(begin, end), end)
        except OSError as error:
            raise self._broken(f"bytes {begin} to {end} cannot be read ({error.strerror})") from error
        if hashlib.sha256(part).hexdigest() != self.record.blocks[index]:
            raise self._broken(f"bytes {begin} to {end} are not what was committed (digest of block {index})")

    def _read_directly(self, begin: int, end: int) -> int:
        """Reads whole pages past the page cache, as far as that goes; answers how many bytes are there. Memory, offset
        and length must be in whole pages for it (open(2), O_DIRECT)."""
        pages_end = begin + (end - begin) // PAGE_BYTES * PAGE_BYTES
        at = begin
        while self._direct >= 0 and at < pages_end:
            try:
                count = os.preadv(self._direct, [self._view[at:pages_end]], at)
            except OSError:  # refused, or broken: the page cache tells which
                break
            at += count // PAGE_BYTES * PAGE_BYTES
            if count % PAGE_BYTES or not count:
                break
        return at - begin

    def _read(self, begin: int, end: int) -> None:
        while begin < end:
            count = os.preadv(self._file, [self._view[begin:end]], self._begin + begin)
            if count == 0:
                raise self._broken(f"it ends at byte {begin} of {self.record.nbytes}")
            begin += count

    def _broken(self, why: str) -> IntegrityError:
        return IntegrityError(
            f"shard {self.record.path} of member {self.member} at {self.path} is not whole: {why}. Nothing was "
            "restored from it and no live state was touched; take the shard from another copy, or an earlier "
            "checkpoint.",
            path=str(self.path),
            member=self.member,
            component=self.record.component,
        )
