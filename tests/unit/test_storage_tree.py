"""A tree comes back equal in type and in every bit, or is refused by the path of what cannot be stored."""

from __future__ import annotations

import collections
import dataclasses
import enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lastgood.storage.errors import EncodeError, IntegrityError, UsageError
from lastgood.storage.image import ImageLayout, read_image
from lastgood.storage.tree import ShardedPiece, flatten, rebuild, register_enum
from tests.unit.storage_samples import Color, same, tensor_of, torch_dtypes, trees


def round_trip(tree: Any) -> Any:
    flat = flatten(tree)
    layout = ImageLayout.of(flat)
    buffer = bytearray(layout.nbytes)
    layout.write_into(buffer, flat)
    return read_image(buffer, copy=True)


@given(trees)
@settings(deadline=None, max_examples=300)
def test_every_tree_comes_back_equal_in_every_bit(tree: Any) -> None:
    assert same(tree, round_trip(tree))


@given(trees)
@settings(deadline=None, max_examples=50)
def test_rebuild_of_the_live_leaves_gives_the_tree_without_an_image(tree: Any) -> None:
    flat = flatten(tree)
    assert same(tree, rebuild(flat.skeleton, flat.leaves))


@pytest.mark.parametrize("dtype", torch_dtypes(), ids=str)
def test_every_torch_dtype_round_trips_in_every_form(dtype: torch.dtype) -> None:
    square = tensor_of(dtype, (5, 6), 7)
    tree = {
        "plain": tensor_of(dtype, (3, 4), 1),
        "zero_dim": tensor_of(dtype, (), 2),
        "empty": tensor_of(dtype, (0, 3), 3),
        "transposed": square.t(),
        "rows": tensor_of(dtype, (9,), 4)[1::2],
        "expanded": tensor_of(dtype, (1, 3), 5).expand(4, 3),
        "shares_with_transposed": square[2:],
    }
    back = round_trip(tree)
    assert same(tree, back)
    assert (
        back["transposed"].untyped_storage().data_ptr() == back["shares_with_transposed"].untyped_storage().data_ptr()
    )


def test_all_torch_dtypes_are_stored_or_refused_by_name() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert every - set(torch_dtypes()) == quantized


def test_a_quantized_tensor_is_refused_by_path_and_dtype() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(EncodeError, match=r'state\["w"\] is a quantized tensor \(torch.qint8\)'):
        flatten({"w": quantized})


def test_a_tied_tensor_is_stored_once_and_is_one_object_again() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    flat = flatten({"embed": weight, "head": weight, "alias": weight.data})
    assert len(flat.specs) == 1
    back = round_trip({"embed": weight, "head": weight, "alias": weight.data})
    assert back["embed"] is back["head"] is back["alias"]
    assert type(back["embed"]) is torch.Tensor and not back["embed"].requires_grad


def test_overlapping_views_share_one_memory_again() -> None:
    base = torch.arange(100, dtype=torch.float32)
    tree = {"a": base[:60], "b": base[40:], "c": base[44:54].view(2, 5).t(), "raw": base.view(torch.uint8)[161:170]}
    flat = flatten(tree)
    assert [spec.nbytes for spec in flat.specs] == [400]
    back = round_trip(tree)
    assert same(tree, back)
    back["a"][44] = -1.0
    assert back["b"][4] == -1.0 and back["c"][0, 0] == -1.0


def test_disjoint_views_of_one_storage_are_stored_apart() -> None:
    flat_parameters = torch.randn(1000)
    flat = flatten({"a": flat_parameters[:10], "b": flat_parameters[990:]})
    assert [spec.nbytes for spec in flat.specs] == [40, 40]


def test_a_view_of_little_in_a_large_storage_costs_only_itself() -> None:
    flat = flatten([torch.zeros(1_000_000)[5:8]])
    assert [spec.nbytes for spec in flat.specs] == [12]


def test_an_expanded_tensor_costs_only_its_memory() -> None:
    flat = flatten([torch.ones(1).expand(1_000_000)])
    assert [spec.nbytes for spec in flat.specs] == [4]
    assert same(round_trip([torch.ones(1).expand(50)]), [torch.ones(50)])


def test_conjugated_and_negated_views_keep_their_values() -> None:
    values = tensor_of(torch.complex64, (4,), 3)
    tree = {"conj": values.conj(), "neg": values.conj().imag, "plain": values}
    assert same(tree, round_trip(tree))


def test_the_same_array_in_two_places_is_one_array_again() -> None:
    array = np.arange(6)
    back = round_trip([array, array])
    assert back[0] is back[1]


def test_flatten_copies_nothing() -> None:
    tensor, array = torch.ones(3), np.ones(3)
    flat = flatten([tensor, array])
    assert flat.leaves[0] is tensor and flat.leaves[1] is array


def test_ordered_dict_and_size_come_back_as_dict_and_tuple() -> None:
    back = round_trip(collections.OrderedDict(shape=torch.Size([2, 3])))
    assert type(back) is dict and same(back, {"shape": (2, 3)})


def test_a_sharded_piece_comes_back_and_is_reported_as_a_chunk() -> None:
    piece = ShardedPiece(torch.arange(6.0).view(2, 3), (8, 3), (4, 0))
    layout = ImageLayout.of(flatten({"layers": [{"weight": piece}]}))
    (chunk,) = layout.chunks
    assert (chunk.fqn, chunk.dtype) == ("layers.0.weight", "float32")
    assert (chunk.global_shape, chunk.offsets, chunk.sizes) == ((8, 3), (4, 0), (2, 3))
    assert same(round_trip({"w": piece}), {"w": piece})


def test_a_piece_outside_of_its_tensor_is_refused() -> None:
    with pytest.raises(EncodeError, match=r"\(2, 3\) at \(7, 0\) is outside of \(8, 3\)"):
        flatten(ShardedPiece(torch.zeros(2, 3), (8, 3), (7, 0)))


class _Named(NamedTuple):
    x: int


@dataclasses.dataclass
class _Data:
    x: int


class _Plain(enum.Enum):
    ONE = 1


class _Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1, 2}, "builtins.set"),
        (_Named(1), "_Named"),
        (_Data(1), "_Data"),
        (object(), "builtins.object"),
        (collections.defaultdict(list), "collections.defaultdict"),
        (bytearray(b"x"), "builtins.bytearray"),
        (1j, "builtins.complex"),
        (_Plain.ONE, "an enum that is not registered"),
        (np.array([object()]), "the object dtype object"),
        (np.zeros(2, [("a", "<i4")]), "the structured dtype"),
        (np.array(["a"]), "non-numeric dtype"),
        (np.datetime64(3, "s"), "numpy scalar of dtype datetime64"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.zeros(2).as_subclass(_Sub), "subclass _Sub"),
        ({object(): 1}, "a key of type object"),
        ({b"x": 1}, "a key of type bytes"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_by_its_path(value: Any, says: str) -> None:
    with pytest.raises(EncodeError) as caught:
        flatten({"optimizer": {"groups": [value]}})
    assert says in str(caught.value)
    assert caught.value.path.startswith('state["optimizer"]["groups"][0]')
    assert "Nothing was saved" in str(caught.value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(EncodeError, match=r'state\["a"\]\[1\] is a dict that contains itself'):
        flatten(tree)


def test_the_same_list_in_two_places_is_no_cycle() -> None:
    shared = [1, 2]
    assert same(round_trip([shared, shared]), [[1, 2], [1, 2]])


def test_a_tree_nested_too_deep_is_refused_and_one_at_the_limit_is_not() -> None:
    deep: Any = 1
    for _ in range(128):
        deep = {(1, 2): (deep,)} if isinstance(deep, int) else [deep]
    with pytest.raises(EncodeError, match="nested too deep"):
        flatten(deep)
    assert same(round_trip(deep[0]), deep[0])


def test_names_that_collide_or_are_reserved_stay_apart() -> None:
    tree = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__skeleton__": torch.full((1,), 2.0),
        "__metadata__": torch.full((1,), 3.0),
        "": torch.full((1,), 4.0),
        1: torch.full((1,), 5.0),
        "1": torch.full((1,), 6.0),
        "\ud800": torch.full((1,), 7.0),
    }
    names = [spec.name for spec in flatten(tree).specs]
    assert len(set(names)) == len(names) and {"a.b", "a.b~2"} <= set(names)
    assert same(tree, round_trip(tree))


def test_an_enum_that_is_not_registered_is_never_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flatten(Color.RED)
    monkeypatch.setattr("lastgood.storage.enums._by_name", {})
    with pytest.raises(UsageError, match="register_enum"):
        rebuild(flat.skeleton, flat.leaves)


def test_a_member_that_changed_its_value_is_an_error_not_another_member() -> None:
    flat = flatten(register_enum(enum.Enum("Phase", {"UP": 1}, module=__name__)).UP)
    register_enum(enum.Enum("Phase", {"UP": 2}, module=__name__))  # the class after a change of the code
    with pytest.raises(UsageError, match="does not have"):
        rebuild(flat.skeleton, flat.leaves)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "os.system"},
        {"$": "leaf", "i": 3},
        {"$": "leaf", "i": -1},
        {"$": "int", "hex": 7},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1, 2, 3]]},
        {"$": "dtype", "name": "load"},
        {"$": "scalar", "dtype": "O", "hex": "00"},
        {"$": "bytes", "base64": "?"},
        {"$": "float", "hex": "00"},
        {"$": "tuple", "items": "ab"},
        {"$": []},
    ],
    ids=str,
)
def test_a_malformed_skeleton_is_an_integrity_error(node: Any) -> None:
    with pytest.raises(IntegrityError, match="skeleton is malformed"):
        rebuild({"leaves": [], "tree": node}, [])


def test_storage_without_tensors_is_usable_without_torch(tmp_path: Path) -> None:
    from tests.unit.storage_samples import run_child

    child = run_child(
        """
import sys, numpy as np
from lastgood.storage import image, files, manifest, store, layout, verify, digest, ids, tree, failpoints
tree_in = {"a": [1, 2.5, (None, b"x" * 2000)], "np": np.arange(3)}
flat = tree.flatten(tree_in); plan = image.ImageLayout.of(flat); buffer = bytearray(plan.nbytes)
plan.write_into(buffer, flat); back = image.read_image(buffer)
assert back["a"] == tree_in["a"] and (back["np"] == tree_in["np"]).all()
heavy = {"torch", "ray", "boto3"} & set(sys.modules)
assert not heavy, heavy
"""
    )
    assert child.returncode == 0, child.stderr
