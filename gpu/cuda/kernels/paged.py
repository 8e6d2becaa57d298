"""What the paged attention kernels share: one tile of keys, and the states that parts of a context leave behind.

One idea carries all of them. Softmax attention over a set of keys is fully described, for one query, by a *state*

    maximum   the largest score,
    total     the sum of 2 ** (score - maximum),
    output    the sum of 2 ** (score - maximum) * value, not divided by anything,

and the states of two disjoint sets of keys give the state of their union: scale both to the larger maximum and add
(online softmax: Milakov & Gimelshein 2018, section 3; with values: FlashAttention 2205.14135, section 3.1). Scores are
held in units of log 2: the scale that the host passes has log2(e) in it, and exp2 is the instruction that the GPU has.

A program holds the state of a *tile* of queries in registers and walks over keys. Rows of a tile are (token, head) pairs
of one KV head's group, packed without gaps: row r is token r // GROUP and head r % GROUP of the group. So a page is read
once for all query heads that share it, any ratio of heads packs densely (nothing is padded to a power of two but the
tile's end), and decode (one token), chunks (many) and shared prefixes (one token of many rows) differ only in what they
call a token.

Keys are found one by one: position -> block table -> block -> address. A tile of keys may therefore span any number of
blocks and begin anywhere in one, and the block size may be any number; it is a constant of the compiled kernel, so that
the division is shifts and multiplications. The lookups of a tile hit the first-level cache and cost one load per 16 KB
of keys. The alternative, tiles that are blocks, ties the tile's size to the block's: 16 keys are too few for the matrix
units to be busy, 256 too many for shared memory.

What no query of a tile may see is neither loaded (the mask of the load puts zeros) nor counted (its score is -inf), so
that junk in the pool, NaN included, cannot arrive as 0 * NaN. All addresses into pools are 64-bit.

No maximum is ever -inf when something is subtracted from it: each walk's first tile has a key that each of its queries
sees. Queries beyond a tile's end are zeros and see what is loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launch import INTERPRETED

LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """Sizes of a kernel's tile and the resources to run it with."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def padded(count: int) -> int:
    """The least power of two that is not below `count`: what tiles measure."""
    return int(triton.next_power_of_2(count))


def pool_constants(*, group: int, head_dim: int, block_size: int, tile: Tile) -> dict[str, Any]:
    """The compile-time constants that each kernel over a pool has. `group` is the number of query heads to a KV head."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "UPCAST": INTERPRETED,
    }


@triton.jit
def load_vectors(base, offsets, inside, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Vectors at `base + offsets`: [len(offsets), PADDED_DIM], zero beyond HEAD_DIM and, if MASKED, where not `inside`."""
    dims = tl.arange(0, PADDED_DIM)
    pointers = base + offsets[:, None] + dims[None, :]
    # A mask that is always true would still be computed.
    if HEAD_DIM == PADDED_DIM:
        vectors = tl.load(pointers, mask=inside[:, None], other=0.0) if MASKED else tl.load(pointers)
    else:
        real = dims[None, :] < HEAD_DIM
        mask = (inside[:, None] & real) if MASKED else real
        vectors = tl.load(pointers, mask=mask, other=0.0)
    return vectors


@triton.jit
def store_vectors(base, offsets, inside, vectors, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Store `vectors` [len(offsets), PADDED_DIM] at `base + offsets` where `inside`, cast to what lies there."""
    dims = tl.arange(0, PADDED_DIM)
    mask = inside[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(base + offsets[:, None] + dims[None, :], vectors.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_queries(base, offsets, inside, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """The tile's queries [BLOCK_M, PADDED_DIM], zero where not `inside`. Keys and values are cast to their type."""
    queries = load_vectors(base, offsets, inside, HEAD_DIM, PADDED_DIM, True)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PADDED_DIM: tl.constexpr):
    """The state of no keys."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    return maximum, total, output


@triton.jit
def attend_tile(
    maximum,
    total,
    output,
    queries,
    keys,
    values,
    table,
    first,
    end,
    limits,
    scale,
    block_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys at positions [first, first + BLOCK_N) to a state, of which the row m of the tile sees those < limits[m].

    `keys` and `values` point at the KV head's vector in the pool's first slot, `table` at the sequence's block table.
    With MASKED, positions from `end` on are not read; without it, all positions exist and all rows see them.
    """
    positions = first + tl.arange(0, BLOCK_N)
    inside = positions < end
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    offsets = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE).to(tl.int64) * token_stride

    key = load_vectors(keys, offsets, inside, HEAD_DIM, PADDED_DIM, MASKED).to(queries.dtype)
    # "ieee" matters to float32 only, which would be rounded to tf32.
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))

    higher = tl.maximum(maximum, tl.max(scores, 1))
    fade = tl.exp2(maximum - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    value = load_vectors(values, offsets, inside, HEAD_DIM, PADDED_DIM, MASKED).to(queries.dtype)
    output = tl.dot(weights.to(queries.dtype), value, output * fade[:, None], input_precision="ieee")
    return higher, total, output


@triton.jit
def split_length(num_keys, num_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of each split when `num_keys` are split `num_splits` times: whole tiles, not below MIN_SPLIT.

    Split s has the keys [s * length, min((s + 1) * length, num_keys)), which may be none.
    """
    even = tl.maximum(tl.cdiv(num_keys, num_splits), MIN_SPLIT)
    return tl.cdiv(even, BLOCK_N) * BLOCK_N


@triton.jit
def store_states(
    outputs,
    maxima,
    totals,
    states,
    heads,
    inside,
    maximum,
    total,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Write a tile's states to scratch.

    `states` and `heads` [BLOCK_M] say where: `outputs` is float32 [states, NUM_HEADS, HEAD_DIM], `maxima` and `totals`
    are float32 [states, NUM_HEADS].
    """
    places = states.to(tl.int64) * NUM_HEADS + heads
    tl.store(maxima + places, maximum, mask=inside)
    tl.store(totals + places, total, mask=inside)
    store_vectors(outputs, places * HEAD_DIM, inside, output, HEAD_DIM, PADDED_DIM)
