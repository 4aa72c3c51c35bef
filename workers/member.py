"""A member: one (role, rank) of this process with its named components. The rule: only `Prepared.apply` writes to them.

The agent calls `mark` at every end_step, `gate.copying` and `capture` when a save is under way, and hands the member
to load.prepare at resume. Optimizer hooks count updates and keep the window (gate.py); close() removes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..coordinator.messages import MemberId, MemberReport
from ..storage.errors import LastgoodError, SnapshotError, UsageError
from ..storage.layout import check_name
from .component import Component, Tree
from .device_fence import DeviceFence
from .gate import HOLD_LIMIT_S, Gate
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
        self._hooks = [
            handle
            for optimizer in self._optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

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
    def updates(self) -> int | None:
        """Optimizer updates of the run so far, restored at resume; None when the member has no optimizer."""
        return self._updates if self._optimizers else None

    def restored(self, updates: int | None) -> None:
        """Live state was just written from a checkpoint: takes over its count of updates."""
        self._updates = updates or 0
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
        have finished. Raises WindowClosedError when the window of `step` is not open.
        """
        self.gate.require(step)
        return self.survey()

    def survey(self) -> dict[str, Tree]:
        """As capture, but of any moment: to plan images and to find out early what cannot be encoded."""
        self._fence.wait(self.devices())
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
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.gate.before_step(id(optimizer), sys._getframe(1))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.gate.after_step(id(optimizer), sys._getframe(1)):
            self._updates += 1
            self._fence.record({param.device for group in optimizer.param_groups for param in group["params"]})


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
