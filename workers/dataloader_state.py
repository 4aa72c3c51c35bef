"""torchdata's StatefulDataLoader. The rule: after a resume its next batch, and every stream, is that of the run.

Two things are done beside its own state_dict, both seen to matter for exactness:
a loader that was not iterated yet is not asked for its state, since that makes its iterator, which draws a seed
earlier than the run would have; and at resume the iterator is made at once and the streams it draws from are put
back, since the run drew that seed before the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, ClassVar

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..storage.errors import UsageError
from .component import Differences, LoadContext, Tree, private_copy
from .rng_state import generator_state, set_generator_state
from .small_state import SmallState, has_methods

_LOADER = ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader")
_DRAWING = frozenset(kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
_SAMPLERS = "torchdata.stateful_dataloader.sampler"


def is_stateful_dataloader(target: Any) -> bool:
    """Is it torchdata's loader, or a subclass? Asked by name, as torchdata may not be installed."""
    return any((kind.__module__, kind.__qualname__) == _LOADER for kind in type(target).__mro__)


def loader_fingerprint(target: Any) -> dict[str, Any]:
    """`dataset_length` and `batch_size` of a loader-like object, where it has them."""
    found: dict[str, Any] = {}
    dataset = getattr(target, "dataset", None)
    if isinstance(dataset, Sized):
        found["dataset_length"] = len(dataset)
    size = getattr(target, "batch_size", None)
    if size is None:
        size = getattr(getattr(target, "batch_sampler", None), "batch_size", None)
    if isinstance(size, int):
        found["batch_size"] = size
    return found


def _drawing_sampler(loader: Any) -> Any:
    """A sampler of the loader that draws an order which torchdata cannot bring back; None when there is none.

    torchdata skips what was taken already; that is exact only for a sampler that gives the same order again.
    """
    sampler, kept = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler, True
    while sampler is not None and not has_methods(sampler, "state_dict", "load_state_dict"):
        if type(sampler).__iter__ in _DRAWING:
            return sampler
        if _named(sampler, _SAMPLERS, "RandomSampler"):
            return None if kept else sampler
        kept = kept and _named(sampler, _SAMPLERS, "BatchSampler")  # its iterator asks that of the sampler inside
        sampler = getattr(sampler, "sampler", None)
    return None


def _named(target: Any, module: str, name: str) -> bool:
    return any((kind.__module__, kind.__qualname__) == (module, name) for kind in type(target).__mro__)


class DataLoaderState(SmallState):
    """{"loader": its state_dict or None before the first iteration, "generators": the streams that it draws from}"""

    kind: ClassVar[str] = "dataloader"
    order: ClassVar[int] = 60

    def __init__(self, loader: Any, where: str) -> None:
        super().__init__(where)
        lost = _drawing_sampler(loader)
        if lost is not None:
            raise UsageError(
                f"{where}: its {type(lost).__module__}.{type(lost).__name__} draws an order that no state_dict keeps, "
                "so a resume in mid-epoch would go on in another one. Nothing was touched; use "
                "torchdata.stateful_dataloader.sampler (RandomSampler, BatchSampler), or a sampler with state_dict and "
                "load_state_dict.",
                component=where,
            )
        self.loader = loader

    def read(self) -> Tree:
        # next_iter_state: None, or what a user's load_state_dict left for the next iteration
        started = self.loader._iterator is not None
        state = self.loader.state_dict() if started else self.loader.next_iter_state
        return {
            "loader": private_copy(state),
            "generators": {name: generator_state(generator) for name, generator in self._generators().items()},
        }

    def fingerprint(self) -> dict[str, Any]:
        return loader_fingerprint(self.loader)

    def prepare(self, loaded: Tree, context: LoadContext) -> Tree:
        differences = Differences(context)
        differences.keys(loaded["generators"], self._generators(), "generators.")
        differences.raise_if_any()
        return private_copy(loaded)

    def apply(self, prepared: Tree) -> None:
        default = torch.get_rng_state()
        self.loader.load_state_dict({} if prepared["loader"] is None else prepared["loader"])
        if prepared["loader"] is None:
            self.loader.next_iter_state = None
        else:
            self.loader.state_dict()  # makes the iterator that the next iter() takes
        for name, generator in self._generators().items():
            set_generator_state(generator, prepared["generators"][name])
        torch.set_rng_state(default)
        self.forget()

    def _generators(self) -> dict[str, torch.Generator]:
        found = {
            "loader": getattr(self.loader, "generator", None),
            "sampler": getattr(getattr(self.loader, "sampler", None), "generator", None),
        }
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}
