"""SwiGLU's activation (Shazeer 2020, 2002.05202): the SiLU of the gate, times the other projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Variant

_COLUMNS = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, width, stride, COLUMNS: tl.constexpr):
    """One program for COLUMNS columns of a token. Rows of `gate_up` lie `stride` apart, `out` is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < width
    row = gate_up + token * stride + columns
    gate = tl.load(row, mask=is_inside, other=0.0)
    up = tl.load(row + width, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    # exp of what is never positive: it cannot overflow.
    small = tl.exp(-tl.abs(wide))
    silu = (wide * tl.where(wide < 0, small, 1.0) / (1.0 + small)).to(gate.dtype)
    # Rounded twice, as two operations in the dtype are: see the product in `norms.py`.
    tl.store(out + token * width + columns, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=is_inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `Glue.silu_mul`."""
    assert gate_up.dim() == 2 and gate_up.stride(-1) == 1 and gate_up.shape[1] % 2 == 0
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _COLUMNS))
        silu_mul_kernel[grid](gate_up, out, width, gate_up.stride(0), COLUMNS=_COLUMNS)
    return out


def _variant(dtype: str) -> Variant:
    types = {"gate_up": f"*{dtype}", "out": f"*{dtype}", "width": "i32", "stride": "i32", "COLUMNS": "constexpr"}
    return Variant(f"silu_mul {dtype}", silu_mul_kernel, types, {"COLUMNS": _COLUMNS})


VARIANTS: list[Variant] = [_variant(dtype) for dtype in ("bf16", "fp16", "fp32")]
