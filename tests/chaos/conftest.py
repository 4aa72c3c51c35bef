"""The slice of the campaign that CI runs: one field for a few trials with fixed plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_trials.py":
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """A field of two raylets; failed trials leave their directories under pytest's own."""
    with Campaign(slots=2, kept=tmp_path_factory.mktemp("failed")) as running:
        yield running
