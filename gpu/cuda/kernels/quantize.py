"""Activations to float8_e4m3fn with a scale for each row: what precedes a matrix product of `fp8.py`.

A program takes some whole rows, which stay in its registers between finding their largest element and dividing by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import FP8, LARGEST, SMALLEST_SCALE, padded
from .launch import INTERPRETED, Variant
from .rope import as_stored

_TILE = 1024
"""Elements a program takes at least, in as many rows as that needs."""

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def quantize_rows_kernel(
    x, elements, scales, num_rows, width, x_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr
):
    """One program for ROWS rows. `elements` and `scales` are contiguous."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    rows = rows.to(tl.int64)
    wide = tl.load(x + rows * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    # A maximum that overlooks NaN will do: the element itself stays NaN.
    scale = tl.maximum(tl.max(tl.abs(wide), axis=1) / _LARGEST, _SMALLEST_SCALE)[:, None]
    tl.store(elements + rows * width + columns, as_stored(wide, scale, tl.float8e4nv, INTERPRETED), mask=is_inside)
    tl.store(scales + rows, scale, mask=rows < num_rows)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `QuantizeRows`. Rows of `x` are contiguous."""
    num_rows, width = x.shape
    assert x.stride(1) == 1 or width == 1
    elements = torch.empty((padded(num_rows), width), dtype=FP8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        tile = _tile(width)
        quantize_rows_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
            x, elements, scales, num_rows, width, x.stride(0), **tile, INTERPRETED=INTERPRETED, num_warps=_num_warps(width)
        )
    return elements, scales


def _tile(width: int) -> dict[str, int]:
    """Rows and columns of a program, powers of two."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _TILE // columns), "WIDTH": columns}


def _num_warps(width: int) -> int:
    """Enough that a thread holds 16 to 64 elements of a wide row."""
    columns = triton.next_power_of_2(width)
    return 4 if columns <= 2048 else 8 if columns <= 8192 else 16


def _variant(model: str, dtype: str, width: int) -> Variant:
    pointers = {"x": f"*{dtype}", "elements": "*fp8e4nv", "scales": "*fp32"}
    numbers = dict.fromkeys(("num_rows", "width", "x_stride"), "i32")
    types = {**pointers, **numbers, **dict.fromkeys(("ROWS", "WIDTH", "INTERPRETED"), "constexpr")}
    constants = {**_tile(width), "INTERPRETED": False}
    return Variant(f"quantize_rows {dtype} to fp8 {model}", quantize_rows_kernel, types, constants, num_warps=_num_warps(width))


VARIANTS: list[Variant] = [
    _variant("Llama-8B", "bf16", 4096),
    _variant("Llama-8B down", "bf16", 14336),
    _variant("Llama-70B down", "bf16", 28672),
    _variant("SmolLM2", "fp16", 576),
    _variant("SmolLM2", "fp32", 576),
]
