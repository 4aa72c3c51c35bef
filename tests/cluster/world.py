"""What the stories are made of: real FSDP2 ranks as plain Ray actors, and helpers that stop, kill and damage things."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import lastgood
from lastgood.coordinator.names import NAMESPACE, coordinator_name
from lastgood.storage import failpoints
from lastgood.workers.images import HEADER_BYTES
from lastgood.workers.stager_actor import find_stagers

LIMIT_S = 90.0  # no story waits longer for one condition


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits for a condition and answers its value; fails naming it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


class Rank:
    """One rank of a tiny FSDP2 training job; knows nothing of lastgood."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, seed: int = 7) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.rank = rank
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in self.model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5))
        torch.manual_seed(100 + rank)

    def train(self, hold: str | None = None) -> float:
        """One update on random data. `hold`: the update stops half-way until the file `<hold>.go` appears."""
        data = torch.randn(8, 13)
        loss = (self.model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        hook = None
        if hold is not None:
            hook = self.optimizer.register_step_pre_hook(lambda *_: self._hold(hold))
        self.optimizer.step()
        if hook is not None:
            hook.remove()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def roll_out(self, name: str) -> float:
        """A long rollout: busy, drawing random numbers, until the file `<name>.go` appears."""
        Path(f"{name}.{self.rank}.busy").touch()
        total = 0.0
        while not Path(f"{name}.go").exists():
            total += float(torch.rand(64).sum())
        return total

    def _hold(self, name: str) -> None:
        Path(f"{name}.{self.rank}.busy").touch()
        while not Path(f"{name}.go").exists():
            time.sleep(0.005)

    def state_digest(self) -> str:
        """SHA-256 over this rank's parameters, moments, schedule and random state."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.to_local().detach().numpy().tobytes())  # pyright: ignore[reportAttributeAccessIssue]
            for key, value in sorted(self.optimizer.state[parameter].items()):
                local = value.to_local() if hasattr(value, "to_local") else value
                digest.update(key.encode() + local.numpy().tobytes())
        digest.update(repr(self.scheduler.state_dict()["last_epoch"]).encode())
        digest.update(repr(self.optimizer.param_groups[0]["lr"]).encode())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()

    def pid(self) -> int:
        return os.getpid()


def rank_state(worker: Rank) -> dict[str, Any]:
    return {
        "model": worker.model,
        "optimizer": worker.optimizer,
        "scheduler": worker.scheduler,
        "rng": lastgood.RNG(),
    }


class World:
    """A run with two ranks on two raylets. Build it up with `start`, tear it down with `end`."""

    def __init__(self, name: str, root: Path, failpoint_dir: Path, cluster: Cluster) -> None:
        self.name = name
        self.root = root
        self.failpoints = failpoint_dir
        self.cluster = cluster
        self.store = root / "store"
        self.staging = f"{root}/node-{{label:slot}}"
        self.store.mkdir()
        self.ranks: list[Any] = []
        self.run: Any = None
        self.cursor: dict[str, Any] = {"seen": 0}
        self._groups = 0

    # -- building

    def attach(self, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "save_freq": 1,
            "heartbeat_s": 0.5,
            "linger_s": 600,
            "return_deadline_s": LIMIT_S,
        }
        self.run = lastgood.attach(self.name, store=self.store, staging=self.staging, **{**defaults, **options})
        return self.run

    def new_ranks(self, world_size: int = 2, seed: int = 7, first_node: int = 0) -> list[Any]:
        """A new generation of ranks, one per raylet in turn; the old ones are ended first."""
        self.end_ranks()
        self._groups += 1
        rendezvous = self.root / f"rendezvous-{self._groups}"
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["Labels"].get("slot", ""))
        self.ranks = [
            ray.remote(Rank)
            .options(
                num_cpus=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    nodes[(first_node + rank) % len(nodes)]["NodeID"], soft=False
                ),
            )
            .remote(rank, world_size, str(rendezvous), seed)
            for rank in range(world_size)
        ]
        ray.get([rank.pid.remote() for rank in self.ranks])
        return self.ranks

    def join(self) -> None:
        """Makes the ranks and this process members."""
        self.run.add_members("actor", self.ranks, state=rank_state)
        self.run.add_driver({"cursor": self.cursor})

    def start(self, **options: Any) -> Any:
        """Ranks, attached and joined, nothing resumed yet."""
        self.new_ranks()
        self.attach(**options)
        self.join()
        return self.run

    def alive_nodes(self) -> list[dict[str, Any]]:
        """Ray's nodes that live."""
        return [node for node in ray.nodes() if node["Alive"]]

    def lose_node(self, node: Any) -> None:
        """SIGKILLs a raylet and what it runs, and waits until the cluster knows."""
        self.cluster.remove_node(node, allow_graceful=False)
        until(lambda: all(n["NodeID"] != node.node_id for n in self.alive_nodes()), "the cluster misses the node")

    # -- training

    def update(self) -> list[float]:
        self.cursor["seen"] += 8
        return ray.get([rank.train.remote() for rank in self.ranks])

    def step(self, step: int) -> Any:
        """One whole step: update, end_step."""
        losses = self.update()
        return self.run.end_step(step, metrics={"loss": losses[0]})

    def digests(self) -> list[str]:
        return ray.get([rank.state_digest.remote() for rank in self.ranks])

    # -- looking

    def checkpoint(self, step: int) -> Any:
        """The newest committed checkpoint of a step; None when there is none."""
        return next((c for c in self.run.checkpoints() if c.step == step and c.committed), None)

    def committed(self, step: int) -> Any:
        """Waits until the step is committed."""
        return until(lambda: self.checkpoint(step), f"a commit of step {step}")

    def durable(self, step: int) -> Any:
        """Waits until the step is durable."""

        def found() -> Any:
            checkpoint = self.checkpoint(step)
            return checkpoint if checkpoint is not None and checkpoint.durable else None

        return until(found, f"step {step} durable")

    def node_dirs(self) -> list[Path]:
        return sorted(self.root.glob("node-*"))

    def shards(self, step: int, *, roots: list[Path] | None = None) -> list[Path]:
        """Every shard file of a step in the given roots (default: all local disks and the store)."""
        where = roots if roots is not None else [*self.node_dirs(), self.store]
        return sorted(
            path for root in where for path in (root / self.name).glob(f"global_step_{step}/*/*/*.safetensors")
        )

    # -- breaking

    def spoil_images(self) -> None:
        """Damages every image of the run, so that a resume reads from disks."""
        images = list(Path("/dev/shm").glob(f"lastgood.*.{self.name}.*/image-*"))
        assert images
        for image in images:
            with image.open("r+b") as file:
                file.seek(HEADER_BYTES + 9)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))

    def arm(self, point: str, action: str) -> None:
        for suffix in ("fired", "go"):
            (self.failpoints / f"{point}.{suffix}").unlink(missing_ok=True)
        failpoints.arm(self.failpoints, point, action)

    def fired(self, point: str) -> None:
        """Waits until the armed point was passed."""
        until(lambda: failpoints.fired(self.failpoints, point), f"failpoint {point} passed")

    def go(self, point: str) -> None:
        failpoints.release(self.failpoints, point)

    def coordinator(self) -> Any:
        return ray.get_actor(coordinator_name(self.name), namespace=NAMESPACE)

    def hello(self) -> dict[str, Any]:
        """The coordinator's word on itself, once it is up."""

        def ask() -> Any:
            with contextlib.suppress(ray.exceptions.RayError):
                return ray.get(self.coordinator().hello.remote())
            return None

        return until(ask, "the coordinator answers")

    def kill_coordinator(self) -> None:
        kill(self.hello()["pid"])

    def stager_pids(self) -> dict[str, int]:
        """Node -> pid of its stager."""
        return dict(ray.get([stager.identity.remote() for stager in find_stagers(self.name)]))

    # -- ending

    def end_ranks(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(rank, no_restart=True)
        self.ranks = []

    def end(self) -> None:
        for left in self.failpoints.iterdir():  # lets paused processes go
            if left.name.endswith(".fired"):
                left.with_suffix(".go").touch()
        from lastgood.workers.install import leave

        leave(self.name)
        self.end_ranks()
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(self.coordinator(), no_restart=True)
        for stager in find_stagers(self.name):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(stager.close_down.remote(), timeout=LIMIT_S)
            ray.kill(stager, no_restart=True)
        shutil.rmtree(self.root, ignore_errors=True)


def _state(pid: int) -> str:
    """The letter that the kernel gives a process's state; "X" once there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def gone(pid: int) -> bool:
    """Whether the process has ended; its parent need not have looked yet."""
    return _state(pid) in ("Z", "X")


def kill(pid: int) -> None:
    """SIGKILL, and back once the process is gone."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)

        until(lambda: gone(pid), f"process {pid} gone")
    finally:
        os.close(handle)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP), and goes on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _state(pid) == "T", f"process {pid} stands still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def node_of(world: World, slot: int) -> str:
    """The durable name of a node's staging directory."""
    return (world.root / f"node-{slot}" / world.name / "node.json").read_text().split('"node":"')[1].split('"')[0]


def flip(path: Path, offset: int = -1) -> None:
    """Flips one bit of a file; the last byte unless told otherwise."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
