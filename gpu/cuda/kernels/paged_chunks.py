"""Attention of prefill chunks over pages: FlashAttention-2 (2307.08691) with a block table.

A program has a tile of one chunk's queries (see `paged`) for one KV head. It walks first over the keys that all its
queries see, without masks, then over the few tiles of keys where the causal limit runs through, and ends there: keys
beyond the last query's are not visited.

Programs of one chunk and KV head are neighbours in the grid, so that they find its keys in the second-level cache, and
the last tile of a chunk, which sees the most keys, comes first: what is long should not begin last.

    grid: (tiles of the longest chunk, KV heads, chunks)

Not done: a chunk of a few tokens behind a long context makes few programs, each of which walks all of it. Splitting the
keys before the chunk as decode does would help a conversation's next turn, for as many states of scratch as it has tokens
times splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .paged import Tile, attend_tile, empty_state, load_queries, padded, store_vectors
from .paged_forms import FORMS, variant


def chunk_tile(*, head_dim: int, element_size: int) -> Tile:
    """The tile for queries of `element_size` bytes. Reasoned and compiled, not yet measured.

    16-bit, heads up to 128: 128 queries and 64 keys with 8 warps. The matrix product of a Hopper warpgroup (4 warps) has
    64 rows, so there are two; a thread holds 64 registers of output and 32 of scores (compiled: 188 in all, none
    spilled, one program on a multiprocessor). 128 queries make 128 FLOP of each byte that is read; with 64 it would be 64, and
    at 500 TFLOP/s reading alone would take 7.8 TB/s, more than the second-level cache gives. Three stages, of which the
    lookup in the block table takes one, keep two tiles of keys and values in shared memory: the next is on its way while
    one is computed, which takes about 1 us, as long as memory takes to answer. With the queries that is
    2 * 2 * 64 * 128 * 2 B + 32 KB = 96 KB, which even GPUs with 99 KB (compute capability 8.6, 8.9) have.
    Wider heads: half the queries and half the keys for the same shared memory, the same warps for the registers.
    32-bit: without matrix units, in tiles whose operands fit into registers.
    """
    if element_size == 4:
        return Tile(rows=32, keys=16, num_warps=8, num_stages=2)
    if padded(head_dim) <= 128:
        return Tile(rows=128, keys=64, num_warps=8, num_stages=3)
    return Tile(rows=64, keys=32, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["first_row", "table_stride"])
def paged_chunks(
    query,
    keys,
    values,
    out,
    block_tables,
    context_lens,
    query_starts,
    first_row,
    scale,
    value_scale,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with the chunks, which are the rows of the step from `first_row` on.

    `scale` is the scores' times log2(e) and, for a scaled pool, times that of the keys. Strides are in elements; keys and
    values have the same. The rest is as in `AttentionInputs` and `AttentionBackend.attend`.
    """
    kv_head = tl.program_id(1)
    row = first_row + tl.program_id(2)
    first_token = tl.load(query_starts + row)
    num_tokens = tl.load(query_starts + row + 1) - first_token
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first >= num_tokens * GROUP:
        return

    packed = first + tl.arange(0, BLOCK_M)
    inside = packed < num_tokens * GROUP
    token = packed // GROUP
    tokens = (first_token + token).to(tl.int64)
    heads = kv_head * GROUP + packed % GROUP
    queries = load_queries(query, tokens * query_token_stride + heads * query_head_stride, inside, HEAD_DIM, PADDED_DIM, UPCAST)

    # Token i of the chunk sees the keys before the chunk and i + 1 of the chunk's.
    past = tl.load(context_lens + row) - num_tokens
    limits = past + token + 1
    end = past + tl.minimum((first + BLOCK_M - 1) // GROUP + 1, num_tokens)
    seen_by_all = (past + first // GROUP + 1) // BLOCK_N * BLOCK_N

    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table = block_tables + row.to(tl.int64) * table_stride
    maximum, total, output = empty_state(BLOCK_M, PADDED_DIM)
    for at in range(0, seen_by_all, BLOCK_N):
        maximum, total, output = attend_tile(
            maximum, total, output, queries, keys, values, table, at, end, limits, scale, block_stride, token_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False,
        )  # fmt: skip
    for at in range(seen_by_all, end, BLOCK_N):
        maximum, total, output = attend_tile(
            maximum, total, output, queries, keys, values, table, at, end, limits, scale, block_stride, token_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True,
        )  # fmt: skip

    output = output * (value_scale / total)[:, None]
    places = tokens * out_token_stride + heads * out_head_stride
    store_vectors(out, places, inside, output, HEAD_DIM, PADDED_DIM)


VARIANTS = [variant(form, paged_chunks, chunk_tile(head_dim=form.head_dim, element_size=form.element_size)) for form in FORMS]
