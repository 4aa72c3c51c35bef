"""Shards that are as they were in the save before: a reference policy, a frozen base. They get a second name, no copy.

The rule: a shard is hashed before it is written only where the two saves before held the same bytes, so that what
changes is never hashed twice. The file that gets the second name was whole and synced when it was written, and its
bytes are read from the disk again and compared with this save's own image: one that has rotted is written anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..coordinator.messages import MemberId
from ..storage.digest import BlockDigests, digest_blocks
from ..storage.files import WriteProgress, link_image

Key = tuple[MemberId, str]  # member, component


@dataclass(frozen=True)
class _Saved:
    """A component's shard in the last save."""

    place: Path
    digests: BlockDigests
    unchanged: bool  # it was the same in the save before that


class Unchanged:
    """Of one stager; it knows only what it has written itself."""

    def __init__(self, threads: int, start_thread: Callable[[], None]) -> None:
        """`threads` hash one shard; each calls `start_thread` first."""
        self._threads = threads
        self._start_thread = start_thread
        self._last: dict[Key, _Saved] = {}

    def link(self, key: Key, payload: memoryview, place: Path, progress: WriteProgress) -> BlockDigests | None:
        """Makes `place` a second name of the last save's file where that holds these bytes; blocks.

        Answers None when it must be written. Raises StagingError, also once `progress` was given up.
        """
        last = self._last.get(key)
        if last is None or not last.unchanged or last.digests.nbytes != len(payload):
            return None
        found = digest_blocks(payload, last.digests.block_bytes, self._threads, self._start_thread)
        progress.check(place, len(payload))
        if found != last.digests or not link_image(last.place, place, payload):
            return None
        progress.add(len(payload))
        return found

    def note(self, key: Key, place: Path, digests: BlockDigests) -> None:
        """The component's shard stands there now, whole."""
        last = self._last.get(key)
        self._last[key] = _Saved(place, digests, last is not None and last.digests == digests)
