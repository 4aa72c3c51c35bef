"""A state tree taken apart into a JSON skeleton and leaves of bytes, and put together again. No pickle, no imports.

    value                                      node in the skeleton
    None, bool, int, finite float, str, list   themselves
    dict with plain str keys                   a JSON object
    everything else                            an object {"$": <tag>, ...}, tags below
    torch tensor, numpy array, long bytes      {"$": "leaf", "i": <number>}, the bytes lie in the image

The rule: what comes back is equal in type and in every bit, or flatten refuses it by its path in the tree. Two
exceptions, by design: an OrderedDict comes back as dict and a torch.Size as tuple (parameters as plain tensors, all on
the CPU). Tensors that share memory share it again; the same tensor in two places is one object again.
"""

from __future__ import annotations

import base64
import collections
import enum
import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .enums import enum_name, find_member, register_enum
from .errors import EncodeError, IntegrityError
from .leaves import LeafKind, LeafSpec, ShardedPiece, TensorEntry, leaf_spec, numpy_dtype, piece_problem

__all__ = ["Flat", "ShardedPiece", "flatten", "rebuild", "register_enum"]

MAX_DEPTH = 128  # of nested containers; far above real states, far below the interpreter's limit
INLINE_BYTES = 1024  # bytes objects up to this long stay in the skeleton
RESERVED_NAMES = frozenset({"__metadata__", "__skeleton__"})
_JSON_INT = 1 << 63

_Path = tuple[Any, ...] | None  # (parent path, step): linked, so that walking builds no text


@dataclass(frozen=True, eq=False)
class Flat:
    """A tree taken apart. `leaves` are the live values: nothing is copied, so they may still change."""

    tree: Any  # JSON values only
    specs: tuple[LeafSpec, ...]
    leaves: tuple[Any, ...]  # torch tensor, numpy array or bytes, one for each spec
    tensors: tuple[TensorEntry, ...]

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal for trees whose images have the same header: it holds names, dtypes, shapes and sharing, no values."""
        return (self.specs, self.tensors)

    @property
    def skeleton(self) -> dict[str, Any]:
        """What rebuild needs beside the leaves; JSON values only."""
        table = [[spec.name, spec.kind, spec.dtype, spec.shape, spec.item_bytes] for spec in self.specs]
        return {"leaves": table, "tree": self.tree}

    def skeleton_bytes(self) -> bytes:
        """The skeleton as JSON in UTF-8."""
        return json.dumps(self.skeleton, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def flatten(tree: Any, name: str = "state") -> Flat:
    """Takes `tree` apart without copying a tensor. `name` stands for the tree in errors: `state["optimizer"][0]`.

    Raises EncodeError naming the path of the first value that cannot be stored.
    """
    return _Encoder(name).run(tree)


def show_path(name: str, path: _Path) -> str:
    """`state["optimizer"]["groups"][0]`."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"[{json.dumps(step) if type(step) is str else repr(step)}]")
    return name + "".join(reversed(steps))


def _dotted(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step if type(step) is str else str(step))
    steps.reverse()
    name = ".".join(steps) or "value"
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode("utf-8")


class _Pending:
    """A tensor, array or long bytes that was met; its node is filled once all are known (sharing needs them all)."""

    __slots__ = ("node", "path", "piece", "value")

    def __init__(self, value: Any, node: dict[str, Any], path: _Path, piece: ShardedPiece | None) -> None:
        self.value, self.node, self.path, self.piece = value, node, path, piece


class _Encoder:
    """One walk over one tree."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.active: set[int] = set()  # ids of the containers we are inside of
        self.pending: list[_Pending] = []
        self.names: set[str] = set(RESERVED_NAMES)
        self.specs: list[LeafSpec] = []
        self.leaves: list[Any] = []
        self.tensors: list[TensorEntry] = []
        self.torch: Any = None
        self.handlers: dict[type, Callable[[Any, _Path, int], Any]] = {
            type(None): self._same,
            bool: self._same,
            int: self._int,
            float: self._float,
            str: self._str,
            bytes: self._bytes,
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            collections.OrderedDict: self._dict,
            np.ndarray: self._array,
            ShardedPiece: self._piece,
        }
        if "torch" in sys.modules:  # without it no tensor can be in the tree
            from . import tensors as torch_side

            self.torch = torch_side
            self.handlers.update(dict.fromkeys(torch_side.TENSOR_TYPES, self._tensor))
            self.handlers[torch_side.SIZE_TYPE] = self._tuple
            self.handlers[torch_side.DTYPE_TYPE] = self._dtype

    def run(self, tree: Any) -> Flat:
        try:
            node = self.encode(tree, None, 0)
        except RecursionError as error:
            raise self.refuse(None, "is nested too deep", f"nest at most {MAX_DEPTH} containers") from error
        self._place_leaves()
        return Flat(node, tuple(self.specs), tuple(self.leaves), tuple(self.tensors))

    def encode(self, value: Any, path: _Path, depth: int) -> Any:
        handler = self.handlers.get(type(value))
        return handler(value, path, depth) if handler else self._other(value, path, depth)

    def refuse(self, path: _Path, why: str, advice: str) -> EncodeError:
        place = show_path(self.name, path)
        return EncodeError(f"{place} {why}. Nothing was saved and nothing was touched; {advice}.", path=place)

    # scalars

    def _same(self, value: Any, path: _Path, depth: int) -> Any:
        return value

    def _int(self, value: int, path: _Path, depth: int) -> Any:
        return value if -_JSON_INT <= value < _JSON_INT else {"$": "int", "hex": hex(value)}

    def _float(self, value: float, path: _Path, depth: int) -> Any:
        if value - value == 0.0:  # finite
            return value
        return {"$": "float", "hex": struct.pack(">d", value).hex()}  # all bits of a nan

    def _str(self, value: str, path: _Path, depth: int) -> Any:
        if _is_plain(value):
            return value
        return {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}  # holds lone surrogates

    def _bytes(self, value: bytes, path: _Path, depth: int) -> Any:
        if len(value) <= INLINE_BYTES:
            return {"$": "bytes", "base64": base64.b64encode(value).decode("ascii")}
        return self._later(value, path)

    def _dtype(self, value: Any, path: _Path, depth: int) -> Any:
        return {"$": "dtype", "name": str(value).removeprefix("torch.")}

    def _enum(self, value: enum.Enum, path: _Path, depth: int) -> Any:
        name = enum_name(type(value))
        if name is None:
            raise self.refuse(
                path,
                f"is a member of {type(value).__qualname__}, an enum that is not registered",
                "call lastgood.storage.tree.register_enum on the class, or store its value",
            )
        return {"$": "enum", "class": name, "member": value.name, "value": self.encode(value.value, path, depth + 1)}

    def _scalar(self, value: np.generic, path: _Path, depth: int) -> Any:
        if value.dtype.kind not in "biufc":
            raise self.refuse(path, f"is a numpy scalar of dtype {value.dtype}", "store a number, str or bytes")
        return {"$": "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}

    # containers

    def _enter(self, value: Any, path: _Path, depth: int) -> None:
        if id(value) in self.active:
            raise self.refuse(path, f"is a {type(value).__name__} that contains itself", "store it without the cycle")
        if depth >= MAX_DEPTH:
            raise self.refuse(path, "is nested too deep", f"nest at most {MAX_DEPTH} containers")
        self.active.add(id(value))

    def _items(self, value: Sequence[Any], path: _Path, depth: int) -> list[Any]:
        self._enter(value, path, depth)
        nodes = [self.encode(item, (path, index), depth + 1) for index, item in enumerate(value)]
        self.active.discard(id(value))
        return nodes

    def _list(self, value: list[Any], path: _Path, depth: int) -> Any:
        return self._items(value, path, depth)

    def _tuple(self, value: tuple[Any, ...], path: _Path, depth: int) -> Any:
        return {"$": "tuple", "items": self._items(value, path, depth)}

    def _dict(self, value: dict[Any, Any], path: _Path, depth: int) -> Any:
        self._enter(value, path, depth)
        if all(type(key) is str and key != "$" and _is_plain(key) for key in value):
            node: Any = {key: self.encode(item, (path, key), depth + 1) for key, item in value.items()}
        else:
            pairs = []
            for key, item in value.items():
                inner = (path, key)
                pairs.append([self._key(key, inner, depth + 1), self.encode(item, inner, depth + 1)])
            node = {"$": "dict", "items": pairs}
        self.active.discard(id(value))
        return node

    def _key(self, key: Any, path: _Path, depth: int) -> Any:
        if type(key) is tuple:
            return {"$": "tuple", "items": [self._key(part, path, depth + 1) for part in key]}
        if key is None or type(key) in (bool, int, float, str) or (isinstance(key, enum.Enum) and enum_name(type(key))):
            return self.encode(key, path, depth)
        raise self.refuse(
            path,
            f"has a key of type {type(key).__qualname__}",
            "use keys that are str, int, float, bool, None, registered enums or tuples of these",
        )

    # leaves

    def _later(self, value: Any, path: _Path, piece: ShardedPiece | None = None) -> dict[str, Any]:
        node: dict[str, Any] = {"$": "leaf"}
        self.pending.append(_Pending(value, node, path, piece))
        return node

    def _array(self, value: np.ndarray[Any, Any], path: _Path, depth: int, piece: ShardedPiece | None = None) -> Any:
        if value.dtype.kind not in "biufc":
            what = "structured" if value.dtype.names else "object" if value.dtype.hasobject else "non-numeric"
            raise self.refuse(
                path, f"is a numpy array of the {what} dtype {value.dtype}", "store numeric or bool arrays, or a list"
            )
        return self._later(value, path, piece)

    def _tensor(self, value: Any, path: _Path, depth: int, piece: ShardedPiece | None = None) -> Any:
        problem = self.torch.problem(value)
        if problem:
            raise self.refuse(path, *problem)
        return self._later(value, path, piece)

    def _piece(self, value: ShardedPiece, path: _Path, depth: int) -> Any:
        store = self.handlers.get(type(value.tensor))
        if store not in (self._tensor, self._array):
            kind = type(value.tensor).__qualname__
            raise self.refuse(path, f"is a ShardedPiece of a {kind}", "give it a torch tensor or numpy array")
        problem = piece_problem(tuple(value.tensor.shape), tuple(value.global_shape), tuple(value.offsets))
        if problem:
            raise self.refuse(path, f"is a ShardedPiece whose {problem}", "give it the box's place in the whole tensor")
        store = self._tensor if store == self._tensor else self._array
        node = store(value.tensor, path, depth, value)
        return {"$": "piece", "shape": list(value.global_shape), "at": list(value.offsets), "value": node}

    def _other(self, value: Any, path: _Path, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return self._enum(value, path, depth)
        if isinstance(value, np.generic):
            return self._scalar(value, path, depth)
        problem = self.torch.problem(value) if self.torch and self.torch.is_tensor(value) else None
        if problem:
            raise self.refuse(path, *problem)
        raise self.refuse(
            path,
            f"is a {type(value).__module__}.{type(value).__qualname__}, which has no exact form in a checkpoint",
            "convert it to dicts, lists, tuples, numbers, str, bytes, tensors, numpy arrays or registered enums",
        )

    # once all leaves are known

    def _place_leaves(self) -> None:
        """Gives every leaf its number, name and spec, in the order of the walk; fills the nodes."""
        of_torch = [p.value for p in self.pending if not isinstance(p.value, (np.ndarray, bytes))]
        places = iter(self.torch.plan(of_torch) if of_torch else ())
        numbers: dict[Any, int] = {}  # identity of a leaf that may be met again -> its number
        for pending in self.pending:
            value, name = pending.value, self._unique(_dotted(pending.path))
            if isinstance(value, (np.ndarray, bytes)):
                self._place_array(pending, name, numbers)
                continue
            place = next(places)
            if place is None:
                spec = leaf_spec(name, LeafKind.TORCH, self.torch.dtype_name(value), tuple(value.shape))
                pending.node["i"] = number = self._add(spec, value)
                self._note(pending.piece, name, number, spec.dtype, spec.shape, 0, spec.nbytes)
                continue
            number = numbers.get(place.key)
            if number is None:
                spec = leaf_spec(name, place.kind, place.dtype, place.shape, place.item_bytes)
                number = numbers[place.key] = self._add(spec, place.source)
            pending.node["i"] = number
            if place.view is not None:
                pending.node.update({"$": "view", **place.view})
            dtype = self.torch.dtype_name(value)
            self._note(pending.piece, name, number, dtype, tuple(value.shape), place.begin, place.nbytes)

    def _place_array(self, pending: _Pending, name: str, numbers: dict[Any, int]) -> None:
        value = pending.value
        number = numbers.get(id(value))
        if number is None:
            if isinstance(value, bytes):
                spec = leaf_spec(name, LeafKind.BYTES, "uint8", (len(value),))
            else:
                spec = leaf_spec(name, LeafKind.NUMPY, value.dtype.str, value.shape)
            number = numbers[id(value)] = self._add(spec, value)
        pending.node["i"] = number
        if pending.piece is not None:
            spec = self.specs[number]
            self._note(pending.piece, name, number, numpy_dtype(spec.dtype).name, spec.shape, 0, spec.nbytes)

    def _add(self, spec: LeafSpec, source: Any) -> int:
        self.specs.append(spec)
        self.leaves.append(source)
        return len(self.specs) - 1

    def _note(
        self,
        piece: ShardedPiece | None,
        name: str,
        leaf: int,
        dtype: str,
        sizes: tuple[int, ...],
        begin: int | None,
        nbytes: int,
    ) -> None:
        shape = tuple(piece.global_shape) if piece else sizes
        offsets = tuple(piece.offsets) if piece else (0,) * len(sizes)
        self.tensors.append(TensorEntry(name, leaf, dtype, sizes, shape, offsets, begin, nbytes))

    def _unique(self, name: str) -> str:
        found, count = name, 1
        while found in self.names:
            count += 1
            found = f"{name}~{count}"
        self.names.add(found)
        return found


def _is_plain(text: str) -> bool:
    """Whether UTF-8 can carry it: no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def rebuild(skeleton: Any, leaves: Sequence[Any], *, where: str = "the tree") -> Any:
    """Puts the tree together from Flat.skeleton (as it is, or read back from JSON) and one value for each leaf.

    The values are used as they are: what shares memory with a buffer goes on sharing it. Raises IntegrityError naming
    `where` when the skeleton is malformed, UsageError when it holds an enum that is not registered here.
    """
    return _Decoder(leaves, where).run(skeleton)


def read_specs(skeleton: Any, *, where: str) -> tuple[LeafSpec, ...]:
    """The specs of the leaves of a skeleton that was read back. Raises IntegrityError."""
    try:
        return tuple(
            leaf_spec(_typed(name, str), LeafKind(kind), _typed(dtype, str), _ints(shape), _typed(item_bytes, int))
            for name, kind, dtype, shape, item_bytes in _typed(skeleton["leaves"], list)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(where, f"its table of leaves is broken: {error}") from error


def _malformed(where: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: {why}. Nothing was restored from it; take this checkpoint from another copy, or an earlier one.",
        path=where,
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, found {type(value).__name__}")
    return value


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(_typed(item, int) for item in _typed(value, list))


class _Decoder:
    """One skeleton read back."""

    def __init__(self, leaves: Sequence[Any], where: str) -> None:
        self.leaves, self.where = leaves, where
        self.views: dict[Any, Any] = {}
        self.readers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "int": lambda node: int(_typed(node["hex"], str), 16),
            "float": lambda node: struct.unpack(">d", bytes.fromhex(node["hex"]))[0],
            "str": lambda node: bytes.fromhex(node["hex"]).decode("utf-8", "surrogatepass"),
            "bytes": lambda node: base64.b64decode(node["base64"], validate=True),
            "tuple": lambda node: tuple(map(self.decode, _typed(node["items"], list))),
            "dict": lambda node: {self.decode(key): self.decode(value) for key, value in _typed(node["items"], list)},
            "enum": lambda node: find_member(node["class"], node["member"], self.decode(node["value"])),
            "scalar": lambda node: np.frombuffer(bytes.fromhex(node["hex"]), numpy_dtype(node["dtype"]), 1)[0],
            "dtype": self._dtype,
            "piece": lambda node: ShardedPiece(self.decode(node["value"]), _ints(node["shape"]), _ints(node["at"])),
            "leaf": lambda node: self._leaf(node["i"]),
            "view": self._view,
        }

    def run(self, skeleton: Any) -> Any:
        try:
            return self.decode(_typed(skeleton, dict)["tree"])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, struct.error, RecursionError) as error:
            raise _malformed(self.where, f"its skeleton is malformed ({type(error).__name__}: {error})") from error

    def decode(self, node: Any) -> Any:
        kind = type(node)
        if kind is dict:
            if "$" in node:
                return self.readers[node["$"]](node)
            return {key: self.decode(value) for key, value in node.items()}
        if kind is list:
            return [self.decode(item) for item in node]
        return node

    def _leaf(self, number: Any) -> Any:
        if not 0 <= _typed(number, int) < len(self.leaves):
            raise IndexError(f"there is no leaf {number}")
        return self.leaves[number]

    def _dtype(self, node: dict[str, Any]) -> Any:
        from . import tensors

        return tensors.dtype_named(_typed(node["name"], str))

    def _view(self, node: dict[str, Any]) -> Any:
        from . import tensors

        base = self._leaf(node["i"])
        shape, stride, offset = _ints(node["shape"]), _ints(node["stride"]), _typed(node["offset"], int)
        key = (node["i"], node["dtype"], shape, stride, offset)
        if key not in self.views:
            self.views[key] = tensors.view_of(base, _typed(node["dtype"], str), shape, stride, offset)
        return self.views[key]
