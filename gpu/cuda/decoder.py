"""The decoder of `models/decoder.py` on a GPU: the same model, with fused operations and the pool's own attention.

Nothing here waits for the device or depends on what tensors hold, so a run over fixed tensors can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.config import ModelConfig
from ..models.rope import inverse_frequencies, rotation
from ..models.weights import DecoderWeights
from .attention.contract import AttentionBackend, AttentionInputs, PagedKeysValues
from .glue import Glue
from .matrices import LayerMatrices


class TokenInputs(NamedTuple):
    """The tokens of a step. `token_ids` int32, `positions` and `slots` int64, [tokens] each."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor


class GpuDecoder:
    """A model on a device. Stateless: the KV is in the caches that it is given, one for each layer."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, layers: Sequence[LayerMatrices], glue: Glue, *, max_positions: int
    ) -> None:
        self.config = config
        self._layers = layers
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._lm_head = weights.lm_head
        self._glue = glue
        self._cos_sin = _cos_sin(config, max_positions).to(weights.embedding.device)

    def hidden(
        self, tokens: TokenInputs, caches: Sequence[PagedKeysValues], attention: AttentionBackend, inputs: AttentionInputs
    ) -> Tensor:
        """What the logits of each token are made of: [tokens, hidden_size]. Writes all rows' keys and values."""
        glue, eps = self._glue, self.config.rms_norm_eps
        residual = F.embedding(tokens.token_ids, self._embedding)
        normed = glue.rms_norm(residual, self._layers[0].norms.input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attend(layer, normed, tokens, caches[index], (attention, inputs))
            normed = glue.add_rms_norm(layer.attention_out(attended), residual, layer.norms.post_attention_norm, eps)
            output = layer.down(glue.silu_mul(layer.gate_up(normed)))
            is_last = index + 1 == len(self._layers)
            next_norm = self._final_norm if is_last else self._layers[index + 1].norms.input_norm
            normed = glue.add_rms_norm(output, residual, next_norm, eps)
        return normed

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and logits."""
        return self._embedding.dtype

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size] of rows of `hidden`, in its dtype."""
        return F.linear(hidden, self._lm_head)

    def _attend(
        self,
        layer: LayerMatrices,
        normed: Tensor,
        tokens: TokenInputs,
        cache: PagedKeysValues,
        attending: tuple[AttentionBackend, AttentionInputs],
    ) -> Tensor:
        config = self.config
        heads = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.norms.q_norm is not None and layer.norms.k_norm is not None:
            query = self._normed_heads(query, layer.norms.q_norm)
            key = self._normed_heads(key, layer.norms.k_norm)
        self._glue.rope_and_write(
            query,
            key,
            value,
            positions=tokens.positions,
            cos_sin=self._cos_sin,
            slots=tokens.slots,
            cache=cache,
        )
        out = query.new_empty(query.shape)
        backend, inputs = attending
        backend.attend(query, cache, inputs, out)
        return torch.flatten(out, 1)

    def _normed_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Qwen3's norm of each head of queries or keys."""
        rows = heads.reshape(-1, heads.shape[-1])
        return self._glue.rms_norm(rows, weight, self.config.rms_norm_eps).view(heads.shape)


def _cos_sin(config: ModelConfig, max_positions: int) -> Tensor:
    """float32 [max_positions, head_dim]: cosines, then sines."""
    cos, sin = rotation(torch.arange(max_positions), inverse_frequencies(config), torch.float32)
    return torch.cat((cos, sin), dim=-1)[:, 0].contiguous()
