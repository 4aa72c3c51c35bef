"""The threads of one shard file: some write its pieces while others hash its blocks, from the same memory.

The rule: the first error ends the work. No thread begins another piece after it, and no thread writes any more when the
with block is over: only then may the file be closed, or a piece would go into whatever gets its descriptor next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from .digest import block_ranges, hash_block

Range = tuple[int, int]  # (begin, end)


class Crew:
    """`threads` threads that write, and as many that hash. Used for one file, in a with block that ends with them.

    `start_thread` is the first thing that each of them does (it lowers its priority); it may not raise.
    """

    def __init__(self, threads: int, start_thread: Callable[[], None] = lambda: None) -> None:
        self._count = max(1, threads)
        self._pool = ThreadPoolExecutor(2 * self._count, "lastgood-stage", start_thread)
        self._hashes: list[Future[str]] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None  # the first

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        self._pool.shutdown(cancel_futures=True)

    def work(
        self,
        view: memoryview,
        block_bytes: int,
        pieces: Sequence[Range],
        write: Callable[[int, int], None],
        *,
        at_once: bool,
    ) -> None:
        """Begins to hash the blocks of `view`, and returns when all `pieces` are written.

        Pieces are taken in their order, `at_once` by all threads that write. Raises the first error of a
        `write(begin, end)`.
        """
        todo = iter(pieces)
        writers = [self._pool.submit(self._write, todo, write) for _ in range(self._count if at_once else 1)]
        self._hashes = [self._pool.submit(hash_block, view, *part) for part in block_ranges(len(view), block_bytes)]
        wait(writers)
        if self._error is not None:
            raise self._error

    def digests(self) -> tuple[str, ...]:
        """Of all blocks; waits until they are hashed."""
        return tuple(future.result() for future in self._hashes)

    def _write(self, todo: Iterator[Range], write: Callable[[int, int], None]) -> None:
        try:
            while (piece := self._next(todo)) is not None:
                write(*piece)
        except BaseException as error:  # noqa: BLE001 - `work` raises it
            self._fail(error)

    def _next(self, todo: Iterator[Range]) -> Range | None:
        with self._lock:
            return None if self._error is not None else next(todo, None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
