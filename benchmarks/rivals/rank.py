"""`python -m benchmarks.rivals.rank WAY RANK MEGABYTES ROUNDS FOLDER RUN`: one rank, in the environment of its rival.

Rank 0 writes what it found to FOLDER/found.json. A round is two saves: one beside which nothing runs, for the seconds
of the save, and one beside which updates go on until it is done on every rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import distributed

from .way import Way
from .ways import WAYS

MEMBERS = 2
STEPS = 3  # undisturbed updates of a round
ORPHAN_S = 1.0  # so long after its parent a rank ends too


@dataclass
class Found:
    """Wall seconds at rank 0, one of each kind for each save; the first save is not among them."""

    first_s: float = 0.0
    returns_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)
    synced_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    steps_beside_s: list[float] = field(default_factory=list)


def measure(way: Way, rounds: int) -> Found:
    found = Found()
    step = 0
    for number in range(rounds + 1):  # the first one warms up
        steps_s = [_spent(way.rank.update) for _ in range(STEPS)]
        step += 1
        returns_s, stall_s, written_s, synced_s = _saved(way, step)
        _tidy(way, step)
        step += 1
        beside_s = _steps_beside(way, step)
        _tidy(way, step)
        if number == 0:
            found.first_s = stall_s
            continue
        found.returns_s.append(returns_s)
        found.stalls_s.append(stall_s)
        found.written_s.append(written_s)
        found.synced_s.append(synced_s)
        found.steps_s += steps_s
        found.steps_beside_s += beside_s
    return found


def _spent(what: Callable[[], object]) -> float:
    """Seconds until all ranks have done it that began together."""
    distributed.barrier()
    began = time.perf_counter()
    what()
    distributed.barrier()
    return time.perf_counter() - began


def _saved(way: Way, step: int) -> tuple[float, float, float, float]:
    """Seconds from the call until it returned, the state might change, the rival was done, all of it was synced."""
    distributed.barrier()
    began = time.perf_counter()
    way.begin(step)
    distributed.barrier()
    returned = time.perf_counter()
    way.settle()
    distributed.barrier()
    settled = time.perf_counter()
    way.finish()
    distributed.barrier()
    written = time.perf_counter()
    if way.persists and not way.syncs:
        for path in way.files(step)[way.rank.rank :: MEMBERS]:
            _sync(path)
        distributed.barrier()
    synced = time.perf_counter()
    return returned - began, settled - began, written - began, synced - began


def _steps_beside(way: Way, step: int) -> list[float]:
    """Seconds of each update that began while a save was in flight on any rank."""
    spent_s = []
    distributed.barrier()
    way.begin(step)
    while not _everywhere(way.done()):
        spent_s.append(_spent(way.rank.update))
    way.finish()
    return spent_s


def _everywhere(so: bool) -> bool:
    votes = torch.tensor([int(so)])
    distributed.all_reduce(votes, distributed.ReduceOp.MIN)
    return bool(votes.item())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _tidy(way: Way, step: int) -> None:
    distributed.barrier()
    if way.rank.rank == 0:
        way.forget(step)
        os.sync()
    distributed.barrier()


def _end_with(parent: int) -> None:
    """Kills this rank's session, and so what its rival started, once the benchmark itself is gone."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    name, rank, megabytes, rounds, folder, run = sys.argv[1:]
    kind = WAYS[name]
    member = kind.ranks(int(rank), MEMBERS, str(Path(folder, "rendezvous")), float(megabytes))
    member.update()
    saves = Path(folder, "saves")
    saves.mkdir(exist_ok=True)
    way = kind(member, saves, run)
    found = measure(way, int(rounds))
    if member.rank == 0:
        Path(folder, "found.json").write_text(json.dumps(asdict(found)))
    way.close()


if __name__ == "__main__":
    main()
