"""A stager's folder of images: leftovers of the dead go, of whatever run; those of the living stay."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lastgood.workers import images
from lastgood.workers.images import ImageRoom


def abandoned(root: Path, run: str) -> Path:
    """What a killed stager of a run leaves."""
    folder = root / f"lastgood.{os.getuid()}.{run}.node.killed"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "image-000001").write_bytes(b"the weights of a model")
    return folder


def test_a_starting_stager_frees_the_memory_that_killed_ones_of_any_run_hold(tmp_path: Path) -> None:
    left = [abandoned(tmp_path, "run"), abandoned(tmp_path, "another")]
    stranger = tmp_path / f"lastgood.{os.getuid() + 1}.run.node.killed"
    stranger.mkdir()
    living = ImageRoom(tmp_path, "third", "node", "living")
    room = ImageRoom(tmp_path, "run", "node", "new")
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in (stranger, living.folder, room.folder))
    for each in (living, room):
        each.close()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []

    class Fcntl:
        """A sweeper comes between the making of the folder and its lock, once."""

        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(lock: int, how: int) -> Any:
            if not swept:
                swept.append("swept")
                shutil.rmtree(tmp_path / f"lastgood.{os.getuid()}.run.node.new")
            return fcntl.flock(lock, how)

    monkeypatch.setattr(images, "fcntl", Fcntl)
    room = ImageRoom(tmp_path, "run", "node", "new")
    assert swept
    assert (room.folder / "lock").exists()
    room.close()
