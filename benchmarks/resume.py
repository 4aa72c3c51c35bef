"""`python -m benchmarks.resume [--megabytes 200] [--rounds 5] [--json]`: from the kill of all ranks to training again.

Two FSDP2 ranks (gloo, CPU) are SIGKILLed while the driver waits for a rollout, the last step's checkpoint is complete.
New ranks are made, restore it and do one update. Wall seconds of each phase:

noticed       from the kill until the driver's call to the ranks raises
processes     until the new processes are up, the process group and the model built
join          lastgood only: until they are members of the run (add_members)
restore       until the call that restores has returned
first update  until one update is done

Starting processes takes the longest and is the same for all; "since up" is the rest: join, restore and first update.

The ways, in another order each round, medians of all rounds after one that warms up:

lastgood, ranks died              coordinator and stager live on, and with them the images of the last save
lastgood, ranks and stager died   so nothing is left in memory; the state comes from the node's disk
dcp.load                          of a dcp.save, by get_state_dict and set_state_dict
as verl                           torch.load of each rank's model, optimizer and extra file, then a barrier, as in
                                  verl/utils/checkpoint/fsdp_checkpoint_manager.py of github.com/volcengine/verl

Memory: nothing was dropped and the stager lives; lastgood reads what is nearest. Disk: what was written was synced and
then dropped from the page cache before the kill, file by file; TMPDIR says which disk, which must not be a tmpfs. Page
cache: nothing was dropped, as when a restart follows soon after the save.

After every restore, outside of the phases, each rank's parameters and moments must be equal bit for bit to the saved
ones (by SHA-256), else it stops. The driver lives on in all ways; all ranks are on one node; saving is not measured.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.exceptions

import lastgood
from lastgood.workers.stager_actor import find_stagers

from . import script
from .ranks import ray_of_its_own, roots
from .sharded import ShardedRank, new_sharded_ranks, state

MEMBERS = 2
LIMIT_S = 600.0  # for one wait of a trial


@dataclass(frozen=True)
class Phases:
    """Wall seconds of one trial."""

    noticed_s: float
    processes_s: float
    join_s: float
    restore_s: float
    first_update_s: float

    @property
    def since_up_s(self) -> float:
        return self.join_s + self.restore_s + self.first_update_s

    @property
    def total_s(self) -> float:
        return self.noticed_s + self.processes_s + self.since_up_s


PHASES = ("noticed_s", "processes_s", "join_s", "restore_s", "first_update_s", "since_up_s", "total_s")
SPANS = ("restore_s", "since_up_s", "total_s")  # whose spread the table shows too; JSON has all


@dataclass(frozen=True)
class Spread:
    """Of all rounds, in seconds."""

    median_s: float
    least_s: float
    most_s: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        return cls(statistics.median(seconds), min(seconds), max(seconds))


@dataclass(frozen=True)
class Resumed:
    """What one way took, by phase."""

    way: str
    read_from: str
    checked: str
    phases: dict[str, Spread]  # by the names in PHASES


@dataclass(frozen=True)
class Found:
    """All ways, and what was restored: bytes of parameters and moments of one rank."""

    ways: list[Resumed]
    rank_bytes: int
    rounds: int


class Keeper(Protocol):
    """How a trial's state is kept. One for each trial; this is all that differs between the ways."""

    def save(self, ranks: list[Any]) -> None:
        """Makes a checkpoint; back when it is complete."""
        ...

    def pids(self) -> list[int]:
        """Processes of the keeper's own that are killed with the ranks."""
        ...

    def join(self, ranks: list[Any]) -> None:
        """Makes new ranks known."""
        ...

    def restore(self, ranks: list[Any]) -> None:
        """Back when all ranks are as they were saved."""
        ...

    def close(self) -> None:
        """Ends what the keeper started."""
        ...


class ByLastgood:
    """A run of its own for the trial, led by this process."""

    def __init__(self, folder: Path, stager_dies: bool) -> None:
        self._stager_dies = stager_dies
        self._run = lastgood.attach(f"resume-{folder.name}", **roots(folder), save_freq=None)

    def save(self, ranks: list[Any]) -> None:
        """Durable too, so that no upload runs into the restart."""
        self.join(ranks)
        self._run.resume()
        self._run.end_step(1)
        self._run.save(reason="benchmark").wait("durable", LIMIT_S)

    def pids(self) -> list[int]:
        if not self._stager_dies:
            return []
        return [pid for _, pid in ray.get([stager.identity.remote() for stager in find_stagers(self._run.name)])]

    def join(self, ranks: list[Any]) -> None:
        self._run.add_members("actor", ranks, state=state)

    def restore(self, ranks: list[Any]) -> None:
        del ranks  # it knows its members
        restored = self._run.resume("latest")
        assert restored is not None
        assert restored.step == 1

    def close(self) -> None:
        self._run.close(save_last=False)


class ByRanks:
    """The ranks do it themselves, into one folder, told by the driver."""

    def __init__(self, folder: Path, save: Callable[..., None], load: Callable[..., None]) -> None:
        """`save`, `load`: methods of ShardedRank that take the folder."""
        self._folder = str(folder / "checkpoint")
        self._save, self._load = save.__name__, load.__name__

    def save(self, ranks: list[Any]) -> None:
        ray.get([getattr(rank, self._save).remote(self._folder) for rank in ranks])

    def pids(self) -> list[int]:
        return []

    def join(self, ranks: list[Any]) -> None:
        """Nobody has to know them."""

    def restore(self, ranks: list[Any]) -> None:
        ray.get([getattr(rank, self._load).remote(self._folder) for rank in ranks])

    def close(self) -> None:
        """Nothing was started."""


def by_dcp(folder: Path) -> Keeper:
    return ByRanks(folder, ShardedRank.save_with_dcp, ShardedRank.load_with_dcp)


def by_verl(folder: Path) -> Keeper:
    return ByRanks(folder, ShardedRank.save_as_verl, ShardedRank.load_as_verl)


@dataclass(frozen=True)
class Way:
    """One row of the table. `cold`: what was written is dropped from the page cache before the kill."""

    name: str
    read_from: str
    checked: str  # what tells a flipped bit from a saved one
    keeper: Callable[[Path], Keeper]  # takes a folder of the trial's own
    cold: bool


WAYS = (
    Way("lastgood, ranks died", "memory", "SHA-256", lambda folder: ByLastgood(folder, False), False),
    Way("lastgood, ranks and stager died", "disk", "SHA-256", lambda folder: ByLastgood(folder, True), True),
    Way("dcp.load", "disk", "nothing", by_dcp, True),
    Way("dcp.load", "page cache", "nothing", by_dcp, False),
    Way("as verl: torch.load", "disk", "nothing", by_verl, True),
    Way("as verl: torch.load", "page cache", "nothing", by_verl, False),
)


class Laps:
    """A stopwatch."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def lap_s(self) -> float:
        """Seconds since the lap before."""
        last_s, self._last_s = self._last_s, time.perf_counter()
        return self._last_s - last_s


def drop_from_page_cache(folder: Path) -> None:
    """Syncs every file below `folder`, since only clean pages can be dropped, and drops it."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def kill_in_rollout(ranks: list[Any], pids: list[int]) -> float:
    """SIGKILLs the processes while the ranks roll out; seconds until the driver's call raises."""
    rollouts = [rank.roll_out.remote() for rank in ranks]
    laps = Laps()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    try:
        ray.get(rollouts, timeout=LIMIT_S)
    except ray.exceptions.RayActorError:
        return laps.lap_s()
    raise AssertionError("a rollout that does not end has ended")


def trial(way: Way, folder: Path, megabytes: float) -> tuple[Phases, int]:
    """One restart; and the bytes of one rank's state. Needs a new `folder`, and a Ray."""
    keeper = way.keeper(folder)
    ranks, pids = new_sharded_ranks(MEMBERS, folder / "rendezvous-1", megabytes)
    ray.get([rank.update.remote() for rank in ranks])
    keeper.save(ranks)
    saved = ray.get([rank.digest.remote() for rank in ranks])
    if way.cold:
        drop_from_page_cache(folder)
    noticed_s = kill_in_rollout(ranks, [*pids, *keeper.pids()])
    laps = Laps()
    ranks, _ = new_sharded_ranks(MEMBERS, folder / "rendezvous-2", megabytes)
    processes_s = laps.lap_s()
    keeper.join(ranks)
    join_s = laps.lap_s()
    keeper.restore(ranks)
    restore_s = laps.lap_s()
    restored = ray.get([rank.digest.remote() for rank in ranks])
    assert restored == saved, f"{way.name} restored something else than was saved"
    laps.lap_s()
    ray.get([rank.update.remote() for rank in ranks])
    first_update_s = laps.lap_s()
    rank_bytes: int = ray.get(ranks[0].state_bytes.remote())
    keeper.close()
    for rank in ranks:
        ray.kill(rank)
    return Phases(noticed_s, processes_s, join_s, restore_s, first_update_s), rank_bytes


def measure(megabytes: float, rounds: int) -> Found:
    """Needs `megabytes` (10^6 bytes) of memory for each rank, its image and its restore, and twice that of disk."""
    spent: dict[Way, list[Phases]] = {way: [] for way in WAYS}
    rank_bytes = 0
    with ray_of_its_own() as folder:
        for number in range(rounds + 1):
            turn = number % len(WAYS)
            for way in [*WAYS[turn:], *WAYS[:turn]]:
                place = folder / f"{number}-{WAYS.index(way)}"
                (place / "store").mkdir(parents=True)
                phases, rank_bytes = trial(way, place, megabytes)
                shutil.rmtree(place)
                if number:
                    spent[way].append(phases)
    ways = [
        Resumed(
            way.name,
            way.read_from,
            way.checked,
            {phase: Spread.of([getattr(one, phase) for one in found]) for phase in PHASES},
        )
        for way, found in spent.items()
    ]
    return Found(ways, rank_bytes, rounds)


def name(phase: str) -> str:
    """A phase as the table's header says it."""
    return f"{phase.removesuffix('_s').replace('_', ' ')}, s"


def text(found: Found) -> str:
    lines = [
        f"| way | read from | checked by | {' | '.join(name(phase) for phase in PHASES)} |",
        f"|{' --- |' * (len(PHASES) + 3)}",
    ]
    for way in found.ways:
        cells = [way.way, way.read_from, way.checked]
        for phase, spread in way.phases.items():
            span = f" ({spread.least_s:.2f} to {spread.most_s:.2f})" if phase in SPANS else ""
            cells.append(f"{spread.median_s:.2f}{span}")
        lines.append(f"| {' | '.join(cells)} |")
    cores = len(os.sched_getaffinity(0))
    lines += [
        "",
        f"{MEMBERS} ranks with {found.rank_bytes / 1e6:.0f} MB of parameters and moments each, {cores} cores "
        f"({platform.machine()}); medians of {found.rounds} rounds (least to most). Every restored state was equal bit "
        "for bit to the saved one.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, megabytes=200.0, rounds=5))
