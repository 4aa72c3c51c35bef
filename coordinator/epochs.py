"""Epochs: the numbers of a run's coordinators, allocated by exclusive create in the store."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..storage.errors import StoreError
from ..storage.ids import utc_text
from ..storage.layout import RunPaths, parse_epoch_name
from ..storage.manifest import EpochNote
from ..storage.store import Store

_TRIES = 100


def claim_epoch(store: Store, paths: RunPaths, owner: str, floor: int, clock: Callable[[], float] = time.time) -> int:
    """A new epoch, higher than every one in the store and than `floor` (the highest that any stager has seen).

    `owner` is this incarnation's token: a create of unknown outcome is read back and compared with it. Raises
    StoreError when the store does not take it.
    """
    for _ in range(_TRIES):
        numbers = (parse_epoch_name(key.rsplit("/", 1)[-1]) for key in store.list(paths.epochs))
        number = 1 + max([floor, *(n for n in numbers if n is not None)])
        note = EpochNote(epoch=number, owner=owner, noted_at=utc_text(clock()))
        key = paths.epoch(number)
        if store.create_exclusive(key, note.to_bytes()):
            return number
        if EpochNote.from_bytes(store.get(key), where=key).owner == owner:
            return number  # the create had landed although it was reported lost
    raise StoreError(
        f"no epoch could be claimed for run {paths.run} in {_TRIES} tries: other coordinators keep starting. Nothing "
        "was changed. Is the run attached from several clusters at once?",
        run=paths.run,
    )
