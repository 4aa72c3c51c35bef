"""A toy in JAX, for a rival that saves JAX arrays: as many bytes as benchmarks/sharded.py, in larger arrays."""

from __future__ import annotations

import os
import socket
from importlib import import_module
from typing import Any

import torch

LAYERS = 8
BATCH = 8
VALUE_BYTES = 12  # of one parameter in float32, with both moments

RATE, DECAY, FIRST, SECOND, TINY = 1e-3, 1e-2, 0.9, 0.999, 1e-8  # AdamW, as torch has it


class JaxRank:
    """One process of a JAX job on CPUs: linear layers and AdamW's moments, sharded by rows over the processes."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, megabytes: float) -> None:
        """As ShardedRank. gloo is only for this benchmark's own barriers; JAX has its collectives."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size
        os.environ.update(JAX_PLATFORMS="cpu", JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"  # one thread each, as the ranks in torch
        self.jax: Any = import_module("jax")
        self.jax.distributed.initialize(_address(), world_size, rank)
        mesh = self.jax.make_mesh((world_size,), ("ranks",))
        rows = self.jax.sharding.NamedSharding(mesh, self.jax.sharding.PartitionSpec("ranks"))
        width = max(world_size, round((megabytes * 1e6 * world_size / (VALUE_BYTES * LAYERS)) ** 0.5))
        self.width = width - width % world_size
        make = self.jax.jit(self._new, out_shardings=rows)
        self.state: dict[str, Any] = make(self.jax.random.key(7))
        self._updated = self.jax.jit(self._update, out_shardings=rows)
        self._count = 0

    def update(self) -> None:
        """One update on random data; returns when it is computed."""
        self._count += 1
        self.state = self._updated(self.state, self._count)
        self.jax.block_until_ready(self.state)

    def _new(self, key: Any) -> dict[str, Any]:
        numbers = self.jax.numpy
        shape = (self.width, self.width)
        keys = self.jax.random.split(key, LAYERS)
        weights = {f"{n}": self.jax.random.normal(each, shape) / self.width**0.5 for n, each in enumerate(keys)}
        zeros = {name: numbers.zeros(shape) for name in weights}
        return {"weight": weights, "exp_avg": zeros, "exp_avg_sq": dict(zeros)}

    def _update(self, state: dict[str, Any], count: Any) -> dict[str, Any]:
        numbers = self.jax.numpy
        data = self.jax.random.normal(self.jax.random.key(count), (BATCH, self.width))

        def loss(weights: dict[str, Any]) -> Any:
            out = data
            for name in sorted(weights):
                out = out @ weights[name].T
            return numbers.mean((out - data) ** 2)

        def stepped(weight: Any, first: Any, second: Any) -> Any:
            ahead = first / (1 - FIRST**count) / (numbers.sqrt(second / (1 - SECOND**count)) + TINY)
            return weight * (1 - RATE * DECAY) - RATE * ahead

        map_ = self.jax.tree.map
        slopes = self.jax.grad(loss)(state["weight"])
        first = map_(lambda old, slope: FIRST * old + (1 - FIRST) * slope, state["exp_avg"], slopes)
        second = map_(lambda old, slope: SECOND * old + (1 - SECOND) * slope**2, state["exp_avg_sq"], slopes)
        return {"weight": map_(stepped, state["weight"], first, second), "exp_avg": first, "exp_avg_sq": second}


def _address() -> str:
    """Where JAX's processes meet: a port that was free at rank 0 a moment ago. Collective."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = [f"127.0.0.1:{found.getsockname()[1]}"]
        torch.distributed.broadcast_object_list(address)
    return address[0]
