"""`python -m benchmarks.stall [--megabytes 500] [--rounds 7] [--json]`: what a save costs training.

Two ranks with so much state each, on one node, a save every step. Wall seconds that training loses, medians of all
rounds after two that warm up (images are made, pages faulted in), one way after the other:

memcpy       both ranks at once copy all their tensors into memory of their own that is warm
blocking     end_step, called -> returned
overlapped   end_step, called -> returned, and what the next optimizer step then waits for, three memcpys later
first        blocking, the first save of new ranks: of their second step, or of their very first; no warm-up

Each round waits until the save before is durable, so that its staging and upload take no part in it.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import ray
import torch

import lastgood

from . import script
from .ranks import Rank, rank_of, ray_of_its_own, roots, state, until_newest

MEMBERS = 2
WARM_UP = 2
IDLE_COPIES = 3.0  # length of the idle phase before the next update, in memcpys


class CopyingRank(Rank):
    """A rank that also copies its tensors by itself, and tells how long its update was held back."""

    def copy(self) -> float:
        """Seconds of one copy of all tensors into memory that is kept."""
        moments = [value for entries in self.optimizer.state.values() for value in entries.values()]
        weights = [*self.model.parameters(), *self.rollout.parameters()]
        live = [parameter.detach() for parameter in weights] + moments
        if not hasattr(self, "_own"):
            self._own = [torch.empty_like(tensor) for tensor in live]
        began = time.perf_counter()
        for own, tensor in zip(self._own, live, strict=True):
            own.copy_(tensor)
        return time.perf_counter() - began

    def held(self) -> float:
        """Does an update; seconds from the call of the optimizer's step until the hooks before it were through."""
        through: list[float] = []
        hook = self.optimizer.register_step_pre_hook(lambda *_: through.append(time.perf_counter()))  # after lastgood's
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        began = time.perf_counter()
        self.optimizer.step()
        hook.remove()
        return through[0] - began


@dataclass(frozen=True)
class Lost:
    """Wall seconds that training lost in one way, and how many memcpys that is."""

    what: str
    rounds: int
    median_s: float
    least_s: float
    most_s: float
    copies: float

    @classmethod
    def of(cls, what: str, seconds: list[float], memcpy_s: float, warm_up: int = WARM_UP) -> Lost:
        kept = seconds[warm_up:]
        median_s = statistics.median(kept)
        return cls(what, len(kept), median_s, min(kept), max(kept), median_s / memcpy_s)


class Trial:
    """One run over two ranks, whose saves either block or overlap."""

    def __init__(self, folder: Any, megabytes: float, snapshot: str, name: str = "", save_freq: int = 1) -> None:
        self.ranks: list[Any] = [
            ray.remote(CopyingRank).options(num_cpus=0).remote(rank, MEMBERS, megabytes) for rank in range(MEMBERS)
        ]
        ray.get([rank.update.remote() for rank in self.ranks])
        self.run = lastgood.attach(
            name or snapshot, **roots(folder), save_freq=save_freq, save_total_limit=2, snapshot=snapshot
        )
        self.run.add_members("actor", self.ranks, state=state, rank=rank_of)
        self.run.resume()
        self.step = 0

    def memcpy_s(self) -> float:
        """Until the slower of the ranks has copied all its tensors."""
        return max(ray.get([rank.copy.remote() for rank in self.ranks]))

    def end_step_s(self) -> float:
        self.step += 1
        began = time.perf_counter()
        self.run.end_step(self.step)
        return time.perf_counter() - began

    def held_s(self) -> float:
        return max(ray.get([rank.held.remote() for rank in self.ranks]))

    def settle(self) -> None:
        """Waits until the last save is durable."""
        until_newest(self.run, self.step, lambda newest: newest.durable)

    def end(self) -> None:
        self.run.close()
        for rank in self.ranks:
            ray.kill(rank)


def first_s(folder: Any, megabytes: float, step: int, number: int) -> float:
    """The first save of new ranks, of their first step or of their second."""
    trial = Trial(folder, megabytes, "blocking", f"first-{step}-{number}", save_freq=step)
    for _ in range(1, step):
        trial.end_step_s()
        time.sleep(IDLE_COPIES * trial.memcpy_s())  # the idle phase that is measured, no wait for a condition
        trial.held_s()
    lost_s = trial.end_step_s()
    trial.settle()
    trial.end()
    return lost_s


def measure(megabytes: float, rounds: int) -> list[Lost]:
    memcpy: list[float] = []
    blocking: list[float] = []
    overlapped: list[float] = []
    for snapshot in ("blocking", "overlapped"):
        with ray_of_its_own() as folder:
            trial = Trial(folder, megabytes, snapshot)
            for _ in range(rounds + WARM_UP):
                memcpy.append(trial.memcpy_s())
                lost_s = trial.end_step_s()
                if snapshot == "overlapped":
                    time.sleep(IDLE_COPIES * memcpy[-1])  # the idle phase that is measured, no wait for a condition
                (blocking if snapshot == "blocking" else overlapped).append(lost_s + trial.held_s())
                trial.settle()
            trial.end()
    first: dict[int, list[float]] = {1: [], 2: []}
    with ray_of_its_own() as folder:
        for number in range(rounds):
            for step, seconds in first.items():
                seconds.append(first_s(folder, megabytes, step, number))
    memcpy_s = statistics.median(memcpy[WARM_UP:])
    return [
        Lost.of("one memcpy of the state", memcpy, memcpy_s),
        Lost.of("a save, blocking", blocking, memcpy_s),
        Lost.of("a save, overlapped", overlapped, memcpy_s),
        Lost.of("the first save, of the second step", first[2], memcpy_s, warm_up=0),
        Lost.of("the first save, of the first step", first[1], memcpy_s, warm_up=0),
    ]


def text(found: list[Lost]) -> str:
    lines = ["| what | rounds | median, s | least to most, s | in memcpys |", "| --- | --- | --- | --- | --- |"]
    for each in found:
        spread = f"{each.least_s:.3f} to {each.most_s:.3f}"
        lines.append(f"| {each.what} | {each.rounds} | {each.median_s:.3f} | {spread} | {each.copies:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(script.run(__doc__, measure, text, megabytes=500.0, rounds=7))
