"""Attention by flash-attn 3 (Shah et al., arXiv 2407.08608) on Hopper: pages of any size, but not every build.

Decode rows and chunks both go through `flash_attn_with_kvcache`, in two calls: the first has one query token a row, which
it packs with the other query heads of a KV head, the second has chunks of any lengths (`cu_seqlens_q`). It is told 0
splits: it takes an upper bound from the shapes, on the host, and each row's own number on the device, so a captured graph
may be replayed with other lengths.

Read: hopper/flash_attn_interface.py as it lies in the sources of flash-attn 2.8.3, and on the development branch at commit
01afd16d, where the function has the same parameters; the checks of hopper/flash_api.cpp at 000090d0. The package is built
from source, with parts of it left out at will (paging, float16, head dims), and none of that shows in its version. It may
also let NaN through, at block sizes that depend on the build's tiles: see `trial`. So it is used only after a trial.
"""

from __future__ import annotations

from importlib import util

import torch
from torch import Tensor

from .contract import AttentionInputs, PagedKeysValues
from .derived import PerStep, block_tables_up_to_bound, chunk_starts
from .needs import AttentionNeeds, why_not_flash_kernels


class Flash3:
    """Implements `AttentionBackend` with the module `flash_attn_interface`. The constructor raises `ImportError` without it."""

    name = "flash-attn-3"
    can_be_captured = True
    attends_shared = False

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._starts = PerStep(chunk_starts)

    def warm_up(self, cache: PagedKeysValues, dtype: torch.dtype) -> None:
        """See `AttentionBackend.warm_up`. There is nothing to compile."""

    def attend(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        """See `AttentionBackend.attend`."""
        tables = block_tables_up_to_bound(inputs, cache.keys.shape[1])
        if inputs.num_decodes:
            rows = slice(inputs.num_decodes)
            attended = self._attend(
                query[rows, None],
                cache.keys,
                cache.values,
                cache_seqlens=inputs.context_lens[rows],
                page_table=tables[rows],
                causal=True,
                num_splits=0,
            )
            out[rows] = attended[:, 0]
        if inputs.num_chunks:
            rows = slice(inputs.num_decodes, inputs.num_decodes + inputs.num_chunks)
            tokens = slice(inputs.num_decodes, inputs.num_tokens)
            out[tokens] = self._attend(
                query[tokens],
                cache.keys,
                cache.values,
                cache_seqlens=inputs.context_lens[rows],
                page_table=tables[rows],
                cu_seqlens_q=self._starts.of(inputs).queries,
                max_seqlen_q=inputs.max_query_len,
                causal=True,
                num_splits=0,
            )


def why_not_flash3(needs: AttentionNeeds) -> str | None:
    """Why `Flash3` cannot be used for `needs`, in words, all reasons; None if nothing speaks against a trial."""
    reasons = []
    if util.find_spec("flash_attn_interface") is None:
        reasons.append("not installed")
    reasons += why_not_flash_kernels(needs)
    if needs.capability is None:
        reasons.append("the device is no GPU")
    elif needs.capability[0] != 9:
        reasons.append("the GPU's compute capability is {}.{}, not 9.x".format(*needs.capability))
    return ", ".join(reasons) or None
