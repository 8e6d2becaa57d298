"""A small step that shows whether a backend works on this machine.

A package that can be imported may still not run: its kernels may be for other GPUs, a part of it may have been left out
when it was built, its functions may have changed. And it may run and be wrong, which a known result shows. One fault is
looked for on purpose: flash-attn 3 multiplies the weights of masked keys, which are 0, with what lies in the pool behind a
row's context where it reads whole pages (by TMA: if the block size is a multiple of its tile, and then only for chunks
longer than another tile; Dao-AILab/flash-attention issues 1745 and 2374). A NaN that an earlier owner left in a block
would reach the next one's result, so the pool is NaN there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .contract import AttentionBackend, AttentionInputs, PagedKeysValues
from .needs import AttentionNeeds

CHUNK = 256
"""Tokens of the chunk: more than any kernel's tile of query rows, so that it takes the way that long chunks take."""

CONTEXT = CHUNK + 1
"""Keys of both rows. The last block has room behind them unless blocks are of 1 token or 257."""

TOLERANCE = 0.02
"""The results lie in [0.5, 0.67]; bfloat16 rounds them by up to 0.002. One key more or less changes the first by 0.17."""


class _Step(NamedTuple):
    query: Tensor
    cache: PagedKeysValues
    inputs: AttentionInputs
    expected: Tensor
    """Float32 [tokens]: what all elements of a token's output are."""


def why_it_fails(backend: AttentionBackend, needs: AttentionNeeds) -> str | None:
    """What is wrong with `backend` on `needs.device`, in words; None if a decode row and a chunk come out right.

    Waits for the device.
    """
    step = _small_step(needs)
    out = torch.full_like(step.query, float("nan"))
    try:
        backend.attend(step.query, step.cache, step.inputs, out)
        attended = out.float().cpu()
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError) as error:
        return f"it fails in a trial: {first_line(error)}"
    if attended.isnan().any():
        return "in a trial it gave NaN, which lies in the pool behind a row's context only"
    if not torch.allclose(attended, step.expected[:, None, None].expand_as(attended), rtol=0, atol=TOLERANCE):
        return "it computed something else than attention in a trial"
    return None


def first_line(error: Exception) -> str:
    """An exception in a line: torch's messages go on with traces."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _small_step(needs: AttentionNeeds) -> _Step:
    """A decode row and a chunk over the same keys, in blocks that lie backwards.

    Keys are 0, so each of those that a token sees weighs the same; values are 1 at even positions and 0 at odd ones.
    """
    num_blocks = -(-CONTEXT // needs.block_size)
    positions = torch.arange(num_blocks * needs.block_size)
    values = torch.where(positions < CONTEXT, (positions + 1) % 2, torch.nan)
    pool = torch.stack((values * 0, values)).view(2, num_blocks, needs.block_size).transpose(0, 1).flip(0)
    pool = pool[..., None, None].expand(-1, -1, -1, needs.num_kv_heads, needs.head_dim).contiguous()
    pool = pool.to(needs.kv_dtype).to(needs.device)
    seen = torch.tensor([CONTEXT, *range(CONTEXT - CHUNK + 1, CONTEXT + 1)])

    def on_device(rows: list[list[int]] | list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=needs.device)

    inputs = AttentionInputs(
        block_tables=on_device([list(reversed(range(num_blocks)))] * 2),
        context_lens=on_device([CONTEXT] * 2),
        query_starts=on_device([0, 1, 1 + CHUNK]),
        num_decodes=1,
        num_chunks=1,
        num_chunk_tokens=CHUNK,
        max_query_len=CHUNK,
        max_context_len=CONTEXT,
    )
    query = torch.ones(1 + CHUNK, needs.num_heads, needs.head_dim, dtype=needs.dtype, device=needs.device)
    return _Step(query, PagedKeysValues(pool[:, 0], pool[:, 1]), inputs, expected=((seen + 1) // 2) / seen)
