"""Which checkpoints may go, and how one goes from the store. The choice is pure: the catalog comes in, reasons go out.

Never the newest committed, never the newest durable, never the one resumed from, never one that is not durable yet:
local copies are collected only after the remote ones are verified.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..storage.ids import utc_text
from ..storage.layout import COMPLETED, RunPaths
from ..storage.manifest import Completed, Tombstone, read_completed
from ..storage.store import Store
from .catalog import Checkpoint
from .messages import AttemptHead


def to_collect(
    checkpoints: Sequence[Checkpoint], keep_last: int | None, protected: Collection[str]
) -> list[tuple[Checkpoint, str]]:
    """The checkpoints beyond the `keep_last` newest committed ones, oldest first, each with the reason as a sentence.

    `checkpoints`: newest first. `protected`: attempts that stay whatever their age. None keeps all.
    """
    if keep_last is None:
        return []
    committed = [checkpoint for checkpoint in checkpoints if checkpoint.committed]
    newest_durable = next((checkpoint.attempt for checkpoint in committed if checkpoint.durable), None)
    return [
        (checkpoint, f"{keep_last} newer checkpoints are kept (save_total_limit)")
        for checkpoint in reversed(committed[max(keep_last, 1) :])
        if checkpoint.durable and checkpoint.attempt != newest_durable and checkpoint.attempt not in protected
    ]


def collect_remotely(store: Store, paths: RunPaths, head: AttemptHead, reason: str) -> None:
    """Deletes a checkpoint from the store: a tombstone in COMPLETED's place first, then pointer and files.

    The tombstone stays for ever, so that a writer that wakes up late cannot complete the attempt again. May be
    repeated, and must be after a death in the middle (Survey.half_collected); does nothing for an attempt that never
    stood there.
    """
    key = paths.completed(head.step, head.attempt)
    data = store.find(key)
    if data is None:
        return
    if isinstance(read_completed(data, where=key), Completed):
        data = Tombstone(
            run=paths.run,
            attempt=head.attempt,
            step=head.step,
            epoch=head.epoch,
            sequence=head.sequence,
            reason=reason,
            deleted_at=utc_text(time.time()),
        ).to_bytes()
    store.replace(key, data)  # one that stands too: whoever wrote it may have died before it was durable
    pointer = store.find(paths.pointer(head.step))
    if pointer is not None and read_completed(pointer, where=paths.pointer(head.step)).attempt == head.attempt:
        store.delete_many([paths.pointer(head.step)])
    store.delete_many([paths.ledger(head.epoch, head.sequence)])  # a newer commit has its own entry
    folder = paths.attempt_dir(head.step, head.attempt)
    store.sweep(f"{folder}/", 0.0)  # a stager that still uploads here is late, and fails
    store.delete_many([found for found in store.list(f"{folder}/") if found != f"{folder}/{COMPLETED}"])
