"""Attention by flash-attn 2 (Dao, arXiv 2307.08691), which needs blocks of a multiple of 256 tokens.

Two calls a step. One for all rows would do, but its varlen kernel splits the keys of a row over several multiprocessors
only where every row has one query token: in a mixed batch each decode row would walk through its context alone.
`flash_attn_with_kvcache` splits, and it is told 0 splits: it chooses from the shapes, on the host, so a captured graph
replays what was chosen for its bounds.

Read: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of 2.8.3, which 2.8.0 shares to the letter.
Both read the page stride from the tensors, so views of a block-major pool are fine. The kernels fill with zeros what
they do not load of the last tile of values, so that NaN behind a context stays out. What follows 2.8.3 is another matter:
the development branch copies the lengths to the host in each call (Dao-AILab/flash-attention pull request 2711).
"""

from __future__ import annotations

import re
from importlib import metadata

import torch
from torch import Tensor

from .contract import AttentionInputs, PagedKeysValues
from .derived import PerStep, block_tables_up_to_bound, chunk_starts
from .needs import AttentionNeeds, why_not_flash_kernels

_OLDEST, _NEWEST = (2, 8, 0), (2, 8, 3)
_PAGE = 256


class Flash2:
    """Implements `AttentionBackend` with the package `flash_attn`. The constructor raises `ImportError` without it."""

    name = "flash-attn"
    can_be_captured = True
    attends_shared = False

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._attend_varlen = flash_attn_varlen_func
        self._attend_kvcache = flash_attn_with_kvcache
        self._starts = PerStep(chunk_starts)

    def warm_up(self, cache: PagedKeysValues, dtype: torch.dtype) -> None:
        """See `AttentionBackend.warm_up`. There is nothing to compile."""

    def attend(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        """See `AttentionBackend.attend`."""
        if inputs.num_decodes:
            self._decode(query, cache, inputs, out)
        if inputs.num_chunks:
            self._prefill(query, cache, inputs, out)

    def _decode(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        rows = slice(inputs.num_decodes)
        attended = self._attend_kvcache(
            query[rows, None],
            cache.keys,
            cache.values,
            cache_seqlens=inputs.context_lens[rows],
            block_table=block_tables_up_to_bound(inputs, cache.keys.shape[1])[rows],
            causal=True,
            num_splits=0,
        )
        out[rows] = attended[:, 0]

    def _prefill(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        rows = slice(inputs.num_decodes, inputs.num_decodes + inputs.num_chunks)
        tokens = slice(inputs.num_decodes, inputs.num_tokens)
        starts = self._starts.of(inputs)
        out[tokens] = self._attend_varlen(
            query[tokens],
            cache.keys,
            cache.values,
            cu_seqlens_q=starts.queries,
            cu_seqlens_k=starts.keys,
            max_seqlen_q=inputs.max_query_len,
            max_seqlen_k=inputs.max_context_len,
            causal=True,
            block_table=block_tables_up_to_bound(inputs, cache.keys.shape[1])[rows],
        )


def installed_version() -> str | None:
    """The installed flash-attn's version, found without importing it; None if there is none.

    The name of its distribution is asked for: flash-attn 4 brings a package `flash_attn` too, with nothing of this in it.
    """
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return None


def why_not_flash2(needs: AttentionNeeds) -> str | None:
    """Why `Flash2` cannot be used for `needs`, in words, all reasons; None if nothing speaks against opening it."""
    version = installed_version()
    reasons = []
    if version is None:
        reasons.append("not installed")
    elif not _is_known(version):
        reasons.append(f"version {version} is installed, and only 2.8.0 to 2.8.3 are known to do what is needed")
    if needs.block_size % _PAGE:
        reasons.append(f"block_size must be a multiple of {_PAGE}, not {needs.block_size}")
    reasons += why_not_flash_kernels(needs)
    if needs.capability is None:
        reasons.append("the device is no GPU")
    elif needs.capability < (8, 0):
        reasons.append("the GPU's compute capability is {}.{}, under 8.0".format(*needs.capability))
    return ", ".join(reasons) or None


def _is_known(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and _OLDEST <= tuple(map(int, numbers.groups())) <= _NEWEST
