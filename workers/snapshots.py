"""A snapshot that stands in this node's memory: sealed images, and how far their writes have come. Pure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..coordinator.messages import AttemptHead, HeldSnapshot, MemberId, NodeSnapshot
from ..storage.files import WriteProgress
from ..storage.layout import shard_path
from ..storage.manifest import ShardRecord
from .orders import SealedShard


@dataclass
class StandingSnapshot:
    """One attempt whose images are sealed here and not yet staged."""

    head: AttemptHead
    vote: NodeSnapshot
    shards: tuple[SealedShard, ...]
    held: HeldSnapshot | None = None  # what a later coordinator is told of it
    staged: asyncio.Future[tuple[ShardRecord, ...]] | None = None
    progress: dict[tuple[MemberId, str], WriteProgress] = field(default_factory=dict)  # of the writes, once begun

    @property
    def being_written(self) -> bool:
        return self.staged is not None and not self.staged.done()

    def unwritten(self) -> tuple[list[str], MemberId | None]:
        """What is not on the disk yet, a phrase for each shard, and whose shard the first one is."""
        told: list[str] = []
        first: MemberId | None = None
        for shard in self.shards:
            progress = self.progress.get((shard.member, shard.component))
            if progress is not None and progress.ended:
                continue
            name = shard_path(shard.member.role, shard.member.rank, shard.component)
            how_far = "has not begun" if progress is None else f"has {progress.done_bytes} of {shard.nbytes} bytes"
            told.append(f"{name} {how_far}")
            if progress is not None and first is None:
                first = shard.member
        return told, first
