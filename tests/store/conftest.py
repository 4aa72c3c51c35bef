"""Every store that exists, each as one parameter of the fixture `store`: the conformance suite runs against all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.storage.store import Store, open_store


@pytest.fixture(params=["path", "file-url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store."""
    root = tmp_path / "a store"
    root.mkdir()
    return open_store(str(root) if request.param == "path" else "file://" + str(root).replace(" ", "%20"))
