"""The group of training ranks as the driver holds it: started together, called together, replaced together.

Every call has a deadline. A rank that died is told from a rank that merely complains about its dead peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ...storage.errors import LastgoodError
from .cluster import SLOT
from .recipe import Recipe
from .worker import PolicyWorker

START_DEADLINE_S = 120.0  # starting the actors, importing torch and transformers, building the model
CALL_DEADLINE_S = 90.0  # one rollout or update of all ranks
_VERDICT_S = 15.0  # after the first error: how long to listen for which rank truly died


class RankLostError(LastgoodError):
    """A training rank died. Field `ranks` names which; the group is of no use any more."""


class RankGroup:
    """The actors of one generation of training processes, ordered by rank."""

    def __init__(self, recipe: Recipe) -> None:
        """Starts one actor per rank, each on its own node, and waits until the model stands on all."""
        self.recipe = recipe
        actor: Any = ray.remote(PolicyWorker)
        self.handles: list[Any] = [
            actor.options(num_cpus=1, max_restarts=0, label_selector={SLOT: str(rank)}).remote(recipe, rank)
            for rank in range(recipe.world_size)
        ]
        try:
            self.pids: list[int] = self._gather([h.pid.remote() for h in self.handles], START_DEADLINE_S)
            port = ray.get(self.handles[0].open_rendezvous.remote(), timeout=START_DEADLINE_S)
            self.parameters = sum(self._gather([h.build.remote(port) for h in self.handles], START_DEADLINE_S))
        except BaseException:
            self.kill()
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Calls `method` on every rank, with its own element of `arguments`; answers ordered by rank.

        Raises RankLostError when a rank is dead, TimeoutError past CALL_DEADLINE_S, else what the rank raised.
        """
        arguments = arguments or [()] * len(self.handles)
        return self._gather(
            [getattr(handle, method).remote(*given) for handle, given in zip(self.handles, arguments, strict=True)],
            CALL_DEADLINE_S,
        )

    def kill(self) -> None:
        """Ends every actor of the group, at once and for good."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)

    def _gather(self, references: list[Any], deadline_s: float) -> list[Any]:
        answers: dict[Any, Any] = {}
        waiting, error = list(references), None
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=_VERDICT_S if error else deadline_s)
            if not done:
                break
            try:
                answers[done[0]] = ray.get(done[0])
            except RayActorError as dead:
                rank = references.index(done[0])
                raise RankLostError(
                    f"rank {rank} of the policy died while the driver was calling it; start a new group of ranks and "
                    f"resume from the newest checkpoint",
                    ranks=[rank],
                ) from dead
            except RayError as complaint:
                error = error or complaint
        if error:
            raise error
        if waiting:
            late = sorted(references.index(reference) for reference in waiting)
            raise TimeoutError(f"ranks {late} did not answer within {deadline_s:.0f} s; is the machine overloaded?")
        return [answers[reference] for reference in references]
