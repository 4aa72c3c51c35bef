"""Ranks and a run for measurements: plain Ray actors with as much state as asked for, on a Ray of their own."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import lastgood

from .qwen_shape import QwenShaped

LIMIT_S = 600.0  # for one wait
VALUE_BYTES = 14  # of one parameter: itself and two moments in float32, and what a rollout reads in bfloat16


class Rank:
    """One rank: a model, its AdamW, its weights in bfloat16, RNG. Each rank's state is its own, nothing is sharded."""

    def __init__(self, rank: int, world_size: int, megabytes: float = 0.0) -> None:
        """`megabytes` (10^6 bytes) of state in all, shaped as Qwen2 has it; 0: a few bytes."""
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        self.model = QwenShaped(megabytes * 1e6 / VALUE_BYTES) if megabytes else torch.nn.Linear(4, 4)
        self.rollout = copy.deepcopy(self.model).to(torch.bfloat16).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.update()

    def pid(self) -> int:
        return os.getpid()

    def update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, parameter in zip(self.rollout.parameters(), self.model.parameters(), strict=True):
                weight.copy_(parameter)

    def roll_out(self, seconds: float) -> None:
        """Busy in one method for so long, mostly waiting, as a rank is whose engine generates."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.rand(1000).sum()
            time.sleep(0.01)

    def lead(self, run: str, steps: int, options: dict[str, Any]) -> list[float]:
        """A member-led loop without updates; seconds of each end_step."""
        member = lastgood.member(
            run, role="actor", rank=self.rank, world_size=self.world_size, state=state(self), **options
        )
        member.resume()
        spent_s = []
        for step in range(member.next_step, steps + 1):
            began = time.perf_counter()
            member.end_step(step)
            spent_s.append(time.perf_counter() - began)
            time.sleep(0.002)  # a step takes some time
        member.close(save_last=False)
        return spent_s


def state(rank: Rank) -> dict[str, Any]:
    """The components of a rank."""
    return {"model": rank.model, "optimizer": rank.optimizer, "rollout": rank.rollout, "rng": lastgood.RNG()}


def new_ranks(count: int, megabytes: float = 0.0, nodes: Sequence[str] = ()) -> list[Any]:
    """`nodes`: Ray node ids that they go to in turn; default: wherever Ray puts them."""
    places = [
        {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[rank % len(nodes)], soft=False)} if nodes else {}
        for rank in range(count)
    ]
    ranks: list[Any] = [
        ray.remote(Rank).options(num_cpus=0, **place).remote(rank, count, megabytes)
        for rank, place in enumerate(places)
    ]
    ray.get([rank.update.remote() for rank in ranks])
    return ranks


def rank_of(rank: Rank) -> tuple[int, int]:
    return rank.rank, rank.world_size


@contextmanager
def ray_of_its_own() -> Iterator[Path]:
    """A local Ray, and a directory for the run's roots; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-") as folder:
        (Path(folder) / "store").mkdir()
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="bench")
        try:
            yield Path(folder)
        finally:
            ray.shutdown()


@contextmanager
def two_raylets() -> Iterator[tuple[Path, list[str]]]:
    """As ray_of_its_own, with two raylets on this machine; also answers their node ids."""
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-") as folder:
        (Path(folder) / "store").mkdir()
        shape: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**shape, "labels": {"slot": "0"}})
        try:
            second = cluster.add_node(**{**shape, "labels": {"slot": "1"}})
            ray.init(address=cluster.address, log_to_driver=False, namespace="bench")
            yield Path(folder), [ray.get_runtime_context().get_node_id(), second.node_id]
        finally:
            ray.shutdown()
            cluster.shutdown()


def until_newest(run: Any, step: int, so: Callable[[Any], bool], *, poll_s: float = 0.02) -> None:
    """Waits until the run's newest checkpoint is of this step and `so`. Raises TimeoutError after LIMIT_S."""
    until = time.monotonic() + LIMIT_S
    while not ((newest := run.latest()) and newest.step == step and so(newest)):
        if time.monotonic() > until:
            raise TimeoutError(f"step {step} after {LIMIT_S:.0f} s: {run.status()}")
        time.sleep(poll_s)


def roots(folder: Path) -> dict[str, Any]:
    """Store and staging for attach and member."""
    return {"store": str(folder / "store"), "staging": str(folder / "staging")}
