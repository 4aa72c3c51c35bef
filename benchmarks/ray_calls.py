"""What one call to an actor costs its caller on this machine: CPU of the calling process, and wall time, by payload.

A real local Ray. Calls are issued at once and gathered on an event loop, as the coordinator does; `time.process_time`
counts all threads of the calling process, Ray's too. The callees share this machine's cores, so the wall time is an
upper bound for callees on other nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray

from lastgood.coordinator.actor import SharedManifests

from .fleet import Fleet

ACTORS = 4
CALLS = 400  # at once
ROUNDS = 3
MANIFEST_CALLS = 40
MANIFEST_BYTES = 4 << 20
STORE_BYTES = 1 << 30  # Ray's object store


@dataclass
class CallCost:
    """Of one call, median of the rounds."""

    payload_kb: float
    cpu_s: float
    wall_s: float


class Callee:
    """Answers at once."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    async def empty(self) -> None:
        """Nothing goes in, nothing comes out."""

    async def answer(self, name: str) -> Any:
        return self._answers[name]

    async def take(self, data: bytes) -> int:
        return len(data)


def measure(fleet: Fleet) -> dict[str, CallCost]:
    """Costs by kind of call. Starts a local Ray and ends it."""
    node = next(iter(fleet.nodes))
    answers = {"mark": fleet.snapshot(node, 1, 0), "snapshot": fleet.snapshot(node, 1), "stage": fleet.shards[node]}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with tempfile.TemporaryDirectory(prefix="lg-") as place:  # an own cluster, beside any other on this machine
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=STORE_BYTES,
            _temp_dir=place,
        )
        try:
            return asyncio.run(_measure(answers))
        finally:
            ray.shutdown()


def call_empty(actor: Any) -> Awaitable[None]:
    return actor.empty.remote()


async def _measure(answers: dict[str, Any]) -> dict[str, CallCost]:
    actors: list[Any] = [
        ray.remote(Callee).options(num_cpus=0, max_concurrency=1000).remote(answers) for _ in range(ACTORS)
    ]
    await asyncio.gather(*map(call_empty, actors))
    manifest = os.urandom(MANIFEST_BYTES)
    costs = {"empty": await _cost(actors, call_empty, CALLS, 0)}
    for name, answer in answers.items():
        size = len(pickle.dumps(answer))
        costs[name] = await _cost(actors, lambda actor, name=name: actor.answer.remote(name), CALLS, size)
    costs["manifest, copied"] = await _cost(
        actors, lambda actor: actor.take.remote(manifest), MANIFEST_CALLS, len(manifest)
    )
    shared = SharedManifests()
    costs["manifest, shared"] = await _cost(
        actors, lambda actor: actor.take.remote(shared.share(manifest)), MANIFEST_CALLS, len(manifest)
    )
    return costs


async def _cost(actors: list[Any], call: Callable[[Any], Awaitable[Any]], calls: int, size: int) -> CallCost:
    cpu, wall = [], []
    for measured in range(ROUNDS + 1):  # the first warms up
        cpu_began, wall_began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(asyncio.wait_for(call(actors[n % len(actors)]), 60.0) for n in range(calls)))
        if measured:
            cpu.append((time.process_time() - cpu_began) / calls)
            wall.append((time.perf_counter() - wall_began) / calls)
    return CallCost(size / 1000, statistics.median(cpu), statistics.median(wall))
