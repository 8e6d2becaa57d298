"""Weights as the C kernels read them: each matrix once, in the order of its use, on huge pages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from ..models.config import ModelConfig
from ..models.weights import DecoderWeights
from . import library as lib
from .memory import huge_empty


class PackedWeights:
    """All weights of a model. `layers` is an array of `lib.Layer`; the addresses live as long as this object.

    Takes the layers' matrices out of `weights` as it packs them, so that no second copy of the model stays.
    """

    def __init__(self, library: ctypes.CDLL, level: int, config: ModelConfig, weights: DecoderWeights) -> None:
        dtype = weights.embedding.dtype
        self.layers = (lib.Layer * config.num_layers)()
        self.embedding = weights.embedding
        self.final_norm = weights.final_norm
        self._norms: list[Tensor] = []
        place = _Arena(library, level, _elements(library, level, config, dtype), dtype)
        for target in self.layers:
            source = weights.layers.pop(0)
            self._norms += [source.input_norm, source.post_attention_norm]
            target.input_norm = source.input_norm.data_ptr()
            target.post_attention_norm = source.post_attention_norm.data_ptr()
            target.qkv = place(source.qkv, False)
            target.attention_out = place(source.attention_out, False)
            target.gate_up = place(source.gate_up, True)
            target.down = place(source.down, False)
        self.lm_head = place(weights.lm_head, False)
        self._memory = place.memory


class _Arena:
    """Packs matrices one behind the other."""

    def __init__(self, library: ctypes.CDLL, level: int, num_elements: int, dtype: torch.dtype) -> None:
        self.memory = huge_empty([num_elements], dtype)
        self._pack: Callable[..., None] = library.pack
        self._level = level
        self._panel: int = library.panel_columns(level, dtype is torch.bfloat16)
        self._used = 0

    def __call__(self, matrix: Tensor, interleave: bool) -> int:
        """Address of `matrix` [n, k], packed."""
        n, k = matrix.shape
        address = self.memory.data_ptr() + self._used * self.memory.itemsize
        is_bf16 = self.memory.dtype is torch.bfloat16
        self._pack(self._level, is_bf16, matrix.data_ptr(), address, n, k, interleave)
        self._used += rounded_up(n, self._panel) * k
        return address


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def _elements(library: ctypes.CDLL, level: int, config: ModelConfig, dtype: torch.dtype) -> int:
    panel: int = library.panel_columns(level, dtype is torch.bfloat16)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    in_layers = sum(rounded_up(n, panel) * k for n, k in shapes) * config.num_layers
    return in_layers + rounded_up(config.vocab_size, panel) * hidden
