"""When to save: small frozen policies, combined by composition. Pure: the moment comes in, a Decision goes out.

A decision carries its reason as a sentence; it ends up in the manifest and in `status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..storage.errors import OptionsError


@dataclass(frozen=True)
class Decision:
    """Whether a save is due, and why (or why not)."""

    due: bool
    reason: str


@dataclass(frozen=True)
class Moment:
    """What a policy may look at, at the end of a step. `now_s` is a monotonic clock."""

    step: int
    now_s: float = 0.0
    last_saved_step: int | None = None  # step of the newest attempt that this run made or resumed from
    last_saved_s: float | None = None  # when that was; None before the first
    metrics: Mapping[str, float] = field(default_factory=dict)


class SavePolicy(Protocol):
    """This is the whole surface of a policy."""

    def decide(self, moment: Moment) -> Decision:
        """Whether to save at `moment`. Same moment, same answer."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Every `steps`-th step, counted from 0, so that a resumed run saves at the same steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionsError(f"save every {self.steps} steps: use 1 or more, or the policy Never.", steps=self.steps)

    def decide(self, moment: Moment) -> Decision:
        if moment.step % self.steps:
            return Decision(False, f"step {moment.step} is not a multiple of {self.steps}")
        if moment.last_saved_step == moment.step:
            return Decision(False, f"step {moment.step} has been saved already")
        return Decision(True, f"every {self.steps} steps" if self.steps > 1 else "every step")


@dataclass(frozen=True)
class EverySeconds:
    """When at least `seconds` have passed since the last save (since the start, before the first)."""

    seconds: float
    started_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise OptionsError(f"save every {self.seconds} seconds: use more than 0.", seconds=self.seconds)

    def decide(self, moment: Moment) -> Decision:
        since = moment.now_s - (self.started_s if moment.last_saved_s is None else moment.last_saved_s)
        if since < self.seconds:
            return Decision(False, f"the last save is {since:.0f} s old, less than {self.seconds:.0f} s")
        return Decision(True, f"{since:.0f} s since the last save")


@dataclass(frozen=True)
class AtSteps:
    """At the steps listed, and no others."""

    steps: frozenset[int]

    def decide(self, moment: Moment) -> Decision:
        if moment.step in self.steps:
            return Decision(True, f"step {moment.step} is on the list")
        return Decision(False, f"step {moment.step} is not on the list")


@dataclass(frozen=True)
class WhenBest:
    """When a metric is better than it was at every step before; `best` is kept by whoever composes the policy."""

    metric: str
    best: float | None = None
    higher_is_better: bool = True

    def decide(self, moment: Moment) -> Decision:
        value = moment.metrics.get(self.metric)
        if value is None or value != value:
            return Decision(False, f"no {self.metric} was reported for step {moment.step}")
        if self.best is None or (value > self.best if self.higher_is_better else value < self.best):
            return Decision(True, f"{self.metric} is the best so far: {value:g}")
        return Decision(False, f"{self.metric} {value:g} is not better than {self.best:g}")


@dataclass(frozen=True)
class Never:
    """Saves only when asked."""

    def decide(self, moment: Moment) -> Decision:
        return Decision(False, "no save policy is set")


@dataclass(frozen=True)
class AnyOf:
    """Due when one of the policies says so; the reasons of those that do are joined."""

    policies: tuple[SavePolicy, ...]

    def decide(self, moment: Moment) -> Decision:
        decisions = [policy.decide(moment) for policy in self.policies]
        due = [decision.reason for decision in decisions if decision.due]
        if due:
            return Decision(True, " and ".join(due))
        return Decision(False, "; ".join(decision.reason for decision in decisions) or "no save policy is set")
