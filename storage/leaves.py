"""The leaves of a state tree: what one tensor, array or run of bytes is called, how long it is, how it is stored.

Everything in here depends on the structure of a tree only, never on its values. No torch: dtypes are known by name.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class LeafKind(str, enum.Enum):
    """What a leaf is given back as."""

    TORCH = "torch"
    NUMPY = "numpy"
    BYTES = "bytes"
    STORAGE = "storage"  # memory under several torch tensors that overlap; they are views of it


# torch's name -> (safetensors dtype or None when it has none that its own library reads, bytes per element)
TORCH_DTYPES: dict[str, tuple[str | None, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": (None, 1),
    "float4_e2m1fn_x2": (None, 1),
    "complex32": (None, 4),
    "complex128": (None, 16),
    **{f"{sign}int{bits}": (None, 1) for sign in ("", "u") for bits in range(1, 8)},
    "bits1x8": (None, 1),
    "bits2x4": (None, 1),
    "bits4x2": (None, 1),
    "bits8": (None, 1),
    "bits16": (None, 2),
}

# numpy's dtype.str -> safetensors dtype, of those it can carry
NUMPY_DTYPES = {
    "|b1": "BOOL",
    "|u1": "U8",
    "<u2": "U16",
    "<u4": "U32",
    "<u8": "U64",
    "|i1": "I8",
    "<i2": "I16",
    "<i4": "I32",
    "<i8": "I64",
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "<c8": "C64",
}

STORED_ITEM_BYTES = {stored: size for stored, size in TORCH_DTYPES.values() if stored}

_NUMERIC = re.compile(r"[<>|][biufc][0-9]{1,2}")
MAX_DIMENSIONS = 64


def numpy_dtype(text: str) -> np.dtype[Any]:
    """The numeric or bool numpy dtype of dtype.str `text`. Raises ValueError for any other text."""
    if not _NUMERIC.fullmatch(text):
        raise ValueError(f"{text!r} is not a numeric numpy dtype")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise ValueError(f"this machine's numpy has no dtype {text!r}") from error


class LeafSpec(NamedTuple):
    """One leaf as it lies in the image."""

    name: str  # unique in the image; its dotted path in the tree
    kind: LeafKind
    dtype: str  # the true dtype: torch's name, or numpy's dtype.str; "uint8" for bytes
    shape: tuple[int, ...]  # true shape, in elements of `dtype`
    nbytes: int
    item_bytes: int  # alignment of its bytes in the image
    stored: str  # safetensors dtype in the header

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the header: plain bytes when safetensors does not know the dtype."""
        return self.shape if _carried(self.kind, self.dtype) else (self.nbytes,)


def _carried(kind: LeafKind, dtype: str) -> str | None:
    if kind is LeafKind.NUMPY:
        return NUMPY_DTYPES.get(dtype)
    return TORCH_DTYPES[dtype][0]


def leaf_spec(name: str, kind: LeafKind, dtype: str, shape: tuple[int, ...], item_bytes: int | None = None) -> LeafSpec:
    """The spec of a leaf from what it is. `item_bytes` overrides the alignment (a storage under mixed dtypes).

    Raises ValueError for an unknown dtype or an impossible shape.
    """
    nbytes, size, stored = _measure(kind, dtype, shape)
    return LeafSpec(name, kind, dtype, shape, nbytes, item_bytes or size, stored)


@functools.lru_cache(maxsize=4096)  # a model has few distinct shapes, and every save asks again
def _measure(kind: LeafKind, dtype: str, shape: tuple[int, ...]) -> tuple[int, int, str]:
    if kind is LeafKind.NUMPY:
        size = numpy_dtype(dtype).itemsize
    elif dtype in TORCH_DTYPES:
        size = TORCH_DTYPES[dtype][1]
    else:
        raise ValueError(f"unknown dtype {dtype!r}")
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape):
        raise ValueError(f"impossible shape {shape}")
    return math.prod(shape) * size, size, _carried(kind, dtype) or "U8"


class TensorEntry(NamedTuple):
    """One tensor of the tree: a box of a global tensor, and the part of a leaf that holds it."""

    name: str
    leaf: int
    dtype: str
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int | None  # bytes from the leaf's first; None when its elements do not lie in row-major order
    nbytes: int


@dataclass(frozen=True, eq=False)
class ShardedPiece:
    """One box of a sharded tensor, as a leaf of a state tree; a tree that is read back holds it again.

    `tensor` is a torch tensor or numpy array, `offsets` its place in the global tensor of `global_shape`, in elements.
    """

    tensor: Any
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def piece_problem(sizes: tuple[int, ...], global_shape: tuple[int, ...], offsets: tuple[int, ...]) -> str | None:
    """Why a box does not lie inside its global tensor; None when it does."""
    if not len(sizes) == len(global_shape) == len(offsets):
        return f"shape {sizes}, global_shape {global_shape} and offsets {offsets} differ in length"
    if any(o < 0 or o + s > g for s, g, o in zip(sizes, global_shape, offsets, strict=True)):
        return f"{sizes} at {offsets} is outside of {global_shape}"
    return None
