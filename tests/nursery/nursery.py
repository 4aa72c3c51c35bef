"""Forks processes from one that has imported what they need: Ray workers for the raylets, drivers of chaos trials.

The processes are what they would be otherwise: Ray's own worker program, or a module of the tests. Only the import is
shared: of torch by all, of Ray and lastgood by the workers of one job on one raylet (newborn.py says why), and by the
drivers. A nursery without work for IDLE_S ends.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.nursery import newborn
from tests.nursery.namespaces import HOME, enter

_OF_ALL = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "lastgood.workers.agent",  # what of lastgood does without Ray
    "lastgood.workers.stager",
    "lastgood.coordinator.service",
)
_WITH_RAY = (
    "ray",
    "ray._private.workers.default_worker",
    "lastgood.workers.install",
    "lastgood.workers.stager_actor",
    "lastgood.coordinator.actor",
    "lastgood.client.attach",
)
START_S = 120.0
IDLE_S = 90.0
DRIVERS = "drivers"  # the nursery of the trials' own modules


class Nursery:
    """The first nursery's process, as its owner holds it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.address = str(folder / "nursery")
        with (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "tests.nursery.nursery", self.address),
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        until = time.monotonic() + START_S
        while not Path(self.address).exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the nursery did not start: {(folder / 'nursery.log').read_text()}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, module: str, argument: str, log: Path, namespace: int, environment: Mapping[str, str]) -> int:
        """Starts `python -m module argument` with its output appended to `log`; answers its pid."""
        with log.open("ab") as out, Path(os.devnull).open("rb") as nothing:
            descriptors = (nothing.fileno(), out.fileno(), out.fileno(), namespace)
            return newborn.born(self.address, DRIVERS, ["-m", module, argument], descriptors, dict(environment))

    def close(self) -> None:
        """Ends all nurseries. What was born in them is in groups of its own and lives on."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _serve(address: str, *, idle_s: float | None) -> None:
    """Answers requests until nobody has asked for `idle_s`."""
    gc.collect()
    gc.freeze()  # children share these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)
    listener.settimeout(idle_s)
    nurseries: dict[str, int] = {}
    while True:
        try:
            line, _ = listener.accept()
        except TimeoutError:
            Path(address).unlink(missing_ok=True)
            return
        line.settimeout(None)
        with contextlib.suppress(OSError, EOFError), line:
            _answer(line, listener, nurseries)


def _answer(line: socket.socket, listener: socket.socket, nurseries: dict[str, int]) -> None:
    size, ancillary, _, _ = line.recvmsg(8, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    try:
        text, environment, cwd, group = _read(line, int.from_bytes(size, "big")).decode().split("\1")
        arguments = text.split("\0")
        pid = nurseries.get(arguments[-1], 0) if arguments[0] == "nursery" else 0
        if not pid or not Path(f"/proc/{pid}").exists():
            pid = os.fork()
            if pid == 0:
                listener.close()
                line.close()
                _live(arguments, environment.split("\0"), cwd, list(descriptors))
            if arguments[0] == "nursery":
                nurseries[arguments[-1]] = pid
            else:
                os.setpgid(pid, int(group))  # before its parent-by-name can go, and the group's number with it
        line.sendall(str(pid).encode())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = line.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _live(arguments: list[str], environment: Sequence[str], cwd: str, descriptors: list[int]) -> None:
    """The new process's life. Does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        for entry in environment:
            name, _, value = entry.partition("=")
            os.environ[name] = value
        os.chdir(cwd)
        if arguments[0] == "nursery":
            for descriptor in descriptors:
                os.close(descriptor)
            for name in _WITH_RAY:
                importlib.import_module(name)
            _serve(arguments[1], idle_s=IDLE_S)
        else:
            _become(descriptors)
            _run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the process is about to end; this is its last word
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(descriptors: Sequence[int]) -> None:
    """Takes over output and network of whoever asked."""
    for wanted, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, wanted)
    if os.fstat(descriptors[3]).st_ino != Path(HOME).stat().st_ino:
        enter(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    random.seed()


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = [arguments[1], *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        atexit._run_exitfuncs()  # as at the end of any Python program
    else:  # raylet: setup_worker's own arguments, the worker's program, its arguments
        program = next(index for index, argument in enumerate(arguments) if argument.endswith("_worker.py"))
        own = ("--serialized-runtime-env-context", "--language")
        sys.argv = [arg for arg in arguments[program:] if not arg.startswith(own)]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    for module in _OF_ALL:
        importlib.import_module(module)
    assert "ray" not in sys.modules, "Ray takes its job and raylet from the environment when it is imported"
    _serve(sys.argv[1], idle_s=None)
