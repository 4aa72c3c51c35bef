"""GRPO as pure functions: tensors in, tensors out; no model, no state, no randomness.

Shapes: n sequences, r response tokens. `mask` is 1 for response tokens up to and including the end mark, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int, *, epsilon: float = 1e-6) -> Tensor:
    """Advantage of each sample relative to its own group: (reward - mean) / (standard deviation + epsilon).

    `rewards`: float [n], the samples of one prompt next to each other. Returns float [n]; a group whose samples all
    earned the same gets exactly 0, so it teaches nothing. Raises ValueError when n is not a multiple of `group_size`.
    """
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not make whole groups of {group_size}")
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True, unbiased=False) + epsilon)).reshape(-1)


def response_mask(responses: Tensor, end: int) -> Tensor:
    """1.0 for every token up to and including the first `end`, 0.0 after it. int64 [n, r] -> float32 [n, r]."""
    ended_before = (responses == end).cumsum(dim=1) - (responses == end).long()
    return (ended_before == 0).to(torch.float32)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of `tokens` under `logits` at `temperature`. [n, r, v], int64 [n, r] -> float32 [n, r]."""
    scaled = logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def kl_to_reference(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) per token: exp(d) - d - 1, d = reference - policy; at least 0."""
    difference = reference_log_probs - log_probs
    return torch.exp(difference) - difference - 1.0


@dataclass(frozen=True)
class GrpoLoss:
    """The loss to minimise, and what a trainer logs. All 0-d tensors; only `total` carries a gradient."""

    total: Tensor
    kl: Tensor  # mean per token
    clipped_fraction: Tensor  # of tokens whose ratio was cut off


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    reference_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float,
) -> GrpoLoss:
    """Clipped policy gradient plus KL penalty, averaged over the unmasked tokens of the minibatch.

    All [n, r] except `advantages` [n]. The ratio is kept within [1 - clip_low, 1 + clip_high] where leaving it would
    be rewarded (the pessimistic minimum of PPO).
    """
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantage = advantages.unsqueeze(1)
    gain, safe_gain = ratio * advantage, clipped * advantage
    kl = kl_to_reference(log_probs, reference_log_probs)
    tokens = mask.sum().clamp(min=1.0)

    def mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / tokens

    return GrpoLoss(
        total=mean(kl_coefficient * kl - torch.minimum(gain, safe_gain)),
        kl=mean(kl.detach()),
        clipped_fraction=mean((safe_gain < gain).detach().float()),
    )
