"""Rotary position embedding (Su et al. 2021, 2104.09864), and with it the writing of keys and values into pages.

One launch for all tokens and heads of a step: a program takes a group of heads of one token, of the query or of the keys and
values. Angles are applied in float32 and what comes out is rounded once, to the dtype that it is stored in.
Positions and slots may lie anywhere in a step's inputs: where they do must not have the kernel compiled anew.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..attention.contract import PagedKeysValues
from .launch import INTERPRETED, Variant

_PAIRS = 512
"""Pairs of elements a program turns: 4 a thread, and none in two threads, which turning in place could not bear."""

_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _e4m3_bits(x):
    """`x` float32, at most 448 in size, as float8_e4m3fn, rounded to the nearest and then to the even one, in a uint8.

    For the interpreter alone, whose own conversion loses the carry out of the mantissa: 1.99 becomes 1 there.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Adding 2**23 leaves the rounded number of steps of 2**-9 in the low bits of the mantissa.
    steps = (tl.minimum(tl.abs(x), 1.0) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, steps, tl.where(x == x, normal, 0x7F))
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def as_stored(x, scale, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """`x` float32 as a pool of `dtype` holds it: float8 is divided by `scale` and saturates; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x / scale, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        return _e4m3_bits(x).to(dtype, bitcast=True) if INTERPRETED else x.to(dtype)
    return x.to(dtype)


@triton.jit
def _turned(low, high, cos, sin):
    """Pairs (low, high) turned by their angles, in float32."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_and_write_kernel(
    query,
    key,
    value,
    positions,
    cos_sin,
    slots,
    keys,
    values,
    key_scale,
    value_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angles_stride,
    keys_block_stride,
    keys_slot_stride,
    keys_head_stride,
    values_block_stride,
    values_slot_stride,
    values_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program for HEADS heads of a token: groups of query heads first, then of KV heads. PAIRS covers HEAD_DIM // 2."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    half: tl.constexpr = HEAD_DIM // 2
    pairs = tl.arange(0, PAIRS)[None, :]
    angles = cos_sin + tl.load(positions + token) * angles_stride + pairs
    cos = tl.load(angles, mask=pairs < half, other=0.0)
    sin = tl.load(angles + half, mask=pairs < half, other=0.0)
    if group < query_groups:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        is_inside = (heads < NUM_HEADS) & (pairs < half)
        places = query + token * query_token_stride + heads * query_head_stride + pairs
        low = tl.load(places, mask=is_inside, other=0.0)
        high = tl.load(places + half, mask=is_inside, other=0.0)
        new_low, new_high = _turned(low, high, cos, sin)
        tl.store(places, new_low.to(low.dtype), mask=is_inside)
        tl.store(places + half, new_high.to(low.dtype), mask=is_inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (group - query_groups) * HEADS + tl.arange(0, HEADS)[:, None]
            is_inside = (heads < NUM_KV_HEADS) & (pairs < half)
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            source = key + token * key_token_stride + heads * key_head_stride + pairs
            low = tl.load(source, mask=is_inside, other=0.0)
            high = tl.load(source + half, mask=is_inside, other=0.0)
            new_low, new_high = _turned(low, high, cos, sin)
            dtype: tl.constexpr = keys.dtype.element_ty
            target = keys + block * keys_block_stride + offset * keys_slot_stride + heads * keys_head_stride + pairs
            tl.store(target, as_stored(new_low, key_scale, dtype, INTERPRETED), mask=is_inside)
            tl.store(target + half, as_stored(new_high, key_scale, dtype, INTERPRETED), mask=is_inside)
            source = value + token * value_token_stride + heads * value_head_stride + pairs
            low = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
            high = tl.load(source + half, mask=is_inside, other=0.0).to(tl.float32)
            target = values + block * values_block_stride + offset * values_slot_stride + heads * values_head_stride + pairs
            tl.store(target, as_stored(low, value_scale, dtype, INTERPRETED), mask=is_inside)
            tl.store(target + half, as_stored(high, value_scale, dtype, INTERPRETED), mask=is_inside)


def rope_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: PagedKeysValues,
) -> None:
    """See `Glue.rope_and_write`."""
    keys, values = cache.keys, cache.values
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert head_dim % 2 == 0 and all(x.stride(-1) == 1 for x in (query, key, value, cos_sin, keys, values))
    assert key.shape == value.shape and keys.shape == values.shape and keys.dtype == values.dtype
    if not num_tokens:
        return
    tile = _tile(head_dim)
    groups = triton.cdiv(num_heads, tile["HEADS"]) + triton.cdiv(num_kv_heads, tile["HEADS"])
    rope_and_write_kernel[(num_tokens, groups)](
        query,
        key,
        value,
        positions,
        cos_sin,
        slots,
        keys,
        values,
        cache.key_scale,
        cache.value_scale,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos_sin.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys.shape[1],
        **tile,
        INTERPRETED=INTERPRETED,
    )


def _tile(head_dim: int) -> dict[str, int]:
    """Heads and pairs of a program, powers of two."""
    pairs = triton.next_power_of_2(head_dim // 2)
    return {"HEADS": max(1, _PAIRS // pairs), "PAIRS": pairs}


def _variant(model: str, dtype: str, pool: str, constants: dict[str, int]) -> Variant:
    names = rope_and_write_kernel.arg_names
    types = {name: "i32" if name.endswith("_stride") else "constexpr" for name in names}
    types |= dict.fromkeys(("query", "key", "value"), f"*{dtype}") | dict.fromkeys(("keys", "values"), f"*{pool}")
    types |= {"positions": "*i64", "slots": "*i64", "cos_sin": "*fp32", "key_scale": "fp32", "value_scale": "fp32"}
    types |= dict.fromkeys(("keys_block_stride", "values_block_stride"), "i64")
    all_constants = {**constants, **_tile(constants["HEAD_DIM"]), "INTERPRETED": False}
    # In the order of the arguments: Triton reads a signature by place.
    signature = {name: types[name] for name in names}
    pool_name = "fp8" if pool == "fp8e4nv" else pool
    return Variant(f"rope_and_write {dtype} to {pool_name} {model}", rope_and_write_kernel, signature, all_constants)


_LLAMA_8B = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
_SMOLLM2 = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 16}

VARIANTS: list[Variant] = [
    _variant("Llama-8B", "bf16", "bf16", _LLAMA_8B),
    _variant("Llama-8B", "bf16", "fp8e4nv", _LLAMA_8B),
    _variant("Llama-8B", "fp16", "fp8e4nv", _LLAMA_8B),
    _variant("Llama-8B blocks of 256", "bf16", "bf16", {**_LLAMA_8B, "BLOCK_SIZE": 256}),
    _variant("SmolLM2", "fp16", "fp16", _SMOLLM2),
    _variant("SmolLM2", "fp32", "fp32", _SMOLLM2),
    _variant("heads of 80 blocks of 24", "bf16", "bf16", {**_LLAMA_8B, "HEAD_DIM": 80, "BLOCK_SIZE": 24}),
]
