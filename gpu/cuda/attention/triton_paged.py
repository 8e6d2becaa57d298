"""Attention in our own Triton kernels: any block size, any ratio of heads, strided and float8 pools.

    chunks                      paged_chunks
    decode rows, few keys       paged_decode, straight into `out`
    decode rows, split          paged_decode into scratch, merge_states
    with shared prefixes        paged_shared for each run, then as split

Decode rows and chunks are two launches: they want other tiles, and a decode row in the grid of a long chunk would walk
its context alone. Scratch is allocated once: captured graphs and eager steps write the same memory, one after the other
on the compute stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.paged import LOG2_E, Tile, pool_constants
from ..kernels.paged_chunks import chunk_tile, paged_chunks
from ..kernels.paged_decode import MERGE_WARPS, MERGED_AT_ONCE, decode_tile, merge_states, paged_decode
from ..kernels.paged_shared import paged_shared, shared_tile
from .contract import AttentionInputs, PagedKeysValues, SharedRun
from .splits import (
    MIN_SPLIT_KEYS,
    SHARING_COSTS_BYTES,
    max_shared_states,
    max_states,
    num_splits,
    shared_splits,
    worth_sharing,
)


class HeadShape(NamedTuple):
    """Heads of a model: `num_heads` is a multiple of `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads


class _Call(NamedTuple):
    """One layer's attention in one step."""

    query: Tensor
    cache: PagedKeysValues
    inputs: AttentionInputs
    out: Tensor


class _Scratch(NamedTuple):
    """Memory between the kernels; see `store_states` and `paged_shared`."""

    outputs: Tensor
    maxima: Tensor
    totals: Tensor
    sharing: Tensor


class TritonPaged:
    """Implements `AttentionBackend`.

    `max_rows` is the most decode rows of a step, `num_sms` the device's number of multiprocessors.
    `sharing_costs_bytes`: see `worth_sharing`.
    """

    name = "triton"
    can_be_captured = True
    attends_shared = True

    def __init__(
        self,
        heads: HeadShape,
        *,
        max_rows: int,
        num_sms: int,
        device: torch.device,
        sharing_costs_bytes: int = SHARING_COSTS_BYTES,
    ) -> None:
        self._heads = heads
        self._num_sms = num_sms
        self._max_rows = max_rows
        self._sharing_costs_bytes = sharing_costs_bytes
        self._shared_states = max_shared_states(max_rows, num_heads=heads.num_heads, num_sms=num_sms)
        states = max_states(max_rows, num_kv_heads=heads.num_kv_heads, num_sms=num_sms) + self._shared_states
        self._scratch = _Scratch(
            outputs=torch.empty(states, heads.num_heads, heads.head_dim, dtype=torch.float32, device=device),
            maxima=torch.empty(states, heads.num_heads, dtype=torch.float32, device=device),
            totals=torch.empty(states, heads.num_heads, dtype=torch.float32, device=device),
            sharing=torch.zeros(max_rows, 3, dtype=torch.int32, device=device),
        )

    def attend(self, query: Tensor, cache: PagedKeysValues, inputs: AttentionInputs, out: Tensor) -> None:
        """See `AttentionBackend.attend`.

        Raises `ValueError` for more decode rows than `max_rows`, and for keys and values with different strides.
        """
        if inputs.num_decodes > self._max_rows:
            raise ValueError(f"{inputs.num_decodes} decode rows, of at most {self._max_rows}")
        if cache.keys.stride() != cache.values.stride():
            raise ValueError(f"keys have strides {cache.keys.stride()}, values {cache.values.stride()}; they must be equal")
        call = _Call(query, cache, inputs, out)
        if inputs.num_decodes:
            splits = num_splits(
                inputs.num_decodes,
                num_kv_heads=self._heads.num_kv_heads,
                max_context_len=inputs.max_context_len,
                num_sms=self._num_sms,
            )
            self._attend_decodes(call, splits, self._runs_worth_sharing(call))
        if inputs.num_chunks:
            self._attend_chunks(call)

    def warm_up(self, cache: PagedKeysValues, dtype: torch.dtype) -> None:
        """Compile all forms of the kernels that steps over `cache` may need, for queries of `dtype`.

        Otherwise the first step with a long context or a shared run waits seconds for a compiler. Launches tiny steps
        that read block 0, whatever is in it, and drops what they compute. Not to be captured.
        """
        device, block_size = cache.keys.device, cache.keys.shape[1]
        # Members whose queries are one more than the small tile of `shared_tile` has rows.
        members = min(16 // self._heads.group + 1, self._max_rows)
        tokens = members + 2
        query = torch.zeros(tokens, self._heads.num_heads, self._heads.head_dim, dtype=dtype, device=device)
        inputs = AttentionInputs(
            block_tables=torch.zeros(members + 1, 2, dtype=torch.int32, device=device),
            context_lens=torch.full((members + 1,), block_size + 1, dtype=torch.int32, device=device),
            query_starts=torch.tensor([*range(members + 1), tokens], dtype=torch.int32, device=device),
            num_decodes=members,
            num_chunks=1,
            num_chunk_tokens=2,
            max_query_len=2,
            max_context_len=block_size + 1,
        )
        call = _Call(query, cache, inputs, torch.empty_like(query))
        rows = torch.arange(members, dtype=torch.int32, device=device)
        self._attend_chunks(call)
        self._attend_decodes(call, 1, [])
        self._attend_decodes(call, 2, [])
        self._attend_decodes(call, 1, [SharedRun(rows, 1, block_size)])
        self._attend_decodes(call, 1, [SharedRun(rows, members, block_size)])

    def _attend_chunks(self, call: _Call) -> None:
        inputs, heads = call.inputs, self._heads
        tile = chunk_tile(head_dim=heads.head_dim, element_size=call.query.element_size())
        tiles = -(-inputs.max_query_len * heads.group // tile.rows)
        paged_chunks[(tiles, heads.num_kv_heads, inputs.num_chunks)](
            out=call.out,
            context_lens=inputs.context_lens,
            query_starts=inputs.query_starts,
            first_row=inputs.num_decodes,
            value_scale=call.cache.value_scale,
            **_out_strides(call),
            **self._of_pool(call, tile),
        )

    def _attend_decodes(self, call: _Call, splits: int, runs: list[SharedRun]) -> None:
        inputs, heads = call.inputs, self._heads
        if runs:
            self._attend_shared(call, runs, first_state=inputs.num_decodes * splits)
        to_scratch = splits > 1 or bool(runs)
        tile = decode_tile(group=heads.group, head_dim=heads.head_dim, element_size=call.query.element_size())
        of_splits = {
            **self._scratch._asdict(),
            "out": call.out,
            "context_lens": inputs.context_lens,
            "num_splits": splits,
            "value_scale": call.cache.value_scale,
            "NUM_HEADS": heads.num_heads,
            "MIN_SPLIT": MIN_SPLIT_KEYS,
            "SHARED": bool(runs),
            **_out_strides(call),
        }
        paged_decode[(heads.num_kv_heads, inputs.num_decodes, splits)](
            TO_SCRATCH=to_scratch, **of_splits, **self._of_pool(call, tile)
        )
        if to_scratch:
            constants = self._constants(call, tile)
            merge_states[(heads.num_heads, inputs.num_decodes)](
                **of_splits,
                **{name: constants[name] for name in ("HEAD_DIM", "PADDED_DIM", "BLOCK_N")},
                BLOCK_STATES=MERGED_AT_ONCE,
                num_warps=MERGE_WARPS,
            )

    def _attend_shared(self, call: _Call, runs: list[SharedRun], *, first_state: int) -> None:
        """Leave the states of `runs` from `first_state` on, and in `sharing` where those of each row are."""
        heads = self._heads
        self._scratch.sharing.zero_()
        splits = shared_splits(
            [(run.num_members, run.num_keys) for run in runs],
            group=heads.group,
            num_kv_heads=heads.num_kv_heads,
            num_sms=self._num_sms,
            room=self._shared_states,
        )
        for run, splits_here in zip(runs, splits, strict=True):
            num_queries = run.num_members * heads.group
            tile = shared_tile(num_queries=num_queries, head_dim=heads.head_dim, element_size=call.query.element_size())
            paged_shared[(heads.num_kv_heads, -(-num_queries // tile.rows), splits_here)](
                rows=run.rows,
                num_members=run.num_members,
                num_keys=run.num_keys,
                first_state=first_state,
                num_splits=splits_here,
                NUM_HEADS=heads.num_heads,
                MIN_SPLIT=MIN_SPLIT_KEYS,
                **self._scratch._asdict(),
                **self._of_pool(call, tile),
            )
            first_state += run.num_members * splits_here

    def _runs_worth_sharing(self, call: _Call) -> list[SharedRun]:
        keys = call.cache.keys
        key_bytes = 2 * keys.element_size() * self._heads.num_kv_heads * self._heads.head_dim
        return [
            run
            for run in call.inputs.shared_runs
            if worth_sharing(
                run.num_members,
                run.num_keys,
                group=self._heads.group,
                key_bytes=key_bytes,
                costs_bytes=self._sharing_costs_bytes,
            )
        ]

    def _of_pool(self, call: _Call, tile: Tile) -> dict[str, Any]:
        """What every kernel that reads the pool is called with."""
        keys, tables = call.cache.keys, call.inputs.block_tables
        return {
            "query": call.query,
            "keys": keys,
            "values": call.cache.values,
            "block_tables": tables,
            "scale": LOG2_E * self._heads.head_dim**-0.5 * call.cache.key_scale,
            "query_token_stride": call.query.stride(0),
            "query_head_stride": call.query.stride(1),
            "block_stride": keys.stride(0),
            "token_stride": keys.stride(1),
            "head_stride": keys.stride(2),
            "table_stride": tables.stride(0),
            **self._constants(call, tile),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def _constants(self, call: _Call, tile: Tile) -> dict[str, Any]:
        heads = self._heads
        return pool_constants(group=heads.group, head_dim=heads.head_dim, block_size=call.cache.keys.shape[1], tile=tile)


def _out_strides(call: _Call) -> dict[str, int]:
    return {"out_token_stride": call.out.stride(0), "out_head_stride": call.out.stride(1)}
