"""`python -m benchmarks.footprint [--megabytes 400] [--saves 200] [--json]`: what a run takes, and what it writes.

memory        most private memory (RssAnon, by 20 ms) of ranks, stager and coordinator together during five saves, over
              what they had between saves; images lie in shared memory and are not in it
growth        of that memory between saves, and of shared memory, from save 50 to the last of `--saves` (small states)
unchanged     bytes of shard files that a save wrote anew, in staging and in the store, though nothing had changed
to durable    seconds from committed to durable in a store on the same disk, over those of a raw copy of the same files
              with an fsync each; medians of five
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import lastgood
from lastgood.coordinator.names import NAMESPACE, coordinator_name
from lastgood.workers.images import SHARED_MEMORY
from lastgood.workers.stager_actor import find_stagers

from . import script
from .ranks import Rank, new_ranks, rank_of, ray_of_its_own, roots, state, until_newest

MEMBERS = 2
ROUNDS = 5
WARM_UP = 3  # images are made, and what does not change is known as such
SETTLED = 50  # saves until growth is looked for
SMALL_MB = 1.0
SAMPLE_S = 0.02


@dataclass(frozen=True)
class Used:
    """One measured quantity."""

    what: str
    value: float
    unit: str


class Trial:
    """One run over two ranks, each step saved."""

    def __init__(self, folder: Path, name: str, megabytes: float, state: Callable[[Any], dict[str, Any]]) -> None:
        self.ranks = new_ranks(MEMBERS, megabytes)
        self.run = lastgood.attach(name, **roots(folder), save_freq=1, save_total_limit=3)
        self.run.add_members("actor", self.ranks, state=state, rank=rank_of)
        self.run.resume()
        self.step = 0
        coordinator: Any = ray.get_actor(coordinator_name(name), namespace=NAMESPACE)
        stagers = ray.get([stager.identity.remote() for stager in find_stagers(name)])
        hello: dict[str, Any] = ray.get(coordinator.hello.remote())
        self.pids = [
            *ray.get([rank.pid.remote() for rank in self.ranks]),
            *(pid for _, pid in stagers),
            hello["pid"],
        ]

    def save(self) -> None:
        """Back when it is durable."""
        self.begin()
        self.until(lambda newest: newest.durable)

    def begin(self) -> None:
        self.step += 1
        outcome = self.run.end_step(self.step)
        assert outcome.saving, outcome.failures

    def until(self, so: Callable[[Any], bool]) -> None:
        until_newest(self.run, self.step, so, poll_s=SAMPLE_S / 4)

    def private_bytes(self) -> int:
        return sum(_private_bytes(pid) for pid in self.pids)

    def end(self) -> None:
        self.run.close()
        for rank in self.ranks:
            ray.kill(rank)


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def shared_bytes(run: str) -> int:
    """Of a run's images on this machine."""
    return sum(path.stat().st_blocks * 512 for path in SHARED_MEMORY.glob(f"lastgood.*.{run}.*/image-*"))


class Peak:
    """The most private memory of a trial, by samples."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.most_bytes = max(self.most_bytes, self.trial.private_bytes())


def frozen(rank: Rank) -> dict[str, Any]:
    """A component that nothing changes."""
    return {"reference": rank.model}


def _memory(trial: Trial) -> Used:
    ray.get([rank.update.remote() for rank in trial.ranks])
    idle_bytes = trial.private_bytes()
    with Peak(trial) as peak:
        for _ in range(ROUNDS):
            trial.save()
    return Used(
        "private memory of all processes while they save, over idle", (peak.most_bytes - idle_bytes) / 1e6, "MB"
    )


def _growth(folder: Path, saves: int) -> list[Used]:
    trial = Trial(folder, "growth", SMALL_MB, state)
    for _ in range(SETTLED):
        trial.save()
    private_bytes, images_bytes = trial.private_bytes(), shared_bytes(trial.run.name)
    for _ in range(saves - SETTLED):
        trial.save()
    grown = trial.private_bytes() - private_bytes, shared_bytes(trial.run.name) - images_bytes
    trial.end()
    span = f"from save {SETTLED} to {saves}"
    return [
        Used(f"growth of private memory {span}", grown[0] / 1e6, "MB"),
        Used(f"growth of shared memory {span}", grown[1] / 1e6, "MB"),
    ]


def _shards(root: Path, step: int) -> list[Path]:
    return sorted(root.glob(f"*/global_step_{step}/*/**/*.safetensors"))


def _unchanged(folder: Path, megabytes: float) -> Used:
    """Two names of one file have one inode."""
    trial = Trial(folder, "unchanged", megabytes, frozen)
    for _ in range(WARM_UP):
        trial.save()
    before = {(path.stat().st_dev, path.stat().st_ino) for path in _all_shards(folder, trial.step)}
    trial.save()
    shards = _all_shards(folder, trial.step)
    assert len(shards) == 2 * MEMBERS, shards  # in staging and in the store
    anew = sum(path.stat().st_size for path in shards if (path.stat().st_dev, path.stat().st_ino) not in before)
    trial.end()
    return Used("bytes written by a save of shards that are unchanged", anew, "bytes")


def _all_shards(folder: Path, step: int) -> list[Path]:
    """Of the run `unchanged`, in staging and in the store."""
    return [path for root in ("staging", "store") for path in _shards(folder / root, step) if "unchanged" in path.parts]


def _to_durable(trial: Trial, folder: Path) -> Used:
    ratios = []
    for _ in range(ROUNDS):
        ray.get([rank.update.remote() for rank in trial.ranks])
        os.sync()
        trial.begin()
        trial.until(lambda newest: newest.committed)
        began_s = time.perf_counter()
        trial.until(lambda newest: newest.durable)
        ours_s = time.perf_counter() - began_s
        ratios.append(ours_s / _raw_copy_s(_shards(folder / "staging", trial.step), folder / "raw"))
    return Used("committed to durable, over a raw copy of the same files", statistics.median(ratios), "raw copies")


def _raw_copy_s(shards: list[Path], target: Path) -> float:
    """The files are in the page cache as far as they are for the upload: written past it, so they are read here."""
    target.mkdir()
    os.sync()
    began_s = time.perf_counter()
    for number, shard in enumerate(shards):
        copy = target / str(number)
        shutil.copyfile(shard, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
    spent_s = time.perf_counter() - began_s
    shutil.rmtree(target)
    return spent_s


def measure(megabytes: float, saves: int) -> list[Used]:
    with ray_of_its_own() as folder:
        trial = Trial(folder, "large", megabytes, state)
        for _ in range(WARM_UP):
            trial.save()
        found = [_memory(trial), _to_durable(trial, folder)]
        trial.end()
        return [*found, _unchanged(folder, megabytes), *_growth(folder, saves)]


def text(found: list[Used]) -> str:
    lines = ["| what | measured | |", "| --- | --- | --- |"]
    lines += [f"| {each.what} | {each.value:,.2f} | {each.unit} |" for each in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, megabytes=400.0, saves=200))
