"""FSDP2 ranks that are killed and restored, for benchmarks/resume.py: one toy, and the peers' ways to keep its state.

What all of them import is imported with this module, so that no way pays for it while it restores.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lastgood

from .qwen_shape import QwenShaped
from .ranks import VALUE_BYTES

TOKENS = (1, 16)  # batch and length of what an update trains on
RANDOM_STATE = "rng"


class ShardedRank:
    """One rank of an FSDP2 job over gloo: a model, AdamW, a schedule, the weights that a rollout reads in bfloat16.

    Knows nothing of lastgood.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: str, megabytes: float) -> None:
        """`rendezvous`: a file of this generation's own. `megabytes` (10^6 bytes) of state here."""
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(7)
        parameters = megabytes * 1e6 * world_size / VALUE_BYTES
        self.model, self.rollout = QwenShaped(parameters), QwenShaped(parameters).to(torch.bfloat16)
        self.rollout.requires_grad_(False)
        mesh = init_device_mesh("cpu", (world_size,))
        for model in (self.model, self.rollout):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5))
        torch.manual_seed(100 + rank)

    def pid(self) -> int:
        """The process of this rank; answers once its model is built."""
        return os.getpid()

    def update(self) -> float:
        """One update on random tokens; the loss."""
        loss = self.model.loss(torch.randint(self.model.vocabulary, TOKENS))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        for weight, parameter in zip(self.rollout.parameters(), self.model.parameters(), strict=True):
            _local(weight).copy_(_local(parameter))
        return float(loss.detach())

    def roll_out(self) -> None:
        """A rollout that does not end."""
        threading.Event().wait()

    def digest(self) -> str:
        """SHA-256 over this rank's part of every parameter, of its AdamW state and of the rollout's weights."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors():
            digest.update(name.encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def state_bytes(self) -> int:
        """Bytes of what `digest` reads."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, _local(parameter)
            for key, value in sorted(self.optimizer.state[parameter].items()):
                yield f"{name}.{key}", _local(value)
        for name, weight in self.rollout.named_parameters():
            yield f"rollout.{name}", _local(weight)

    # -- torch.distributed.checkpoint: no RNG and no schedule, its state_dict functions know neither

    def save_with_dcp(self, folder: str) -> None:
        """Collective. DCP syncs the files that it writes."""
        save(self._dcp_state(), checkpoint_id=folder)

    def load_with_dcp(self, folder: str) -> None:
        """Collective."""
        state = self._dcp_state()  # of a new rank: makes the moments first, so that there is something to load into
        load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_model_state_dict(self.rollout, state["rollout"])

    def _dcp_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "rollout": get_model_state_dict(self.rollout)}

    # -- as verl does, read in its verl/utils/checkpoint/fsdp_checkpoint_manager.py (FSDPCheckpointManager)

    def save_as_verl(self, folder: str) -> None:
        """Collective."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        torch.save(self.model.state_dict(), self._verl_file(folder, "model"))
        torch.save(self.optimizer.state_dict(), self._verl_file(folder, "optim"))
        torch.save(self.rollout.state_dict(), self._verl_file(folder, "rollout"))
        drawn = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
        extra = {"lr_scheduler": self.scheduler.state_dict(), RANDOM_STATE: drawn}
        torch.save(extra, self._verl_file(folder, "extra_state"))
        torch.distributed.barrier()

    def load_as_verl(self, folder: str) -> None:
        """Collective."""
        self.model.load_state_dict(_unpickled(self._verl_file(folder, "model")))
        self.optimizer.load_state_dict(_unpickled(self._verl_file(folder, "optim")))
        self.rollout.load_state_dict(_unpickled(self._verl_file(folder, "rollout")))
        extra = _unpickled(self._verl_file(folder, "extra_state"))
        torch.set_rng_state(extra[RANDOM_STATE]["cpu"])
        np.random.set_state(extra[RANDOM_STATE]["numpy"])
        random.setstate(extra[RANDOM_STATE]["random"])
        self.scheduler.load_state_dict(extra["lr_scheduler"])
        torch.distributed.barrier()

    def _verl_file(self, folder: str, part: str) -> Path:
        return Path(folder, f"{part}_world_size_{self.world_size}_rank_{self.rank}.pt")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part, contiguous as FSDP2 keeps it."""
    tensor = tensor.detach()
    return cast("DTensor", tensor).to_local() if isinstance(tensor, DTensor) else tensor


def _unpickled(path: Path) -> Any:
    """As verl reads its files: pickles of this benchmark's own making, code included."""
    return torch.load(path, weights_only=False)


def state(rank: ShardedRank) -> dict[str, Any]:
    """The components of a rank, for lastgood."""
    return {
        "model": rank.model,
        "optimizer": rank.optimizer,
        "rollout": rank.rollout,
        "scheduler": rank.scheduler,
        "rng": lastgood.RNG(),
    }


def new_sharded_ranks(count: int, rendezvous: Path, megabytes: float) -> tuple[list[Any], list[int]]:
    """A generation of ranks whose models are built, and their pids."""
    ranks: list[Any] = [
        ray.remote(ShardedRank).options(num_cpus=0).remote(rank, count, str(rendezvous), megabytes)
        for rank in range(count)
    ]
    return ranks, ray.get([rank.pid.remote() for rank in ranks])
