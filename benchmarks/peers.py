"""`python -m benchmarks.peers [--megabytes 400] [--rounds 5] [--json]`: what a save costs beside what others would do.

Two FSDP2 ranks (gloo) with so much state each, on one node; one save a round, medians after one round that warms up,
the ways in alternating order. Wall seconds:

stall   training stands still: the save is called -> it returns on every rank (lastgood: end_step)
safe    the save is called -> all of it is synced to the disk (lastgood: committed; nothing is uploaded in between)

Every way saves model and optimizer. torch.save writes into the page cache, as verl leaves it ("as verl"), or syncs its
files as well. DCP syncs what it writes; in the background it has one stager that is used again, and cached plans.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

import lastgood

from . import script
from .ranks import ray_of_its_own, roots
from .sharded import ShardedRank, state

MEMBERS = 2
LIMIT_S = 600.0
POLL_S = 0.005


class PeerRank(ShardedRank):
    """A rank that also saves in the background with DCP."""

    _stager: DefaultStager | None = None
    _saving: Any = None

    def begin_with_dcp(self, folder: str, kind: str) -> None:
        """Collective. Returns when the state may change again. `kind`: thread or process."""
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, True, False, False))
        self._saving = async_save(
            self._dcp_state(),
            storage_writer=FileSystemWriter(folder),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=self._stager,
        )

    def end_with_dcp(self) -> None:
        """Returns when what was begun is written."""
        self._saving.result()

    def save_as_verl_synced(self, folder: str) -> None:
        """Collective."""
        self.save_as_verl(folder)
        for path in Path(folder).glob(f"*_rank_{self.rank}.pt"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        torch.distributed.barrier()


@dataclass(frozen=True)
class Cost:
    """Of one way to save: medians in wall seconds, and the spread of the stall."""

    way: str
    rounds: int
    stall_s: float
    least_s: float
    most_s: float
    safe_s: float | None  # None: it is never synced

    @classmethod
    def of(cls, way: str, stalls: list[float], safes: list[float | None]) -> Cost:
        known = [safe for safe in safes if safe is not None]
        safe_s = statistics.median(known) if known else None
        return cls(way, len(stalls), statistics.median(stalls), min(stalls), max(stalls), safe_s)


def new_ranks(folder: Path, megabytes: float) -> list[Any]:
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    ranks: list[Any] = [
        ray.remote(PeerRank).options(num_cpus=0).remote(rank, MEMBERS, str(rendezvous), megabytes)
        for rank in range(MEMBERS)
    ]
    ray.get([rank.update.remote() for rank in ranks])
    return ranks


class Peers:
    """All ways but ours, over one pair of ranks. Each answers (stall, safe)."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self.folder = folder
        self.ranks = new_ranks(folder, megabytes)
        self._count = itertools.count()

    def _new(self) -> str:
        return str(self.folder / f"peer-{next(self._count)}")

    def _timed(self, method: str, *arguments: Any) -> float:
        began = time.perf_counter()
        ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=LIMIT_S)
        return time.perf_counter() - began

    def verl(self) -> tuple[float, float | None]:
        return self._timed("save_as_verl", self._new()), None

    def verl_synced(self) -> tuple[float, float | None]:
        spent_s = self._timed("save_as_verl_synced", self._new())
        return spent_s, spent_s

    def dcp(self) -> tuple[float, float | None]:
        spent_s = self._timed("save_with_dcp", self._new())
        return spent_s, spent_s

    def dcp_async(self, kind: str) -> tuple[float, float | None]:
        stall_s = self._timed("begin_with_dcp", self._new(), kind)
        return stall_s, stall_s + self._timed("end_with_dcp")

    def tidy(self) -> None:
        ray.get([rank.update.remote() for rank in self.ranks])
        for left in self.folder.glob("peer-*"):
            shutil.rmtree(left)
        os.sync()

    def end(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


class Ours:
    """lastgood over a pair of ranks of its own."""

    def __init__(self, folder: Path, megabytes: float, snapshot: str) -> None:
        self.ranks = new_ranks(folder, megabytes)
        self.run = lastgood.attach(snapshot, **roots(folder), save_freq=1, save_total_limit=2, snapshot=snapshot)
        self.run.add_members("actor", self.ranks, state=state)
        self.run.resume()
        self.step = 0

    def save(self) -> tuple[float, float | None]:
        self.step += 1
        began = time.perf_counter()
        self.run.end_step(self.step)
        stall_s = time.perf_counter() - began
        self._until(lambda newest: newest.committed)
        return stall_s, time.perf_counter() - began

    def _until(self, so: Callable[[Any], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not ((newest := self.run.latest()) and newest.step == self.step and so(newest)):
            if time.monotonic() > until:
                raise TimeoutError(f"step {self.step}: {self.run.status()}")
            time.sleep(POLL_S)

    def tidy(self) -> None:
        self._until(lambda newest: newest.durable)
        ray.get([rank.update.remote() for rank in self.ranks])
        os.sync()

    def end(self) -> None:
        self.run.close()
        for rank in self.ranks:
            ray.kill(rank)


def measure(megabytes: float, rounds: int) -> list[Cost]:
    spent: dict[str, list[tuple[float, float | None]]] = {}
    with ray_of_its_own() as folder:
        peers = Peers(folder, megabytes)
        blocking, overlapped = (Ours(folder, megabytes, snapshot) for snapshot in ("blocking", "overlapped"))
        ways: dict[str, tuple[Callable[[], tuple[float, float | None]], Any]] = {
            "lastgood, blocking": (blocking.save, blocking),
            "lastgood, overlapped": (overlapped.save, overlapped),
            "as verl: torch.save": (peers.verl, peers),
            "torch.save and fsync": (peers.verl_synced, peers),
            "dcp.save": (peers.dcp, peers),
            "dcp.async_save, thread": (lambda: peers.dcp_async("thread"), peers),
            "dcp.async_save, process": (lambda: peers.dcp_async("process"), peers),
        }
        for number in range(rounds + 1):  # the first one warms up
            for way, (save, whose) in ways.items() if number % 2 else reversed(ways.items()):
                found = save()
                whose.tidy()
                if number:
                    spent.setdefault(way, []).append(found)
        for whose in (blocking, overlapped, peers):
            whose.end()
    return [Cost.of(way, [s for s, _ in spent[way]], [safe for _, safe in spent[way]]) for way in ways]


def text(found: list[Cost]) -> str:
    ours = found[0]
    assert ours.safe_s is not None
    lines = [
        "| way | stall, s | least to most | over ours | on disk, s | over ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        spread = f"{each.least_s:.3f} to {each.most_s:.3f}"
        safe = "never synced | " if each.safe_s is None else f"{each.safe_s:.2f} | {each.safe_s / ours.safe_s:.2f}"
        lines.append(f"| {each.way} | {each.stall_s:.3f} | {spread} | {each.stall_s / ours.stall_s:.2f} | {safe} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, megabytes=400.0, rounds=5))
