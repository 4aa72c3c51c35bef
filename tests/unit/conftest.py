"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.workers.agent import Agent
from tests.unit.stager_world import LocalLink, Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    here = Node(tmp_path)
    yield here
    here.close()


@pytest.fixture
def keeping_node(tmp_path: Path) -> Iterator[Node]:
    """One of a run with snapshot_freq."""
    (tmp_path / "store").mkdir()
    here = Node(tmp_path, images_per_component=2)
    yield here
    here.close()


@pytest.fixture
def agent(node: Node) -> Iterator[Agent]:
    here = Agent("run", LocalLink(node))
    yield here
    here.close()
