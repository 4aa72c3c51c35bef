"""Named points at which a test (or the demo) stops or kills the process that passes them.

Armed by files, so that they work across processes and restarts: `LASTGOOD_FAILPOINTS` names a directory, and a file
`<point>` in it holds `kill`, `pause` or `raise`. A point fires once: it renames its file to `<point>.fired` first, so
whoever armed it can count what truly fired. `pause` then waits until `<point>.go` exists. Without the variable a
point costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "LASTGOOD_FAILPOINTS"


class FailpointError(OSError):
    """What an armed `raise` point raises: an I/O error like those a disk gives."""


def failpoint(name: str) -> None:
    """Stops or kills this process when `name` is armed; returns at once otherwise.

    Raises FailpointError when armed with `raise`. Blocks the calling thread when armed with `pause`.
    """
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    armed = Path(directory) / name
    try:
        action = armed.read_text().strip()
        armed.rename(armed.with_name(name + ".fired"))  # exactly one process wins the rename
    except FileNotFoundError:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise FailpointError(f"failpoint {name} was armed to raise")
    elif action == "pause":
        while not armed.with_name(name + ".go").exists():
            time.sleep(0.005)
    else:
        raise ValueError(f"failpoint {name}: unknown action {action!r}; use kill, pause or raise")


def arm(directory: Path, name: str, action: str) -> None:
    """Arms `name` once with `kill`, `pause` or `raise`. The file appears whole (rename)."""
    temporary = directory / f".{name}.arming"
    temporary.write_text(action)
    temporary.rename(directory / name)


def fired(directory: Path, name: str) -> bool:
    """Whether `name` was armed and a process has passed it."""
    return (directory / f"{name}.fired").exists()


def release(directory: Path, name: str) -> None:
    """Lets a process that is paused at `name` go on."""
    (directory / f"{name}.go").touch()
