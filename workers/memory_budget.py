"""How much host memory may still be taken on this node: of the host, and of every cgroup that this process is in.

Images are memory that nobody can take back while a save runs. Beyond what is free the kernel ends a process, and before
that Ray does (above RAY_memory_usage_threshold): the trainer as likely as ours. So what is too much is an error first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RAY_THRESHOLD = 0.95  # Ray's own default of RAY_memory_usage_threshold


@dataclass(frozen=True)
class Budget:
    """What may be taken now. `free_bytes` of `total_bytes` are not used, `kept_bytes` of these must stay free."""

    free_bytes: int
    total_bytes: int
    kept_bytes: int
    whose: str  # "the host", or the cgroup that has the limit

    @property
    def left_bytes(self) -> int:
        return max(0, self.free_bytes - self.kept_bytes)


def memory_budget(root: Path = Path("/")) -> Budget | None:
    """The tightest budget; None where this system tells none. `root`: where /proc and /sys are.

    Page cache that is not in use counts as free. What cannot be read sets no limit: it must not be why a save fails.
    """
    return min(_budgets(root), key=lambda budget: budget.left_bytes, default=None)


def _budgets(root: Path) -> Iterator[Budget]:
    with contextlib.suppress(OSError, KeyError):
        facts = _table(root / "proc/meminfo")
        yield _budget(facts["MemAvailable"] * 1024, facts["MemTotal"] * 1024, "the host")
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for folder in _folders(root / mount, path):
            yield from _of_group(folder, limit, usage, cache)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup and those above it; in a container the path may be that of the host and only the top be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _of_group(folder: Path, limit: str, usage: str, cache: str) -> Iterator[Budget]:
    try:
        told = (folder / limit).read_text().strip()
        if told == "max":
            return
        most_bytes, used_bytes = int(told), int((folder / usage).read_text())
        idle_bytes = _table(folder / "memory.stat").get(cache, 0)
    except (OSError, ValueError):
        return  # the top of a hierarchy has no limit, or it is not mounted here
    yield _budget(most_bytes - used_bytes + min(idle_bytes, used_bytes), most_bytes, f"cgroup {folder}")


def _budget(free_bytes: int, total_bytes: int, whose: str) -> Budget:
    threshold = RAY_THRESHOLD
    with contextlib.suppress(ValueError):
        threshold = float(os.environ.get("RAY_memory_usage_threshold", RAY_THRESHOLD))  # noqa: SIM112 - Ray's spelling
    return Budget(max(0, free_bytes), total_bytes, int(total_bytes * max(0.0, 1.0 - threshold)), whose)


def _table(file: Path) -> dict[str, int]:
    """The lines `name: number unit` or `name number` of a file of the kernel's."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
