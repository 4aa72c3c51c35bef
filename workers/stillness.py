"""Whether live tensors were written to while they were copied, as far as torch tells.

torch counts in-place writes of each tensor (`_version`); a view and a detached tensor share their base's count. Writes
that it does not count, and that nothing can tell from outside: through `.data`, through numpy or another library on the
same memory, and by kernels that are still running. Updates of optimizers need none of this: the gate holds them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..storage.leaves import ShardedPiece
from ..storage.tensors import problem


def tensors_in(tree: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every torch tensor of a state tree, with its dotted name; a ShardedPiece's own part."""
    if isinstance(tree, torch.Tensor):
        yield where, tree
    elif isinstance(tree, ShardedPiece):
        yield from tensors_in(tree.tensor, where)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_in(value, f"{where}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from tensors_in(value, f"{where}.{index}")


class Stillness:
    """Taken before a copy, asked after it."""

    def __init__(self, trees: Mapping[str, Any]) -> None:
        """`trees`: state trees by name, with live tensors."""
        self._before = [
            (name, tensor, tensor._version, tensor.untyped_storage().nbytes())
            for where, tree in trees.items()
            for name, tensor in tensors_in(tree, where)
            if problem(tensor) is None
            and not tensor.is_inference()  # torch counts no writes of these; those are refused
        ]

    def disturbed(self) -> str | None:
        """The first tensor that was written to, or whose memory was given back, since; None when all stood still."""
        for name, tensor, version, nbytes in self._before:
            if tensor._version != version or tensor.untyped_storage().nbytes() != nbytes:
                return name
        return None
