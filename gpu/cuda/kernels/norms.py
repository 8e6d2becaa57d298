"""RMSNorm (Zhang and Sennrich 2019, 1910.07467), alone and behind an addition to the residual stream.

A program norms some whole rows, which stay in its registers: the fused form reads and writes the residual once. The number
of rows is another one in each step, and must not have the kernel compiled anew for 1, for multiples of 16 and for others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Variant

_TILE = 1024
"""Elements a program takes at least, in as many rows as that needs: 8 a thread, and no element in two threads, which the
update in place could not bear."""


@triton.jit
def _normed(wide, weight, eps, width):
    """Rows of `wide`, float32 [ROWS, WIDTH] and 0 beyond `width`: normed, cast to the dtype of `weight`, then weighted."""
    mean_square = tl.sum(wide * wide, axis=1) / width
    cast = (wide * tl.rsqrt(mean_square + eps)[:, None]).to(weight.dtype)
    # In float32 the product of two 16-bit floats is exact, so this is rounded once, as the product in their dtype is.
    return (cast.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, weight, out, num_rows, num_inner, width, outer_stride, inner_stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """One program for ROWS rows. Row i of `x` is [i // num_inner, i % num_inner]; `out` is contiguous."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    starts = (rows // num_inner).to(tl.int64) * outer_stride + (rows % num_inner).to(tl.int64) * inner_stride
    wide = tl.load(x + starts + columns, mask=is_inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0)
    tl.store(out + rows.to(tl.int64) * width + columns, _normed(wide, weights, eps, width), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x, residual, weight, out, num_rows, width, x_stride, residual_stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """One program for ROWS rows. The norm is of the sum as the residual keeps it, rounded to its dtype."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_inside = (rows < num_rows) & (columns < width)
    rows = rows.to(tl.int64)
    added = tl.load(x + rows * x_stride + columns, mask=is_inside, other=0.0)
    places = residual + rows * residual_stride + columns
    total = tl.load(places, mask=is_inside, other=0.0).to(tl.float32) + added.to(tl.float32)
    kept = total.to(added.dtype)
    tl.store(places, kept, mask=is_inside)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0)
    tl.store(out + rows * width + columns, _normed(kept.to(tl.float32), weights, eps, width), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Glue.rms_norm`."""
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    assert rows.dim() == 3 and x.stride(-1) == 1 and weight.dtype == x.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = rows.shape[0] * rows.shape[1], x.shape[-1]
    if num_rows:
        tile = _tile(width)
        strides = rows.stride()
        rms_norm_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
            x, weight, out, num_rows, rows.shape[1], width, strides[0], strides[1], eps, **tile, num_warps=_num_warps(width)
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Glue.add_rms_norm`."""
    assert x.dim() == 2 and x.stride(-1) == residual.stride(-1) == 1 and weight.dtype == x.dtype == residual.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x.shape
    if num_rows:
        tile = _tile(width)
        add_rms_norm_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
            x, residual, weight, out, num_rows, width, x.stride(0), residual.stride(0), eps, **tile, num_warps=_num_warps(width)
        )
    return out


def _tile(width: int) -> dict[str, int]:
    """Rows and columns of a program, powers of two."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _TILE // columns), "WIDTH": columns}


def _num_warps(width: int) -> int:
    """Enough that a thread holds 16 to 32 elements of a wide row."""
    columns = triton.next_power_of_2(width)
    return 4 if columns <= 2048 else 8 if columns <= 8192 else 16


def _norm_variant(model: str, dtype: str, width: int) -> Variant:
    pointers = dict.fromkeys(("x", "weight", "out"), f"*{dtype}")
    numbers = dict.fromkeys(("num_rows", "num_inner", "width", "outer_stride", "inner_stride"), "i32")
    types = {**pointers, **numbers, "eps": "fp32", "ROWS": "constexpr", "WIDTH": "constexpr"}
    return Variant(f"rms_norm {dtype} {model}", rms_norm_kernel, types, _tile(width), num_warps=_num_warps(width))


def _add_norm_variant(model: str, dtype: str, width: int) -> Variant:
    pointers = dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}")
    numbers = dict.fromkeys(("num_rows", "width", "x_stride", "residual_stride"), "i32")
    types = {**pointers, **numbers, "eps": "fp32", "ROWS": "constexpr", "WIDTH": "constexpr"}
    return Variant(f"add_rms_norm {dtype} {model}", add_rms_norm_kernel, types, _tile(width), num_warps=_num_warps(width))


VARIANTS: list[Variant] = [
    _norm_variant("Llama-8B", "bf16", 4096),
    _norm_variant("SmolLM2", "fp16", 576),
    _norm_variant("heads of 128", "bf16", 128),
    _norm_variant("SmolLM2", "fp32", 576),
    _add_norm_variant("Llama-8B", "bf16", 4096),
    _add_norm_variant("SmolLM2", "fp16", 576),
    _add_norm_variant("SmolLM2", "fp32", 576),
    _add_norm_variant("16384 wide", "bf16", 16384),
]
