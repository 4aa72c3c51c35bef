"""What a resume makes of objects in the store that it cannot use: it never passes over them in silence."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.coordinator.restore import ResumeTermsOrder
from lastgood.coordinator.service import Service
from lastgood.storage.errors import ResumeError
from lastgood.storage.layout import COMPLETED, RunPaths
from lastgood.storage.manifest import LedgerEntry, Tombstone, read_completed
from tests.unit.storage_samples import sealed
from tests.unit.test_cli_at_rest import commit
from tests.unit.test_service_store import alone

NOW = "2030-01-01T00:00:00Z"


class Stored:
    """One checkpoint in the store of a run whose nodes are all new."""

    def __init__(self, root: Path, step: int, sequence: int) -> None:
        self.folder = commit(root / "store", step, sequence, run="run")
        self.completed = self.folder / COMPLETED
        found = read_completed(self.completed.read_bytes(), where="COMPLETED")
        assert not isinstance(found, Tombstone)
        entry = LedgerEntry(
            run=found.run,
            attempt=found.attempt,
            step=found.step,
            epoch=found.epoch,
            sequence=found.sequence,
            nodes=found.participants,
            manifest_sha256=found.manifest_sha256,
            committed_at=found.committed_at,
        )
        self.ledger = root / "store" / RunPaths("", "run").ledger(found.epoch, found.sequence)
        self.ledger.parent.mkdir(parents=True, exist_ok=True)
        self.ledger.write_bytes(entry.to_bytes())


def empty(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(b"")


def by_another_lastgood(path: Path) -> None:
    path.write_bytes(sealed({**json.loads(path.read_bytes()), "format_version": 9}))


def served(root: Path, scene: Callable[[Service], object], mode: int | str = "auto") -> tuple[list[int], list[str]]:
    """(steps that are offered, sentences told as lost) by a new coordinator; `scene` may do more with it."""

    async def run() -> tuple[list[int], list[str]]:
        service = await alone(root)
        try:
            assert service.driver is not None
            offered, lost = await service.driver.candidates(mode)
            made = scene(service)
            if asyncio.iscoroutine(made):
                await made
            return [json.loads(one.manifest)["step"] for one in offered], lost
        finally:
            await service.end()

    return asyncio.run(run())


def nothing_more(_: Service) -> None:
    return None


async def from_scratch(service: Service) -> None:
    assert service._resuming is not None
    with pytest.raises(ResumeError, match="no checkpoint to resume from"):
        await service._resuming.restore("auto", ResumeTermsOrder(30.0), lambda: 30.0)


def test_a_run_whose_only_checkpoint_is_damaged_is_not_begun_from_scratch(tmp_path: Path) -> None:
    only = Stored(tmp_path, 500, 2)
    empty(only.completed, only.ledger)
    offered, lost = served(tmp_path, from_scratch)
    assert offered == []
    for path, sentence in zip((only.completed, only.ledger), sorted(lost), strict=True):
        assert sentence.startswith(str(path.relative_to(tmp_path / "store")))


def test_a_damaged_marker_is_named_and_not_called_gone(tmp_path: Path) -> None:
    empty(Stored(tmp_path, 500, 2).completed)
    _, (sentence,) = served(tmp_path, from_scratch)
    assert sentence.startswith("step 500 ")
    assert f"/{COMPLETED} is not a whole COMPLETED" in sentence
    assert "neither they nor the store" not in sentence


@pytest.mark.parametrize("ledger_too", [False, True], ids=["marker", "marker and ledger entry"])
def test_a_damaged_checkpoint_that_is_or_may_be_newer_is_told_as_lost(tmp_path: Path, ledger_too: bool) -> None:
    Stored(tmp_path, 400, 1)
    newest = Stored(tmp_path, 500, 2)
    empty(newest.completed, *([newest.ledger] if ledger_too else []))
    offered, lost = served(tmp_path, nothing_more)
    assert offered == [400]
    assert any(newest.folder.name in sentence for sentence in lost)


def test_what_is_damaged_and_certainly_older_is_logged_and_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oldest, old = Stored(tmp_path, 300, 1), Stored(tmp_path, 400, 2)
    Stored(tmp_path, 500, 3)
    empty(oldest.ledger, old.completed)
    (oldest.folder / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert served(tmp_path, nothing_more) == ([500], [])
    assert old.folder.name in caplog.text
    assert oldest.folder.name in caplog.text


def test_a_marker_in_another_ones_place_is_told(tmp_path: Path) -> None:
    Stored(tmp_path, 400, 1)
    newest = Stored(tmp_path, 500, 2)
    newest.folder.rename(newest.folder.parent / "elsewhere")
    offered, lost = served(tmp_path, nothing_more)
    assert offered == [400]
    assert any("global_step_500/elsewhere/COMPLETED speaks of step 500" in sentence for sentence in lost)


def test_a_resume_at_a_step_is_not_told_of_another_steps_damage(tmp_path: Path) -> None:
    Stored(tmp_path, 400, 1)
    newest = Stored(tmp_path, 500, 2)
    newest.ledger.unlink()
    empty(newest.completed)
    assert served(tmp_path, nothing_more, 400) == ([400], [])
    offered, (sentence,) = served(tmp_path, nothing_more, 500)
    assert offered == []
    assert newest.folder.name in sentence


@pytest.mark.parametrize("newer", [True, False], ids=["all of it", "only what is older"])
@pytest.mark.parametrize("mode", ["auto", "latest"])
def test_a_resume_never_passes_over_what_another_lastgood_wrote(tmp_path: Path, mode: str, newer: bool) -> None:
    old, new = Stored(tmp_path, 400, 1), Stored(tmp_path, 500, 2)
    for one in (old, new) if newer else (old,):
        by_another_lastgood(one.completed)
        by_another_lastgood(one.ledger)
    with pytest.raises(ResumeError, match="format version 9, and this lastgood reads version") as caught:
        served(tmp_path, nothing_more, mode)
    assert f"run/global_step_{500 if newer else 400}/" in str(caught.value)


def test_a_step_that_this_lastgood_wrote_can_still_be_named(tmp_path: Path) -> None:
    Stored(tmp_path, 400, 1)
    new = Stored(tmp_path, 500, 2)
    by_another_lastgood(new.completed)
    offered, _ = served(tmp_path, nothing_more, 400)
    assert offered == [400]


def flip_sequence(path: Path, before: int, after: int) -> None:
    """One bit, so that the file is still JSON and speaks of another place in the order."""
    assert (before ^ after).bit_count() == 1
    data = path.read_bytes()
    flipped = data.replace(f'"sequence":{before}'.encode(), f'"sequence":{after}'.encode())
    assert sum((a ^ b).bit_count() for a, b in zip(data, flipped, strict=True)) == 1
    path.write_bytes(flipped)


def test_a_flipped_bit_in_the_order_of_the_newest_is_told(tmp_path: Path) -> None:
    Stored(tmp_path, 400, 5)
    newest = Stored(tmp_path, 500, 6)
    flip_sequence(newest.completed, 6, 4)
    offered, (sentence,) = served(tmp_path, nothing_more)
    assert offered == [400]
    assert str(newest.completed.relative_to(tmp_path / "store")) in sentence


def test_a_flipped_bit_in_the_order_of_an_older_one_makes_it_no_newer(tmp_path: Path) -> None:
    old = Stored(tmp_path, 400, 5)
    Stored(tmp_path, 500, 6)
    flip_sequence(old.completed, 5, 7)
    assert served(tmp_path, nothing_more) == ([500], [])


def test_a_damaged_checkpoint_under_a_path_is_told_as_lost_by_a_resume_from_there(tmp_path: Path) -> None:
    Stored(tmp_path, 400, 1)
    newest = Stored(tmp_path, 500, 2)
    (newest.folder / "manifest.json").write_bytes(b"{}")

    async def from_the_path(service: Service) -> None:
        assert service._resuming is not None
        (candidate,), (sentence,) = await service._resuming._candidates(str(tmp_path / "store" / "run"), lambda: 30.0)
        assert "global_step_400" in candidate.where
        assert sentence.startswith(f"{newest.folder} is broken: ")

    served(tmp_path, from_the_path)
