"""The image is a plain safetensors file whose header moves only with the structure, and whose damage is found."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lastgood.storage.errors import FormatVersionError, IntegrityError, SnapshotError
from lastgood.storage.image import PAGE_BYTES, ImageLayout, read_image
from lastgood.storage.tree import flatten
from tests.unit.storage_samples import same, tensor_of, torch_dtypes


def image_of(tree: Any) -> bytearray:
    flat = flatten(tree)
    layout = ImageLayout.of(flat)
    buffer = bytearray(b"\xaa" * layout.nbytes)  # what the buffer held before must not show
    layout.write_into(buffer, flat)
    return buffer


def small_state(lr: float = 0.1) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"groups": [{"lr": lr, "betas": (0.9, 0.999)}], "state": {0: {"step": torch.tensor(3.0)}}},
        "rng": np.arange(5, dtype=np.uint32),
        "raw": b"z" * 1500,
    }


def test_the_safetensors_library_reads_every_native_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tree = small_state()
    path.write_bytes(image_of(tree))
    with safe_open(path, "pt") as file:
        assert {"model.w", "model.b", "optimizer.state.0.step", "rng", "raw", "__skeleton__"} == set(file.keys())
        assert same(file.get_tensor("model.w"), tree["model"]["w"])
        assert same(file.get_tensor("model.b"), tree["model"]["b"])
        assert file.metadata()["format"] == "pt"
    assert same(safetensors.torch.load_file(path)["optimizer.state.0.step"], torch.tensor(3.0))
    numbers = {key: value for key, value in tree.items() if key != "model"}  # numpy has no bfloat16
    assert (safetensors.numpy.load(bytes(image_of(numbers)))["rng"] == tree["rng"]).all()


def test_the_safetensors_library_opens_an_image_of_every_dtype(tmp_path: Path) -> None:
    tree = {str(dtype): tensor_of(dtype, (2, 3), 1) for dtype in torch_dtypes()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(image_of({**tree, "nothing": torch.zeros(0, 3), "also nothing": torch.zeros(0)}))
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no dict
            file.get_tensor(name)


def test_data_starts_on_a_page_and_large_elements_come_first() -> None:
    tree = {
        "u8": torch.zeros(3, dtype=torch.uint8),
        "f64": torch.zeros(2, dtype=torch.float64),
        "f16": torch.ones(1).half(),
    }
    tree["c128"] = torch.zeros(1, dtype=torch.complex128)
    layout = ImageLayout.of(flatten(tree))
    begins = {spec.name: begin for spec, begin in zip(layout.specs, layout.begins, strict=True)}
    assert layout.data_start % PAGE_BYTES == 0 and layout.nbytes % PAGE_BYTES == 0
    assert sorted(begins, key=lambda name: begins[name]) == ["c128", "f64", "f16", "u8"]
    assert all(begins[spec.name] % spec.item_bytes == 0 for spec in layout.specs)


def test_a_changed_number_moves_nothing_and_the_plan_is_kept() -> None:
    before, after = flatten(small_state(0.1)), flatten(small_state(1.2345678901234567e-05))
    layout = ImageLayout.of(before)
    assert ImageLayout.of(after, reuse=layout) is layout
    buffer = bytearray(layout.nbytes)
    layout.write_into(buffer, before)
    first = bytes(buffer)
    layout.write_into(buffer, after)
    assert first[: layout.skeleton_at] == buffer[: layout.skeleton_at] and first != buffer
    assert read_image(buffer)["optimizer"]["groups"][0]["lr"] == 1.2345678901234567e-05


def test_equal_trees_give_equal_bytes() -> None:
    assert image_of(small_state()) == image_of(small_state())


def test_a_new_structure_gets_a_new_plan_and_is_never_written_by_the_old_one() -> None:
    layout = ImageLayout.of(flatten({"w": torch.zeros(3)}))
    other = flatten({"w": torch.zeros(4)})
    assert ImageLayout.of(other, reuse=layout) is not layout
    buffer = bytearray(layout.nbytes)
    with pytest.raises(SnapshotError, match=r"w was torch float32\[3\], is torch float32\[4\]"):
        layout.write_into(buffer, other)
    assert buffer == bytearray(layout.nbytes)


def test_a_skeleton_that_outgrows_its_room_gets_a_new_plan() -> None:
    layout = ImageLayout.of(flatten({"log": ""}))
    grown = flatten({"log": "x" * layout.skeleton_bytes})
    assert not layout.fits(grown)
    with pytest.raises(SnapshotError, match="beyond its room"):
        layout.write_into(bytearray(layout.nbytes), grown)


def test_a_buffer_that_is_too_small_or_read_only_is_refused() -> None:
    flat = flatten(small_state())
    layout = ImageLayout.of(flat)
    for buffer in (bytearray(layout.nbytes - 1), bytes(layout.nbytes)):
        with pytest.raises(SnapshotError, match="Nothing was written"):
            layout.write_into(buffer, flat)


def test_a_bound_image_takes_the_values_of_the_moment_again_and_again() -> None:
    state = {"w": torch.zeros(4), "a": np.zeros(2), "n": 0}
    flat = flatten(state)
    layout = ImageLayout.of(flat)
    buffer = bytearray(layout.nbytes)
    bound = layout.bind(buffer)
    for number in range(3):
        state["w"].fill_(number)
        state["a"].fill(number)
        state["n"] = number
        bound.write(flatten(state))
        assert same(read_image(buffer, copy=True), state)


def test_reading_shares_the_buffers_memory_unless_asked_to_copy() -> None:
    buffer = image_of({"w": torch.zeros(4), "a": np.zeros(2)})
    shared, own = read_image(buffer), read_image(buffer, copy=True)
    shared["w"][0] = 5.0
    shared["a"][0] = 6.0
    assert read_image(buffer)["w"][0] == 5.0 and read_image(buffer)["a"][0] == 6.0
    assert own["w"][0] == 0.0 and own["a"][0] == 0.0


def test_a_read_only_buffer_is_read_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert same(read_image(bytes(image_of(small_state()))), small_state())
    assert not recwarn.list


def test_chunks_name_the_bytes_of_each_tensor() -> None:
    weight = torch.arange(6.0)
    flat = flatten({"w": weight, "tied": weight, "part": weight[2:4], "b": torch.ones(2, dtype=torch.bfloat16)})
    layout = ImageLayout.of(flat)
    buffer = bytearray(layout.nbytes)
    layout.write_into(buffer, flat)
    found = {chunk.fqn: bytes(buffer[chunk.begin : chunk.end]) for chunk in layout.chunks}
    assert found["w"] == found["tied"] == weight.numpy().tobytes()
    assert found["part"] == weight[2:4].numpy().tobytes()
    assert {chunk.fqn: chunk.dtype for chunk in layout.chunks}["b"] == "bfloat16"


def test_an_image_holds_five_thousand_tensors() -> None:
    state = {f"layer.{i}.weight": torch.zeros(2) for i in range(5000)}
    flat = flatten(state)
    layout = ImageLayout.of(flat)
    buffer = bytearray(layout.nbytes)
    layout.write_into(buffer, flat)
    assert len(read_image(buffer)) == 5000


def test_an_image_of_another_version_is_refused_with_both_versions() -> None:
    buffer = image_of(small_state())
    at = buffer.index(b'"lastgood_image":"1"')
    buffer[at : at + 20] = b'"lastgood_image":"7"'
    with pytest.raises(FormatVersionError, match=r"version '7'.*version '1'"):
        read_image(buffer)


def test_a_foreign_safetensors_file_is_refused() -> None:
    with pytest.raises(IntegrityError):
        read_image(safetensors.torch.save({"w": torch.zeros(2000)}))


@pytest.mark.parametrize("cut", [0, 7, 100, PAGE_BYTES, -1, -PAGE_BYTES])
def test_a_truncated_image_is_refused(cut: int) -> None:
    with pytest.raises(IntegrityError):
        read_image(image_of(small_state())[:cut])


def test_an_image_with_more_behind_it_is_refused() -> None:
    with pytest.raises(IntegrityError):
        read_image(image_of(small_state()) + b" ")


def _resealed(change: Any) -> bytes:
    """An image whose header was changed by somebody who also knows how to make the digest right."""
    buffer = image_of(small_state())
    length = struct.unpack("<Q", buffer[:8])[0]
    entries = json.loads(bytes(buffer[8 : 8 + length]))
    change(entries)
    header = struct.pack("<Q", length) + json.dumps(entries, separators=(",", ":")).encode().ljust(length)
    text = bytes(buffer[buffer.index(b'{"sha256":"') :]).rstrip(b" ")
    body = text[text.index(b'"body":') + 7 : -1]
    digest = hashlib.sha256(header + body).hexdigest().encode()
    tail = (b'{"sha256":"' + digest + b'","body":' + body + b"}").ljust(len(buffer) - buffer.index(b'{"sha256":"'))
    return header + bytes(buffer[8 + length : buffer.index(b'{"sha256":"')]) + tail


def test_the_resealing_of_these_tests_is_right() -> None:
    assert same(read_image(_resealed(lambda entries: None)), small_state())


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["model.w"].update(dtype="I32"),
        lambda e: e["model.w"].update(shape=[4, 3]),
        lambda e: e["model.w"].update(data_offsets=[0, 1 << 40]),
        lambda e: e["model.w"].update(data_offsets=[-8, 40]),
        lambda e: e["model.w"].update(data_offsets=[4, 52]),
        lambda e: e["model.w"].update(data_offsets=e["rng"]["data_offsets"]),
        lambda e: e["model.w"].update(data_offsets="0"),
        lambda e: e.pop("rng"),
        lambda e: e.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda e: e.update(rng=5),
    ],
)
def test_a_header_that_contradicts_its_skeleton_is_refused_even_with_a_right_digest(change: Any) -> None:
    with pytest.raises(IntegrityError):
        read_image(_resealed(change))


_IMAGE = bytes(image_of(small_state()))
_LAYOUT = ImageLayout.of(flatten(small_state()))
_META = [*range(_LAYOUT.data_start), *range(_LAYOUT.skeleton_at, _LAYOUT.nbytes)]


@given(st.lists(st.tuples(st.sampled_from(_META), st.integers(1, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=500)
def test_flipped_bytes_in_header_or_skeleton_are_found(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(_IMAGE)
    for at, flip in flips:
        damaged[at] ^= flip
    try:
        back = read_image(bytes(damaged))
    except IntegrityError:
        return
    assert same(back, small_state())


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_any_bytes_in_place_of_the_header_are_found(junk: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_image(junk + _IMAGE[len(junk) :] if not _IMAGE.startswith(junk) else b"")
