"""One shard as it lies in memory and on disk: a safetensors file. The rule: the header depends on structure only.

    8 bytes     length of the header, little endian
    header      JSON, padded with spaces so that the data starts on a 4096-byte boundary
    leaves      largest element size first, without gaps
    skeleton    U8 tensor "__skeleton__", always last: {"sha256":"...","body":{...}} padded with spaces

A changed number in the tree changes bytes of the skeleton and moves nothing, so one plan serves every save until the
structure changes. `sha256` is over header and body: a flipped byte in either is found without a manifest (the leaves'
bytes are covered by the shard's block digests). The file's length is a multiple of 4096.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .direct import PAGE_BYTES
from .errors import EncodeError, FormatVersionError, IntegrityError, SnapshotError
from .leaves import LeafKind, LeafSpec, numpy_dtype
from .manifest import Chunk
from .tree import Flat, read_specs, rebuild

IMAGE_VERSION = "1"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library reads no longer header
SKELETON = "__skeleton__"
_VERSION_KEY = "lastgood_image"
_PREFIX = b'{"sha256":"'
_MIDDLE = b'","body":'
_BODY_AT = len(_PREFIX) + 64 + len(_MIDDLE)

Buffer = Any  # whatever memoryview takes: mmap, bytearray, bytes, numpy array


def _round_up(nbytes: int, to: int = PAGE_BYTES) -> int:
    return -(-nbytes // to) * to


class ImageLayout:
    """Where everything lies in the image of one structure. Immutable; made by `of`."""

    def __init__(self, flat: Flat) -> None:
        self._structure = flat.structure
        self.specs: tuple[LeafSpec, ...] = flat.specs
        order = sorted(range(len(self.specs)), key=lambda i: -self.specs[i].item_bytes)  # stable
        begins = [0] * len(self.specs)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", _VERSION_KEY: IMAGE_VERSION}}
        at = 0
        for index in order:
            spec = self.specs[index]
            begins[index] = at
            entries[spec.name] = _entry(spec.stored, spec.stored_shape, at, at + spec.nbytes)
            at += spec.nbytes
        needed = _BODY_AT + len(flat.skeleton_bytes()) + 1
        # Room for numbers to grow longer: an eighth, at least 1 KiB; then to the end of the page.
        self.skeleton_bytes = _round_up(at + needed + max(1024, needed // 8)) - at
        entries[SKELETON] = _entry("U8", (self.skeleton_bytes,), at, at + self.skeleton_bytes)
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        self.data_start = _round_up(8 + len(text))
        if self.data_start > MAX_HEADER_BYTES:
            raise EncodeError(
                f"{len(self.specs)} tensors need a header of {len(text)} bytes, and safetensors reads at most "
                f"{MAX_HEADER_BYTES}. Nothing was saved; split the state into more components.",
                path="state",
            )
        self.header = struct.pack("<Q", self.data_start - 8) + text.ljust(self.data_start - 8)
        self.begins = tuple(self.data_start + begin for begin in begins)  # of the leaves, in the file
        self.skeleton_at = self.data_start + at
        self.nbytes = self.skeleton_at + self.skeleton_bytes

    @classmethod
    def of(cls, flat: Flat, reuse: ImageLayout | None = None) -> ImageLayout:
        """The layout for `flat`: `reuse` itself when flat fits it, else a new one.

        Raises EncodeError when the structure is too large for one file.
        """
        return reuse if reuse is not None and reuse.fits(flat) else cls(flat)

    def fits(self, flat: Flat) -> bool:
        """Whether `flat` has this structure and its skeleton still has room."""
        return self._structure == flat.structure and _BODY_AT + len(flat.skeleton_bytes()) + 1 <= self.skeleton_bytes

    def write_into(self, buffer: Buffer, flat: Flat) -> None:
        """Writes the whole image into the first `nbytes` of a writable buffer; returns when every byte is there.

        Holds no second copy of a tensor. Raises SnapshotError when flat does not fit this layout or the buffer is
        too small; then nothing was written. To write into the same buffer again and again, `bind` it once.
        """
        self.bind(buffer).write(flat)

    def bind(self, buffer: Buffer) -> BoundImage:
        """The buffer prepared for many writes. It stays exported (an mmap cannot be closed) while this lives."""
        return BoundImage(self, buffer)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every torch tensor and ShardedPiece of the tree, as a box with its byte range in the file.

        Left out are views whose elements do not lie in row-major order (a slice of columns of another tensor in the
        tree): they come back through the tree only.
        """
        _, tensors = self._structure
        return tuple(
            Chunk(
                fqn=tensor.name,
                dtype=tensor.dtype,
                global_shape=tensor.global_shape,
                offsets=tensor.offsets,
                sizes=tensor.sizes,
                begin=self.begins[tensor.leaf] + tensor.begin,
                end=self.begins[tensor.leaf] + tensor.begin + tensor.nbytes,
            )
            for tensor in tensors
            if tensor.begin is not None
        )

    def difference(self, flat: Flat) -> str:
        """How flat's structure differs, in words; for errors."""
        mine, theirs = {spec.name: spec for spec in self.specs}, {spec.name: spec for spec in flat.specs}
        gone, new = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        changed = [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]
        parts = [f"gone: {', '.join(gone[:3])}"] if gone else []
        parts += [f"new: {', '.join(new[:3])}"] if new else []
        parts += [f"{n} was {_show(mine[n])}, is {_show(theirs[n])}" for n in sorted(changed)[:3]]
        return "; ".join(parts) or "another sharing, or a skeleton that outgrew its room"


def _show(spec: LeafSpec) -> str:
    return f"{spec.kind.value} {spec.dtype}{list(spec.shape)}"


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


class BoundImage:
    """A layout and a writable buffer. `write` may be called again and again, by one thread at a time."""

    def __init__(self, layout: ImageLayout, buffer: Buffer) -> None:
        """Raises SnapshotError when the buffer is too small or cannot be written."""
        view = memoryview(buffer).cast("B")
        if view.readonly or len(view) < layout.nbytes:
            what = "read-only" if view.readonly else f"{len(view)} bytes long"
            raise SnapshotError(
                f"an image of {layout.nbytes} bytes does not fit into a buffer that is {what}. Nothing was written; "
                "prepare the images again.",
                needed_bytes=layout.nbytes,
            )
        self.layout = layout
        self._view = view[: layout.nbytes]
        self._torch: list[tuple[int, Any]] = []
        self._arrays: list[tuple[int, np.ndarray[Any, Any]]] = []
        torch_leaves = [i for i, s in enumerate(layout.specs) if s.kind in (LeafKind.TORCH, LeafKind.STORAGE)]
        if torch_leaves:
            from . import tensors

            memory = tensors.over_buffer(self._view)
            for index in torch_leaves:
                begin, spec = layout.begins[index], layout.specs[index]
                if spec.nbytes:
                    self._torch.append((index, tensors.Target(memory[begin : begin + spec.nbytes], spec)))
        for index, spec in enumerate(layout.specs):
            if spec.kind in (LeafKind.NUMPY, LeafKind.BYTES) and spec.nbytes:
                self._arrays.append((index, _array(self._view, spec, layout.begins[index])))

    def write(self, flat: Flat) -> None:
        """Writes the whole image; returns when every byte is there. Raises SnapshotError when flat does not fit."""
        layout = self.layout
        if layout._structure != flat.structure:
            raise SnapshotError(
                f"the state no longer has the structure its image was laid out for ({layout.difference(flat)}). "
                "Nothing was written; the image must be laid out again.",
            )
        body = flat.skeleton_bytes()
        if _BODY_AT + len(body) + 1 > layout.skeleton_bytes:
            raise SnapshotError(
                f"the skeleton has grown to {len(body)} bytes, beyond its room of {layout.skeleton_bytes}. "
                "Nothing was written; the image must be laid out again.",
            )
        if self._torch:
            from . import tensors

            tensors.copy_all([(target, flat.leaves[index]) for index, target in self._torch])
        for index, array in self._arrays:
            source = flat.leaves[index]
            np.copyto(array, np.frombuffer(source, np.uint8) if isinstance(source, bytes) else source, casting="no")
        self._view[: layout.data_start] = layout.header
        digest = hashlib.sha256(layout.header + body).hexdigest().encode("ascii")
        text = _PREFIX + digest + _MIDDLE + body + b"}"
        self._view[layout.skeleton_at :] = text.ljust(layout.skeleton_bytes)


def _array(view: memoryview, spec: LeafSpec, begin: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(np.uint8) if spec.kind is LeafKind.BYTES else numpy_dtype(spec.dtype)
    count = spec.nbytes // dtype.itemsize
    return np.frombuffer(view, dtype, count, begin).reshape(spec.shape)


def read_image(buffer: Buffer, *, copy: bool = False, where: str = "the image") -> Any:
    """The tree of an image. `buffer` holds the whole file and nothing else; `where` is for errors.

    Without `copy`, tensors and arrays share memory with the buffer: it must stay, and what was read-only must not be
    written through a tensor. With `copy`, each has memory of its own. Block digests are not checked here (verify.py,
    files.py do). Raises IntegrityError for anything that is not exactly an image, FormatVersionError for one of
    another version, UsageError for an enum that is not registered here. Executes and imports nothing.
    """
    view = memoryview(buffer).cast("B")
    entries, data_start = _read_header(view, where)
    skeleton = _read_skeleton(view, entries, data_start, where)
    specs = read_specs(skeleton, where=where)
    begins = _check_entries(entries, specs, len(view) - data_start, where)
    leaves = _read_leaves(view, specs, [data_start + begin for begin in begins], copy)
    return rebuild(skeleton, leaves, where=where)


def _broken(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is not a whole shard image: {why}. Nothing was restored from it; take this checkpoint from another "
        "copy, or an earlier checkpoint.",
        path=where,
    )


def _read_header(view: memoryview, where: str) -> tuple[dict[str, Any], int]:
    if len(view) < PAGE_BYTES:
        raise _broken(where, f"it has only {len(view)} bytes")
    data_start = struct.unpack("<Q", view[:8])[0] + 8
    if data_start % PAGE_BYTES or data_start > min(len(view), MAX_HEADER_BYTES):
        raise _broken(where, f"its header would end at byte {data_start}")
    try:
        entries = json.loads(bytes(view[8:data_start]).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(where, f"its header is not JSON ({error})") from error
    metadata = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or _VERSION_KEY not in metadata:
        raise _broken(where, "its header does not say that it is an image of lastgood")
    if metadata[_VERSION_KEY] != IMAGE_VERSION:
        raise FormatVersionError(
            f"{where}: this shard image has format version {metadata[_VERSION_KEY]!r}, and this lastgood reads version "
            f"{IMAGE_VERSION!r}. Nothing was changed; use the lastgood that wrote it, or a newer one.",
            path=where,
            found=metadata[_VERSION_KEY],
            supported=IMAGE_VERSION,
        )
    return entries, data_start


def _read_skeleton(view: memoryview, entries: dict[str, Any], data_start: int, where: str) -> Any:
    begin, end = _range(entries.get(SKELETON), where, SKELETON)
    if end != len(view) - data_start or end - begin <= _BODY_AT:
        raise _broken(where, "its skeleton is not the last thing in it")
    text = bytes(view[data_start + begin :]).rstrip(b" ")
    digest = text[len(_PREFIX) : len(_PREFIX) + 64]
    body = text[_BODY_AT:-1]
    if text[: len(_PREFIX)] != _PREFIX or text[len(_PREFIX) + 64 : _BODY_AT] != _MIDDLE or text[-1:] != b"}":
        raise _broken(where, "its skeleton has not the form that lastgood writes")
    if hashlib.sha256(bytes(view[:data_start]) + body).hexdigest().encode("ascii") != digest:
        raise _broken(where, "its header and skeleton are not those that were written (digest)")
    try:
        return json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(where, f"its skeleton is not JSON ({error})") from error


def _range(entry: Any, where: str, name: str) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(o) is not int for o in offsets):
        raise _broken(where, f"its header has no byte range for {name!r}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise _broken(where, f"its header gives {name!r} the bytes {begin} to {end}")
    return begin, end


def _check_entries(entries: dict[str, Any], specs: Sequence[LeafSpec], nbytes: int, where: str) -> list[int]:
    """The leaves' offsets, once header and skeleton agree and the ranges cover `nbytes` of data without gaps."""
    if len({spec.name for spec in specs}) != len(specs) or entries.keys() != {*(s.name for s in specs), SKELETON}:
        raise _broken(where, "its header and skeleton do not name the same tensors")
    begins = []
    for spec in specs:
        entry = entries[spec.name]
        begin, end = _range(entry, where, spec.name)
        if (entry.get("dtype"), entry.get("shape")) != (spec.stored, list(spec.stored_shape)):
            raise _broken(where, f"header and skeleton differ about the dtype or shape of {spec.name!r}")
        if end - begin != spec.nbytes:
            raise _broken(where, f"{spec.name!r} has {end - begin} bytes instead of {spec.nbytes}")
        begins.append(begin)
    at = 0
    for begin, end in sorted(_range(entry, where, name) for name, entry in entries.items()):
        if begin != at:
            raise _broken(where, f"its tensors do not cover the data at byte {at}")
        at = end
    if at != nbytes:
        raise _broken(where, f"its tensors cover {at} of {nbytes} bytes")
    return begins


def _read_leaves(view: memoryview, specs: Sequence[LeafSpec], begins: Sequence[int], copy: bool) -> list[Any]:
    leaves: list[Any] = []
    memory: Any = None
    for spec, begin in zip(specs, begins, strict=True):
        if spec.kind is LeafKind.BYTES:
            leaves.append(bytes(view[begin : begin + spec.nbytes]))
        elif spec.kind is LeafKind.NUMPY:
            array = _array(view, spec, begin) if spec.nbytes else np.empty(spec.shape, numpy_dtype(spec.dtype))
            leaves.append(array.copy() if copy else array)
        else:
            from . import tensors

            if memory is None:
                memory = tensors.over_buffer(view)
            part = memory[begin : begin + spec.nbytes]
            leaves.append(tensors.typed(tensors.copy_of(part) if copy else part, spec))
    return leaves
