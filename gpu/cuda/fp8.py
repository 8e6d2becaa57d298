"""Matrices in float8_e4m3fn: half of bfloat16's bytes to keep and to read, multiplied by torch's `_scaled_mm`.

What is divided by what, before it is rounded to 3 bits of mantissa and at most 448:

    weight [out, in]          one scale, once                       largest element / 448
    activations [rows, in]    a scale for each row, in every step   largest element of the row / 448

One scale for all activations of a step would make a row's result depend on the rows beside it: on a neighbour's outlier,
on what the padding rows of a captured step hold, and on a row that is NaN, after which all would be. With its own scale a
row is quantised to the same bits in any company, and fails alone. Scales measured beforehand would cost less in a step, and
need text like that which will come.

`_scaled_mm` takes a scale for each row by itself, but cuBLAS computes that on some devices and for some shapes only: on
compute capability 9.0 not a few rows of many columns, which is what decoding is (pytorch/ao issue 4582), on 12.0 nothing
(pytorch issue 192707). With one scale it computes everywhere from 8.9 on. So it gets the weight's scale, and the rows' are
multiplied into what comes out. That passes over the result once more; of a step that decodes it is a small part, since
reading the weight is the large one.

Rows are rounded up to a multiple of 16 before the product: cuBLAS has refused other numbers of them (pytorch issue 167882).

The embedding and the head stay as they are: where logits are close to each other, the head's rounding would decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .matrices import Dense, Matrix

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448. What is larger saturates; NaN stays NaN."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""In place of 0, the scale of zeros, so that they stay zeros."""

MULTIPLE = 16
"""Of which cuBLAS wants both dimensions of a float8 matrix."""

_FIRST_WITH_FP8 = (8, 9)
_ROWS_AT_ONCE = 4096

_log = logging.getLogger(__name__)


class Fp8Weight(NamedTuple):
    """A weight divided by `scale`: `elements` float8_e4m3fn [out, in], contiguous. `scale` and `one`, a 1, are float32 [1]."""

    elements: Tensor
    scale: Tensor
    one: Tensor


QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Activations [rows, in] to float8 [rows rounded up to `MULTIPLE`, in] and scales float32 [rows, 1].

Rows beyond hold anything. Launches without waiting for the device.
"""

ScaledProduct = Callable[[Tensor, Fp8Weight, torch.dtype], Tensor]
"""float8 activations [rows, in] by a weight: [rows, out] in a dtype, bfloat16 or float32, the weight's scale multiplied in."""


def why_no_fp8(capability: tuple[int, int] | None) -> str | None:
    """Why a GPU of this compute capability does not compute in float8, in words; None if it does, and for what is no GPU."""
    if capability is None or capability >= _FIRST_WITH_FP8:
        return None
    return "fp8 needs a GPU of compute capability 8.9 or later, and this one has {}.{}".format(*capability)


class Fp8Matrix:
    """Implements `Matrix` in float8. Works on the weight it is given once, and keeps nothing of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, quantize: QuantizeRows, multiply: ScaledProduct) -> None:
        """Quantise `weight` [out, in], of which both dimensions are multiples of 16. `bias` [out] is kept as it is."""
        self._weight = quantized_weight(weight)
        self._bias = bias
        self._quantize, self._multiply = quantize, multiply

    def __call__(self, x: Tensor) -> Tensor:
        """See `Matrix`."""
        elements, scales = self._quantize(x)
        # Without its row's scale a sum is larger than float16 can be, but not than bfloat16.
        dtype = x.dtype if x.dtype == torch.bfloat16 else torch.float32
        product = self._multiply(elements, self._weight, dtype)[: x.shape[0]]
        product.mul_(scales)
        if self._bias is not None:
            product.add_(self._bias)
        return product.to(x.dtype)

    @property
    def num_bytes(self) -> int:
        """See `Matrix`."""
        tensors = (*self._weight, *(() if self._bias is None else (self._bias,)))
        return sum(tensor.nbytes for tensor in tensors)


class Fp8Maker:
    """Makes matrices in float8, and others of those that float8 products do not fit: a `MakeMatrix`."""

    def __init__(self, *, quantize: QuantizeRows, multiply: ScaledProduct) -> None:
        self._quantize, self._multiply = quantize, multiply
        self._told: set[torch.Size] = set()

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A matrix of `weight`; says so once for each shape that stays as it is."""
        reason = why_not_quantized(weight)
        if reason is None:
            return Fp8Matrix(weight, bias, quantize=self._quantize, multiply=self._multiply)
        if weight.shape not in self._told:
            self._told.add(weight.shape)
            _log.warning(f"quantization fp8: {reason}; it stays {str(weight.dtype).removeprefix('torch.')}")
        return Dense(weight, bias)


def fp8_maker(*, is_gpu: bool, has_triton: bool) -> Fp8Maker:
    """What makes float8 matrices for a device, in the best way that it has."""
    return Fp8Maker(
        quantize=_triton_quantize_rows() if has_triton else quantize_rows,
        multiply=scaled_product if is_gpu else dequantized_product,
    )


def why_not_quantized(weight: Tensor) -> str | None:
    """Why `weight` cannot be multiplied in float8, in words; None if it can."""
    if not any(size % MULTIPLE for size in weight.shape):
        return None
    return f"a matrix of {' x '.join(map(str, weight.shape))} has a dimension that is no multiple of {MULTIPLE}"


# ---- quantising ---------------------------------------------------------------------------------


def quantized(values: Tensor, scale: Tensor | float) -> Tensor:
    """`values` divided by `scale`, which broadcasts, in float8. Rounds to the nearest and saturates; NaN stays NaN."""
    # Clamped here: what a conversion does beyond the range differs between torch's versions and devices.
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def scale_of(largest: Tensor) -> Tensor:
    """float32 scales for elements of up to `largest`. An infinite or NaN one makes elements, and so products, NaN."""
    return (largest.float() / LARGEST).clamp(min=SMALLEST_SCALE)


def quantized_weight(weight: Tensor) -> Fp8Weight:
    """`weight` with one scale. Needs no more than some thousand rows of it in float32 beside the result."""
    low, high = torch.aminmax(weight)
    scale = scale_of(torch.maximum(-low, high)).reshape(1)
    elements = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        elements[some] = quantized(weight[some], scale)
    return Fp8Weight(elements, scale, torch.ones_like(scale))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`QuantizeRows` in torch's operations: the reference, and the way where there is no Triton."""
    scales = scale_of(x.abs().amax(dim=1, keepdim=True))
    elements = torch.empty((padded(x.shape[0]), x.shape[1]), dtype=FP8, device=x.device)
    elements[: x.shape[0]].copy_(quantized(x, scales))
    return elements, scales


def padded(num_rows: int) -> int:
    """`num_rows` rounded up to `MULTIPLE`."""
    return -(-num_rows // MULTIPLE) * MULTIPLE


def _triton_quantize_rows() -> QuantizeRows:
    from .kernels.quantize import quantize_rows

    return quantize_rows


# ---- products -----------------------------------------------------------------------------------


def scaled_product(x: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """`ScaledProduct` on a GPU. `use_fast_accum` stays off: with it Hopper sums in fewer bits than float32 has."""
    return torch._scaled_mm(x, weight.elements.t(), scale_a=weight.one, scale_b=weight.scale, out_dtype=dtype)


def dequantized_product(x: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """`ScaledProduct` in float32: the reference, for devices without float8 products.

    torch's own `_scaled_mm` on the CPU says the same, a hundred times slower.
    """
    return (F.linear(x.float(), weight.elements.float()) * weight.scale).to(dtype)
