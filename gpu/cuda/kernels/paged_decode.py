"""Attention of decode rows over pages: one query token a row, its context split between programs, and the merge.

A row's keys are read once and used for a handful of query heads, so decoding is bound by memory, and a GPU reaches its
memory's speed only when all of its multiprocessors read. Where rows times KV heads are fewer than that takes, a context is
split and each split leaves a state (see `paged`) in scratch; a second kernel merges a row's states (Flash-Decoding, Dao
et al. 2023).

The number of splits is the host's, from counts, so a captured graph can keep it. Where splits begin and end is the
device's, from the row's own context: as even as whole tiles allow, none shorter than MIN_SPLIT. So a short row of a graph
that was captured for long ones has one split, and the programs of its other splits end after two loads. With one split
and no shared prefix there is no scratch: the kernel writes the result itself.

Keys of a prefix that several rows share are attended elsewhere (`paged_shared`), before: `sharing` says where a row's own
keys begin and where the states of the shared ones lie. The merge takes a row's states in a fixed order, the splits of
its own keys first, so results are deterministic; and a row's result depends on the other rows only through the number
of splits and, if it is in a shared run, that run's.

    paged_decode  grid: (KV heads, rows, splits)
    merge_states  grid: (heads, rows)

KV heads vary fastest: their vectors are neighbours in a slot. Splits vary slowest: those that are empty in most rows
come last, when the first programs leave.

Alternatives: a merge by the program of a row that comes last saves a launch (about 2 us in a graph), and costs a counter in
memory that must be zero before each launch, and fences. Splitting all rows' keys evenly over programs (FlashInfer's
planner) balances better, but makes a row's split points, and with them its rounding, depend on its neighbours, and needs
a plan from the host for each step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..attention.splits import MIN_SPLIT_KEYS
from .launch import Variant
from .paged import (
    Tile,
    attend_tile,
    empty_state,
    load_queries,
    load_vectors,
    padded,
    split_length,
    store_states,
    store_vectors,
)
from .paged_forms import FORMS, Form, variant

MERGED_AT_ONCE = 16
"""States that the merge loads together: with 66 splits, the most that one row of 8 KV heads gets on an H100, five loads."""

MERGE_WARPS = 2
"""A merge is mostly waiting for a few loads: small programs, so that many wait at the same time."""


def decode_tile(*, group: int, head_dim: int, element_size: int) -> Tile:
    """The tile for `group` query heads to a KV head. Reasoned and compiled, not yet measured.

    A matrix product has at least 16 rows, so a group below that is padded in registers; nothing more is read for it. The
    work is little: 8 KFLOP a key of head_dim 128 at 512 bytes are 16 FLOP a byte, a tenth of what the matrix units do while
    memory delivers. What counts is bytes on their way: a multiprocessor of an H200 receives 36 bytes a nanosecond and
    memory takes about one microsecond, so 36 KB must be in flight. 64 keys and values of 128 16-bit elements are 32 KB, one
    such tile is on its way while another is in registers (four stages, of which the block table's lookup takes one), and by
    registers and shared memory (compiled: 128 a thread, 38 KB) four programs fit on a multiprocessor.
    32-bit: without matrix units, in tiles whose operands fit into registers.
    """
    rows = padded(max(group, 16))
    if element_size == 4:
        return Tile(rows=rows, keys=16, num_warps=4, num_stages=3)
    return Tile(rows=rows, keys=64 if padded(head_dim) <= 128 else 32, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def paged_decode(
    query,
    keys,
    values,
    out,
    outputs,
    maxima,
    totals,
    sharing,
    block_tables,
    context_lens,
    num_splits,
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    TO_SCRATCH: tl.constexpr,
    SHARED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with the decode rows, which are the first rows of the step: token i is row i.

    With TO_SCRATCH, split s of row r is written as state r * num_splits + s (see `store_states`) and `out` is not used;
    without it, `num_splits` is 1 and scratch is not used. With SHARED, a row's keys begin at `sharing[row, 0]`, an int32
    [rows, 3]. Scales and strides as in `paged_chunks`.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + row)
    begin = 0
    if SHARED:
        begin = tl.load(sharing + row * 3)
    length = split_length(context - begin, num_splits, MIN_SPLIT, BLOCK_N)
    begin += split * length
    if begin >= context:
        return
    end = tl.minimum(begin + length, context)

    member = tl.arange(0, BLOCK_M)
    inside = member < GROUP
    heads = kv_head * GROUP + member
    token = row.to(tl.int64)
    queries = load_queries(query, token * query_token_stride + heads * query_head_stride, inside, HEAD_DIM, PADDED_DIM, UPCAST)
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    table = block_tables + row.to(tl.int64) * table_stride
    limits = tl.full([BLOCK_M], 0, tl.int32) + end
    maximum, total, output = empty_state(BLOCK_M, PADDED_DIM)
    # All tiles are masked, though only the last needs it: a second loop would begin with nothing on its way.
    for at in range(begin, end, BLOCK_N):
        maximum, total, output = attend_tile(
            maximum, total, output, queries, keys, values, table, at, end, limits, scale, block_stride, token_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, MASKED=True,
        )  # fmt: skip

    if TO_SCRATCH:
        states = tl.full([BLOCK_M], 0, tl.int32) + (row * num_splits + split)
        store_states(outputs, maxima, totals, states, heads, inside, maximum, total, output, NUM_HEADS, HEAD_DIM, PADDED_DIM)
    else:
        output = output * (value_scale / total)[:, None]
        places = token * out_token_stride + heads * out_head_stride
        store_vectors(out, places, inside, output, HEAD_DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["num_splits"])
def merge_states(
    out,
    outputs,
    maxima,
    totals,
    sharing,
    context_lens,
    num_splits,
    value_scale,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
):
    """Merge the states of each row's splits and, with SHARED, those of its run: `sharing[row]` is (keys, first, states)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    own_keys = tl.load(context_lens + row)
    first_shared = 0
    num_shared = 0
    if SHARED:
        own_keys -= tl.load(sharing + row * 3)
        first_shared = tl.load(sharing + row * 3 + 1)
        num_shared = tl.load(sharing + row * 3 + 2)
    num_own = tl.cdiv(own_keys, split_length(own_keys, num_splits, MIN_SPLIT, BLOCK_N))

    maximum = float("-inf")
    total = 0.0
    output = tl.zeros([PADDED_DIM], tl.float32)
    for at in range(0, num_own + num_shared, BLOCK_STATES):
        index = at + tl.arange(0, BLOCK_STATES)
        inside = index < num_own + num_shared
        state = tl.where(index < num_own, row * num_splits + index, first_shared + index - num_own)
        places = state.to(tl.int64) * NUM_HEADS + head
        maxima_here = tl.load(maxima + places, mask=inside, other=float("-inf"))
        totals_here = tl.load(totals + places, mask=inside, other=0.0)
        outputs_here = load_vectors(outputs, places * HEAD_DIM, inside, HEAD_DIM, PADDED_DIM, True)
        higher = tl.maximum(maximum, tl.max(maxima_here, 0))
        fade = tl.exp2(maximum - higher)
        weights = tl.exp2(maxima_here - higher)
        total = total * fade + tl.sum(weights * totals_here, 0)
        output = output * fade + tl.sum(weights[:, None] * outputs_here, 0)
        maximum = higher

    dims = tl.arange(0, PADDED_DIM)
    place = row.to(tl.int64) * out_token_stride + head * out_head_stride
    merged = output * (value_scale / total)
    tl.store(out + place + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


_CONSTANTS = {"MIN_SPLIT": MIN_SPLIT_KEYS, "BLOCK_STATES": MERGED_AT_ONCE}
_USUAL = FORMS[0]


def _tile(form: Form) -> Tile:
    return decode_tile(group=form.group, head_dim=form.head_dim, element_size=form.element_size)


def _variant(form: Form, ending: str, *, to_scratch: bool, shared: bool) -> Variant:
    flags = {"TO_SCRATCH": to_scratch, "SHARED": shared}
    return variant(form, paged_decode, _tile(form), ending=ending, **flags, **_CONSTANTS)


VARIANTS = [
    *(_variant(form, "_split", to_scratch=True, shared=False) for form in FORMS),
    _variant(_USUAL, "_whole", to_scratch=False, shared=False),
    _variant(_USUAL, "_shared", to_scratch=True, shared=True),
    *(
        variant(
            _USUAL,
            merge_states,
            _tile(_USUAL)._replace(num_warps=MERGE_WARPS),
            ending="_shared" if shared else "",
            SHARED=shared,
            **_CONSTANTS,
        )
        for shared in (False, True)
    ),
]
