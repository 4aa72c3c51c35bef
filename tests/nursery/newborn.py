"""What a raylet starts in the place of Ray's setup_worker.py: asks a nursery for the process. Imports little.

A nursery forks from a process that has imported torch, Ray and lastgood already, so a worker is there in a fraction of
the time. Ray reads its job and its raylet from the environment when it is imported, so there is a nursery for each.
"""

import array
import os
import socket
import sys
import time

SOCKET = "TESTS_NURSERY"
RETRY_S = 0.02
START_S = 100.0
DESCRIPTORS = tuple[int, int, int, int]


def ask(
    address: str, arguments: list[str], descriptors: DESCRIPTORS, environment: dict[str, str], group: int = 0
) -> int:
    """The pid of a new process that runs `arguments`; `descriptors`: its stdin, stdout, stderr, network namespace.

    `group`: the process group it joins; 0 is one of its own.
    """
    variables = "\0".join(f"{name}={value}" for name, value in environment.items())
    message = "\1".join(("\0".join(arguments), variables, os.getcwd(), str(group))).encode()  # noqa: PTH109
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(address)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        line.sendmsg([len(message).to_bytes(8, "big")], passed)
        line.sendall(message)
        answer = line.recv(32)
        if not answer:
            raise ConnectionResetError(f"the nursery {address} ended")
        return int(answer)


def born(
    base: str, key: str, arguments: list[str], descriptors: DESCRIPTORS, environment: dict[str, str], group: int = 0
) -> int:
    """As ask, of the nursery for `key`, which the one at `base` starts when it is not there."""
    address = f"{base}.{key}"
    until = time.monotonic() + START_S
    while True:
        try:
            return ask(address, arguments, descriptors, environment, group)
        except (FileNotFoundError, ConnectionError):
            if time.monotonic() > until:
                raise
            ask(base, ["nursery", address], descriptors, environment)  # does nothing when it is on its way
            time.sleep(RETRY_S)


if __name__ == "__main__":
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    of = "-".join(os.environ.get(name, "none") for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"))
    # Into the group that the raylet made for this process: it ends the whole group when the worker is gone.
    born(os.environ[SOCKET], of, sys.argv[1:], (0, 1, 2, home), dict(os.environ), os.getpgrp())
