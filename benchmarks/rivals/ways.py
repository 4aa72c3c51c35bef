"""The ways to save: a class for each. None imports its rival before it is made, in the rival's environment.

What each library promises was read in its own files, named in the docstrings. FSDP2 states go to those that take
DTensors; the others get each rank's own local tensors.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from .jax_rank import JaxRank
from .way import LIMIT_S, POLL_S, Way


class TorchCheckpointing(Way):
    """torch-checkpointing, asynchronous: a thread copies into shared memory, a process of each rank's own writes.

    Read in torch_checkpointing/checkpoint_manager.py: whoever updates in place does so inside `manager.lock()`, which
    waits for the copy. So `settle` takes that lock, and every optimizer step does. FSDP2 state, without a resharder,
    whose metadata are gathered on CUDA only (metadata_manager.py); the staging pool is allocated before the first save
    (`prewarm_staging`). storage/filesystem.py opens with O_DIRECT and writes what is not aligned, which ext4 refuses:
    `use_direct_io=False`. It has no fsync anywhere.
    """

    rival = "torch-checkpointing"

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        package = import_module("torch_checkpointing")
        storage = import_module("torch_checkpointing.storage.filesystem")
        self.manager = package.CheckpointManager(
            package.CheckpointManager.Config(storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False))
        )
        rank.optimizer.register_step_pre_hook(self._before_step)
        rank.optimizer.register_step_post_hook(self._after_step)
        self.manager.prewarm_staging(rank.sharded())
        self.writing: Any = None

    def begin(self, step: int) -> None:
        self.writing = self.manager.save(str(self.place(step)), self.rank.sharded())

    def settle(self) -> None:
        with self.manager.lock():
            pass

    def _before_step(self, *_: Any) -> None:
        self.manager.lock().__enter__()

    def _after_step(self, *_: Any) -> None:
        self.manager.lock().__exit__(None, None, None)

    def wait(self) -> None:
        self.writing.result(LIMIT_S)

    def close(self) -> None:
        self.manager.close()


class Torchsnapshot(Way):
    """torchsnapshot, `Snapshot.async_take` (torchsnapshot/snapshot.py): returns when all is copied or written.

    Of 2022, before DTensors: the local tensors of each rank. storage_plugins/fs.py has no fsync.
    """

    rival = "torchsnapshot"

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        self.package = import_module("torchsnapshot")
        self.pending: Any = None

    def begin(self, step: int) -> None:
        state = self.package.StateDict(state=self.rank.local())
        self.pending = self.package.Snapshot.async_take(str(self.place(step)), {"rank": state})

    def wait(self) -> None:
        self.pending.wait()


class DlroverMemory(Way):
    """dlrover's flash checkpoint, to shared memory only: what survives a killed rank, and no lost machine.

    Its FSDP checkpointer (trainer/torch/flash_checkpoint/fsdp.py) asks for FSDP1, so each rank hands its local tensors
    to the DDP one (ddp.py), as one of two shards. Without dlrover-run rank 0 starts the saver's process (engine.py).
    """

    rival = "dlrover"
    persists = False
    storage: ClassVar[str] = "MEMORY"

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        package = "dlrover.trainer.torch.flash_checkpoint"
        self.kind = getattr(import_module(f"{package}.checkpointer").StorageType, self.storage)
        self.checkpointer = import_module(f"{package}.ddp").DdpCheckpointer(
            str(folder), local_shard_num=rank.world_size, global_shard_num=rank.world_size
        )
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step
        path = str(self.place(step) / f"rank_{self.rank.rank}.pt")
        self.checkpointer.save_checkpoint(step, self.rank.local(), path=path, storage_type=self.kind)
        if self.checkpointer._engine._cached_step != step:
            raise RuntimeError("dlrover skipped a save: its saver still held the shared memory")

    def done(self) -> bool:
        return True  # the call copies, and nothing follows it

    def forget(self, step: int) -> None:
        shutil.rmtree(self.place(step), ignore_errors=True)  # there is none of a save to memory

    def close(self) -> None:
        self.checkpointer._engine.close()

    @classmethod
    def sweep(cls, run: str) -> None:
        """Its sockets and shared memory carry the run's name (python/common/multi_process.py)."""
        for left in Path("/dev/shm").glob(f"{run}_*"):
            left.unlink()
        sockets = Path("/tmp/ckpt_sock")
        shutil.rmtree(sockets / run, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: another job's
            sockets.rmdir()


class DlroverDisk(DlroverMemory):
    """As above, and its saver's process writes the shards with torch.save and then the step into a tracker file.

    That file is looked at here every 5 ms: its own `wait_latest_checkpoint` sleeps 3 s. Its saver looks every 5 s
    whether all shards are done (python/elastic_agent/torch/ckpt_saver.py). Only the tracker is synced.
    """

    persists = True
    storage = "DISK"

    def done(self) -> bool:
        tracker = self.folder / "dlrover_latest.txt"
        return tracker.exists() and tracker.read_text() == str(self.step)

    def wait(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.done():
            if time.monotonic() > until:
                raise TimeoutError(f"dlrover has not written step {self.step} after {LIMIT_S:g} s")
            time.sleep(POLL_S)


class ResiliencyPeer(Way):
    """lm-resiliency (GEMINI), in memory: `save_tensors`, then the copy goes to the other rank over gloo.

    Read in lm_resiliency/checkpointing/manager.py: it takes each DTensor's local shard; on CPUs the copy into its
    buffers is made inside the call, the exchange by threads. Nothing goes to the disk until the process is told to end.
    """

    rival = "lm-resiliency"
    persists = False
    replicates: ClassVar[bool] = True

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        config = import_module("lm_resiliency.checkpointing.config").InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(folder), run_id=run, pin_memory=False
        )
        self.manager = import_module("lm_resiliency.checkpointing.manager").InMemoryCheckpointManager(
            config, parallelism_info=SimpleNamespace(has_natural_replicas=not self.replicates)
        )

    def begin(self, step: int) -> None:
        self.manager.save_tensors(list(self.rank.local().values()), step)

    def wait(self) -> None:
        if not self.manager.finalize_replication(LIMIT_S):
            raise RuntimeError("the copy did not reach the other rank")

    def forget(self, step: int) -> None:
        for left in self.folder.rglob(f"step-{step}"):
            shutil.rmtree(left)

    def close(self) -> None:
        self.manager.close()


class ResiliencyDisk(ResiliencyPeer):
    """lm-resiliency, to the disk: the call above without the exchange, and `flush_to_disk` at once.

    That clones the buffers inside the call; a thread writes them with torch.save, syncs file and directory
    (lm_resiliency/checkpointing/disk.py), and has no public way to be waited for.
    """

    persists = syncs = True
    replicates = False

    def begin(self, step: int) -> None:
        super().begin(step)
        self.manager.flush_to_disk(step)

    def wait(self) -> None:
        super().wait()
        self.manager._disk.wait()


class Moonclip(Way):
    """moonclip as it comes: save() copies, its threads hash, find deltas, compress (zstd) and write; `flush` syncs.

    Read in moonclip/pytorch.py and its README. Each rank has a store of its own, of its local tensors: its extension
    reads memory by address and knows no DTensors. It keeps the last three saves itself.
    """

    rival = "moonclip"
    syncs = True
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        self.manager = import_module("moonclip").CheckpointManager(
            str(folder / f"rank-{rank.rank}"), world_size=1, rank=0, max_total_snapshots=3, **self.options
        )

    def begin(self, step: int) -> None:
        self.manager.save(step, extra={"state": self.rank.local()})

    def wait(self) -> None:
        self.manager.flush()

    def forget(self, step: int) -> None:
        """It does so itself."""


class MoonclipRaw(Moonclip):
    """moonclip with compression_level=0, which it documents as none: for weights that change all over."""

    options: ClassVar[dict[str, Any]] = {"compression_level": 0}


class Orbax(Way):
    """Orbax's AsyncCheckpointer as it comes (OCDBT, zarr, zstd): JAX arrays of as many bytes, over two processes.

    The arrays never change, so a step beside it makes new ones: memory for both is needed, and not counted here.
    Tensorstore syncs the files of arrays (seen with strace), Orbax neither its metadata nor the rename that commits.
    """

    rival = "orbax"
    ranks = JaxRank
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, rank: Any, folder: Path, run: str) -> None:
        super().__init__(rank, folder, run)
        self.package = import_module("orbax.checkpoint")
        self.checkpointer = self.package.AsyncCheckpointer(self.package.PyTreeCheckpointHandler(**self.options))

    def begin(self, step: int) -> None:
        self.checkpointer.save(self.place(step), args=self.package.args.PyTreeSave(self.rank.state))

    def wait(self) -> None:
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        self.checkpointer.close()


class OrbaxRaw(Orbax):
    """Orbax with use_compression=False (orbax/checkpoint/_src/handlers/pytree_checkpoint_handler.py)."""

    options: ClassVar[dict[str, Any]] = {"use_compression": False}


WAYS: dict[str, type[Way]] = {
    "torch-checkpointing, async": TorchCheckpointing,
    "torchsnapshot, async_take": Torchsnapshot,
    "dlrover, to memory": DlroverMemory,
    "dlrover, to memory and disk": DlroverDisk,
    "lm-resiliency, to memory and peer": ResiliencyPeer,
    "lm-resiliency, to memory and disk": ResiliencyDisk,
    "moonclip": Moonclip,
    "moonclip, not compressed": MoonclipRaw,
    "orbax, async": Orbax,
    "orbax, async, not compressed": OrbaxRaw,
}
