"""A disk that answers with an error, at whichever operation of a save, costs one attempt at most, and says why.

LASTGOOD_CRASH_EVERY=1 takes every operation with every error; without it a sample is taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.crash.cluster import DISKS, no_links
from tests.crash.errors import ERRNOS, Errors
from tests.crash.memory import folder_in_memory
from tests.crash.plants import ERROR_PLANTS

EVERY = int(os.environ.get("LASTGOOD_CRASH_EVERY", 0)) or 30
# What is said of each planted bug (part of one of the sentences).
SAYS = {
    "an error of a directory's fsync is swallowed": "nobody was told",
    "an error of the operating system is told as it comes": "a bare OSError was told",
    "the temporary file of a failed write stays": "is left until the next start",
    "the files of a failed attempt stay": "is left of the attempt that failed",
    "a failed write of a shard does not say which": "the file is not named",
}


@pytest.fixture
def errors(request: pytest.FixtureRequest) -> Iterator[Errors]:
    logging.disable(logging.CRITICAL)
    with folder_in_memory() as folder, no_links():
        yield Errors(folder, plant=getattr(request, "param", None))
    logging.disable(logging.NOTSET)


def test_an_error_at_any_operation_costs_one_attempt_at_most_and_names_errno_file_and_node(errors: Errors) -> None:
    faults = errors.faults(EVERY)
    broken = list(errors.broken(faults))
    assert not broken, f"{len(broken)} broken promises, the first:\n" + "\n".join(broken[:3])
    assert errors.fired.total() == len(faults) > len(errors.operations) // 4
    assert set(errors.fired) == {operation.kind for _, operation in errors.operations}
    assert {(fault.disk, fault.errno) for fault in faults} == {(disk, code) for disk in DISKS for code in ERRNOS}
    assert errors.outcomes["lost"] > 20 and errors.outcomes["committed"] > 20


@pytest.mark.parametrize("errors", ERROR_PLANTS, indirect=True)
def test_a_planted_bug_in_the_handling_of_errors_is_found(errors: Errors, request: pytest.FixtureRequest) -> None:
    plant = request.node.callspec.params["errors"]
    assert any(SAYS[plant] in sentence for sentence in errors.broken(errors.faults(20)))
