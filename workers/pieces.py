"""Pieces of tensors: what of a tensor lives in this process, and what of it lies in a checkpoint.

The rule: every live tensor is a *box* (offsets and sizes) of a global tensor, a plain tensor being the whole box.
Saving names the box; loading asks for a box and gets it out of whatever pieces were saved, so a checkpoint loads at
any world size. torch.distributed.checkpoint's planner computes which part of which piece is read. No collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..storage.errors import IntegrityError, UsageError
from ..storage.tree import ShardedPiece


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, in elements. `local` is the tensor that holds it here: never a copy."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)


def box_of(tensor: torch.Tensor, where: str) -> Box:
    """What of `tensor` lives here. Raises UsageError for a DTensor that is a sum still to be made (Partial)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Box(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{where} is a DTensor with placements {tensor.placements}: a partial sum has no value of its own to save. "
            "Nothing was captured; redistribute it first.",
            path=where,
        )
    local = tensor._local_tensor
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(sizes) != tuple(local.shape) and (local.numel() or math.prod(sizes)):  # empty is empty in any shape
        raise UsageError(
            f"{where}: this rank holds {tuple(local.shape)} of {tuple(tensor.shape)}, and its placements "
            f"{tensor.placements} say {tuple(sizes)}. Nothing was captured; this way of sharding is not supported.",
            path=where,
        )
    if local.numel() == 0:
        offsets = tuple(min(o, g) for o, g in zip(offsets, tensor.shape, strict=True))
    return Box(tuple(tensor.shape), tuple(offsets), local)


def leaf_of(tensor: torch.Tensor, where: str) -> torch.Tensor | ShardedPiece:
    """The leaf that stands for `tensor` in a state tree: the live local tensor, with its place when it is a part."""
    box = box_of(tensor, where)
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return box.local
    return ShardedPiece(box.local, box.global_shape, box.offsets)


@dataclass(frozen=True)
class SavedPiece:
    """One saved box. `read` gives its verified bytes as a tensor in host memory, to be read only."""

    member: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class SavedTensor:
    """A tensor as a checkpoint holds it: a set of boxes by several members, none of them read yet."""

    def __init__(
        self,
        where: str,
        dtype: torch.dtype,
        global_shape: tuple[int, ...],
        pieces: Sequence[SavedPiece],
        *,
        sharded: bool,
        others: Callable[[], SavedTensor] | None = None,
    ) -> None:
        """`pieces` are distinct boxes; `sharded` tells that they were parts of a DTensor. `where` is for errors.

        `others` gives the tensor out of every member's shard; asked only for a box that `pieces` do not hold.
        """
        self.where = where
        self.sharded = sharded
        self.dtype = dtype
        self.global_shape = global_shape
        self.pieces = tuple(pieces)
        self._others = others

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.global_shape)}"

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The box in host memory, to be read only. Raises IntegrityError when the pieces do not cover it."""
        offsets, sizes = tuple(offsets), tuple(sizes)
        if math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=self.dtype)
        for piece in self.pieces:
            if piece.offsets == offsets and piece.sizes == sizes:
                return piece.read()
        if self._others is not None:
            return self._others().box(offsets, sizes)
        return self._assemble(offsets, sizes)

    def whole(self) -> torch.Tensor:
        """The whole tensor in host memory, to be read only."""
        return self.box((0,) * len(self.global_shape), self.global_shape)

    def _assemble(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        pieces = [piece for piece in self.pieces if math.prod(piece.sizes)]
        plan = create_read_items_for_chunk_list(
            self.where,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size(self.global_shape),
                chunks=[_chunk(piece.offsets, piece.sizes) for piece in pieces],
            ),
            [_chunk(offsets, sizes)],
        )
        covered = sum(math.prod(item.lengths) for item in plan)
        if covered != math.prod(sizes):
            raise IntegrityError(
                f"{self.where}: the saved pieces give {covered} of the {math.prod(sizes)} elements of the box "
                f"{sizes} at {offsets} of {self.global_shape}; they are from {_members(pieces)}. Nothing was touched; "
                "resume from another checkpoint.",
                path=self.where,
            )
        result = torch.empty(sizes, dtype=self.dtype)
        for item in plan:
            piece = pieces[item.storage_index.index or 0]
            source, target = piece.read(), result
            for dim, length in enumerate(item.lengths):
                source = source.narrow(dim, item.storage_offsets[dim], length)
                target = target.narrow(dim, item.dest_offsets[dim], length)
            target.copy_(source)
        return result


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _members(pieces: Sequence[SavedPiece]) -> str:
    return ", ".join(sorted({piece.member for piece in pieces})) or "no member"


def whole_tree(tree: Any) -> Any:
    """The tree with whole tensors in host memory in place of its SavedTensors, however deep; to be read only."""
    if isinstance(tree, SavedTensor):
        return tree.whole()
    if isinstance(tree, dict):
        return {key: whole_tree(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(whole_tree(value) for value in tree)
    return tree
