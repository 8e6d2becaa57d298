"""Inputs for kernels that show what is read or written beside them, and how nearly results must agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative and absolute: two roundings to the dtype. The interpreter cuts float32 to bfloat16 instead of rounding it."""

DTYPES = list(TOLERANCES)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> None:
    """Same shape, dtype and, nearly, values; NaN only where the other has it."""
    tolerance = TOLERANCES[theirs.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def cut_out(rows: int, width: int, dtype: torch.dtype, *, scale: float = 1.0, margin: int = 7) -> tuple[Tensor, Tensor]:
    """Random rows inside of a larger tensor of NaN, `margin` columns wider, and that tensor."""
    around = torch.full((rows + 2, width + margin), math.nan, dtype=dtype)
    inside = around[1 : rows + 1, 3 : width + 3]
    inside.copy_(torch.randn(rows, width) * scale)
    return inside, around


def bits(values: Tensor) -> Tensor:
    """Contents as bytes: equal NaNs are equal."""
    return values.contiguous().view(torch.uint8)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal in every bit."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.equal(bits(ours), bits(theirs))
