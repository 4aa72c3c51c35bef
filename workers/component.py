"""One named part of a member's state: the interface that capture and restore see, and the private copy of a tree.

The rule: `hold` and `capture` only read. They call nothing that steps, communicates, draws random numbers or
allocates accelerator memory, so saving changes nothing in a run.

A *state tree* is nested dict/list/tuple of scalars, bytes, numpy arrays, tensors and ShardedPieces (storage/tree.py).
"""

from __future__ import annotations

import abc
import collections
import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ..storage import tensors as storage_tensors
from ..storage.errors import EncodeError, FingerprintError
from ..storage.tree import ShardedPiece

Tree = Any
Memo = dict[int, tuple[Any, Any]]  # id -> (tensor or array, its copy); held, so that the id stays its own

_SHOWN = 12  # names listed in a mismatch before "and N more"


@dataclass(frozen=True)
class LoadContext:
    """What `prepare` is told beside the tree."""

    where: str  # names the component in errors: "actor.model"
    member: str  # "actor:3"
    allow: Collection[str] = field(
        default_factory=frozenset
    )  # changes accepted by name: "actor.optimizer.param_groups"

    def allows(self, change: str) -> bool:
        """Is the change `<where>.<change>` accepted by name?"""
        return f"{self.where}.{change}" in self.allow


class Reshard(enum.Enum):
    """How a component loads when the number of members of its role has changed."""

    BOXES = "boxes"  # any world size; prepare gets SavedTensors (pieces.py) in place of tensors, at the same size too
    AGREE = "agree"  # the same on every rank: loads when all saved ranks agree
    POLICY = "policy"  # belongs to its rank: the user's policy decides


class Component(abc.ABC):
    """One named part of a member's state. This is the whole surface.

    Life: `hold` at every end_step; `capture` when a save is under way; or, once at resume, `prepare` then `apply`.
    """

    kind: ClassVar[str]  # "model", "optimizer", "scheduler", "rng", "dataloader", "stateful", "mapping", "value", ...
    heavy: ClassVar[bool] = False  # True: capture refers to live tensors. False: capture gives a private copy
    on_reshard: ClassVar[Reshard] = Reshard.POLICY  # how it loads when the number of members has changed
    order: ClassVar[int] = 50  # apply runs by ascending order: models 10, optimizers 20, ..., RNG 90

    def devices(self) -> set[torch.device]:
        """The devices that hold its live tensors, host memory included or not."""
        return set()

    @property
    def pausable(self) -> bool:
        """Does it keep moving on its own, so that pause()/release() must surround the snapshot?"""
        return False

    def pause(self) -> None:  # noqa: B027 - most components have nothing to do here
        """Stands still until release(). Only called when pausable."""

    def release(self) -> None:  # noqa: B027
        """Moves on. Only called when pausable; harmless when not paused."""

    def hold(self) -> None:  # noqa: B027
        """Keeps a private copy of whatever does not stand still inside the quiescent window. Called at end_step."""

    @abc.abstractmethod
    def capture(self) -> Tree:
        """The state tree of the step that was last held.

        Tensors of heavy components are the live ones: the caller copies them before the window closes and writes to
        none of them. Everything else is private to the caller.
        """

    def fingerprint(self) -> dict[str, Any]:
        """JSON values compared at resume, by name. The same on every rank and, for models, at every world size."""
        return {}

    @abc.abstractmethod
    def prepare(self, loaded: Tree, context: LoadContext) -> Any:
        """Checks that `loaded` fits the live object and stages it in host memory; touches nothing live.

        Returns what `apply` takes. Raises FingerprintError naming every key that differs, IntegrityError for bytes
        that are not what was committed.
        """

    @abc.abstractmethod
    def apply(self, prepared: Any) -> None:
        """Writes what `prepare` returned into the live object. May run in any thread; autograd is off."""


class Differences:
    """Collects how a loaded tree differs from the live object, to tell all of it in one error."""

    def __init__(self, context: LoadContext) -> None:
        self.context = context
        self.changes: dict[str, tuple[Any, Any]] = {}

    def add(self, name: str, saved: Any, now: Any) -> None:
        """`name` is relative to the component. None as a value means: not there."""
        self.changes[f"{self.context.where}.{name}"] = (saved, now)

    def keys(self, saved: Collection[str], now: Collection[str], prefix: str = "") -> set[str]:
        """Adds missing and unexpected keys; answers those that both have."""
        saved_keys, live_keys = set(saved), set(now)
        for key in sorted(live_keys - saved_keys, key=str):
            self.add(f"{prefix}{key}", None, "present")
        for key in sorted(saved_keys - live_keys, key=str):
            self.add(f"{prefix}{key}", "present", None)
        return saved_keys & live_keys

    def raise_if_any(self) -> None:
        """Raises FingerprintError when anything was added."""
        if not self.changes:
            return
        missing = [name for name, (saved, _) in self.changes.items() if saved is None]
        unexpected = [name for name, (_, now) in self.changes.items() if now is None]
        changed = [
            f"{name} was {saved}, is {now}"
            for name, (saved, now) in self.changes.items()
            if saved is not None and now is not None
        ]
        parts = [
            f"{title}: {_listed(names)}"
            for title, names in (
                ("missing in the checkpoint", missing),
                ("unexpected in the checkpoint", unexpected),
                ("changed", changed),
            )
            if names
        ]
        raise FingerprintError(
            f"member {self.context.member}: the checkpoint does not fit {self.context.where}. {'; '.join(parts)}. "
            "Nothing was touched; build the objects as they were when the checkpoint was written, or resume from "
            "another checkpoint.",
            member=self.context.member,
            changes=dict(self.changes),
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def private_copy(tree: Tree, path: str = "", memo: Memo | None = None) -> Tree:
    """A copy of a state tree that shares no memory with it; tensors come to host memory, tied ones stay tied.

    Values that no checkpoint can hold pass unchanged: encoding names them by their path. Raises EncodeError with the
    path for a DTensor, of which a process holds only a part. One `memo` over several calls keeps ties between them.
    """
    memo = {} if memo is None else memo
    _share(tree, memo)
    return _copied(tree, path, memo)


def _share(tree: Tree, memo: Memo) -> None:
    """Copies the memory under tensors that overlap once, and puts views of the copy into the memo."""
    found: dict[int, torch.Tensor] = {}
    _collect(tree, found)
    values = [value for key, value in found.items() if key not in memo]
    bases: dict[Any, torch.Tensor] = {}
    for value, place in zip(values, storage_tensors.plan(values), strict=True):
        if place is None:
            continue
        if place.key not in bases:
            bases[place.key] = _host_copy(place.source)
        copy = bases[place.key]
        if place.view is not None:
            view = place.view
            copy = storage_tensors.view_of(copy, view["dtype"], view["shape"], view["stride"], view["offset"])
        memo[id(value)] = (value, copy)


def _collect(tree: Tree, found: dict[int, torch.Tensor]) -> None:
    if type(tree) in (torch.Tensor, torch.nn.Parameter):
        if storage_tensors.problem(tree) is None:
            found[id(tree)] = tree
    elif type(tree) is ShardedPiece:
        _collect(tree.tensor, found)
    elif type(tree) in (dict, collections.OrderedDict):
        for value in tree.values():
            _collect(value, found)
    elif type(tree) in (list, tuple):
        for value in tree:
            _collect(value, found)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in storage_tensors.AS_BYTES:  # torch has no copy kernel for these
        return tensor.detach().view(torch.uint8).to("cpu", copy=True).view(tensor.dtype)
    return tensor.detach().to("cpu", copy=True)


def _copied(tree: Tree, path: str, memo: Memo) -> Tree:
    if isinstance(tree, DTensor):
        raise EncodeError(
            f"{path or 'the state'} is a DTensor, of which this process holds only a part. Nothing was captured; "
            "keep sharded tensors in a model or an optimizer component.",
            path=path,
        )
    if type(tree) in (torch.Tensor, torch.nn.Parameter):
        if id(tree) not in memo:
            memo[id(tree)] = (tree, _host_copy(tree))
        return memo[id(tree)][1]
    if type(tree) is ShardedPiece:
        return ShardedPiece(_copied(tree.tensor, path, memo), tree.global_shape, tree.offsets)
    if type(tree) in (dict, collections.OrderedDict):
        return {key: _copied(value, _join(path, key), memo) for key, value in tree.items()}
    if type(tree) in (list, tuple, torch.Size):
        items = [_copied(value, _join(path, index), memo) for index, value in enumerate(tree)]
        return items if type(tree) is list else tuple(items)
    if type(tree) is np.ndarray:
        if id(tree) not in memo:
            memo[id(tree)] = (tree, tree.copy())
        return memo[id(tree)][1]
    return tree


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
