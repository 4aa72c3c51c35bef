"""lastgood keeps the last good checkpoint of a distributed RL training run on Ray.

The face: every public name, and nothing else. Each is imported when it is first asked for, so that `import lastgood`
stays quick and the command line needs neither torch nor Ray until a command does. Imports here are absolute.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastgood.client.attach import attach, connect
    from lastgood.client.member import LedMember, member
    from lastgood.client.run import Run, SaveHandle
    from lastgood.coordinator.catalog import Checkpoint
    from lastgood.coordinator.options import Options
    from lastgood.coordinator.restore import Restored
    from lastgood.storage import errors
    from lastgood.storage.tree import register_enum
    from lastgood.workers.rng_state import RNG
    from lastgood.workers.small_state import Value

    __version__: str

__all__ = [
    "RNG",
    "Checkpoint",
    "LedMember",
    "Options",
    "Restored",
    "Run",
    "SaveHandle",
    "Value",
    "__version__",
    "attach",
    "connect",
    "errors",
    "member",
    "register_enum",
]

_HOME = {
    "RNG": "lastgood.workers.rng_state",
    "Checkpoint": "lastgood.coordinator.catalog",
    "LedMember": "lastgood.client.member",
    "Options": "lastgood.coordinator.options",
    "Restored": "lastgood.coordinator.restore",
    "Run": "lastgood.client.run",
    "SaveHandle": "lastgood.client.run",
    "Value": "lastgood.workers.small_state",
    "attach": "lastgood.client.attach",
    "connect": "lastgood.client.attach",
    "member": "lastgood.client.member",
    "register_enum": "lastgood.storage.tree",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name == "errors":
        value = importlib.import_module("lastgood.storage.errors")
    elif name == "__version__":
        value = importlib.import_module("importlib.metadata").version("lastgood")
    else:
        raise AttributeError(f"module 'lastgood' has no attribute {name!r}; public names: {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
