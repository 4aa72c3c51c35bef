"""The driver of a GRPO run: sample, reward, learn, step after step, with or without lastgood.

The loop is written once. Without `saving` it runs bare (the run everything is compared with); with it, it differs by
the lines that touch `saving`, and survives the death of ranks by starting new ones and resuming.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .grpo import group_advantages
from .ranks import RankGroup, RankLostError
from .recipe import Recipe
from .task import SampleStream, Tokenizer, make_loader, reward
from .worker import json_digest, rng_digests, tensor_digest

if TYPE_CHECKING:
    from .saving import Saving

_MAX_GENERATIONS = 4  # groups of ranks one run may use up


@dataclass(frozen=True)
class StepReport:
    """What the driver learned from one step."""

    step: int
    loss: float  # mean over ranks and their updates
    reward: float  # mean over all samples
    kl: float


@dataclass(frozen=True)
class RunResult:
    """The end of a run: everything the demo compares, by name."""

    facts: dict[str, Any]  # name -> digest, or a list of plain values; names are grouped by their part before "/"
    rewards: list[float]  # mean reward per step
    losses: list[float]
    parameters: int  # of the policy
    updates: int  # optimizer updates


class Trainer:
    """Runs one recipe to its end. `on_step` is told every finished step, `before_save` is called just before a save."""

    def __init__(
        self,
        recipe: Recipe,
        saving: Saving | None = None,
        *,
        on_step: Callable[[StepReport], None],
        on_event: Callable[[str], None],
        before_save: Callable[[int, RankGroup], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self.saving = saving
        self._on_step = on_step
        self._on_event = on_event
        self._before_save = before_save
        self._tokenizer = Tokenizer()

    def run(self) -> RunResult:
        """Trains all steps; with `saving`, through lost ranks. Raises RankLostError when it cannot be helped."""
        for generation in range(1, _MAX_GENERATIONS + 1):
            ranks = RankGroup(self.recipe)
            try:
                return self._train(ranks)
            except RankLostError as lost:
                if self.saving is None or generation == _MAX_GENERATIONS:
                    raise
                self._on_event(f"rank {lost.ranks[0]} is gone; starting new ranks and resuming")
            finally:
                ranks.kill()
        raise AssertionError("unreachable: the last generation returns or raises")

    def _train(self, ranks: RankGroup) -> RunResult:
        recipe, saving = self.recipe, self.saving
        # All state of the driver is new for each generation, as if this process had just been started.
        random.seed(recipe.seed)
        torch.manual_seed(recipe.seed)
        loader = make_loader(recipe.prompts_per_step, recipe.seed)
        cursor: dict[str, Any] = {"step": 0, "sample_ids": [], "losses": [], "rewards": []}
        first = saving.join(ranks.handles, dataloader=loader, cursor=cursor) if saving else 1
        if saving and first > 1:
            self._on_event(f"resumed from step {first - 1}")
        samples = SampleStream(loader)
        updates = 0
        for step in range(first, recipe.steps + 1):
            report, sample_ids, updates_now = self._step(step, ranks, samples)
            updates += updates_now
            cursor["step"] = step
            cursor["sample_ids"].append(sample_ids)
            cursor["losses"].append(report.loss)
            cursor["rewards"].append(report.reward)
            if saving:
                if step in recipe.save_steps and self._before_save:
                    self._before_save(step, ranks)
                for failure in saving.end_step(step, metrics={"reward": report.reward, "loss": report.loss}):
                    self._on_event(failure)
            self._on_step(report)
        if saving:
            saving.finish()
        facts = {
            "sample ids": cursor["sample_ids"],
            "losses": [loss.hex() for loss in cursor["losses"]],
            "rewards": [value.hex() for value in cursor["rewards"]],
            **{f"trainer {name}": digest for name, digest in rng_digests().items()},
            "dataloader": json_digest(_plain(loader.state_dict())),
        }
        for rank, digests in enumerate(ranks.call("digest")):
            facts |= {f"{name} (rank {rank})": digest for name, digest in digests.items()}
        return RunResult(facts, cursor["rewards"], cursor["losses"], ranks.parameters, updates)

    def _step(self, step: int, ranks: RankGroup, samples: SampleStream) -> tuple[StepReport, list[int], int]:
        """One step: rollout on all ranks, rewards and advantages here, update on all ranks."""
        recipe = self.recipe
        batch = samples.take()
        prompts, answers = [], []
        for sample in batch:
            left, right = sample.left, sample.right
            if random.random() < 0.5:  # the driver's own randomness is part of the run too
                left, right = right, left
            prompts.append(self._tokenizer.prompt(left, right))
            answers.append(left + right)
        share = len(prompts) // recipe.world_size
        rollouts = ranks.call("rollout", [(prompts[r * share : (r + 1) * share],) for r in range(recipe.world_size)])

        prompt_length = len(prompts[0])
        responses = [row for rollout in rollouts for row in rollout.tokens[:, prompt_length:].tolist()]
        rewards = torch.tensor(
            [reward(self._tokenizer.decode(row), answers[i // recipe.group_size]) for i, row in enumerate(responses)],
            dtype=torch.float32,
        )
        advantages = group_advantages(rewards, recipe.group_size).chunk(recipe.world_size)
        reports = ranks.call("update", list(zip(rollouts, advantages, strict=True)))

        mean = [sum(values) / len(reports) for values in zip(*((r.loss, r.kl) for r in reports), strict=True)]
        return (
            StepReport(step, loss=mean[0], reward=float(rewards.mean()), kl=mean[1]),
            [sample.identity for sample in batch],
            reports[0].updates,
        )


def _plain(value: Any) -> Any:
    """The same tree with tensors replaced by their digests."""
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
