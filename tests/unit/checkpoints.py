"""Writes and reads checkpoints of members without an agent, a stager or a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lastgood.storage.digest import digest_blocks
from lastgood.storage.image import ImageLayout, read_image
from lastgood.storage.layout import shard_path
from lastgood.storage.manifest import Manifest, MemberRecord, RoleRecord, ShardRecord
from lastgood.storage.tree import flatten
from lastgood.workers.member import Member
from lastgood.workers.shard_reader import ShardCopy

BLOCK_BYTES = 4096  # small, so that a shard has many blocks


def image_of(tree: Any) -> bytes:
    """A state tree as the bytes of its shard file."""
    flat = flatten(tree)
    layout = ImageLayout.of(flat)
    buffer = bytearray(layout.nbytes)
    layout.write_into(buffer, flat)
    return bytes(buffer)


def round_trip(tree: Any) -> Any:
    """A state tree as it comes back from a shard file."""
    return read_image(image_of(tree), copy=True)


def save(folder: Path, member: Member, step: int) -> list[ShardRecord]:
    """Copies the state of the member's open window into shard files below `folder`, as the agent does."""
    records = []
    with member.gate.copying(step):
        for component, tree in member.capture(step).items():
            flat = flatten(tree)
            layout = ImageLayout.of(flat)
            buffer = bytearray(layout.nbytes)
            layout.write_into(buffer, flat)
            path = shard_path(member.id.role, member.id.rank, component)
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(buffer)
            digests = digest_blocks(bytes(buffer), BLOCK_BYTES)
            records.append(
                ShardRecord(
                    role=member.id.role,
                    rank=member.id.rank,
                    component=component,
                    path=path,
                    nbytes=layout.nbytes,
                    block_bytes=BLOCK_BYTES,
                    blocks=digests.blocks,
                    digest=digests.digest,
                    node="node",
                    chunks=layout.chunks,
                )
            )
    return records


def manifest_of(
    step: int, members: Iterable[Member], records: Iterable[ShardRecord], fingerprint: dict[str, Any] | None = None
) -> Manifest:
    """The manifest over the shards of all members."""
    members = list(members)
    counted = [(member.id.role, member.id.rank, member.updates) for member in members]
    roles = {
        member.id.role: RoleRecord(world_size=member.world_size, components=member.component_names)
        for member in members
    }
    return make_manifest(step, roles, counted, records, fingerprint or {})


def make_manifest(
    step: int,
    roles: dict[str, RoleRecord],
    members: Iterable[tuple[str, int, int | None]],
    records: Iterable[ShardRecord],
    fingerprint: dict[str, Any],
) -> Manifest:
    """As manifest_of, from plain data: members are (role, rank, updates)."""
    return Manifest(
        run="run",
        attempt="attempt",
        step=step,
        epoch=1,
        sequence=1,
        kind="manual",
        created_at="2031-05-06T07:08:09Z",
        roles=roles,
        members=tuple(MemberRecord(role=role, rank=rank, node="node", updates=n) for role, rank, n in members),
        participants=("node",),
        shards=tuple(records),
        fingerprint=fingerprint,
    )


def checkpoint(folder: Path, member: Member, step: int = 1) -> Manifest:
    """Marks and saves the only member of a role; answers the manifest."""
    member.mark(step)
    return manifest_of(step, [member], save(folder, member, step), member.fingerprint())


def locate_in(folder: Path) -> Callable[[ShardRecord], ShardCopy]:
    """The shards of `folder` for load.prepare."""
    return lambda record: ShardCopy(folder / record.path)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor: equal exactly when every bit is."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
