"""What is asked of attention for the life of an executor: the model's heads, the pool and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """The facts that decide which backends can run.

    `dtype` is that of queries and outputs, `kv_dtype` that of the pool. `capability` is the GPU's compute capability, major
    and minor; None if `device` is no GPU.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    capability: tuple[int, int] | None


def name_of(dtype: torch.dtype) -> str:
    """`dtype` as settings spell it."""
    return str(dtype).removeprefix("torch.")


def why_not_flash_kernels(needs: AttentionNeeds) -> list[str]:
    """Which of `needs` the kernels of flash-attn 2 and 3 both lack.

    As `mha_varlen_fwd` and `mha_fwd_kvcache` of flash-attn 2.8.3 and `mha_fwd` of flash-attn 3 check them.
    """
    reasons = []
    if needs.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it computes in float16 and bfloat16, not in {name_of(needs.dtype)}")
    elif needs.kv_dtype != needs.dtype:
        reasons.append(f"the KV pool must be {name_of(needs.dtype)} too, not {name_of(needs.kv_dtype)}")
    if needs.head_dim > 256 or needs.head_dim % 8:
        reasons.append(f"head_dim must be a multiple of 8 up to 256, not {needs.head_dim}")
    if needs.num_heads % needs.num_kv_heads:
        reasons.append(f"{needs.num_heads} heads are no multiple of {needs.num_kv_heads} KV heads")
    return reasons
