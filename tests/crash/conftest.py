"""One campaign for all tests of crashes, on disks in memory.

LASTGOOD_CRASH_EVERY and LASTGOOD_CRASH_SAMPLES enlarge it (see campaign.Campaign).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, Recorded
from tests.crash.cluster import no_links
from tests.crash.memory import folder_in_memory


@pytest.fixture(scope="session")
def campaign() -> Iterator[Campaign]:
    logging.disable(logging.CRITICAL)  # what is broken is logged by the product, thousands of times
    try:
        with folder_in_memory() as folder, no_links():
            every, samples = (int(os.environ.get(f"LASTGOOD_CRASH_{name}", 0)) for name in ("EVERY", "SAMPLES"))
            yield Campaign(folder, every=every or 10, samples=samples or 2)
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a campaign of one's own."""
    logging.disable(logging.CRITICAL)
    with folder_in_memory() as one, no_links():
        yield one
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def chapters(campaign: Campaign) -> dict[str, Recorded]:
    """Every chapter, told once to its end and seen whole by the layer."""
    return {chapter.chapter: chapter for chapter in campaign.record()}
