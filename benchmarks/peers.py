"""`python -m benchmarks.peers [--megabytes 400] [--rounds 5] [--json]`: what a save costs beside what others would do.

Two FSDP2 ranks (gloo) with so much state each, on one node; one save a round, medians after one round that warms up,
the ways in alternating order:

stall   wall seconds that training stands still: the save is called -> it returns on every rank (lastgood: end_step)
safe    the save is called -> all of it is synced to the disk (lastgood: committed; nothing is uploaded in between)
CPU     seconds of all cores, whoever used them, until it is safe (or returns), less what an idle machine uses
step    the same CPU-bound work in every rank right after the save has returned, over that work with nothing beside it;
        in rounds of its own, and only of ways that write in the background

Every way saves model, optimizer and the rollout's weights. torch.save writes into the page cache, as verl leaves it
("as verl"), or syncs its files as well. DCP syncs what it writes; in the background it has one stager that is used
again, and cached plans.
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
from .ranks import LIMIT_S, ray_of_its_own, roots, until_newest
from .sharded import ShardedRank, state

MEMBERS = 2
IDLE_S = 2.0  # how long the idle machine is looked at
WORK_SIDE = 256  # of the matrices that work multiplies


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

    def work(self, passes: int) -> float:
        """Wall seconds of CPU-bound work in one thread."""
        matrix = torch.eye(WORK_SIDE)
        began = time.perf_counter()
        for _ in range(passes):
            matrix = matrix @ matrix
        return time.perf_counter() - began

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
    """Of one way to save: medians, and the spread of the stall."""

    way: str
    rounds: int
    stall_s: float
    least_s: float
    most_s: float
    safe_s: float | None  # None: it is never synced
    cpu_s_per_gb: float
    step: float | None  # None: it writes before it returns


@dataclass(frozen=True)
class Spent:
    """By one save."""

    stall_s: float
    safe_s: float
    cpu_s: float


def busy_s() -> float:
    """CPU seconds that this machine has spent since it was started, on anything (proc_stat(5))."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def new_ranks(folder: Path, megabytes: float) -> list[Any]:
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    ranks: list[Any] = [
        ray.remote(PeerRank).options(num_cpus=0).remote(rank, MEMBERS, str(rendezvous), megabytes)
        for rank in range(MEMBERS)
    ]
    ray.get([rank.update.remote() for rank in ranks])
    return ranks


class Ranks:
    """A pair of ranks, and calls to both."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self.folder = folder
        self.ranks = new_ranks(folder, megabytes)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=LIMIT_S)

    def work_s(self, passes: int) -> float:
        return max(self.ask("work", passes))

    def end(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


class Peers(Ranks):
    """All ways but ours."""

    _count = itertools.count()

    def _new(self) -> str:
        return str(self.folder / f"peer-{next(self._count)}")

    def verl(self) -> None:
        self.ask("save_as_verl", self._new())

    def verl_synced(self) -> None:
        self.ask("save_as_verl_synced", self._new())

    def dcp(self) -> None:
        self.ask("save_with_dcp", self._new())

    def begin_dcp(self, kind: str) -> None:
        self.ask("begin_with_dcp", self._new(), kind)

    def end_dcp(self) -> None:
        self.ask("end_with_dcp")

    def tidy(self) -> None:
        self.ask("update")
        for left in self.folder.glob("peer-*"):
            shutil.rmtree(left)
        os.sync()


class Ours(Ranks):
    """lastgood over a pair of ranks of its own."""

    def __init__(self, folder: Path, megabytes: float, snapshot: str) -> None:
        super().__init__(folder, megabytes)
        self.run = lastgood.attach(snapshot, **roots(folder), save_freq=1, save_total_limit=2, snapshot=snapshot)
        self.run.add_members("actor", self.ranks, state=state)
        self.run.resume()
        self.step = 0

    def begin(self) -> None:
        self.step += 1
        outcome = self.run.end_step(self.step)
        assert outcome.saving, outcome.failures

    def commit(self) -> None:
        until_newest(self.run, self.step, lambda newest: newest.committed)

    def tidy(self) -> None:
        until_newest(self.run, self.step, lambda newest: newest.durable)
        self.ask("update")
        os.sync()

    def end(self) -> None:
        self.run.close()
        super().end()


@dataclass(frozen=True)
class Way:
    """`begin` stalls training; `end` waits until it is safe (None: it is when `begin` returns, if `synced`)."""

    name: str
    whose: Peers | Ours
    begin: Callable[[], None]
    end: Callable[[], None] | None = None
    synced: bool = True

    def save(self, idle_rate: float) -> Spent:
        """`idle_rate`: CPU seconds per second of an idle machine."""
        began_s, cpu_s = time.perf_counter(), busy_s()
        self.begin()
        stall_s = time.perf_counter() - began_s
        if self.end is not None:
            self.end()
        safe_s = time.perf_counter() - began_s
        cpu_s = busy_s() - cpu_s - safe_s * idle_rate
        self.whose.tidy()
        return Spent(stall_s, safe_s, cpu_s)

    def step(self, passes: int) -> float | None:
        """Work beside the save over work alone."""
        if self.end is None:
            return None
        alone_s = self.whose.work_s(passes)
        self.begin()
        beside_s = self.whose.work_s(passes)
        self.end()
        self.whose.tidy()
        return beside_s / alone_s

    def cost(self, spent: list[Spent], steps: list[float | None], gb: float) -> Cost:
        stalls = [each.stall_s for each in spent]
        known = [step for step in steps if step is not None]
        return Cost(
            self.name,
            len(spent),
            statistics.median(stalls),
            min(stalls),
            max(stalls),
            statistics.median(each.safe_s for each in spent) if self.synced else None,
            statistics.median(each.cpu_s for each in spent) / gb,
            statistics.median(known) if known else None,
        )


def idle_rate() -> float:
    cpu_s = busy_s()
    time.sleep(IDLE_S)  # the idle machine is measured, no condition awaited
    return (busy_s() - cpu_s) / IDLE_S


def measure(megabytes: float, rounds: int) -> list[Cost]:
    with ray_of_its_own() as folder:
        peers = Peers(folder, megabytes)
        blocking, overlapped = (Ours(folder, megabytes, snapshot) for snapshot in ("blocking", "overlapped"))
        ways = [
            Way("lastgood, blocking", blocking, blocking.begin, blocking.commit),
            Way("lastgood, overlapped", overlapped, overlapped.begin, overlapped.commit),
            Way("as verl: torch.save", peers, peers.verl, synced=False),
            Way("torch.save and fsync", peers, peers.verl_synced),
            Way("dcp.save", peers, peers.dcp),
            Way("dcp.async_save, thread", peers, lambda: peers.begin_dcp("thread"), peers.end_dcp),
            Way("dcp.async_save, process", peers, lambda: peers.begin_dcp("process"), peers.end_dcp),
        ]
        spent: dict[str, list[Spent]] = {way.name: [] for way in ways}
        for way in ways:  # warms up
            way.save(0.0)
        rate = idle_rate()
        for number in range(rounds):
            for way in ways[:: 1 if number % 2 else -1]:
                spent[way.name].append(way.save(rate))
        longest_s = max(each.safe_s for kept in spent.values() for each in kept)
        passes = max(1, int(longest_s / (peers.work_s(100) / 100)))  # so long that every save ends within it
        steps: dict[str, list[float | None]] = {way.name: [] for way in ways}
        for number in range(rounds):
            for way in ways[:: 1 if number % 2 else -1]:
                steps[way.name].append(way.step(passes))
        gb = MEMBERS * megabytes / 1e3
        for whose in (blocking, overlapped, peers):
            whose.end()
    return [way.cost(spent[way.name], steps[way.name], gb) for way in ways]


def text(found: list[Cost]) -> str:
    ours = found[0]
    assert ours.safe_s is not None
    lines = [
        "| way | stall, s | least to most | over ours | on disk, s | over ours | CPU s per GB | step beside it |",
        f"|{' --- |' * 8}",
    ]
    for each in found:
        safe = "never synced | " if each.safe_s is None else f"{each.safe_s:.2f} | {each.safe_s / ours.safe_s:.2f}"
        cells = [
            each.way,
            f"{each.stall_s:.3f}",
            f"{each.least_s:.3f} to {each.most_s:.3f}",
            f"{each.stall_s / ours.stall_s:.2f}",
            safe,
            f"{each.cpu_s_per_gb:.2f}",
            "" if each.step is None else f"{each.step:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, megabytes=400.0, rounds=5))
