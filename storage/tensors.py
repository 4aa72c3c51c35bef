"""What lastgood knows of torch: which tensors can be stored, which share memory, and how their bytes are copied.

The only module of storage/ that imports torch; tree.py and image.py reach for it when a tree holds tensors. Nothing
in here allocates on a device, computes, or synchronises more than a copy does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .leaves import TORCH_DTYPES, LeafKind, LeafSpec

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
SIZE_TYPE = torch.Size
DTYPE_TYPE = torch.dtype

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in TORCH_DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_ALL_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}
# torch has no copy kernel for these; their bytes are copied as plain bytes
AS_BYTES = {getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8)}


class Place(NamedTuple):
    """Where one tensor's bytes will lie: a leaf (tensors with the same key share it), whole or as a view."""

    key: Any
    kind: LeafKind
    dtype: str  # of the leaf
    shape: tuple[int, ...]  # of the leaf
    item_bytes: int
    source: torch.Tensor  # the live bytes of the leaf
    view: dict[str, Any] | None  # None: the tensor is the whole leaf
    begin: int | None  # of this tensor in the leaf, bytes; None when it is not in row-major order
    nbytes: int


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def problem(value: torch.Tensor) -> tuple[str, str] | None:
    """Why a tensor cannot be stored, and what to do instead; None when it can."""
    if type(value) not in TENSOR_TYPES:
        return (
            f"is a tensor of the subclass {type(value).__qualname__}",
            "hand over its local plain tensor, or a ShardedPiece",
        )
    if value.layout is not torch.strided or value.is_nested:
        return f"is a tensor of layout {value.layout}", "store its parts as plain strided tensors"
    if value.is_quantized:
        return f"is a quantized tensor ({value.dtype})", "store int_repr() with its scales and zero points"
    if value.dtype not in _NAMES:
        return f"is a tensor of dtype {value.dtype}, which has no form in a checkpoint", "convert or view it first"
    if value.device.type == "meta":
        return "is a tensor on the meta device, which holds no values", "materialise it first"
    return None


def dtype_named(name: str) -> torch.dtype:
    """The dtype of torch's name. Raises ValueError when this torch has none of that name."""
    if name not in _ALL_DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return _ALL_DTYPES[name]


class _Span(NamedTuple):
    """A tensor's memory in its storage, in bytes."""

    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    number: int
    repeats: bool  # expanded: elements share memory, so its values are more than its memory


def plan(values: Sequence[torch.Tensor]) -> list[Place | None]:
    """The place of each tensor that shares memory with another one; None for one that has a leaf to itself.

    Looks at metadata only. Tensors with the same memory, dtype, shape and strides share one leaf. Different tensors
    whose memory overlaps become views of one leaf that holds the memory under all of them; so does an expanded one.
    """
    places: list[Place | None] = [None] * len(values)
    together: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if value.numel() == 0 or value.is_conj() or value.is_neg():
            together.setdefault(("object", id(value)), []).append(index)
        else:
            together.setdefault(value.untyped_storage().data_ptr(), []).append(index)
    for key, indices in together.items():
        if len(indices) == 1 and values[indices[0]].is_contiguous():
            continue
        if type(key) is tuple:  # the same object in several places; its memory cannot be viewed as it is
            place = whole(values[indices[0]], key)
            for index in indices:
                places[index] = place
            continue
        for device in dict.fromkeys(values[index].device for index in indices):
            spans = [_span(values[index], index) for index in indices if values[index].device == device]
            for cluster in _overlapping(spans):
                _place_cluster(cluster, values, (device, key), places)
    return places


def _span(value: torch.Tensor, index: int) -> _Span:
    size, shape, stride = value.element_size(), tuple(value.shape), value.stride()
    start = int(value.storage_offset()) * size
    reach = (sum((n - 1) * int(s) for n, s in zip(shape, stride, strict=True)) + 1) * size
    return _Span(start, start + reach, value.dtype, shape, stride, index, value.numel() * size > reach)


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Groups of spans connected by overlap, in order of memory."""
    clusters: list[list[_Span]] = []
    end = -1
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        if span.start < end:
            clusters[-1].append(span)
        else:
            clusters.append([span])
        end = max(end, span.end)
    return clusters


def dtype_name(value: torch.Tensor) -> str:
    """torch's name of its dtype, without the prefix."""
    return _NAMES[value.dtype]


def whole(value: torch.Tensor, key: Any) -> Place:
    """A leaf that one tensor fills."""
    size = value.element_size()
    shape = tuple(value.shape)
    return Place(key, LeafKind.TORCH, _NAMES[value.dtype], shape, size, value, None, 0, value.numel() * size)


def _place_cluster(
    cluster: list[_Span], values: Sequence[torch.Tensor], storage_key: Any, places: list[Place | None]
) -> None:
    if len(cluster) == 1 and not cluster[0].repeats:
        return
    key = (storage_key, cluster[0].start)
    if len({span[:5] for span in cluster}) == 1 and not cluster[0].repeats:
        place = whole(values[min(span.number for span in cluster)], key)
        for span in cluster:
            places[span.number] = place
        return
    dtypes = {span.dtype for span in cluster}
    item_bytes = max(dtype.itemsize for dtype in dtypes)
    low = cluster[0].start // item_bytes * item_bytes  # storages begin aligned, so views stay aligned in the image
    high = max(span.end for span in cluster)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    first = values[cluster[0].number]
    with torch.no_grad():
        base = torch.empty(0, dtype=dtype, device=first.device)
        base.set_(first.untyped_storage(), low // dtype.itemsize, ((high - low) // dtype.itemsize,), (1,))
    nbytes = -(-(high - low) // item_bytes) * item_bytes  # a ragged end is filled with zeros
    for span in cluster:
        view = {
            "dtype": _NAMES[span.dtype],
            "shape": list(span.shape),
            "stride": list(span.stride),
            "offset": span.start - low,
        }
        begin = span.start - low if values[span.number].is_contiguous() else None
        length = math.prod(span.shape) * span.dtype.itemsize
        places[span.number] = Place(
            key,
            LeafKind.STORAGE,
            _NAMES[dtype],
            (nbytes // dtype.itemsize,),
            item_bytes,
            base,
            view,
            begin,
            length,
        )


def over_buffer(buffer: memoryview) -> torch.Tensor:
    """The buffer as a tensor of bytes, without a copy. A read-only buffer must never be written through it."""
    with warnings.catch_warnings():  # torch warns about read-only memory; we document it
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(buffer, dtype=torch.uint8)


def typed(memory: torch.Tensor, spec: LeafSpec) -> torch.Tensor:
    """Bytes of a leaf (a 1-D uint8 tensor) as the tensor it is; shares the memory. Raises ValueError."""
    if memory.numel() == 0:
        return torch.empty(spec.shape, dtype=dtype_named(spec.dtype))
    return memory.view(dtype_named(spec.dtype)).view(spec.shape)


def copy_of(memory: torch.Tensor) -> torch.Tensor:
    """Bytes in memory of their own."""
    return memory.clone()


class Target:
    """A leaf's place in an image, ready to be copied into again and again."""

    __slots__ = ("memory", "plain", "view")

    def __init__(self, memory: torch.Tensor, spec: LeafSpec) -> None:
        """`memory` is the leaf's range of the image, a 1-D uint8 tensor."""
        self.memory = memory
        self.plain = dtype_named(spec.dtype) in AS_BYTES
        self.view = memory.view(spec.shape) if self.plain else typed(memory, spec)

    def copy(self, source: torch.Tensor) -> None:
        """Copies the live tensor into the image: from any device, any strides; releases the GIL. Under no_grad."""
        if self.plain:
            self.view.copy_(source.view(torch.uint8))
        elif source.numel() == self.view.numel():
            self.view.copy_(source)
        else:  # memory under several tensors whose end is ragged
            self.memory[: source.numel()].copy_(source)
            self.memory[source.numel() :].zero_()


def copy_all(pairs: Sequence[tuple[Target, torch.Tensor]]) -> None:
    """Copies every source into its target; returns when all bytes are there."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy(source)


def view_of(
    base: torch.Tensor, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A tensor over part of `base`, whose bytes are a storage leaf. `offset` in bytes, `stride` in elements.

    Raises ValueError when it would reach outside.
    """
    kind = dtype_named(dtype)
    memory = base.reshape(-1).view(torch.uint8)
    if len(shape) != len(stride) or offset < 0 or any(n < 1 for n in shape) or any(s < 0 for s in stride):
        raise ValueError(f"impossible view: shape {shape}, stride {stride}, offset {offset}")
    reach = (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * kind.itemsize
    if offset + reach > memory.numel():
        raise ValueError(f"a view of {reach} bytes at {offset} reaches out of {memory.numel()} bytes")
    part = memory[offset : offset + reach].view(kind)
    return torch.as_strided(part, shape, stride, part.storage_offset())


def copy_bits(live: torch.Tensor, host: torch.Tensor) -> None:
    """Writes into a live tensor what was saved of it, in place. Under no_grad."""
    if live.dtype in AS_BYTES:
        live.view(torch.uint8).copy_(host.view(torch.uint8))
    else:
        live.copy_(host)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits in the same order; NaNs are compared like any others."""
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))  # 0-dim: view(-1) first
    return torch.equal(left, right)
