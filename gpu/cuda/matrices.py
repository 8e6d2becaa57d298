"""The matrices of a model as functions of activations: how their elements are kept is nobody else's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from ..models.weights import LayerWeights


class Matrix(Protocol):
    """Multiplies activations [tokens, in] by a matrix [out, in]; adds its bias, if it has one."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, out], of the dtype of `x`."""
        ...

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        ...


class Dense:
    """A matrix in the dtype of its activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Matrix`."""
        return F.linear(x, self._weight, self._bias)

    @property
    def num_bytes(self) -> int:
        """See `Matrix`."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)


MakeMatrix = Callable[[Tensor, Tensor | None], Matrix]
"""Makes a matrix of a weight [out, in] and a bias [out]."""


class LayerNorms(NamedTuple):
    """A layer's norms, as `LayerWeights` has them."""

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class LayerMatrices(NamedTuple):
    """A layer on the device. Nothing of its `LayerWeights` is kept alive but what is in use."""

    norms: LayerNorms
    qkv: Matrix
    attention_out: Matrix
    gate_up: Matrix
    down: Matrix

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        matrices = (self.qkv, self.attention_out, self.gate_up, self.down)
        return sum(matrix.num_bytes for matrix in matrices) + sum(norm.nbytes for norm in self.norms if norm is not None)


def layer_matrices(layer: LayerWeights, make: MakeMatrix = Dense) -> LayerMatrices:
    """A layer whose matrices `make` keeps."""
    return LayerMatrices(
        norms=LayerNorms(layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm),
        qkv=make(layer.qkv, layer.qkv_bias),
        attention_out=make(layer.attention_out, None),
        gate_up=make(layer.gate_up, None),
        down=make(layer.down, None),
    )
