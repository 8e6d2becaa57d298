"""Stands in for the package `flash_attn` 2.8.3 on the CPU: it checks what the real one checks, and more, and attends plainly.

The checks are those of `mha_varlen_fwd` and `mha_fwd_kvcache` in its csrc/flash_attn/flash_api.cpp, without the ones that
ask for a GPU. Beyond them it refuses what the real one would read out of bounds or answer wrongly without a word: bounds
that do not bound, starts that do not rise, pages that are none, rows that are not aligned to 16 bytes. Parameters that
nothing here needs must keep their defaults. Signatures are the real ones; a test compares them with the sources.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .paged_batches import attend_plainly, gathered

__version__ = "2.8.3"

PAGE = 256

calls: list[str] = []
"""Names of the functions that were called, in order."""


class RefusedError(RuntimeError):
    """What was passed is not what the real function takes."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    calls.append("flash_attn_varlen_func")
    refuse_others(
        dropout_p=dropout_p, softmax_scale=softmax_scale, window_size=window_size != (-1, -1), softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    rows = len(cu_seqlens_q) - 1
    check_pages(q, k, v, block_table, rows=rows, page=PAGE)
    assert block_table is not None
    lengths = check_starts(cu_seqlens_q, "cu_seqlens_q", total=q.shape[0], longest=max_seqlen_q)
    contexts = check_starts(cu_seqlens_k, "cu_seqlens_k", total=None, longest=max_seqlen_k)
    require(len(contexts) == rows, "cu_seqlens_k must have shape (batch_size + 1)")
    if max_seqlen_q == 1 and q.shape[1] > k.shape[2]:
        require(q.shape[0] == rows, "with max_seqlen_q 1 the queries are reshaped to one a row")
    check_tables(block_table, contexts, k)
    out = torch.empty_like(q)
    for row, length in enumerate(lengths):
        first = int(cu_seqlens_q[row])
        out[first : first + length] = attend(q[first : first + length], k, v, block_table[row], contexts[row], causal)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    calls.append("flash_attn_with_kvcache")
    refuse_others(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        softmax_scale=softmax_scale, window_size=window_size != (-1, -1), softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse, rotary_interleaved=not rotary_interleaved,
    )  # fmt: skip
    require(q.ndim == 4, "q must have shape (batch_size, seqlen, nheads, headdim)")
    require(0 <= num_splits <= 128, "num_splits > 128 not supported")
    rows = q.shape[0]
    check_pages(q, k_cache, v_cache, block_table, rows=rows, page=PAGE)
    assert block_table is not None
    contexts = check_lengths(cache_seqlens, rows=rows)
    check_tables(block_table, contexts, k_cache)
    return torch.stack(
        [attend(q[row], k_cache, v_cache, block_table[row], context, causal) for row, context in enumerate(contexts)]
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, context: int, causal: bool) -> Tensor:
    """A row's attention, computed in float32, in the dtype of `query`."""
    parts = [gathered(pages, table, context).float() for pages in (keys, values)]
    return attend_plainly(query.float(), *parts, is_causal=causal).to(query.dtype)


def check_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *, rows: int, page: int) -> None:
    """Dtypes, shapes and strides of queries, pages and block table."""
    require(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    require(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    for tensor in (q, k, v):
        require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        is_aligned = tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in strides)
        require(is_aligned, "rows must lie at multiples of 16 bytes")
    if table is None:
        raise RefusedError("the keys are pages, so there must be a block table")
    require(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    require(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    require(k.ndim == 4 and k.shape[1] % page == 0, f"Paged KV cache block size must be divisible by {page}")
    require(rows > 0, "batch size must be positive")
    heads, dim = q.shape[-2:]
    require(dim <= 256 and dim % 8 == 0, "head_size must be a multiple of 8 up to 256")
    require(heads % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    require(
        k.shape == v.shape and k.shape[3] == dim,
        "k and v must have shape (num_blocks, page_block_size, num_heads_k, head_size)",
    )
    require(table.ndim == 2 and table.shape[0] == rows, "block_table must have shape (batch_size, max_num_blocks_per_seq)")


def check_starts(starts: Tensor, name: str, *, total: int | None, longest: int) -> list[int]:
    """Lengths of the rows that begin at `starts`."""
    require(starts.dtype == torch.int32, f"{name} must have dtype int32")
    require(starts.ndim == 1 and starts.is_contiguous(), f"{name} must be contiguous")
    lengths: list[int] = starts.diff().tolist()
    require(int(starts[0]) == 0, f"{name} must begin with 0")
    require(all(length >= 0 for length in lengths), f"{name} must not fall")
    require(total is None or int(starts[-1]) == total, f"{name} must end with the number of tokens")
    require(max(lengths) <= longest, f"{name} has a row longer than the bound for it, {longest}")
    return lengths


def check_lengths(lengths: Tensor | None, *, rows: int) -> list[int]:
    """The rows' numbers of keys."""
    if not isinstance(lengths, Tensor):
        raise RefusedError("cache_seqlens must be a tensor")
    require(lengths.dtype == torch.int32, "seqlens_k must have dtype int32")
    require(lengths.is_contiguous() and lengths.shape == (rows,), "seqlens_k must be contiguous and have shape (batch_size)")
    contexts: list[int] = lengths.tolist()
    return contexts


def check_tables(table: Tensor, contexts: list[int], pages: Tensor) -> None:
    """Every page that a context reaches is in the table and in the pool."""
    for row, context in zip(table, contexts, strict=True):
        needed = -(-context // pages.shape[1])
        require(needed <= len(row), "a context reaches beyond its block table")
        require(all(0 <= block < pages.shape[0] for block in row[:needed].tolist()), "a block table names a page that is none")


def refuse_others(**values: Any) -> None:
    """None of these parameters is emulated; all must be off."""
    for name, value in values.items():
        require(not value if isinstance(value, bool | int | float) else value is None, f"{name} is not emulated")


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise RefusedError(what)
