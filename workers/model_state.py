"""Weights and buffers of an nn.Module: FSDP2 (DTensor) parts and plain tensors alike.

The rule: nothing here calls state_dict(). FSDP2's hooks on it put the sharded parameters back into the modules, which
would pull unsharded weights away from a forward pass that runs in another thread. So parameters are read from the
modules, and where FSDP2 has put an unsharded one there, from FSDP2's own record of the sharded one.

Parameters stand still in the quiescent window and are captured live. Persistent buffers and extra state may change in
a forward pass (batch norm statistics), so they are kept at end_step. Non-persistent buffers are not state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..storage.errors import SnapshotError, UsageError
from ..storage.tensors import copy_bits, same_bits
from .component import Component, Differences, LoadContext, Memo, Reshard, Tree, private_copy
from .device_fence import synchronize
from .pieces import Box, SavedTensor, box_of, leaf_of, whole_tree

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # torch.compile, activation checkpointing
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class _Slot:
    """One named place of a module tree."""

    fqn: str
    module: nn.Module
    tensor: torch.Tensor | None  # None: extra state
    moves: bool  # may change in a forward pass


class ModelState(Component):
    """The state of one nn.Module, as {fully qualified name: tensor, ShardedPiece or extra state}."""

    kind: ClassVar[str] = "model"
    heavy: ClassVar[bool] = True
    on_reshard: ClassVar[Reshard] = Reshard.BOXES
    order: ClassVar[int] = 10

    def __init__(self, module: nn.Module, where: str) -> None:
        """`where` names the component in errors. Raises UsageError for FSDP1, whose state needs collectives."""
        for name, part in module.named_modules():
            if isinstance(part, FullyShardedDataParallel):
                raise UsageError(
                    f"{where}: {name or 'the module'} is wrapped in FullyShardedDataParallel (FSDP1), whose state dict "
                    "needs a collective, and a save may not run one. Nothing was touched; shard it with "
                    "torch.distributed.fsdp.fully_shard (FSDP2), or leave it out of the members' state.",
                    component=where,
                )
            own = _kept_elsewhere(part)
            if own:
                raise UsageError(
                    f"{where}: {name or 'the module'} ({type(part).__name__}) overrides _save_to_state_dict and keeps "
                    f"{', '.join(own)} there, which are no parameters or buffers, so a checkpoint would lack them. "
                    "Nothing was touched; make them buffers, or return them from get_extra_state.",
                    component=where,
                )
        self.module = module
        self.where = where
        self._held: dict[str, Any] | None = None

    def devices(self) -> set[torch.device]:
        return {slot.tensor.device for slot in self._slots() if slot.tensor is not None}

    def hold(self) -> None:
        memo: Memo = {}
        held: dict[str, Any] = {}
        slots = list(self._slots())
        synchronize({slot.tensor.device for slot in slots if slot.tensor is not None and slot.moves})
        for slot in slots:
            if slot.tensor is None:
                held[slot.fqn] = private_copy(slot.module.get_extra_state(), slot.fqn, memo)
            elif slot.moves:
                held[slot.fqn] = private_copy(self._leaf(slot), slot.fqn, memo)
        self._held = held

    def capture(self) -> Tree:
        if self._held is None:
            self.hold()
        held = self._held or {}
        return {slot.fqn: held[slot.fqn] if slot.fqn in held else self._leaf(slot) for slot in self._slots()}

    def fingerprint(self) -> dict[str, Any]:
        """`structure`: a hash over names, dtypes, global shapes and ties; `parameters`: how many numbers they hold."""
        entries: list[Any] = []
        shared: dict[int, list[str]] = {}
        sizes: dict[int, int] = {}
        for slot in self._slots():
            if slot.tensor is None:
                entries.append([slot.fqn])
                continue
            entries.append([slot.fqn, str(slot.tensor.dtype), list(slot.tensor.shape)])
            if not slot.moves:
                shared.setdefault(id(slot.tensor), []).append(slot.fqn)
                sizes[id(slot.tensor)] = slot.tensor.numel()  # of a DTensor: the global count
        ties = sorted(sorted(names) for names in shared.values() if len(names) > 1)
        text = json.dumps([sorted(entries), ties], separators=(",", ":"))
        return {"structure": hashlib.sha256(text.encode()).hexdigest(), "parameters": sum(sizes.values())}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its first name, in its sharded form."""
        seen: set[int] = set()
        for slot in self._slots():
            if slot.tensor is not None and not slot.moves and id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                yield slot.fqn, slot.tensor

    def prepare(self, loaded: Tree, context: LoadContext) -> _PreparedModel:
        slots = {slot.fqn: slot for slot in self._slots()}
        differences = Differences(context)
        common = differences.keys(loaded, slots)
        for fqn in sorted(common):
            saved, tensor = loaded[fqn], slots[fqn].tensor
            if tensor is None:
                continue  # extra state is whatever its module gave, a tensor too
            if not isinstance(saved, SavedTensor):
                differences.add(fqn, "extra state", "a tensor")
            elif (saved.dtype, saved.global_shape) != (tensor.dtype, tuple(tensor.shape)):
                differences.add(fqn, saved, f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        differences.raise_if_any()
        prepared = _PreparedModel([], [])
        first: dict[int, tuple[str, torch.Tensor]] = {}  # tied tensors are written once, and must be saved equal
        for fqn, slot in slots.items():
            if fqn not in common:
                continue
            if slot.tensor is None:
                prepared.extras.append((slot.module, private_copy(whole_tree(loaded[fqn]))))
                continue
            box = self._box(slot)
            host = loaded[fqn].box(box.offsets, box.sizes)
            if id(slot.tensor) not in first:
                first[id(slot.tensor)] = (fqn, host)
                prepared.copies.append((box.local, host))
            elif not same_bits(first[id(slot.tensor)][1], host):
                differences.add(fqn, "a tensor of its own", f"tied to {first[id(slot.tensor)][0]}")
        differences.raise_if_any()
        return prepared

    def apply(self, prepared: _PreparedModel) -> None:
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # weights that were gathered before would be used in place of those written here
        for live, host in prepared.copies:
            copy_bits(live, host)
        for module, value in prepared.extras:
            module.set_extra_state(value)
        self._held = None

    def _leaf(self, slot: _Slot) -> Any:
        return leaf_of(self._on_device(slot), f"{self.where}.{slot.fqn}")

    def _box(self, slot: _Slot) -> Box:
        return box_of(self._on_device(slot), f"{self.where}.{slot.fqn}")

    def _on_device(self, slot: _Slot) -> torch.Tensor:
        assert slot.tensor is not None
        if slot.tensor.is_meta:
            raise SnapshotError(
                f"{self.where}.{slot.fqn} is on the meta device: it has no values yet. Nothing was captured; "
                "materialise the module (to_empty and initialise, or load weights) first.",
                component=self.where,
                path=slot.fqn,
            )
        return slot.tensor

    def _slots(self) -> Iterator[_Slot]:
        return _walk(self.module, "", _sharded_parameters(self.module))


def _kept_elsewhere(module: nn.Module) -> list[str]:
    """What the module alone adds to its state dict beside parameters, buffers and extra state."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return []
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, "", True)
    return sorted(found.keys() - {*module._parameters, *module._buffers, _EXTRA})


@dataclass
class _PreparedModel:
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # (live local tensor, host tensor)
    extras: list[tuple[nn.Module, Any]]


def _walk(module: nn.Module, prefix: str, sharded: dict[tuple[int, str], torch.Tensor]) -> Iterator[_Slot]:
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            yield _Slot(prefix + name, module, sharded.get((id(module), name), parameter), moves=False)
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield _Slot(prefix + name, module, buffer, moves=True)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield _Slot(prefix + _EXTRA, module, None, moves=True)
    for name, child in module._modules.items():
        if child is None:
            continue
        wrapped = name in _WRAPPERS or (
            name == "module" and isinstance(module, (DistributedDataParallel, DataParallel))
        )
        yield from _walk(child, prefix if wrapped else f"{prefix}{name}.", sharded)


def _sharded_parameters(module: nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    """FSDP2's sharded parameters by (id of module, name), whatever stands in the modules at the moment."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                found[id(info.module), info.param_name] = parameter.sharded_param
                for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[id(owner), name] = parameter.sharded_param
    return found
