"""One FSDP2 rank of the demo: an ordinary Ray actor class that has never heard of lastgood.

It holds the policy, its frozen reference, the optimizer and the scheduler. The driver (trainer.py) calls it as verl's
single controller calls its workers: `rollout`, then `update`. `PolicyWorker` is the plain class; whoever creates the
actor wraps it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from .grpo import grpo_loss, response_mask
from .policy import build_policy, response_log_probs, sample_responses
from .task import END, Tokenizer

if TYPE_CHECKING:
    from .recipe import Recipe

COLLECTIVE_TIMEOUT_S = 60.0  # a collective whose peer is gone ends with an error after this at the latest
HOST = "127.0.0.1"  # both raylets are on this machine


@dataclass(frozen=True)
class Rollout:
    """What one rank sampled. n sequences: the groups of its prompts, one after the other."""

    tokens: Tensor  # int64 [n, prompt + response]
    mask: Tensor  # float32 [n, response]
    old_log_probs: Tensor  # float32 [n, response], under the policy that sampled
    reference_log_probs: Tensor  # float32 [n, response]


@dataclass(frozen=True)
class UpdateReport:
    """Means over the rank's optimizer updates of one step."""

    loss: float
    kl: float
    clipped_fraction: float
    grad_norm: float  # global, before clipping
    updates: int


class PolicyWorker:
    """Rank `rank` of the policy. `open_rendezvous` on rank 0, then `build` on all, then `rollout` and `update`."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.recipe = recipe
        self.rank = rank
        self.tokenizer = Tokenizer()
        self._rendezvous: TCPStore | None = None

    def pid(self) -> int:
        """Process id of this rank."""
        return os.getpid()

    def open_rendezvous(self) -> int:
        """Opens the process group's store on a free port of rank 0 and returns the port."""
        self._rendezvous = TCPStore(
            HOST, 0, self.recipe.world_size, is_master=True, wait_for_workers=False, timeout=_timeout()
        )
        return self._rendezvous.port

    def build(self, port: int) -> int:
        """Joins the process group and builds model, reference, optimizer and scheduler. Returns its parameter count."""
        recipe = self.recipe
        store = self._rendezvous or TCPStore(HOST, port, recipe.world_size, timeout=_timeout())
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=recipe.world_size, timeout=_timeout())
        mesh = init_device_mesh("cpu", (recipe.world_size,))
        self.model = build_policy(recipe, self.tokenizer.size, mesh)
        self.reference = build_policy(recipe, self.tokenizer.size, mesh).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        warmup = max(1, recipe.warmup_updates)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / warmup)
        )
        seed = recipe.seed * 1000 + self.rank  # every rank samples its own responses
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return sum(parameter.numel() for parameter in self.model.parameters())

    def rollout(self, prompts: list[list[int]]) -> Rollout:
        """Samples a group of responses for each prompt (all of one length) from the current policy."""
        recipe = self.recipe
        groups = torch.tensor(prompts, dtype=torch.int64).repeat_interleave(recipe.group_size, dim=0)
        tokens = sample_responses(self.model, groups, recipe.response_length, recipe.temperature)
        with torch.no_grad():
            old = response_log_probs(self.model, tokens, groups.shape[1], recipe.temperature)
            reference = response_log_probs(self.reference, tokens, groups.shape[1], recipe.temperature)
        return Rollout(tokens, response_mask(tokens[:, groups.shape[1] :], END), old, reference)

    def update(self, rollout: Rollout, advantages: Tensor) -> UpdateReport:
        """Learns from `rollout` with `advantages` (float32 [n]): inner epochs of shuffled minibatches."""
        recipe = self.recipe
        sequences = rollout.tokens.shape[0]
        prompt_length = rollout.tokens.shape[1] - rollout.mask.shape[1]
        totals = torch.zeros(4, dtype=torch.float64)
        updates = 0
        for _ in range(recipe.inner_epochs):
            for chosen in torch.randperm(sequences).chunk(recipe.minibatches):
                tokens = rollout.tokens[chosen]
                loss = grpo_loss(
                    response_log_probs(self.model, tokens, prompt_length, recipe.temperature),
                    rollout.old_log_probs[chosen],
                    rollout.reference_log_probs[chosen],
                    advantages[chosen],
                    rollout.mask[chosen],
                    clip_low=recipe.clip_low,
                    clip_high=recipe.clip_high,
                    kl_coefficient=recipe.kl_coefficient,
                )
                self.optimizer.zero_grad(set_to_none=True)
                loss.total.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
                self.optimizer.step()
                self.scheduler.step()
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                totals += torch.stack([loss.total.detach(), loss.kl, loss.clipped_fraction, norm]).double()
                updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        means = (totals / updates).tolist()
        return UpdateReport(*means, updates=updates)

    def digest(self) -> dict[str, str]:
        """SHA-256 of every part of this rank's state by name, made without lastgood: what the demo compares.

        Names start with `parameters/`, `reference/`, `optimizer/`, `scheduler` or `rng/`.
        """
        digests: dict[str, str] = {}
        names = {}
        for name, parameter in self.model.named_parameters():
            digests[f"parameters/{name}"] = tensor_digest(parameter)
            names[parameter] = name
        for name, parameter in self.reference.named_parameters():
            digests[f"reference/{name}"] = tensor_digest(parameter)
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                digests[f"optimizer/{names[parameter]}/{key}"] = tensor_digest(value)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        digests["optimizer/groups"] = json_digest(groups)
        digests["scheduler"] = json_digest({k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"})
        return digests | rng_digests()


def rng_digests() -> dict[str, str]:
    """SHA-256 of this process's python, numpy and torch generators, by name."""
    state = np.random.get_state(legacy=False)
    return {
        "rng/python": json_digest(random.getstate()),
        "rng/numpy": json_digest({**state, "state": {k: np.asarray(v).tolist() for k, v in state["state"].items()}}),
        "rng/torch": tensor_digest(torch.get_rng_state()),
    }


def tensor_digest(tensor: Any) -> str:
    """SHA-256 of dtype, shape and bytes of a tensor (of a sharded one: of this rank's piece)."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().contiguous()
    head = f"{local.dtype} {tuple(local.shape)} ".encode()
    return hashlib.sha256(head + local.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of plain data; floats by their shortest exact spelling."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _timeout() -> timedelta:
    return timedelta(seconds=COLLECTIVE_TIMEOUT_S)
