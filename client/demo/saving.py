"""All that the demo does with lastgood: attach, add members, resume, end_step, close, and what each save cost.

It imports the public face, as a user's own code would, and not the folders behind it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import lastgood

from ...storage.errors import NotACheckpointError
from ...storage.verify import RejectKind, find_committed, verify_attempt
from .cluster import Places
from .recipe import Recipe
from .worker import PolicyWorker

RUN = "grpo-demo"


def actor_state(worker: PolicyWorker) -> dict[str, Any]:
    """The actor role's state in one rank's process."""
    return {
        "model": worker.model,
        "optimizer": worker.optimizer,
        "scheduler": worker.scheduler,
        "rng": lastgood.RNG(),
    }


def reference_state(worker: PolicyWorker) -> dict[str, Any]:
    """The reference role's state: it lives in the same process as the actor's."""
    return {"model": worker.reference}


class Saving:
    """The run's connection to lastgood, from its first step to its last."""

    def __init__(self, recipe: Recipe, places: Places) -> None:
        self.resumed_from: list[int] = []  # steps, in order
        self.stall_s: dict[int, float] = {}  # by step of a due save: how long end_step kept the driver
        self.first_epoch = self.last_epoch = 0  # of the coordinator; a higher one at the end: it was replaced
        self._began: dict[int, float] = {}  # by step of a due save: wall clock when end_step was called, first time
        self._recipe = recipe
        self.run = lastgood.attach(RUN, store=str(places.store), staging=places.staging, save_freq=recipe.save_freq)

    def join(self, handles: Sequence[Any], *, dataloader: Any, cursor: dict[str, Any]) -> int:
        """Registers a new generation of ranks and this process's state, resumes; returns the first step to run."""
        self.run.add_members("actor", handles, state=actor_state)
        self.run.add_members("ref", handles, state=reference_state)
        self.run.add_driver({"dataloader": dataloader, "rng": lastgood.RNG(), "cursor": cursor})
        restored = self.run.resume("auto")
        if restored is not None:
            self.resumed_from.append(restored.step)
        self.first_epoch = self.first_epoch or self._epoch()
        return self.run.next_step

    def end_step(self, step: int, metrics: Mapping[str, float]) -> Sequence[str]:
        """Ends a step; saves it when due. Returns once training may go on, with a sentence per failed save."""
        began, began_at = time.monotonic(), time.time()
        outcome = self.run.end_step(step, metrics=dict(metrics))
        if step in self._recipe.save_steps:
            self.stall_s[step] = time.monotonic() - began
            self._began.setdefault(step, began_at)
        return outcome.failures

    def finish(self) -> None:
        """Returns when the last save is committed and durable."""
        self.last_epoch = self._epoch()
        self.run.close()

    def commits_in_store(self, places: Places) -> tuple[dict[int, float], list[str]]:
        """What the store holds, asked without Ray: seconds from end_step to the commit, by step; and what is not whole.

        Every byte is read and hashed again. Both times are this machine's wall clock, which only this report relies on.
        """
        try:
            found = find_committed(places.store / RUN)
        except NotACheckpointError as error:
            return {}, [str(error)]
        seconds: dict[int, float] = {}
        # An attempt that never came to its COMPLETED may lie there after a kill: nobody will ever read it.
        wrong = [f"{one.path}: {one.reason}" for one in found.rejected if one.kind is not RejectKind.UNCOMMITTED]
        for one in found.committed:
            at = datetime.fromisoformat(one.completed.committed_at.replace("Z", "+00:00")).timestamp()
            seconds[one.completed.step] = max(0.0, at - self._began.get(one.completed.step, at))
            wrong += [f"{one.path}: {finding}" for finding in verify_attempt(one.path, one.manifest) if finding.fatal]
        return seconds, wrong

    def _epoch(self) -> int:
        return int(self.run.status()["epoch"])
