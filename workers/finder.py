"""Finds shards for a resume: on this node, at a given path, at the node that wrote them, in the store.

A file that is found is only said to be of the right length. Whoever reads it checks its digest, and asks again with the
paths that it rejects. What is fetched lands beside the attempts and is deleted after the resume.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ..coordinator.messages import AttemptHead
from ..storage.errors import IntegrityError, LastgoodError, StagingError
from ..storage.manifest import ShardRecord
from ..storage.store import Store
from .disk import NodeDisk

log = logging.getLogger("lastgood.stager")

READ_BYTES = 8 << 20  # one piece of a shard that travels

PeerRead = Callable[[str, AttemptHead, str], AsyncIterator[bytes]]  # (node, attempt, shard path) -> pieces
Run = Callable[..., Awaitable[Any]]  # (what it does, the call, its arguments): runs it in a thread of its kind


class Finder:
    """`on_disk` and `at_store` run blocking calls in the stager's lanes."""

    def __init__(self, disk: NodeDisk, on_disk: Run, store: Store, at_store: Run, peer_read: PeerRead) -> None:
        self._disk = disk
        self._on_disk = on_disk
        self._store = store
        self._at_store = at_store
        self._peer_read = peer_read
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def locate(
        self, head: AttemptHead, record: ShardRecord, rejected: Sequence[str], source: str | None
    ) -> tuple[str, str] | None:
        """A file here that should hold the shard, and the tier it is from; None when every source was rejected.

        `rejected` are paths that the agent found broken. Order: local disk, `source` (resume from a path), the node
        that wrote it, the store.
        """
        async with self._locks.setdefault((head.attempt, record.path), asyncio.Lock()):
            places = [(Path(source) / record.path, "path")] if source is not None else []
            try:
                places.insert(0, (self._place(head, record.path), "local"))
            except IntegrityError as error:  # a link that leads elsewhere is not followed
                log.warning("a shard is passed over: %s", error)
            for place, tier in places:
                if str(place) not in rejected and await self._is_there(place, record):
                    return str(place), tier
            fetches: list[tuple[str, Callable[[AttemptHead, ShardRecord, Path], Awaitable[None]]]] = []
            if record.node != self._disk.node:
                fetches.append(("peer", self._fetch_from_peer))
            fetches.append(("store", self._fetch_from_store))
            for tier, fetch in fetches:
                place = self._disk.fetched_file(head, tier, record.path)
                if str(place) in rejected:
                    continue
                if not await self._is_there(place, record):
                    try:
                        await fetch(head, record, place)
                    except (LastgoodError, OSError) as error:
                        log.warning("shard %s of %s not fetched from %s: %s", record.path, head.attempt, tier, error)
                        continue
                return str(place), tier
            return None

    async def read(self, head: AttemptHead, path: str, begin: int, nbytes: int) -> bytes:
        """A piece of a shard here, for another node's resume; shorter at the end of the file, empty past it."""
        return await self._on_disk("read", _read_piece, self._place(head, path), begin, min(nbytes, READ_BYTES))

    def _place(self, head: AttemptHead, path: str) -> Path:
        return self._disk.paths.place(self._disk.paths.shard(head.step, head.attempt, path))

    async def _is_there(self, place: Path, record: ShardRecord) -> bool:
        return await self._on_disk("look at", _has_size, place, record.nbytes)

    async def _fetch_from_peer(self, head: AttemptHead, record: ShardRecord, place: Path) -> None:
        with place.open("wb") as file:
            async for piece in self._peer_read(record.node, head, record.path):
                await self._on_disk("write", file.write, piece)

    async def _fetch_from_store(self, head: AttemptHead, record: ShardRecord, place: Path) -> None:
        key = self._disk.paths.shard(head.step, head.attempt, record.path)
        with place.open("wb") as file:
            for begin in range(0, record.nbytes, READ_BYTES):
                end = min(begin + READ_BYTES, record.nbytes)
                piece = await self._at_store(f"reading {key}", self._store.read_range, key, begin, end)
                await self._on_disk("write", file.write, piece)


def _has_size(place: Path, nbytes: int) -> bool:
    try:
        return place.is_file() and place.stat().st_size == nbytes
    except OSError:
        return False


def _read_piece(place: Path, begin: int, nbytes: int) -> bytes:
    try:
        with place.open("rb") as file:
            file.seek(begin)
            return file.read(nbytes)
    except OSError as error:
        raise StagingError(f"{place} cannot be read: {error}", path=str(place)) from error
