"""`python -m benchmarks.steps [--json]`: what a step costs training when there is next to no state to copy.

Wall milliseconds of `end_step`: led by a driver on the members' node, with nothing due and with a save due; at a
member that leads itself; by a driver with 32 members on this node, a save due; by a driver whose members are on two
nodes (two raylets of this machine). Beside them one call to an actor of this Ray that does nothing, the unit in which
to read the others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import lastgood

from . import script
from .ranks import new_ranks, rank_of, ray_of_its_own, roots, state, two_raylets, until_newest

MEMBERS = 2
MANY = 32


@dataclass(frozen=True)
class Spent:
    """Wall milliseconds of one kind of call."""

    what: str
    count: int
    median_ms: float
    p95_ms: float

    @classmethod
    def of(cls, what: str, seconds: list[float]) -> Spent:
        ranked = sorted(seconds)
        return cls(what, len(ranked), statistics.median(ranked) * 1e3, ranked[int(len(ranked) * 0.95)] * 1e3)


class Idle:
    """An actor that answers nothing."""

    def nothing(self) -> None:
        return None


def timed(count: int, call: Callable[[int], object]) -> list[float]:
    """Seconds of each call after the first tenth of them."""
    spent_s = []
    for number in range(1, count + 1):
        began = time.perf_counter()
        call(number)
        spent_s.append(time.perf_counter() - began)
    return spent_s[count // 10 :]


def measure(steps: int, saves: int) -> list[Spent]:
    with ray_of_its_own() as folder:
        idle: Any = ray.remote(Idle).options(num_cpus=0).remote()
        found = [Spent.of("one call to an actor", timed(steps, lambda _: ray.get(idle.nothing.remote())))]
        found += _led_by_a_driver(folder, steps, saves)
        ranks = new_ranks(MEMBERS)
        options = {**roots(folder), "save_freq": 10**9}
        loops = ray.get([rank.lead.remote("members", steps, options) for rank in ranks])
        seconds = [spent for loop in loops for spent in loop[steps // 10 :]]
        for rank in ranks:
            ray.kill(rank)
        found.append(Spent.of("end_step at a member that leads itself, nothing due", seconds))
        found.append(_saving(folder, "many", new_ranks(MANY), max(10, saves // 2)))
    return [*found, _on_two_nodes(steps)]


def _on_two_nodes(steps: int) -> Spent:
    """The coordinator asks the stager of the other node over Ray."""
    with two_raylets() as (folder, nodes):
        ranks = new_ranks(MEMBERS, nodes=nodes)
        staging = {"staging": str(folder / "staging-{label:slot}")}
        run = lastgood.attach("nodes", **{**roots(folder), **staging}, save_freq=10**9)
        run.add_members("actor", ranks, state=state, rank=rank_of)
        run.resume()
        plain = timed(steps, run.end_step)
        run.close(save_last=False)
    return Spent.of(f"end_step by a driver, {MEMBERS} members on two nodes, nothing due", plain)


def _led_by_a_driver(folder: Path, steps: int, saves: int) -> list[Spent]:
    ranks = new_ranks(MEMBERS)
    run = lastgood.attach("driver", **roots(folder), save_freq=10**9)
    run.add_members("actor", ranks, state=state, rank=rank_of)
    run.resume()
    plain = timed(steps, run.end_step)
    run.close(save_last=False)
    return [
        Spent.of(f"end_step by a driver, {MEMBERS} members, nothing due", plain),
        _saving(folder, "saves", ranks, saves),
    ]


def _saving(folder: Path, name: str, ranks: list[Any], saves: int) -> Spent:
    """Each step is saved."""
    run = lastgood.attach(name, **roots(folder), save_freq=1, save_total_limit=2)
    run.add_members("actor", ranks, state=state, rank=rank_of)
    run.resume()
    waits: list[float] = []
    for step in range(1, saves + 1):
        began = time.perf_counter()
        run.end_step(step)
        waits.append(time.perf_counter() - began)
        until_newest(run, step, lambda newest: newest.committed, poll_s=0.005)  # the next one has the foreground free
    run.close()
    return Spent.of(f"end_step by a driver, {len(ranks)} members, a save due", waits[saves // 10 :])


def text(found: list[Spent]) -> str:
    unit = found[0].median_ms
    lines = [
        "| wall time of | calls | median, ms | p95, ms | in calls to an actor |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in found:
        ratio = each.median_ms / unit
        lines.append(f"| {each.what} | {each.count:,} | {each.median_ms:.2f} | {each.p95_ms:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, steps=500, saves=40))
