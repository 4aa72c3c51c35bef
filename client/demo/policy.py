"""The policy: a small Qwen2 from a transformers config (random weights, nothing is downloaded), sharded by FSDP2.

Parameters are fp32 masters; FSDP2 gathers them in bf16 for compute and reduces gradients in fp32. Embedding and output
head are tied, so the model holds one tensor under two names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .grpo import token_log_probs
from .task import END, PAD

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .recipe import Recipe


def build_policy(recipe: Recipe, vocabulary: int, mesh: DeviceMesh) -> nn.Module:
    """A new model with weights drawn from the recipe's seed (equal on all ranks), then sharded over `mesh`.

    Draws from torch's global generator after seeding it: callers seed again for what comes next.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(recipe.seed)
    architecture: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.hidden_size * 3,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.attention_heads,
        "num_key_value_heads": recipe.kv_heads,
        "max_position_embeddings": 32,
        "initializer_range": recipe.initializer_range,
        "tie_word_embeddings": True,
        "use_cache": False,
        "attn_implementation": "eager",
        "pad_token_id": PAD,
        "eos_token_id": END,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**architecture))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def response_log_probs(model: nn.Module, tokens: Tensor, prompt_length: int, temperature: float) -> Tensor:
    """Log-probabilities of the response part of `tokens` under `model`. int64 [n, p + r] -> float32 [n, r]."""
    logits = model(input_ids=tokens[:, :-1]).logits[:, prompt_length - 1 :]
    return token_log_probs(logits, tokens[:, prompt_length:], temperature)


@torch.no_grad()
def sample_responses(model: nn.Module, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """Samples `length` tokens after each prompt from torch's global generator. int64 [n, p] -> int64 [n, p + length].

    Every rank makes the same number of forward passes, whatever it draws: they are collective under FSDP2. After the
    end mark comes padding.
    """
    tokens = prompts
    ended = torch.zeros(prompts.shape[0], dtype=torch.bool)
    for _ in range(length):
        logits = model(input_ids=tokens).logits[:, -1].float() / temperature
        drawn = torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1).squeeze(1)
        drawn = torch.where(ended, torch.full_like(drawn, PAD), drawn)
        ended |= drawn == END
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], dim=1)
    return tokens
