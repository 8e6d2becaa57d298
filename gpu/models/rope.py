"""Rotary position embedding (Su et al. 2021, 2104.09864), in the half-split layout of the Llama family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import Llama3Rope, ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each of the `head_dim / 2` pairs, float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `rotate`: [tokens, 1, head_dim / 2] each, computed in float32 and then cast."""
    angles = positions[:, None, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of `heads` [tokens, heads, head_dim] by its angle."""
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1: long wavelengths stretched by `factor`, short ones kept, those between interpolated."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
