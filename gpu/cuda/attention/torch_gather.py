"""Attention with what torch has: each row's pages are gathered, and torch attends over them.

This is what is left where nothing reads pages itself, and the reference for that which does. A row's keys are gathered
exactly, so nothing that lies behind a context or in another row's blocks can reach its result.

    varlen_attn                      one call for all rows over all their keys, one behind the other
    scaled_dot_product_attention     row by row, in any dtype, on any device

The first is flash-attn 2 inside torch (2.10 and later). It could read pages (2.12 and later), but is wrong when it splits
keys there (pytorch issue 194167), so it gets no block table and is told not to split. Its parameters differ from version
to version; what it lacks is done without it, and if it fails in a trial on the device, the second way is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import AttentionInputs, PagedKeysValues
from .derived import PerStep
from .needs import AttentionNeeds
from .trial import why_it_fails

Varlen = Callable[..., Tensor]
"""(query, keys, values, query starts, key starts, longest query, longest context) -> attended, causal from the lower right."""


class _Row(NamedTuple):
    """A row's tokens and keys among those of all rows. `mask` is None where no mask or the plain causal one will do."""

    tokens: slice
    keys: slice
    mask: Tensor | None
    is_causal: bool


class _Gathering(NamedTuple):
    """Where the keys of all rows lie, row behind row: int64 [keys] each; `key_starts` is int32 [rows + 1]."""

    blocks: Tensor
    offsets: Tensor
    key_starts: Tensor
    rows: list[_Row]
    longest_query: int
    longest_context: int


class TorchGather:
    """Implements `AttentionBackend`. In the first layer of a step it waits for the device, to read the lengths."""

    name = "torch"
    can_be_captured = False
    attends_shared = False

    def __init__(self, needs: AttentionNeeds) -> None:
        self._block_size = needs.block_size
        self._gathering = PerStep(self._gather)
        self._varlen = open_varlen(needs)
        if self._varlen is not None and why_it_fails(self, needs) is not None:
            self._varlen = None

    @property
    def way(self) -> str:
        """Which of torch's functions attends."""
        return "scaled_dot_product_attention" if self._varlen is None else "varlen_attn"

    def warm_up(self, cache: PagedKeysValues, dtype: torch.dtype) -> None:
        """See `AttentionBackend.warm_up`. There is nothing to compile."""

    def attend(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        """See `AttentionBackend.attend`."""
        gathering = self._gathering.of(inputs)
        if self._varlen is None:
            for row in gathering.rows:
                keys, values = _gathered(cache, gathering, row.keys, query.dtype)
                out[row.tokens] = _attend_row(query[row.tokens], keys, values, row)
        elif gathering.rows:
            keys, values = _gathered(cache, gathering, slice(None), query.dtype)
            tokens = slice(inputs.num_tokens)
            starts = inputs.query_starts[: len(gathering.rows) + 1]
            bounds = gathering.longest_query, gathering.longest_context
            out[tokens] = self._varlen(query[tokens], keys, values, starts, gathering.key_starts, *bounds)

    def _gather(self, inputs: AttentionInputs) -> _Gathering:
        num_rows = inputs.num_decodes + inputs.num_chunks
        device = inputs.block_tables.device
        query_starts: list[int] = inputs.query_starts[: num_rows + 1].tolist()
        contexts: list[int] = inputs.context_lens[:num_rows].tolist()
        key_starts = torch.tensor([0, *contexts]).cumsum(0)
        row_of_key = torch.arange(num_rows).repeat_interleave(torch.tensor(contexts, dtype=torch.int64))
        position = (torch.arange(len(row_of_key)) - key_starts[row_of_key]).to(device)
        blocks = inputs.block_tables[row_of_key.to(device), position // self._block_size]
        first_keys = key_starts.tolist()
        rows = [
            _row(query_starts[i], query_starts[i + 1], first_key=first_keys[i], num_keys=contexts[i], device=device)
            for i in range(num_rows)
        ]
        return _Gathering(
            blocks=blocks.long(),
            offsets=position % self._block_size,
            key_starts=key_starts.to(torch.int32).to(device),
            rows=rows,
            longest_query=max((row.tokens.stop - row.tokens.start for row in rows), default=0),
            longest_context=max(contexts, default=0),
        )


def open_varlen(needs: AttentionNeeds) -> Varlen | None:
    """torch's `varlen_attn` as this version of it wants to be called, or None if it has none that can be called."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1, 0)  # exactly this tuple means causal
    elif "is_causal" in known:
        options["is_causal"] = True
    else:
        return None
    if "num_splits" in known:
        options["num_splits"] = 1
    function: Callable[..., Any] = varlen_attn
    repeats = needs.num_heads // needs.num_kv_heads
    if repeats > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
        repeats = 1

    def attend(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        attended: Tensor = function(query, keys, values, *rest, **options)
        return attended

    return attend


def _row(first: int, last: int, *, first_key: int, num_keys: int, device: torch.device) -> _Row:
    length = last - first
    mask = None
    if 1 < length < num_keys:
        # Lower right: the chunk's token i sees all keys before the chunk, and i + 1 of its own.
        mask = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril_(num_keys - length)
    return _Row(slice(first, last), slice(first_key, first_key + num_keys), mask, is_causal=1 < length == num_keys)


def _gathered(cache: PagedKeysValues, gathering: _Gathering, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a part of what is gathered, [keys, num_kv_heads, head_dim] in `dtype`."""
    place = gathering.blocks[part], gathering.offsets[part]
    keys, values = cache.keys[place], cache.values[place]
    return _widened(keys, cache.key_scale, dtype), _widened(values, cache.value_scale, dtype)


def _widened(stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return stored if stored.dtype == dtype and scale == 1.0 else (stored.float() * scale).to(dtype)


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, row: _Row) -> Tensor:
    attended = F.scaled_dot_product_attention(
        _by_head(query), _by_head(keys), _by_head(values), attn_mask=row.mask, is_causal=row.is_causal, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _by_head(tokens: Tensor) -> Tensor:
    """[tokens, heads, head_dim] as the kernel wants it: [1, heads, tokens, head_dim], a view."""
    return tokens.transpose(0, 1).unsqueeze(0)
