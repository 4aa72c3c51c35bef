"""Finding lastgood's actors in a Ray cluster, and where Ray keeps its own files."""

from __future__ import annotations

import re
import time
from typing import Any, cast

import ray

from .names import NAMESPACE


def plain(error: BaseException) -> str:
    """What an error of Ray says, in one line: the rest is a dump of ids and tracebacks of its own processes."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


def named_actors(prefix: str) -> dict[str, Any]:
    """Name -> handle of every live actor of lastgood whose name begins with `prefix`."""
    listed = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    found: dict[str, Any] = {}
    for actor in listed:
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(prefix):
            try:
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # it ended between the listing and now
    return found


def session_dir() -> str:
    """The directory of the live Ray session, where nothing may be kept: Ray deletes it. Empty without a session."""
    node = ray._private.worker._global_node  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    return node.get_session_dir_path() if node is not None else ""


def draining_nodes() -> dict[str, float | None]:
    """Ray node id -> seconds until the node is taken away (None: not known), for every node that is being drained.

    Ray has no public call for it; this is the one that Ray Train's preemption watcher uses (ray 2.60).
    """
    told: dict[str, int] = ray._private.state.state.get_draining_nodes()  # pyright: ignore
    now_ms = time.time() * 1000
    return {node: (deadline_ms - now_ms) / 1000 if deadline_ms else None for node, deadline_ms in told.items()}
