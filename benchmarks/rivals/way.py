"""What every way to save is asked for, and the rank that saves."""

from __future__ import annotations

import shutil
from concurrent import futures
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..sharded import ShardedRank

LIMIT_S = 300.0  # for one save to be finished
POLL_S = 0.005


class RivalRank(ShardedRank):
    """A rank whose state is handed to a rival, in both shapes that rivals take."""

    def sharded(self) -> dict[str, Any]:
        """Model and optimizer by parameter names, as DTensors (as benchmarks/peers.py hands them to DCP)."""
        return self._dcp_state()

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's own part of every parameter and moment; the tensors share their memory with the state."""
        return dict(self._tensors())


class Way:
    """One way to save, at one rank. This is all that rank.py asks of it."""

    rival: ClassVar[str]  # whose environment it needs
    ranks: ClassVar[Any] = RivalRank
    persists: ClassVar[bool] = True  # it writes files
    syncs: ClassVar[bool] = False  # what `wait` waits for was synced by the rival

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        """`folder`: of this way, shared by its ranks. `run`: a name that nothing else on this machine has."""
        self.rank, self.folder, self.run = rank, folder, run
        self._threads = futures.ThreadPoolExecutor(1)
        self._waiting: futures.Future[None] | None = None

    def place(self, step: int) -> Path:
        """The directory of one save."""
        return self.folder / f"save-{step}"

    def begin(self, step: int) -> None:
        """Collective: saves, and returns when training gets control again."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until the state may change, where `begin` returns before that."""

    def wait(self) -> None:
        """Waits until what was begun is done, as far as the rival can tell."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Waits for nothing itself: a thread does, off the interpreter's lock."""
        if self._waiting is None:
            self._waiting = self._threads.submit(self.wait)
            futures.wait([self._waiting], POLL_S)
        return self._waiting.done()

    def finish(self) -> None:
        """As `wait`, also after `done` was asked."""
        if self._waiting is None:
            self.wait()
        else:
            self._waiting.result(LIMIT_S)
            self._waiting = None

    def files(self, step: int) -> list[Path]:
        """What a save wrote and its directories: what is still to be synced of it."""
        return [self.place(step), *sorted(self.place(step).rglob("*"))]

    def forget(self, step: int) -> None:
        """Called at rank 0 only: deletes a save."""
        shutil.rmtree(self.place(step))

    def close(self) -> None:
        """Ends what the rival has running."""

    @classmethod
    def sweep(cls, run: str) -> None:
        """Called once the ranks are dead: removes what they left outside their folder."""
