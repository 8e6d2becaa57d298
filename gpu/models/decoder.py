"""One decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3 and what shares their shape.

It knows nothing of pages, slots or requests. A step arrives as flat columns - one entry a token,
rows of all sequences one behind the other - and everything that looks across tokens happens in the
attention object made for the step. The arithmetic follows `transformers` operation by operation
(norms and rotation angles in float32, then cast), so that in float32 the two agree token for token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig
from .rope import inverse_frequencies, rotate, rotation
from .weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, flat. `token_ids` and `positions` are int64 [tokens].

    `sample_at` int64 [samples] indexes the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    sample_at: Tensor


class StepAttention(Protocol):
    """Paged attention for the rows of one step."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write `key` and `value` of all rows, then attend with each row over its own context.

        `query` is [tokens, num_heads, head_dim], `key` and `value` [tokens, num_kv_heads, head_dim].
        Returns [tokens, num_heads * head_dim].
        """
        ...


class Decoder:
    """A model that turns a batch into logits. Stateless: the KV is the attention's."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._frequencies = inverse_frequencies(config).to(weights.embedding.device)

    def forward(self, batch: Batch, attention: StepAttention) -> Tensor:
        """Logits [samples, vocab_size] in float32 of the tokens at `batch.sample_at`."""
        return self.head(self.hidden(batch, attention))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in float32 of rows that `hidden` returned."""
        return F.linear(hidden, self._weights.lm_head).float()

    def hidden(self, batch: Batch, attention: StepAttention) -> Tensor:
        """What the logits of the tokens at `batch.sample_at` are made of: [samples, hidden_size]."""
        weights, eps = self._weights, self.config.rms_norm_eps
        hidden = F.embedding(batch.token_ids, weights.embedding)
        cos, sin = rotation(batch.positions, self._frequencies, hidden.dtype)
        for index, layer in enumerate(weights.layers):
            query, key, value = self._project(layer, rms_norm(hidden, layer.input_norm, eps))
            attended = attention.attend(index, rotate(query, cos, sin), rotate(key, cos, sin), value)
            hidden = hidden + F.linear(attended, layer.attention_out)
            gate, up = F.linear(rms_norm(hidden, layer.post_attention_norm, eps), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return rms_norm(hidden[batch.sample_at], weights.final_norm, eps)

    def _project(self, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [tokens, heads, head_dim]."""
        config = self.config
        heads = F.linear(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = rms_norm(key, layer.k_norm, config.rms_norm_eps)
        return query, key, value


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32, cast back before the weight is applied."""
    wide = values.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * wide.to(values.dtype)
