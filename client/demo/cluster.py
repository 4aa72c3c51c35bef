"""The demo's own Ray cluster: two raylets on this machine, each with its own place on disk.

It starts what it needs and shuts down exactly that; a cluster that is already there is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from ...storage.errors import UsageError
from ...storage.failpoints import VARIABLE

NODES = 2
SLOT = "slot"  # the node label that tells the raylets of one machine apart
_OBJECT_STORE_BYTES = 100 * 1024**2
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Places:
    """Where the demo keeps its files, all under one root."""

    root: Path

    @property
    def store(self) -> Path:
        """Root of the store, shared by all nodes."""
        return self.root / "store"

    @property
    def staging(self) -> str:
        """Template of the staging directories: each node fills in its own label."""
        return str(self.root / f"node-{{label:{SLOT}}}")

    @property
    def failpoints(self) -> Path:
        """Directory whose files arm the kills."""
        return self.root / "failpoints"

    def create(self) -> None:
        """Makes the directories. Raises UsageError when the root already holds checkpoints of an earlier demo."""
        if self.root.exists() and any(self.root.iterdir()):
            raise UsageError(
                f"{self.root} is not empty, and the demo must start from nothing; name a new or empty directory",
                path=str(self.root),
            )
        for directory in (self.store, self.failpoints, *(self.root / f"node-{slot}" for slot in range(NODES))):
            directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def two_raylets(places: Places) -> Iterator[None]:
    """A Ray cluster of two raylets labelled slot=0 and slot=1, with this process as its driver; gone afterwards.

    Every process of the cluster sees the failpoints of `places`. Raises UsageError when this process is connected to
    another cluster.
    """
    if ray.is_initialized():
        raise UsageError("this process is connected to a Ray cluster; run the demo in a process of its own")
    with _environment({**_ENVIRONMENT, VARIABLE: str(places.failpoints)}):
        cluster = Cluster()
        try:
            for slot in range(NODES):
                cluster.add_node(
                    num_cpus=4,  # the machine may have fewer: actors of the demo take turns by themselves
                    labels={SLOT: str(slot)},
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                )
            ray.init(
                address=cluster.address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace="lastgood-demo",
            )
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def ray_held_back() -> Iterator[None]:
    """Keeps off standard output what Ray prints there when a process dies; should the demo fail, it is told then.

    For the whole process: whoever wants to write to standard output meanwhile takes hold of the stream before.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables (also of children started meanwhile) and puts back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
