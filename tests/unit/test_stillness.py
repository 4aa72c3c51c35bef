"""Writes that torch counts are seen, and those that it does not are documented: these tests hold the page to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lastgood.storage.leaves import ShardedPiece
from lastgood.workers.stillness import Stillness


def written_through_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def written_through_numpy(tensor: torch.Tensor) -> None:
    array = tensor.detach().numpy()
    array += 1


def written_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def written_through_a_view(tensor: torch.Tensor) -> None:
    tensor.detach()[0].fill_(7)


def given_back(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


SEEN = (written_in_place, written_through_a_view, given_back)
UNSEEN = (written_through_data, written_through_numpy)


def tree_of(tensor: torch.Tensor) -> dict[str, object]:
    return {"still": torch.ones(3), "deep": [{"w": tensor.detach()}], "number": 3}


@pytest.mark.parametrize("write", SEEN)
def test_a_write_that_torch_counts_is_named(write: Callable[[torch.Tensor], None]) -> None:
    tensor = torch.zeros(4, requires_grad=True)
    before = Stillness({"actor:0": {"model": tree_of(tensor)}})
    assert before.disturbed() is None
    write(tensor)
    assert before.disturbed() == "actor:0.model.deep.0.w"


@pytest.mark.parametrize("write", UNSEEN)
def test_a_write_that_torch_does_not_count_is_not_seen(write: Callable[[torch.Tensor], None]) -> None:
    tensor = torch.zeros(4)
    before = Stillness({"actor:0": tree_of(tensor)})
    write(tensor)
    assert tensor.sum() == 4  # it was written
    assert before.disturbed() is None


def test_a_piece_of_a_sharded_tensor_and_tensors_that_share_memory_are_watched() -> None:
    whole = torch.zeros(8)
    left, right = whole[:5], whole[3:]
    piece = torch.zeros(2, 2)
    before = Stillness({"a": {"left": left, "right": right, "piece": ShardedPiece(piece, (4, 2), (0, 0))}})
    piece.mul_(2)
    assert before.disturbed() == "a.piece"
    before = Stillness({"a": {"left": left, "right": right}})
    whole.add_(1)
    assert before.disturbed() == "a.left"


def test_tensors_that_no_checkpoint_takes_are_refused_elsewhere() -> None:
    odd = [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")]
    assert Stillness({"a": odd}).disturbed() is None


def test_tensors_of_inference_mode_have_no_count_and_are_let_be() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    before = Stillness({"a": [tensor]})
    assert before.disturbed() is None
