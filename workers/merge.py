"""The shards of one component as one tree. The rule: members that say the same thing must say the same thing.

Boxes of a sharded tensor are collected under one SavedTensor. Everything else (scalars, plain tensors, keys) exists
once per member and must be equal to the last bit, else the error names both members and the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..storage.errors import IntegrityError, UsageError
from ..storage.tree import ShardedPiece
from .component import Tree
from .pieces import SavedPiece, SavedTensor
from .shard_reader import ShardReader

Source = tuple[ShardReader, Tree]  # a shard and a part of its tree


def own_tree(reader: ShardReader, where: str, others: Callable[[], Tree]) -> Tree:
    """The tree of one member's shard with SavedTensors for tensors. `others` gives the merged tree of all members."""

    def convert(node: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(node, dict):
            return {key: convert(value, (*path, key)) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(convert(value, (*path, index)) for index, value in enumerate(node))
        if _is_leaf(node):
            return _saved([(reader, node)], _show(where, path), others=lambda: _at(others(), path))
        return node

    return convert(reader.tree(whole=True), ())


def merged_tree(readers: Sequence[ShardReader], where: str) -> Tree:
    """One tree out of the shards of all members, with SavedTensors for tensors.

    Raises UsageError naming both members where replicas differ, IntegrityError where boxes leave holes.
    """
    return _merge([(reader, reader.tree(whole=False)) for reader in readers], where, ())


def require_agreement(readers: Sequence[ShardReader], where: str) -> Tree:
    """The tree of the first shard, once all others are equal to it. Raises UsageError naming both members."""
    trees = [(reader, reader.tree(whole=True)) for reader in readers]
    _merge(trees, where, ())
    return trees[0][1]


def _merge(sources: Sequence[Source], where: str, path: tuple[Any, ...]) -> Tree:
    first_reader, first = sources[0]
    if _is_leaf(first):
        _require_type(sources, where, path, _is_leaf)
        return _saved(sources, _show(where, path), whole=True)
    _require_type(sources, where, path, lambda node: type(node) is type(first))
    if isinstance(first, dict):
        for reader, node in sources[1:]:
            if node.keys() != first.keys():
                key = sorted(node.keys() ^ first.keys(), key=str)[0]
                raise _differ(first_reader, reader, _show(where, (*path, key)), "only one of them has it")
        return {key: _merge([(r, node[key]) for r, node in sources], where, (*path, key)) for key in first}
    if isinstance(first, (list, tuple)):
        for reader, node in sources[1:]:
            if len(node) != len(first):
                raise _differ(first_reader, reader, _show(where, path), f"{len(first)} and {len(node)} entries")
        items = [_merge([(r, node[i]) for r, node in sources], where, (*path, i)) for i in range(len(first))]
        return items if isinstance(first, list) else tuple(items)
    for reader, node in sources[1:]:
        if not _equal(first, node):
            raise _differ(first_reader, reader, _show(where, path), f"{_brief(first)} and {_brief(node)}")
    return first


def _saved(
    sources: Sequence[Source], where: str, *, whole: bool = False, others: Callable[[], SavedTensor] | None = None
) -> SavedTensor:
    """`whole`: the sources are all members, so their boxes must make up the tensor."""
    first_reader, first = sources[0]
    dtype, shape = _tensor(first).dtype, _global_shape(first)
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Source] = {}
    sharded = False
    for reader, node in sources:
        tensor = _tensor(node)
        if (tensor.dtype, _global_shape(node)) != (dtype, shape):
            raise _differ(
                first_reader, reader, where, f"{dtype}{list(shape)} and {tensor.dtype}{list(_global_shape(node))}"
            )
        sharded |= isinstance(node, ShardedPiece)
        box = (tuple(node.offsets) if isinstance(node, ShardedPiece) else (0,) * tensor.dim(), tuple(tensor.shape))
        if box not in boxes:
            boxes[box] = (reader, node)
        elif not _same_bits(boxes[box], (reader, node)):
            raise _differ(boxes[box][0], reader, where, f"the box {box[1]} at {box[0]} is not the same")
    pieces = [
        SavedPiece(reader.member, offsets, sizes, _fetcher(reader, _tensor(node)))
        for (offsets, sizes), (reader, node) in boxes.items()
    ]
    held = sum(math.prod(piece.sizes) for piece in pieces)
    if whole and held != math.prod(shape):
        raise IntegrityError(
            f"{where}: the saved boxes hold {held} elements, and a tensor of {list(shape)} has {math.prod(shape)}; "
            f"they are from {', '.join(sorted(piece.member for piece in pieces))}. Nothing was touched; resume from "
            "another checkpoint.",
            path=where,
        )
    return SavedTensor(where, dtype, shape, pieces, sharded=sharded, others=others)


def _fetcher(reader: ShardReader, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: reader.fetch(tensor)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, torch.Tensor) or (isinstance(node, ShardedPiece) and isinstance(node.tensor, torch.Tensor))


def _tensor(node: Any) -> torch.Tensor:
    return node.tensor if isinstance(node, ShardedPiece) else node


def _global_shape(node: Any) -> tuple[int, ...]:
    return tuple(node.global_shape) if isinstance(node, ShardedPiece) else tuple(node.shape)


def _same_bits(one: Source, other: Source) -> bool:
    left, right = (reader.fetch(_tensor(node)).contiguous() for reader, node in (one, other))
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


def _require_type(sources: Sequence[Source], where: str, path: tuple[Any, ...], fits: Callable[[Any], bool]) -> None:
    first_reader, first = sources[0]
    for reader, node in sources[1:]:
        if not fits(node):
            what = f"a {type(first).__name__} and a {type(node).__name__}"
            raise _differ(first_reader, reader, _show(where, path), what)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _show(where: str, path: tuple[Any, ...]) -> str:
    return ".".join([where, *map(str, path)])


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _differ(one: ShardReader, other: ShardReader, where: str, how: str) -> UsageError:
    return UsageError(
        f"{where} is not the same in the shards of members {one.member} and {other.member}: {how}. It can only be "
        "loaded by as many members as it was saved by. Nothing was touched; resume with the same number of members, "
        "or make the ranks agree before saving.",
        path=where,
        members=(one.member, other.member),
    )
