"""The store is away, slow, full or refuses: local commits go on, nothing is published early, and it catches up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lastgood.storage.layout import RunPaths
from lastgood.storage.manifest import EpochNote
from lastgood.storage.store import FileStore
from tests.containment.disks import ext4, frozen, full, immutable, must, read_only, tmpfs
from tests.containment.small_run import SmallRun, until


@contextlib.contextmanager
def run_with_store(root: Path, kind: str) -> Iterator[SmallRun]:
    with tmpfs(root / "store", "64m") if kind == "tmpfs" else ext4(root / "store", 64):
        FileStore(root / "store").create_exclusive(RunPaths("", "run").epoch(1), EpochNote(epoch=1).to_bytes())
        here = SmallRun(root)
        yield here
        here.close()


def markers(run: SmallRun) -> set[str]:
    """Attempts whose COMPLETED stands in the store."""
    return {path.parent.name for path in (run.store_root / "run").glob("global_step_*/*/COMPLETED")}


FAULTS = {
    "stands still": ("ext4", frozen, ("store",)),
    "is full": ("tmpfs", full, ("store",)),
    "is read-only": ("ext4", read_only, ("store",)),
    "refuses": ("ext4", immutable, ("store", "run")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_saves_commit_while_the_store_is_away_and_are_durable_when_it_is_back(tmp_path: Path, name: str) -> None:
    kind, fault, place = FAULTS[name]
    with run_with_store(tmp_path, kind) as run:
        run.commits(1)
        run.durable(1)
        before = markers(run)
        with fault(tmp_path.joinpath(*place)), run.hurry(ledger_s=0.3, remote_s=1.0, upload_s=0.1):
            for step in range(2, 9):  # more than there are threads for the store, at a coordinator or a stager
                run.commits(step)
            # More uploads fail, or hang, than there are threads: none of them may be missing where a save needs one.
            until(lambda: len(_complaints(run, "Upload")) >= 12, "the failing store is told")
            run.commits(9)
            assert markers(run) == before
            assert not [c for c in run.checkpoints() if c.step > 1 and c.durable]
        for step in range(2, 10):
            run.durable(step)
        run.commits(10)
        run.durable(10)
        assert len(markers(run)) == 10


def _complaints(run: SmallRun, what: str = "") -> list[str]:
    """What the coordinator's attempts tell of calls to the store that failed."""
    return [
        sentence
        for attempt in run.status()["background"]
        for _, sentence in attempt["story"]
        if "failed, again in" in sentence and what in sentence
    ]


@contextlib.contextmanager
def unmounted(place: Path) -> Iterator[None]:
    """Another mount hides the store: an empty directory that takes every file."""
    must("mount", "-t", "tmpfs", "tmpfs", place)
    try:
        yield
        assert not [path for path in place.rglob("*") if path.is_file()], "something was written beside the store"
    finally:
        must("umount", "--lazy", place)


@contextlib.contextmanager
def replaced(place: Path) -> Iterator[None]:
    """Somebody has moved the store's directory away."""
    (place / "run").rename(place / "elsewhere")
    yield
    assert not [path for path in (place / "run").rglob("*") if path.is_file()], "something was written beside the store"
    for path in sorted((place / "run").rglob("*"), reverse=True):
        path.rmdir()
    if (place / "run").exists():
        (place / "run").rmdir()
    (place / "elsewhere").rename(place / "run")


@pytest.mark.parametrize("fault", [unmounted, replaced])
def test_nothing_is_written_where_the_store_was(
    tmp_path: Path, fault: Callable[[Path], AbstractContextManager[None]]
) -> None:
    with run_with_store(tmp_path, "tmpfs") as run:
        run.commits(1)
        run.durable(1)
        with fault(tmp_path / "store"), run.hurry(ledger_s=0.3, remote_s=1.0, upload_s=1.0):
            run.commits(2)
            until(lambda: any("mounted" in sentence for sentence in _complaints(run)), "the lost mount is told")
            run.commits(3)
            assert not [c for c in run.checkpoints() if c.step > 1 and c.durable]
        run.durable(2)
        run.durable(3)
        assert len(markers(run)) == 3
