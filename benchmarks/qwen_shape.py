"""The state that is measured: a decoder with the tensors of Qwen2, of whatever size is asked for.

Shapes and names of tensors after Qwen2 (arXiv:2407.10671; modeling_qwen2.py in github.com/huggingface/transformers):
grouped-query attention with biases on q, k and v, a gated MLP, RMSNorm, embeddings that are tied to the head. No
position is encoded: nothing here reads its output.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

LAYERS = 12
HEAD = 8  # narrow, so that a model can have nearly any size
GROUPS = 8  # query heads for each key and value head, so keys are an eighth as wide
MLP = 5  # times the width
VOCABULARY = 16  # times the width
PARAMETERS_PER_SQUARE = LAYERS * (2 + 2 / GROUPS + 3 * MLP) + VOCABULARY  # of the width, biases and norms aside


def width_of(parameters: float) -> int:
    """The width whose model has about so many parameters."""
    unit = HEAD * GROUPS
    return max(1, round((parameters / PARAMETERS_PER_SQUARE) ** 0.5 / unit)) * unit


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // GROUPS)
        self.v_proj = nn.Linear(width, width // GROUPS)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, MLP * width, bias=False)
        self.up_proj = nn.Linear(width, MLP * width, bias=False)
        self.down_proj = nn.Linear(MLP * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` and the answer: (batch, tokens, width)."""
        found = self.input_layernorm(hidden)
        q, k, v = (_heads(proj(found)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        found = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(functional.silu(self.gate_proj(found)) * self.up_proj(found))


def _heads(projected: Tensor) -> Tensor:
    """(batch, tokens, n) to (batch, n / HEAD, tokens, HEAD)."""
    return projected.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class QwenShaped(nn.Module):
    """`parameters`: about so many. Input: token ids (batch, tokens); output: logits (batch, tokens, vocabulary)."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        self.width = width_of(parameters)
        self.vocabulary = VOCABULARY * self.width
        self.embed_tokens = nn.Embedding(self.vocabulary, self.width)
        self.layers = nn.ModuleList(Block(self.width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(self.width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(self.norm(hidden), self.embed_tokens.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Of the next token, a scalar."""
        logits = self(tokens)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
