"""Which component keeps which object of the user's. The rule: what cannot be kept is an error at once, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..storage.errors import UsageError
from .component import Component
from .dataloader_state import DataLoaderState, is_stateful_dataloader
from .model_state import ModelState
from .optimizer_state import OptimizerState
from .rng_state import RNG, RngState
from .small_state import InPlaceState, SchedulerState, StatefulState, Value, ValueState, has_methods

ACCEPTED = (
    "torch.nn.Module, torch.optim.Optimizer, a torch learning rate scheduler, lastgood.RNG(), torchdata's "
    "StatefulDataLoader, any object with state_dict() and load_state_dict(), dict, list, lastgood.Value(get, set)"
)


def resolve_components(role: str, state: Mapping[str, Any]) -> dict[str, Component]:
    """The components of a member by name. Raises UsageError naming one that is None or cannot be kept."""
    if not state:
        raise UsageError(
            f"role {role}: the state names no component, so there is nothing to save. Nothing was touched; pass a dict "
            f"of name to object ({ACCEPTED}).",
            role=role,
        )
    models = {
        name: ModelState(target, f"{role}.{name}") for name, target in state.items() if isinstance(target, nn.Module)
    }
    return {
        name: models[name] if name in models else _resolve(target, f"{role}.{name}", models)
        for name, target in state.items()
    }


def _resolve(target: Any, where: str, models: Mapping[str, ModelState]) -> Component:
    if target is None:
        raise UsageError(
            f"component {where} is None: it was declared, and there is nothing to save. Nothing was touched; add the "
            "member once the object exists, or leave the name out.",
            component=where,
        )
    if isinstance(target, Component):
        return target
    if isinstance(target, Optimizer):
        return OptimizerState(target, where, models)
    if isinstance(target, LRScheduler):
        return SchedulerState(target, where)
    if isinstance(target, RNG):
        return RngState(target, where)
    if isinstance(target, Value):
        return ValueState(target, where)
    if is_stateful_dataloader(target):
        return DataLoaderState(target, where)
    if isinstance(target, (dict, list)):
        return InPlaceState(target, where)
    if has_methods(target, "state_dict", "load_state_dict") and not isinstance(target, type):
        return StatefulState(target, where)
    raise UsageError(
        f"component {where} is a {type(target).__module__}.{type(target).__qualname__}, which lastgood does not know "
        f"how to keep. Nothing was touched; it accepts {ACCEPTED}.",
        component=where,
    )
