"""One real Ray cluster of two raylets for all stories; each story has its own run, directories and actors."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster

from lastgood.storage import failpoints
from tests.cluster import world as world_module
from tests.cluster.world import World
from tests.nursery import newborn
from tests.nursery.nursery import Nursery

ray.cloudpickle.register_pickle_by_value(world_module)  # workers need not find the tests on their path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in item.path.parts:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def failpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where failpoints are armed for every process of the cluster (they inherit the variable)."""
    folder = tmp_path_factory.mktemp("failpoints")
    os.environ[failpoints.VARIABLE] = str(folder)
    return folder


@pytest.fixture(scope="session")
def nursery(failpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where the raylets get their workers from."""
    folder = tmp_path_factory.mktemp("nursery")
    nursery = Nursery(folder, dict(os.environ))
    os.environ[newborn.SOCKET] = nursery.address
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def cluster(nursery: Nursery) -> Iterator[Cluster]:
    """Two raylets, labelled slot=0 and slot=1, so that a staging template gives each its own directory."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # A raylet that is gone counts as dead after about five seconds; Ray's own default is fifteen and more.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
    shape: dict[str, Any] = {
        "num_cpus": 16,
        "object_store_memory": 100 << 20,
        "include_dashboard": False,
        "setup_worker_path": newborn.__file__,
    }
    raylets = Cluster(initialize_head=True, head_node_args={**shape, "labels": {"slot": "0"}, "_system_config": health})
    raylets.add_node(**{**shape, "labels": {"slot": "1"}})
    ray.init(address=raylets.address, namespace="tests", log_to_driver=False)
    yield raylets
    ray.shutdown()
    raylets.shutdown()


@pytest.fixture
def world(request: pytest.FixtureRequest, cluster: Cluster, failpoint_dir: Path, tmp_path: Path) -> Iterator[World]:
    """One run's world: directories, actors, failpoints; everything it started is ended afterwards."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    for left in failpoint_dir.iterdir():
        left.unlink()
    here = World(f"run-{uuid.uuid4().hex[:8]}", tmp_path, failpoint_dir, cluster)
    yield here
    here.end()
