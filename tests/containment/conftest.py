"""A run on plain directories, for the faults that need no disk of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .small_run import SmallRun


@pytest.fixture
def plain_run(tmp_path: Path) -> Iterator[SmallRun]:
    here = SmallRun(tmp_path)
    yield here
    here.close()
