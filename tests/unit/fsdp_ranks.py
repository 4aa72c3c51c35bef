"""One rank of a real FSDP2 training (gloo), run as a process of its own: `python -m tests.unit.fsdp_ranks JOB FOLDER`.

train    4 steps without lastgood; the same 4 steps with a save at step 0 and after every step; both traces are kept
resume   a fresh process loads step 2, trains to step 4 and keeps its trace
reshard  loads step 4 on four ranks, sharded and as 2 x 2 replicas and shards, and keeps the full tensors
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from lastgood.storage.errors import UsageError
from lastgood.storage.manifest import Manifest, RoleRecord, ShardRecord
from lastgood.workers import load
from lastgood.workers.member import Member
from lastgood.workers.rng_state import RNG
from tests.unit.checkpoints import bits, locate_in, make_manifest, save

STEPS = 4
RESUMED = 2
VOCABULARY, WIDTH = 11, 8


class Tiny(nn.Module):
    """A transformer with tied embeddings, a parameter of one element, and a buffer that counts forward passes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.temperature = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.block(self.embed(tokens)) * self.temperature)


class Run:
    """One rank's training."""

    def __init__(self, *, sharded: bool = True, mesh: tuple[int, ...] = ()) -> None:
        """`mesh`: (replicas, shards); without it all ranks shard."""
        torch.manual_seed(7)
        self.rank = dist.get_rank() if sharded else 0
        self.world_size = dist.get_world_size() if sharded else 1
        self.model = Tiny()
        if sharded:
            shape = mesh or (self.world_size,)
            devices = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            fully_shard(self.model.block, mesh=devices)
            fully_shard(self.model, mesh=devices, reshard_after_forward=False)
        plain = [p for name, p in self.model.named_parameters() if "norm" in name or name == "temperature"]
        others = [p for p in self.model.parameters() if not any(p is q for q in plain)]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 3))
        self.cursor: dict[str, Any] = {"step": 0}
        self.losses: list[str] = []
        torch.manual_seed(100 + self.rank)

    def member(self) -> Member:
        return Member.of(
            "actor",
            self.rank,
            self.world_size,
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "rng": RNG(),
                "cursor": self.cursor,
            },
        )

    def roll_out(self) -> None:
        """A forward pass between two updates: it gathers the root's weights, which stay gathered, and counts."""
        with torch.no_grad():
            self.model(torch.zeros(1, 3, dtype=torch.int64))

    def step(self) -> None:
        tokens = torch.randint(VOCABULARY, (2, 5))
        loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.cursor["step"] += 1
        self.losses.append(float(loss.item()).hex())

    def trace(self) -> dict[str, Any]:
        """All there is to know of the run, read without lastgood."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + bits(_local(tensor)))
        moments = hashlib.sha256()
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in sorted(state.items()):
                moments.update(f"{index}{key}".encode() + bits(_local(value)))
        return {
            "losses": list(self.losses),
            "weights": digest.hexdigest(),
            "moments": moments.hexdigest(),
            "rates": [float(group["lr"]).hex() for group in self.optimizer.param_groups],
            "scheduler": repr(sorted(self.scheduler.state_dict().items())),
            "rng": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
            "cursor": dict(self.cursor),
        }

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Weights, buffers and optimizer state, whole, by name (a collective)."""
        found = {name: _full(tensor) for name, tensor in self.model.state_dict().items()}
        names = {id(param): name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(param)]}/{key}"] = _full(value)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(folder: Path) -> dict[str, Any]:
    undisturbed = Run()
    middle: dict[str, Any] = {}
    for step in range(1, STEPS + 1):
        undisturbed.step()
        if step == RESUMED:
            middle = undisturbed.trace()
        undisturbed.roll_out()
    saved = Run()
    member = saved.member()
    for step in range(STEPS + 1):
        if step:
            saved.step()
        report = member.mark(step)
        assert report.updates == step
        if step == STEPS:
            full = saved.full_tensors()
            if saved.rank == 0:
                torch.save(full, folder / "full.pt")
        if step:
            saved.roll_out()
            assert not isinstance(saved.model.head.weight, DTensor)  # gathered, and capture must leave it so
        keep(folder / f"step_{step}", member, step)
        assert not step or not isinstance(saved.model.head.weight, DTensor)
    result = {"undisturbed": undisturbed.trace(), "saved": saved.trace(), "middle": middle, "updates": member.updates}
    capture_on_one_rank_alone(saved, member)
    try:
        Member.of(
            "actor", saved.rank, 2, {"model": FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))}
        )
    except UsageError as error:
        result["fsdp1"] = str(error)
    return result


def capture_on_one_rank_alone(run: Run, member: Member) -> None:
    """Rank 0 captures while the others run no lastgood and no torch code; a collective in it would wait for ever."""
    store = dist.distributed_c10d._get_default_store()
    if run.rank:
        store.wait(["captured"], timedelta(seconds=60))
    else:
        member.mark(STEPS)
        with member.gate.copying(STEPS):
            member.capture(STEPS)
        store.set("captured", "yes")


def keep(folder: Path, member: Member, step: int) -> None:
    records = save(folder, member, step)
    note = {"updates": member.updates, "records": [record.model_dump(mode="json") for record in records]}
    (folder / f"rank_{member.id.rank}.json").write_text(json.dumps(note))


def manifest_in(folder: Path, step: int, world_size: int = 2) -> Manifest:
    """The manifest over what the ranks kept."""
    notes = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]
    records = [ShardRecord.model_validate_json(json.dumps(record)) for note in notes for record in note["records"]]
    roles = {"actor": RoleRecord(world_size=world_size, components=tuple(sorted({r.component for r in records})))}
    return make_manifest(
        step, roles, [("actor", rank, notes[rank]["updates"]) for rank in range(world_size)], records, {}
    )


def resume(folder: Path) -> dict[str, Any]:
    run = Run()
    run.roll_out()  # gathered weights of a moment before the restore must not be used after it
    torch.rand(3)
    member = run.member()
    checkpoint = folder / f"step_{RESUMED}"
    load.prepare(member, manifest_in(checkpoint, RESUMED), locate_in(checkpoint)).apply()
    result: dict[str, Any] = {"middle": run.trace(), "updates": member.updates}
    run.roll_out()
    for _ in range(RESUMED, STEPS):
        run.step()
        run.roll_out()
    return {**result, "end": run.trace(), "end_updates": member.updates}


def reshard(folder: Path) -> dict[str, Any]:
    run = Run()
    run.roll_out()
    member = run.member()
    checkpoint = folder / f"step_{STEPS}"
    manifest = manifest_in(checkpoint, STEPS)
    refused = ""
    try:
        load.prepare(member, manifest, locate_in(checkpoint))
    except UsageError as error:
        refused = str(error)
    policy = {"rng": "fresh", "actor.cursor": "rank0"}
    prepared = load.prepare(member, manifest, locate_in(checkpoint), policy)
    prepared.apply()
    full = run.full_tensors()
    if run.rank == 0:
        torch.save(full, folder / f"full_on_{run.world_size}.pt")
    result = {
        "refused": refused,
        "fresh": list(prepared.fresh),
        "updates": member.updates,
        "cursor": run.cursor["step"],
        "empty_pieces": sum(_local(tensor).numel() == 0 for tensor in run.model.parameters()),
    }
    run.step()  # the state that was made for an optimizer without any serves an update

    replicas = Run(mesh=(2, 2))
    member = replicas.member()
    load.prepare(member, manifest, locate_in(checkpoint), policy).apply()
    result["replicas"] = same_bits(replicas.full_tensors(), full)
    member.mark(STEPS)
    keep(folder / "replicas", member, STEPS)
    dist.barrier()
    again = Run()  # as many ranks, and another mesh: own shards do not hold all of the boxes
    manifest = manifest_in(folder / "replicas", STEPS, run.world_size)
    load.prepare(again.member(), manifest, locate_in(folder / "replicas")).apply()
    result["another mesh"] = same_bits(again.full_tensors(), full)
    return result


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {name: bits(tensor) for name, tensor in one.items()} == {name: bits(t) for name, t in other.items()}


def main(job: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{folder}/rendezvous_{job}_{world_size}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        result = {"train": train, "resume": resume, "reshard": reshard}[job](folder)
        (folder / f"{job}_{world_size}_{rank}.json").write_text(json.dumps(result))
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
