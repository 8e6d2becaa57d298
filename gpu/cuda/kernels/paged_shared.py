"""Attention of decode rows to a prefix that they share: its keys are read once for all of them.

The queries of all rows of a run are independent of each other and see the same keys, so they are one matrix product
(Hydragen 2402.05099, section 3.2; cascade attention in FlashInfer). A tile's rows are (member, head of the group) pairs;
a program has a tile, a KV head and a split of the run's keys, and leaves each member's state in scratch, behind those of
the members' own keys, where `merge_states` finds them.

    grid: (KV heads, tiles of the run's queries, splits)

One launch a run. A launch for all runs would need their sizes on the device, and runs are few: those of one step are
different system prompts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..attention.splits import MIN_SPLIT_KEYS
from .launch import Variant
from .paged import Tile, attend_tile, empty_state, load_queries, padded, split_length, store_states
from .paged_forms import FORMS, Form, variant


def shared_tile(*, num_queries: int, head_dim: int, element_size: int) -> Tile:
    """The tile for a run whose members have `num_queries` queries for each KV head. Reasoned and compiled, not yet measured.

    64 rows are what a warpgroup multiplies on Hopper, and with it each byte of keys makes 64 FLOP; few queries take the
    16 rows of the small product. Two sizes only: each is compiled on its own. Keys and stages as for decodes.
    """
    if element_size == 4:
        return Tile(rows=16, keys=16, num_warps=8, num_stages=3)
    keys = 64 if padded(head_dim) <= 128 else 32
    return Tile(rows=16 if num_queries <= 16 else 64, keys=keys, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["num_members", "num_keys", "first_state", "num_splits", "table_stride"])
def paged_shared(
    query,
    keys,
    values,
    outputs,
    maxima,
    totals,
    sharing,
    block_tables,
    rows,
    num_members,
    num_keys,
    first_state,
    num_splits,
    scale,
    query_token_stride,
    query_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with rows `rows` [num_members] to the first `num_keys` keys of their block tables, which are the same.

    Split s of member m is written as state first_state + m * num_splits + s (see `store_states`), and for each member
    `sharing[row]` becomes (num_keys, its first state, its number of states).
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    length = split_length(num_keys, num_splits, MIN_SPLIT, BLOCK_N)
    begin = split * length
    if begin >= num_keys:
        return
    end = tl.minimum(begin + length, num_keys)

    packed = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = packed < num_members * GROUP
    member = packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    tokens = tl.load(rows + member, mask=inside, other=0)
    queries = load_queries(
        query,
        tokens.to(tl.int64) * query_token_stride + heads * query_head_stride,
        inside,
        HEAD_DIM,
        PADDED_DIM,
        UPCAST,
    )
    states = first_state + member * num_splits
    if (kv_head == 0) & (split == 0):
        is_first = inside & (packed % GROUP == 0)
        tl.store(sharing + tokens * 3, num_keys, mask=is_first)
        tl.store(sharing + tokens * 3 + 1, states, mask=is_first)
        tl.store(sharing + tokens * 3 + 2, tl.cdiv(num_keys, length), mask=is_first)

    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table = block_tables + tl.load(rows).to(tl.int64) * table_stride
    limits = tl.full([BLOCK_M], 0, tl.int32) + end
    maximum, total, output = empty_state(BLOCK_M, PADDED_DIM)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for at in range(begin, whole, BLOCK_N):
        maximum, total, output = attend_tile(
            maximum, total, output, queries, keys, values, table, at, end, limits, scale, block_stride, token_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, MASKED=False,
        )  # fmt: skip
    # Only in the last split, and only if the run's end is no tile's.
    if whole < end:
        maximum, total, output = attend_tile(
            maximum, total, output, queries, keys, values, table, whole, end, limits, scale, block_stride, token_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True,
        )  # fmt: skip
    store_states(
        outputs, maxima, totals, states + split, heads, inside, maximum, total, output, NUM_HEADS, HEAD_DIM, PADDED_DIM
    )


def _variant(form: Form, num_queries: int) -> Variant:
    tile = shared_tile(num_queries=num_queries, head_dim=form.head_dim, element_size=form.element_size)
    return variant(form, paged_shared, tile, ending=f"_{num_queries}", MIN_SPLIT=MIN_SPLIT_KEYS)


VARIANTS = [*(_variant(form, 64) for form in FORMS), _variant(FORMS[0], 16)]
