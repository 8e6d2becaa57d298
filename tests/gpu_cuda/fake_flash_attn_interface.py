"""Stands in for the module `flash_attn_interface` of flash-attn 3 on the CPU, as `fake_flash_attn` does for flash-attn 2.

The checks are those of `mha_fwd` in its hopper/flash_api.cpp. Its one fault that matters here is emulated: where it reads
whole pages (`get_pagedkv_tma` there, with the tiles of tile_size.h for causal attention), values behind a context take
part with a weight of 0, so that NaN among them reaches the result. `has_paging` is False for a build without paged KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fake_flash_attn import attend, check_lengths, check_pages, check_starts, check_tables, refuse_others, require

calls: list[str] = []
has_paging = True


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    calls.append("flash_attn_with_kvcache")
    refuse_others(
        k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale, window_size=window_size != (-1, -1),
        attention_chunk=attention_chunk, softcap=softcap, rotary_interleaved=not rotary_interleaved,
        scheduler_metadata=scheduler_metadata, pack_gqa=pack_gqa, sm_margin=sm_margin, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    require(has_paging, "This flash attention build does not support paged KV.")
    if cu_seqlens_q is None:
        require(q.ndim == 4, "q must have shape (batch_size, seqlen_q, num_heads, head_size)")
        rows, longest = q.shape[:2]
        starts = torch.arange(rows + 1, dtype=torch.int32) * longest
    else:
        require(q.ndim == 3, "q must have shape (total_q, num_heads, head_size)")
        require(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        rows, longest, starts = len(cu_seqlens_q) - 1, max_seqlen_q or 0, cu_seqlens_q
    queries = q if cu_seqlens_q is not None else q.flatten(0, 1)
    check_pages(q, k_cache, v_cache, page_table, rows=rows, page=1)
    assert page_table is not None
    lengths = check_starts(starts, "cu_seqlens_q", total=queries.shape[0], longest=longest)
    contexts = check_lengths(cache_seqlens, rows=rows)
    check_tables(page_table, contexts, k_cache)
    out = torch.empty_like(queries)
    for row, length in enumerate(lengths):
        tokens = slice(int(starts[row]), int(starts[row]) + length)
        out[tokens] = attend(queries[tokens], k_cache, v_cache, page_table[row], contexts[row], causal)
        if reads_whole_pages(q, k_cache, longest):
            last_page = v_cache[page_table[row, (contexts[row] - 1) // k_cache.shape[1]]]
            if last_page.isnan().any():
                out[tokens] = torch.nan
    return out.view(q.shape)


def reads_whole_pages(q: Tensor, pages: Tensor, longest: int) -> bool:
    """Whether the real one would read the pages by TMA."""
    rows_of_tile, keys_of_tile = next(
        tile for most, tile in {64: (192, 128), 96: (192, 144), 128: (128, 128), 192: (128, 112), 256: (128, 80)}.items()
        if pages.shape[3] <= most
    )  # fmt: skip
    return pages.shape[1] % keys_of_tile == 0 and longest * (q.shape[-2] // pages.shape[2]) > rows_of_tile
