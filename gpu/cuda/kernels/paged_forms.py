"""The models for which the paged attention kernels are compiled without a GPU, and the types of their arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from .launch import Variant
from .paged import Tile, pool_constants


class Form(NamedTuple):
    """What of a model and its pool makes a kernel another one. `dtype` and `pool_dtype` in Triton's spelling."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    pool_dtype: str

    @property
    def element_size(self) -> int:
        """Bytes of an element of the queries."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads


FORMS = (
    Form("llama_bf16_block16", 32, 8, 128, 16, "bf16", "bf16"),
    Form("llama_fp16_block256", 32, 8, 128, 256, "fp16", "fp16"),
    Form("llama_fp32_block16", 32, 8, 128, 16, "fp32", "fp32"),
    Form("llama_bf16_fp8_block16", 32, 8, 128, 16, "bf16", "fp8e4nv"),
    Form("smollm2_bf16_block16", 9, 3, 64, 16, "bf16", "bf16"),
    Form("phi2_bf16_block16", 32, 32, 80, 16, "bf16", "bf16"),
    Form("gemma_bf16_block16", 16, 8, 256, 16, "bf16", "bf16"),
)

_INDICES = ("block_tables", "context_lens", "query_starts", "rows", "sharing")
_STATES = ("outputs", "maxima", "totals")


def variant(form: Form, kernel: Any, tile: Tile, *, ending: str = "", **constants: Any) -> Variant:
    """`kernel` compiled for `form`. `constants` are those that not every kernel has; `ending` tells their variants apart."""
    known = {
        **pool_constants(group=form.group, head_dim=form.head_dim, block_size=form.block_size, tile=tile),
        "NUM_HEADS": form.num_heads,
        "UPCAST": False,
        **constants,
    }
    return Variant(
        name=f"{kernel.__name__}_{form.name}{ending}",
        kernel=kernel,
        signature={name: _type_of(name, form) for name in kernel.arg_names},
        constants={name: known[name] for name in kernel.arg_names if name.isupper()},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _type_of(argument: str, form: Form) -> str:
    if argument.isupper():
        return "constexpr"
    if argument in ("query", "out"):
        return f"*{form.dtype}"
    if argument in ("keys", "values"):
        return f"*{form.pool_dtype}"
    if argument in _INDICES:
        return "*i32"
    if argument in _STATES:
        return "*fp32"
    return "fp32" if argument.endswith("scale") else "i32"
