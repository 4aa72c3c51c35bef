"""Small state: schedulers, objects with state_dict, dicts and lists, values behind two functions.

The rule: `hold` takes a private copy at end_step, so that what the run does afterwards does not reach the checkpoint.
Objects that keep moving on their own (pause/release) are captured between the two instead.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from ..storage.tensors import copy_bits, same_bits
from .component import Component, Differences, LoadContext, Reshard, Tree, private_copy


class SmallState(Component):
    """Base of components that are copied privately at end_step."""

    def __init__(self, where: str) -> None:
        """`where` names the component in errors."""
        self.where = where
        self._held: tuple[Tree] | None = None

    @abc.abstractmethod
    def read(self) -> Tree:
        """A private copy of the state as it is now."""

    def hold(self) -> None:
        if not self.pausable:
            self._held = (self.read(),)

    def capture(self) -> Tree:
        if self.pausable:
            return self.read()
        if self._held is None:
            self._held = (self.read(),)
        return self._held[0]

    def prepare(self, loaded: Tree, context: LoadContext) -> Any:
        return private_copy(loaded)

    def forget(self) -> None:
        """The live object was just restored: what was held is of the past."""
        self._held = None


class SchedulerState(SmallState):
    """A torch learning rate scheduler. Functions in it (LambdaLR) are the program's, not state."""

    kind: ClassVar[str] = "scheduler"
    on_reshard: ClassVar[Reshard] = Reshard.AGREE
    order: ClassVar[int] = 30

    def __init__(self, scheduler: LRScheduler, where: str) -> None:
        super().__init__(where)
        self.scheduler = scheduler

    def read(self) -> Tree:
        return private_copy(_plain(self.scheduler.state_dict()))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self.scheduler).__name__}

    def prepare(self, loaded: Tree, context: LoadContext) -> Any:
        live = self.scheduler.state_dict()
        differences = Differences(context)
        _compare_structure(loaded, live, "", differences)
        differences.raise_if_any()
        return like(private_copy(loaded), live)

    def apply(self, prepared: Any) -> None:
        self.scheduler.load_state_dict(prepared)
        self.forget()


class StatefulState(SmallState):
    """An object with state_dict() and load_state_dict(); with pause() and release() it is captured between them."""

    kind: ClassVar[str] = "stateful"

    def __init__(self, target: Any, where: str) -> None:
        super().__init__(where)
        self.target = target

    @property
    def pausable(self) -> bool:
        return has_methods(self.target, "pause", "release")

    def pause(self) -> None:
        self.target.pause()

    def release(self) -> None:
        self.target.release()

    def read(self) -> Tree:
        return private_copy(self.target.state_dict())

    def apply(self, prepared: Any) -> None:
        self.target.load_state_dict(prepared)
        self.forget()


class InPlaceState(SmallState):
    """A dict or a list of the user's; restored in place, so that all who hold it see the restored content."""

    kind: ClassVar[str] = "mapping"

    def __init__(self, target: dict[Any, Any] | list[Any], where: str) -> None:
        super().__init__(where)
        self.target = target

    def read(self) -> Tree:
        return private_copy(dict(self.target) if isinstance(self.target, dict) else list(self.target))

    def prepare(self, loaded: Tree, context: LoadContext) -> Any:
        if not isinstance(self.target, type(loaded)):  # of an OrderedDict or defaultdict the content is kept
            differences = Differences(context)
            differences.add("type", type(loaded).__name__, type(self.target).__name__)
            differences.raise_if_any()
        return like(private_copy(loaded), self.target)

    def apply(self, prepared: Any) -> None:
        _InPlace().fill(self.target, prepared)
        self.forget()


class _InPlace:
    """Writes a restored tree into a live one: dicts, lists, tensors and arrays that fit stay the objects they are, as
    others may hold them too. What does not fit is put in their place."""

    def __init__(self) -> None:
        self._filled: dict[int, tuple[Any, Any]] = {}  # id of a restored object -> (itself, the live one it went into)
        self._used: dict[int, Any] = {}  # id of live objects that were filled; held, so that the id stays its own
        self._memory: set[int] = set()  # storages that were written

    def fill(self, live: Any, value: Any) -> None:
        """`live` is a dict or a list, and `value` of its kind."""
        self._used[id(live)] = live
        self._filled[id(value)] = (value, live)
        if isinstance(live, dict):
            items = {key: self._put(live.get(key), item) for key, item in value.items()}
            live.clear()
            live.update(items)
        else:
            now = [*live, *[None] * len(value)]
            live[:] = [self._put(now[index], item) for index, item in enumerate(value)]

    def _put(self, live: Any, value: Any) -> Any:
        if id(value) in self._filled:
            return self._filled[id(value)][1]
        if type(value) is tuple and type(live) is tuple and len(live) == len(value):
            return tuple(self._put(now, item) for now, item in zip(live, value, strict=True))
        result = live if id(live) not in self._used and self._write(live, value) else value
        if isinstance(value, (dict, list, torch.Tensor, np.ndarray)):
            self._filled[id(value)] = (value, result)
            self._used[id(result)] = result
        return result

    def _write(self, live: Any, value: Any) -> bool:
        """Whether `live` now holds `value`."""
        if isinstance(value, (dict, list)) and type(live) is type(value):
            self.fill(live, value)
            return True
        if isinstance(value, torch.Tensor) and type(live) in (torch.Tensor, torch.nn.Parameter):
            if (live.dtype, live.shape, live.device) != (value.dtype, value.shape, value.device):
                return False
            if not live.is_contiguous() or live.is_inference():
                return False
            memory = live.untyped_storage().data_ptr()
            if memory in self._memory:  # a view of what was written already: it fits, or is none any more
                return same_bits(live, value)
            self._memory.add(memory)
            copy_bits(live.detach(), value)
            return True
        if type(value) is np.ndarray and type(live) is np.ndarray:
            fits = (live.dtype, live.shape) == (value.dtype, value.shape)
            if fits and live.flags.writeable and live.base is None:
                live[...] = value
                return True
        return False


class Value:
    """A part of the state behind two functions: `get()` answers a state tree, `set(tree)` restores it.

    `get` is called at every end_step and must only read. With `pause` and `release` it is called between the two,
    while a save is under way.
    """

    def __init__(
        self,
        get: Callable[[], Tree],
        set: Callable[[Tree], Any],
        *,
        pause: Callable[[], Any] | None = None,
        release: Callable[[], Any] | None = None,
    ) -> None:
        self.get = get
        self.set = set
        self.pause = pause
        self.release = release


class ValueState(SmallState):
    """What a Value stands for."""

    kind: ClassVar[str] = "value"

    def __init__(self, value: Value, where: str) -> None:
        super().__init__(where)
        self.value = value

    @property
    def pausable(self) -> bool:
        return self.value.pause is not None and self.value.release is not None

    def pause(self) -> None:
        if self.value.pause is not None:
            self.value.pause()

    def release(self) -> None:
        if self.value.release is not None:
            self.value.release()

    def read(self) -> Tree:
        return private_copy(self.value.get())

    def apply(self, prepared: Any) -> None:
        self.value.set(prepared)
        self.forget()


def has_methods(target: Any, *names: str) -> bool:
    """Has it all these methods?"""
    return all(callable(getattr(target, name, None)) for name in names)


def like(loaded: Tree, live: Any) -> Tree:
    """`loaded` with the container types and devices that `live` has where the two have the same form."""
    if isinstance(loaded, torch.Tensor) and isinstance(live, torch.Tensor):
        return loaded.to(live.device)
    if isinstance(loaded, dict) and isinstance(live, dict):
        items = {key: like(value, live[key]) if key in live else value for key, value in loaded.items()}
        if isinstance(live, (collections.Counter, collections.OrderedDict)):
            return type(live)(items)
        return items
    if type(loaded) is type(live) and type(loaded) in (list, tuple) and len(loaded) == len(live):
        return type(loaded)(like(value, now) for value, now in zip(loaded, live, strict=True))
    return loaded


def _plain(state: Any) -> Any:
    """A scheduler's state with Counters (MultiStepLR's milestones) as dicts; `like` makes Counters of them again."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_plain(value) for value in state)
    return state


def _compare_structure(saved: Any, live: Any, path: str, differences: Differences) -> None:
    """Adds keys that differ in dicts with names for keys, and lists whose lengths differ."""
    if isinstance(saved, dict) and isinstance(live, dict):
        if all(isinstance(key, str) for key in [*saved, *live]):
            for key in sorted(differences.keys(saved, live, path)):
                _compare_structure(saved[key], live[key], f"{path}{key}.", differences)
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        if len(saved) != len(live):
            differences.add(path.rstrip("."), f"{len(saved)} entries", f"{len(live)} entries")
        else:
            for index, (one, other) in enumerate(zip(saved, live, strict=True)):
                _compare_structure(one, other, f"{path}{index}.", differences)
