"""What the demo trains and how: every number of the run in one frozen value.

The two runs of the demo are handed the same recipe, and nothing else decides what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...storage.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """One GRPO run. Lengths are in tokens, rates per optimizer update."""

    steps: int = 12
    save_freq: int = 3  # a save after every so many steps
    seed: int = 1234
    world_size: int = 2  # FSDP2 ranks, one per raylet

    hidden_size: int = 128
    layers: int = 2
    attention_heads: int = 4
    kv_heads: int = 2
    initializer_range: float = 0.02

    prompts_per_step: int = 8
    group_size: int = 8  # samples per prompt
    response_length: int = 3  # two digits and the end mark
    temperature: float = 1.0

    inner_epochs: int = 2
    minibatches: int = 2  # per inner epoch and rank, one optimizer update each
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.02
    learning_rate: float = 2e-3
    warmup_updates: int = 8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.save_freq < 1:
            raise UsageError(f"the demo saves every {self.save_freq} steps, which is never; give --save-freq 1 or more")
        if self.steps < 3 * self.save_freq:
            raise UsageError(
                f"the demo needs three saves (one for each kill, one that commits after them), so at least "
                f"{3 * self.save_freq} steps with a save every {self.save_freq}; got {self.steps}; raise --steps",
                steps=self.steps,
                save_freq=self.save_freq,
            )

    @property
    def save_steps(self) -> tuple[int, ...]:
        """The steps after which a save is due, ascending."""
        return tuple(range(self.save_freq, self.steps + 1, self.save_freq))

    @property
    def sequences_per_rank(self) -> int:
        """Sequences that one rank samples and learns from per step."""
        return self.prompts_per_step // self.world_size * self.group_size
