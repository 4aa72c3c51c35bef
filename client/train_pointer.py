"""A checkpoint in the form in which Ray Train passes checkpoints around: a directory with one small file that names it.

The rule: Ray Train copies what it is given and deletes it when it likes, so it is given the name, never the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..coordinator.catalog import Checkpoint
from ..storage.errors import NotACheckpointError
from ..storage.layout import RunPaths

FILE = "lastgood.json"


class TrainPointer(BaseModel):
    """What the file says. `path`: of the attempt's directory in the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    step: int
    attempt: str
    path: str


def write(folder: Path, store: str, run: str, checkpoint: Checkpoint) -> Path:
    """A directory in `folder` that names a durable checkpoint; the same one when it is asked for again."""
    inside = RunPaths("", run).attempt_dir(checkpoint.step, checkpoint.attempt)
    pointer = TrainPointer(
        run=run, step=checkpoint.step, attempt=checkpoint.attempt, path=f"{store.rstrip('/')}/{inside}"
    )
    place = folder / checkpoint.attempt
    place.mkdir(exist_ok=True)
    (place / FILE).write_text(pointer.model_dump_json(indent=2) + "\n")
    return place


def read(folder: Path) -> str:
    """The path that a directory names, for resume. Raises NotACheckpointError when it is of another kind."""
    place = folder / FILE
    try:
        return TrainPointer.model_validate_json(place.read_bytes()).path
    except (OSError, ValidationError) as error:
        raise NotACheckpointError(
            f"{folder} was not made by member.train_checkpoint() ({FILE}: {error}). Nothing was touched. Resume from "
            "'auto', a step, or the path of a checkpoint.",
            path=str(folder),
        ) from error
