"""Models to check with: shapes, directories written from seeds, and weights made on the device that no file holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repertory.gpu.cuda.matrices import LayerMatrices
from repertory.gpu.models.config import ModelConfig
from repertory.gpu.models.weights import DecoderWeights, LayerWeights
from repertory.tests.tiny_model import make_tiny_model

from .gpu import Gpu


class Shape(NamedTuple):
    """What a model is built like."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    tie_word_embeddings: bool = True


SMOLLM2 = Shape(30, 576, 9, 3, 64, 1536, 49_152)
"""The demo's model, SmolLM2-135M."""

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14_336, 128_256, tie_word_embeddings=False)

TINY = Shape(2, 64, 4, 2, 16, 128, 320)
"""For rehearsals."""

WIDE = 0.2
"""A spread of weights with which attention decides what comes next; see `tests/tiny_model.py`."""

TAME = 0.04
"""A spread, about hidden ** -0.5, with which rounding to bfloat16 is not blown up from layer to layer. Wants an untied head."""


def write_model(directory: Path, shape: Shape, *, weights: bool = True, spread: float = WIDE, **more: Any) -> Path:
    """Write a model directory of `shape`, the same every time; `more` as `make_tiny_model` has it."""
    return make_tiny_model(directory, weights=weights, initializer_range=spread, **shape._asdict(), **more)


def write_tame(gpu: Gpu, directory: Path) -> tuple[Path, int]:
    """The demo's shape with weights that leave rounding small, or a tiny one: the directory, and the vocabulary's size."""
    shape = gpu.sized(SMOLLM2, TINY)._replace(tie_word_embeddings=False)
    return write_model(directory, shape, spread=gpu.sized(TAME, TINY.hidden**-0.5)), shape.vocab_size


class RandomWeights:
    """Stands for `load_converted`: makes weights on the device, the same every time, and keeps them for the next opening."""

    def __init__(self, *, spread: float = TAME, seed: int = 0) -> None:
        self._spread, self._seed = spread, seed
        self._kept: DecoderWeights | None = None

    def __call__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        convert: Callable[[LayerWeights], LayerMatrices],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[DecoderWeights, list[LayerMatrices]]:
        """Weights of the shape that `config` describes."""
        if self._kept is None or self._kept.embedding.dtype != dtype:
            self._kept = self._make(config, dtype, device)
        return replace(self._kept, layers=[]), [convert(layer) for layer in self._kept.layers]

    def _make(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
        generator = torch.Generator(device).manual_seed(self._seed)

        def random(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(0.0, self._spread, generator=generator)

        layers = [_layer(config, random) for _ in range(config.num_layers)]
        embedding = random(config.vocab_size, config.hidden_size)
        head = embedding if config.tie_word_embeddings else random(config.vocab_size, config.hidden_size)
        return DecoderWeights(embedding, layers, 1 + random(config.hidden_size), head)


def _layer(config: ModelConfig, random: Callable[..., Tensor]) -> LayerWeights:
    hidden = config.hidden_size
    return LayerWeights(
        input_norm=1 + random(hidden),
        qkv=random((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, hidden),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        attention_out=random(hidden, config.num_heads * config.head_dim),
        post_attention_norm=1 + random(hidden),
        gate_up=random(2 * config.intermediate_size, hidden),
        down=random(hidden, config.intermediate_size),
    )
