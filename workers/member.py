"""A member: one (role, rank) of this process with its named components. The rule: only `Prepared.apply` writes to them.

The agent calls `mark` at every end_step, `gate.copying` and `capture` when a save is under way, and hands the member
to load.prepare at resume. Optimizer hooks count updates and keep the window (gate.py); close() removes them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..coordinator.messages import MemberId, MemberReport
from ..storage.errors import LastgoodError, SnapshotError, UsageError
from ..storage.layout import check_name
from .component import Component, Tree
from .device_fence import DeviceFence
from .gate import HOLD_LIMIT_S, Gate
from .model_state import ModelState
from .optimizer_state import OptimizerState
from .pace import Pace
from .resolve import resolve_components


class Member:
    """One (role, rank) that owns part of the state, as it stands in this process."""

    def __init__(
        self,
        role: str,
        rank: int,
        world_size: int,
        components: Mapping[str, Component],
        *,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> None:
        """Most callers use `of`. `world_size`: members of this role. Raises UsageError for impossible ranks."""
        check_name("role", role)
        for name in components:
            check_name("component", name)
        if not 0 <= rank < world_size:
            raise UsageError(
                f"role {role}: rank {rank} does not exist among {world_size} members. Nothing was touched; ask the "
                "process for its rank (torch.distributed.get_rank()).",
                rank=rank,
                world_size=world_size,
            )
        self.id = MemberId(role, rank)
        self.world_size = world_size
        self.components: dict[str, Component] = dict(sorted(components.items()))
        self.gate = Gate(str(self.id), hold_limit_s=hold_limit_s)
        self.pace = Pace()  # of a member-led run
        self._fence = DeviceFence()
        self._updates = 0
        self._optimizers = [c.optimizer for c in self.components.values() if isinstance(c, OptimizerState)]
        self._models = [c for c in self.components.values() if isinstance(c, ModelState)]
        self._strangers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stranger] = weakref.WeakKeyDictionary()
        self._undeclared: str | None = None  # of an undeclared optimizer that stepped beside declared ones
        self._hooks: list[Any] = []
        self._closed = False
        self._stepping = 0  # steps that wait in our pre-hook
        for optimizer in self._optimizers:
            handle = optimizer.register_step_pre_hook(self._before_step)
            hooks: Any = optimizer._optimizer_step_pre_hooks  # torch 2.13 keeps them in an OrderedDict
            hooks.move_to_end(handle.id, last=False)  # a hook of the user's may write
            self._hooks += [handle, optimizer.register_step_post_hook(self._after_step)]
        if self._models:  # an optimizer that was not declared, or was made later, moves the weights as well
            _Watch.add(self)

    @classmethod
    def of(
        cls,
        role: str,
        rank: int,
        world_size: int,
        state: Mapping[str, Any],
        *,
        hold_limit_s: float = HOLD_LIMIT_S,
    ) -> Member:
        """Makes a member of the user's objects by name. Raises UsageError naming a component that cannot be kept."""
        return cls(role, rank, world_size, resolve_components(role, state), hold_limit_s=hold_limit_s)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Sorted, as MemberInfo and RoleDeclaration want them."""
        return tuple(self.components)

    @property
    def pausable(self) -> bool:
        """Does some component ask for pause()/release() around the snapshot?"""
        return any(component.pausable for component in self.components.values())

    @property
    def weights(self) -> tuple[str, ...]:
        """The components that its optimizers change."""
        changed = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        return tuple(
            name
            for name, component in self.components.items()
            if isinstance(component, ModelState) and any(id(p) in changed for p in component.module.parameters())
        )

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the run so far, restored at resume; None when the member has no optimizer."""
        return self._updates if self._optimizers else None

    def restored(self, updates: int | None) -> None:
        """Live state was just written from a checkpoint: takes over its count of updates."""
        self._updates = updates or 0
        self._undeclared = None
        self._fence.forget()

    def devices(self) -> set[torch.device]:
        """The devices that hold tensors of its components."""
        return set().union(*(component.devices() for component in self.components.values()))

    def fingerprint(self) -> dict[str, Any]:
        """What is compared at resume: `<role>.world_size` and `<role>.<component>.<name>`, JSON values."""
        found: dict[str, Any] = {f"{self.id.role}.world_size": self.world_size}
        for name, component in self.components.items():
            for key, value in component.fingerprint().items():
                found[f"{self.id.role}.{name}.{key}"] = value
        return found

    def mark(self, step: int) -> MemberReport:
        """Step `step` has ended: keeps the small state privately, opens the window, reports.

        Raises WindowClosedError while an optimizer update runs, SnapshotError naming the component that failed; the
        window is closed then.
        """
        with self.gate.marking(step):
            for name, component in self.components.items():
                with _named(self.id, name, "keep its small state"):
                    component.hold()
            return MemberReport(self.id, step, self.updates, self.component_names)

    def capture(self, step: int) -> dict[str, Tree]:
        """The state trees of `step` by component: private small state, and live tensors for heavy components.

        Call it, and copy what it returns, inside `gate.copying(step)`. When it returns, the last update's kernels
        have finished. Raises WindowClosedError when the window of `step` is not open; one that an update has closed
        which waits for this very copy is no other window.
        """
        self.gate.require_copying(step)
        if self._undeclared is not None:
            raise SnapshotError(
                f"member {self.id}: an optimizer that is not in its state ({self._undeclared}) has updated its "
                "weights; a checkpoint would lack that optimizer's state. Nothing was copied; the previous checkpoint "
                "stands. Declare it, and where it took the place of a declared one, add the member again.",
                member=str(self.id),
            )
        self._fence.wait(self.devices())
        return self.survey()

    def survey(self) -> dict[str, Tree]:
        """The same trees of any moment, whose tensors may still change: to lay images out, and to find out early what
        cannot be encoded."""
        trees: dict[str, Tree] = {}
        for name, component in self.components.items():
            with _named(self.id, name, "capture its state"):
                trees[name] = component.capture()
        return trees

    def report(self, step: int, nbytes: int = 0) -> MemberReport:
        """The member's word on where it stands. `nbytes`: of its images."""
        return MemberReport(self.id, step, self.updates, self.component_names, nbytes)

    def pause(self) -> None:
        """Calls pause() of every component that has it."""
        for name, component in self.components.items():
            if component.pausable:
                with _named(self.id, name, "pause"):
                    component.pause()

    def release(self) -> None:
        """Calls release() of every component that has it; every one is called even when one fails."""
        failed: list[LastgoodError] = []
        for name, component in self.components.items():
            if component.pausable:
                try:
                    with _named(self.id, name, "release"):
                        component.release()
                except LastgoodError as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def close_window(self, deadline_s: float) -> None:
        """Returns when no copy runs here and none will start before the next mark. Raises DeadlineError."""
        self.gate.close(deadline_s)

    def close(self) -> None:
        """Removes the hooks; the objects are the user's alone again."""
        _Watch.remove(self)
        self._closed = True
        if self._stepping:
            return  # a step waits in one of the hooks: to remove it now would break that step; closed, it does nothing
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._closed:
            return
        self._stepping += 1
        try:
            self.gate.before_step(id(optimizer), sys._getframe(1))
        finally:
            self._stepping -= 1

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.gate.after_step(id(optimizer), sys._getframe(1)):
            self._updates += 1
            self._fence.record({param.device for group in optimizer.param_groups for param in group["params"]})

    def _before_other_step(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        if self._is_stranger(optimizer):
            self._strangers[optimizer].began_at = self._updates
            self.gate.before_step(id(optimizer), frame)

    def _after_other_step(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        if self._is_stranger(optimizer) and self.gate.after_step(id(optimizer), frame):
            if self._optimizers and self._strangers[optimizer].began_at == self._updates:  # wraps no declared one
                self._undeclared = type(optimizer).__name__
            self._fence.record({param.device for group in optimizer.param_groups for param in group["params"]})

    def _is_stranger(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does it move weights of this member without being in its state?"""
        if any(optimizer is declared for declared in self._optimizers):
            return False
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        known = self._strangers.get(optimizer)
        if known is None or known.params != len(params):
            ours = {id(param) for model in self._models for _, param in model.named_parameters()}
            known = self._strangers[optimizer] = _Stranger(len(params), not params.isdisjoint(ours))
        return known.moves_ours


@dataclass
class _Stranger:
    """An optimizer that is not in the state."""

    params: int
    moves_ours: bool
    began_at: int = 0  # count of updates when its step began


class _Watch:
    """One pair of hooks of all optimizers of the process, for all members. It stays: to remove a hook while another
    thread steps would break that step. Members are not kept alive by it."""

    _lock = threading.Lock()
    _members: tuple[weakref.ref[Member], ...] = ()
    _begun = False

    @classmethod
    def add(cls, member: Member) -> None:
        with cls._lock:
            cls._members = (*(other for other in cls._members if other() is not None), weakref.ref(member))
            if not cls._begun:
                register_optimizer_step_pre_hook(cls._before)
                register_optimizer_step_post_hook(cls._after)
                cls._begun = True

    @classmethod
    def remove(cls, member: Member) -> None:
        with cls._lock:
            cls._members = tuple(other for other in cls._members if other() not in (None, member))

    @staticmethod
    def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for reference in _Watch._members:
            member = reference()
            if member is not None:
                member._before_other_step(optimizer, sys._getframe(1))

    @staticmethod
    def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for reference in _Watch._members:
            member = reference()
            if member is not None:
                member._after_other_step(optimizer, sys._getframe(1))


class _named:  # noqa: N801 - reads as a word in `with`
    """Turns what a component raises into a SnapshotError that names it; lastgood's own errors pass."""

    def __init__(self, member: MemberId, component: str, doing: str) -> None:
        self.member = member
        self.component = component
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, LastgoodError):
            raise SnapshotError(
                f"member {self.member}: component {self.component} could not {self.doing}: "
                f"{type(error).__name__}: {error}. Nothing was written; the previous checkpoint stands. Mend the "
                "component's state_dict, get or pause function.",
                member=str(self.member),
                component=self.component,
            ) from error
