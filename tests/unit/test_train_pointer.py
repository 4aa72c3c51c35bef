"""What Ray Train is given names a checkpoint; it comes back as a path, and nothing else passes for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.client import train_pointer
from lastgood.coordinator.catalog import Checkpoint, Standing
from lastgood.storage.errors import NotACheckpointError

FOUND = Checkpoint(20, "01J8XTRAIN", 3, 7, Standing.DURABLE)


def test_the_directory_names_the_attempt_in_the_store_and_is_the_same_when_asked_again(tmp_path: Path) -> None:
    place = train_pointer.write(tmp_path, "/mnt/ckpts/", "qwen", FOUND)
    assert train_pointer.write(tmp_path, "/mnt/ckpts", "qwen", FOUND) == place
    assert [file.name for file in place.iterdir()] == [train_pointer.FILE]
    assert train_pointer.read(place) == "/mnt/ckpts/qwen/global_step_20/01J8XTRAIN"


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"run": "qwen"}', b'{"path": 3}'])
def test_a_checkpoint_of_somebody_else_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / train_pointer.FILE).write_bytes(content)
    with pytest.raises(NotACheckpointError, match=r"was not made by member\.train_checkpoint"):
        train_pointer.read(tmp_path)
