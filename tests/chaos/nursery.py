"""Forks processes from one that has imported torch already: Ray workers for the raylets, drivers for the trials.

The processes are what they would be otherwise: Ray's own worker program, or a module of the tests. Only the import of
what knows nothing of its process is shared (torch above all; not Ray, which reads the environment when it is imported).
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
from collections.abc import Mapping
from pathlib import Path

from . import newborn
from .network import HOME, enter

_HEAVY = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "numpy",
    "pydantic",
    "pydantic_settings",
    "yaml",
    "safetensors",
    "asyncio",
    "concurrent.futures",
    "google.protobuf",
    "click",
    "jsonschema",
    "packaging.version",
    "filelock",
    "requests",
    "msgpack",
    "lastgood.workers.agent",  # what of lastgood does without Ray
    "lastgood.workers.stager",
    "lastgood.coordinator.service",
)
START_S = 120.0


class Nursery:
    """The nursery's process, as its owner holds it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.address = str(folder / "nursery")
        with (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "tests.chaos.nursery", self.address),
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
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
            return newborn.ask(self.address, ["-m", module, argument], descriptors, dict(environment))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve(address: str) -> None:
    for name in _HEAVY:
        importlib.import_module(name)
    assert "ray" not in sys.modules, "Ray takes its job and raylet from the environment when it is imported"
    gc.collect()
    gc.freeze()  # children share these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)
    while True:
        line, _ = listener.accept()
        with contextlib.suppress(OSError, EOFError), line:
            _answer(line, listener)


def _answer(line: socket.socket, listener: socket.socket) -> None:
    size, ancillary, _, _ = line.recvmsg(8, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    try:
        arguments, environment, cwd = _read(line, int.from_bytes(size, "big")).decode().split("\1")
        pid = os.fork()
        if pid == 0:
            listener.close()
            line.close()
            _live(arguments.split("\0"), environment.split("\0"), cwd, list(descriptors))
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


def _live(arguments: list[str], environment: list[str], cwd: str, descriptors: list[int]) -> None:
    """The new process's life. Does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        for entry in environment:
            name, _, value = entry.partition("=")
            os.environ[name] = value
        os.chdir(cwd)
        for wanted, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, wanted)
        if os.fstat(descriptors[3]).st_ino != Path(HOME).stat().st_ino:
            enter(descriptors[3])
        for descriptor in descriptors:
            os.close(descriptor)
        random.seed()
        if arguments[0] == "-m":
            os.setsid()
            sys.argv = [arguments[1], *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            atexit._run_exitfuncs()  # as at the end of any Python program
        else:  # raylet: setup_worker's own arguments, the worker's program, its arguments
            program = next(index for index, argument in enumerate(arguments) if argument.endswith("_worker.py"))
            own = ("--serialized-runtime-env-context", "--language")
            sys.argv = [arg for arg in arguments[program:] if not arg.startswith(own)]
            runpy.run_path(sys.argv[0], run_name="__main__")
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


if __name__ == "__main__":
    _serve(sys.argv[1])
