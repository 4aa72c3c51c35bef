"""State of a torch optimizer, named by the parameters' names. The rule: what is empty is recorded as empty.

torch's get_optimizer_state_dict runs optimizer.step() to fill an empty state, and Optimizer.state_dict() numbers
parameters by position; so this reads optimizer.state and param_groups directly. Moments of sharded parameters are
sharded like them and load at any world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..storage.errors import UsageError
from ..storage.tensors import copy_bits
from .component import Component, Differences, LoadContext, Reshard, Tree, private_copy
from .device_fence import synchronize
from .model_state import ModelState
from .pieces import SavedTensor, box_of, leaf_of

PLAIN = "lastgood_plain"  # of an optimizer whose own state_dict() gives nothing beside param_groups and state


class OptimizerState(Component):
    """{"param_groups": [{..., "params": [name, ...]}, ...], "state": {name: {key: tensor or value}}}"""

    kind: ClassVar[str] = "optimizer"
    heavy: ClassVar[bool] = True
    on_reshard: ClassVar[Reshard] = Reshard.BOXES
    order: ClassVar[int] = 20

    def __init__(self, optimizer: Optimizer, where: str, models: Mapping[str, ModelState]) -> None:
        """`models`: the modules of the same member by component; they name the parameters. Raises UsageError."""
        if type(optimizer).state_dict is not Optimizer.state_dict and not getattr(optimizer, PLAIN, False):
            raise UsageError(
                f"{where}: {type(optimizer).__name__} overrides state_dict(), so it may keep state outside of its "
                "param_groups and state, which a checkpoint would lack (ZeroRedundancyOptimizer keeps all of it in "
                "its .optim). Nothing was touched; declare the optimizer that it wraps, or, if all of its state lies "
                f"in param_groups and state, set its attribute {PLAIN} = True.",
                component=where,
            )
        self.optimizer = optimizer
        self.where = where
        self.models = dict(models)
        self._held: list[dict[str, Any]] | None = None
        self._names()

    def devices(self) -> set[torch.device]:
        return {param.device for group in self.optimizer.param_groups for param in group["params"]}

    def hold(self) -> None:
        names = self._names()
        groups = self.optimizer.param_groups
        synchronize({v.device for group in groups for v in group.values() if isinstance(v, torch.Tensor)})
        self._held = [
            {
                key: [names[id(param)] for param in value]
                if key == "params"
                else private_copy(value, f"param_groups.{index}.{key}")
                for key, value in group.items()
            }
            for index, group in enumerate(groups)
        ]

    def capture(self) -> Tree:
        if self._held is None:
            self.hold()
        names = self._names()
        state: dict[str, Any] = {}
        strangers = []
        for param, entries in self.optimizer.state.items():  # in the order in which they were made
            name = names.get(id(param))
            if name is None:
                strangers.append(param)
                continue
            state[name] = {
                key: leaf_of(value, f"{self.where}.state.{name}.{key}")
                if isinstance(value, torch.Tensor)
                else private_copy(value, f"state.{name}.{key}")
                for key, value in entries.items()
            }
        if strangers:
            raise UsageError(
                f"{self.where}: {type(self.optimizer).__name__} keeps state for {len(strangers)} keys that are not "
                f"parameters of its groups ({', '.join(sorted(map(_shown, strangers))[:5])}). Nothing was captured; "
                "remove that state, or wrap the optimizer in an object with state_dict/load_state_dict.",
                component=self.where,
            )
        return {"param_groups": self._held, "state": state}

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self.optimizer).__name__}

    def prepare(self, loaded: Tree, context: LoadContext) -> _PreparedOptimizer:
        differences = Differences(context)
        names = self._names()
        groups = self._prepare_groups(loaded["param_groups"], names, differences)
        differences.raise_if_any()
        params = {names[id(param)]: (param, group) for param, group in self._params_with_groups()}
        state: list[tuple[torch.Tensor, list[_Entry]]] = []
        for name, entries in loaded["state"].items():
            if name not in params:
                differences.add(f"state.{name}", "present", None)
                continue
            param, group = params[name]
            state.append((param, self._prepare_entries(name, entries, param, group, differences)))
        differences.raise_if_any()
        return _PreparedOptimizer(groups, state)

    def apply(self, prepared: _PreparedOptimizer) -> None:
        for group, values in zip(self.optimizer.param_groups, prepared.groups, strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # in place: captured graphs hold its address
                else:
                    group[key] = value
        restored = [(param, {entry.key: entry.write() for entry in entries}) for param, entries in prepared.state]
        self.optimizer.state.clear()
        self.optimizer.state.update(restored)
        self._held = None

    def _prepare_groups(
        self, saved: list[dict[str, Any]], names: Mapping[int, str], differences: Differences
    ) -> list[dict[str, Any]]:
        live = self.optimizer.param_groups
        if len(saved) != len(live):
            differences.add("param_groups", f"{len(saved)} groups", f"{len(live)} groups")
            return []
        groups: list[dict[str, Any]] = []
        for index, (old, now) in enumerate(zip(saved, live, strict=True)):
            now_names = [names[id(param)] for param in now["params"]]
            differences.keys(old["params"], now_names, f"param_groups.{index}.params.")
            if set(old["params"]) == set(now_names) and old["params"] != now_names:
                differences.add(f"param_groups.{index}.params", "the same names", "in another order")
            if differences.context.allows("param_groups"):
                shared = old.keys() & now.keys()
            else:
                shared = differences.keys(old, now, f"param_groups.{index}.")
            groups.append({key: _private(old[key]) for key in old if key in shared and key != "params"})
        return groups

    def _prepare_entries(
        self, name: str, saved: Mapping[str, Any], param: torch.Tensor, group: dict[str, Any], differences: Differences
    ) -> list[_Entry]:
        live = dict(self.optimizer.state[param]) if param in self.optimizer.state else {}
        entries: list[_Entry] = []
        for key, value in saved.items():
            if not isinstance(value, SavedTensor):
                entries.append(_Entry(key, value=_private(value, _local(param).device)))
                continue
            where = f"{self.where}.state.{name}.{key}"
            now = live.get(key)
            if isinstance(now, torch.Tensor) and (now.dtype, tuple(now.shape)) == (value.dtype, value.global_shape):
                box = box_of(now, where)
                entries.append(_Entry(key, value=now, local=box.local, host=value.box(box.offsets, box.sizes)))
            elif key != "step" and value.global_shape == tuple(param.shape):
                new = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
                box = box_of(new, where)
                entries.append(_Entry(key, value=new, local=box.local, host=value.box(box.offsets, box.sizes)))
            elif not value.sharded:
                on_device = key != "step" or group.get("capturable") or group.get("fused")
                device = _local(param).device if on_device else torch.device("cpu")
                entries.append(_Entry(key, value=value.whole().to(device, copy=True)))
            else:
                differences.add(
                    f"state.{name}.{key}", f"sharded {value}", "nothing that tells how to shard it: update once first"
                )
        return entries

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _params_with_groups(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [(param, group) for group in self.optimizer.param_groups for param in group["params"]]

    def _names(self) -> dict[int, str]:
        """Names by id of parameter; with the model's component before them when several models share the optimizer."""
        wanted = {id(param) for param in self._params()}
        owned = {
            component: {id(param): fqn for fqn, param in model.named_parameters() if id(param) in wanted}
            for component, model in self.models.items()
        }
        owners = [component for component, params in owned.items() if params]
        names = {
            key: fqn if len(owners) == 1 else f"{component}.{fqn}"
            for component in reversed(owners)
            for key, fqn in owned[component].items()
        }
        for index, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in names:
                    models = ", ".join(sorted(self.models)) or "none"
                    raise UsageError(
                        f"{self.where}: parameter {position} of group {index} (shape {list(param.shape)}) belongs to "
                        f"no module of this member (modules: {models}), so it has no name. Nothing was touched; add "
                        "the module to the same member's state, and make the optimizer after fully_shard.",
                        component=self.where,
                    )
        return names


@dataclass
class _Entry:
    """One entry of a parameter's state. With `local`, `host` is copied into it when it is written."""

    key: str
    value: Any
    local: torch.Tensor | None = None
    host: torch.Tensor | None = None

    def write(self) -> Any:
        if self.local is not None and self.host is not None:
            copy_bits(self.local, self.host)
        return self.value


@dataclass
class _PreparedOptimizer:
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: list[tuple[torch.Tensor, list[_Entry]]] = field(default_factory=list)


def _private(value: Any, device: torch.device | str = "cpu") -> Any:
    """A private copy of a loaded value whose tensors are SavedTensors; tensors go to `device`."""
    if isinstance(value, SavedTensor):
        return value.whole().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _private(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_private(item, device) for item in value)
    return private_copy(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _shown(key: Any) -> str:
    return f"a tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
