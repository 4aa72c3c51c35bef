"""The cluster of a campaign: raylets, each in its slot, which can be lost, cut off, brought back and built anew.

Everything that is started here carries the field's token in its environment, so that the processes of other tests on
the same host are never touched. `processes` and `slot_of` read /proc: a victim need not answer to be found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ray.cluster_utils import Cluster

from lastgood.storage.failpoints import VARIABLE
from tests.chaos.network import HOME, Network, netns_of
from tests.nursery import newborn
from tests.nursery.nursery import Nursery

TOKEN = "CHAOS_TOKEN"
END_S = 30.0
# A node that is cut off or stopped counts as dead after about six seconds; Ray's own default is half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
}


class Field:
    """Raylets in slots 0 (the head) to `slots` - 1. Used by one thread."""

    def __init__(self, slots: int = 2) -> None:
        self.token = secrets.token_hex(2)
        self.slots = slots
        self.root = Path(tempfile.mkdtemp(prefix=f"lgchaos-{self.token}-"))
        self.failpoints = self.root / "failpoints"
        self.failpoints.mkdir()
        self.network = Network(self.token, slots) if Network.usable() else None
        self._cluster: Cluster | None = None
        self._raylets: dict[int, Any] = {}  # slot -> Ray's own object for the node
        self._builds = 0
        self.nursery = Nursery(self.root, self.environment(0))

    @property
    def cuttable(self) -> bool:
        return self.network is not None

    @property
    def address(self) -> str:
        """Of the cluster, for ray.init."""
        assert self._cluster is not None
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """Where the processes of the cluster that lives now write what they say."""
        return self.root / f"ray{self._builds}" / "session_latest" / "logs"

    def node_address(self, slot: int) -> str | None:
        """The IP address of a slot's raylet; None where all share one."""
        return None if self.network is None else self.network.address(slot)

    def environment(self, slot: int) -> dict[str, str]:
        """What every process of a slot finds in its environment."""
        own = {
            TOKEN: f"{self.token}",
            VARIABLE: str(self.failpoints),
            newborn.SOCKET: str(self.root / "nursery"),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "SPT_NOENV": "1",  # else Ray's process titles overwrite the environment that we read in /proc
            "OMP_NUM_THREADS": "1",
        }
        if self.network is not None:
            own["GLOO_SOCKET_IFNAME"] = self.network.interface(slot)
        return {**os.environ, **own}

    # -- building

    def build(self) -> None:
        """A new cluster in all slots; the one before is gone."""
        self._builds += 1
        for slot in range(self.slots):
            self.add(slot)

    def add(self, slot: int) -> None:
        """Starts the raylet of an empty slot."""
        shape: dict[str, Any] = {
            "num_cpus": 4,
            "object_store_memory": 80 << 20,
            "labels": {"slot": str(slot)},
            "setup_worker_path": newborn.__file__,
            "include_log_monitor": False,
        }
        if self.network is not None:
            shape["node_ip_address"] = self.network.address(slot)
        with self._environment_of(slot), self._inside(slot):
            if slot == 0:
                head = {
                    "_system_config": _HEALTH,
                    "include_dashboard": False,
                    "no_monitor": True,
                    "temp_dir": str(self.root / f"ray{self._builds}"),
                }
                # Not noted as this host's cluster: other tests here may look for theirs.
                with mock.patch("ray._private.utils.write_ray_address"):
                    self._cluster = Cluster(
                        initialize_head=True, head_node_args={**shape, **head}, shutdown_at_exit=False
                    )
                self._raylets[0] = self._cluster.head_node
            else:
                assert self._cluster is not None
                self._raylets[slot] = self._cluster.add_node(**shape, wait=False)

    def raylet(self, slot: int) -> int | None:
        """The pid of a slot's raylet; None when it does not run."""
        node = self._raylets.get(slot)
        if node is None or "raylet" not in node.all_processes:
            return None
        process = node.all_processes["raylet"][0].process
        return process.pid if process.poll() is None else None

    def lose(self, slot: int) -> None:
        """Clears away what is left of a slot whose raylet is gone: it can be added again."""
        node = self._raylets.pop(slot, None)
        if node is not None:
            with contextlib.suppress(ProcessLookupError):
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)

    def down(self) -> list[int]:
        """Slots whose raylet does not run."""
        return [slot for slot in range(self.slots) if self.raylet(slot) is None]

    def raze(self) -> None:
        """SIGKILLs every process of the cluster and of its runs. The nursery lives on."""
        until = time.monotonic() + END_S
        while True:
            left = [pid for pid in self.processes() if pid != self.nursery.pid]
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for node in self._raylets.values():
                for infos in node.all_processes.values():
                    for info in infos:
                        info.process.poll()  # reaps it
            if time.monotonic() > until:
                raise TimeoutError(f"these processes do not go: {left}")
            time.sleep(0.02)
        self._raylets.clear()
        self._cluster = None
        shutil.rmtree(self.root / f"ray{self._builds}", ignore_errors=True)
        if self.network is not None:
            for slot in range(1, self.slots):
                self.network.mend(slot)

    def close(self) -> None:
        """Ends everything that the field started."""
        self.raze()
        self.nursery.close()
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- looking

    def processes(self) -> dict[int, str]:
        """Pid -> command line of every live process with the field's token."""
        mark = f"{TOKEN}={self.token}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            except OSError:
                continue  # it ended, or is another user's
            found[int(entry.name)] = command.decode(errors="replace")
        return found

    def named(self, title: str) -> list[int]:
        """Pids of Ray workers of one kind: `StagerActor`, `CoordinatorActor`, `Rank`."""
        return sorted(pid for pid, command in self.processes().items() if command.startswith(f"ray::{title}"))

    def in_slot(self, slot: int) -> list[int]:
        """Pids of all processes in a slot. Only where slots have networks of their own."""
        assert self.network is not None
        there = self.network.open(slot)
        try:
            wanted = os.fstat(there).st_ino
        finally:
            os.close(there)
        return [pid for pid in self.processes() if netns_of(pid) == wanted]

    def start(self, module: str, argument: str, log: Path, slot: int = 0) -> int:
        """Starts a module of the tests in a slot's network; answers its pid."""
        there = os.open(HOME, os.O_RDONLY) if self.network is None else self.network.open(slot)
        try:
            return self.nursery.start(module, argument, log, there, self.environment(slot))
        finally:
            os.close(there)

    @contextlib.contextmanager
    def _environment_of(self, slot: int) -> Iterator[None]:
        """Raylets inherit this process's environment, so it is theirs while one starts."""
        before = dict(os.environ)
        os.environ.update(self.environment(slot))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _inside(self, slot: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.network is None else self.network.inside(slot)
