"""Draws with top-k and top-p, a program a row: `sampling.py` is where they belong, and why they are done so.

A source is a row's candidates or the whole row. It is read in blocks of SIZE, and what is computed of it again in each pass
are its weights. Numbers and masses are float64 where they are compared with a goal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Variant
from .sampling import TOP_P, bits_of, first_reaching, float_of, source_of, top_k_of, uniform_of, variants_of, weights_at


@triton.jit
def draw_filtered(
    logits, parameters, maxima, counts, masses, candidates, candidate_ids, num_candidates, tokens,
    row_stride, vocab, max_rows,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Tokens of the rows with top-k or top-p, from their candidates or, without, from all that they have."""
    row = tl.program_id(0).to(tl.int64)
    num_found = tl.load(num_candidates + row)
    if num_found != 0:
        maximum = tl.max(tl.load(maxima + row * PARTS + tl.arange(0, PARTS)), axis=0)
        everything = row * LEVELS * PARTS + (LEVELS - 1) * PARTS + tl.arange(0, PARTS)
        all_count = tl.sum(tl.load(counts + everything), axis=0)
        all_mass = tl.sum(tl.load(masses + everything), axis=0)
        if num_found > 0:
            values, count = candidates + row * CANDIDATES, num_found
        else:
            values, count = logits + row * row_stride, vocab
        source = source_of(values, count, maximum, parameters + row, max_rows)
        place = _draw_kept(source, all_count, all_mass, parameters + row, max_rows, CANDIDATES)
        if num_found > 0:
            place = tl.load(candidate_ids + row * CANDIDATES + place)
        tl.store(tokens + row, place)


@triton.jit
def _draw_kept(source, all_count, all_mass, own, max_rows, SIZE: tl.constexpr):
    """The place in `source` of a draw from what top-k and top-p keep of its weights.

    All weights of the row are `all_count` and `all_mass`: more than those of `source` where top-k is off, or is not met.
    """
    wanted, share = top_k_of(own, max_rows), float_of(own, TOP_P, max_rows)
    least, num_least, mass = 0, 0, all_mass
    if wanted < all_count:
        least, num_above = _threshold(source, wanted.to(tl.float64), tl.maximum(least, 1), True, SIZE)
        num_least = wanted - num_above.to(tl.int32)
        if share < 1:
            mass_above, _, _ = _measure(source, least, False, SIZE)
            mass = mass_above + num_least * _of_bits(least)
    if share < 1:
        goal = share * mass
        # Nothing below top-k's threshold counts, and of its equals only the first: they are never measured apart.
        last, num_last = least, num_least
        least, mass_above = _threshold(source, goal, tl.maximum(last, 1), False, SIZE)
        # A token stays if those ahead of it do not make up the goal.
        num_least = ((goal - mass_above) / _of_bits(least)).to(tl.int32)
        num_least += (mass_above + num_least * _of_bits(least) < goal).to(tl.int32)
        num_least = tl.where(least == last, tl.minimum(num_least, num_last), num_least)
    end = 0
    if num_least > 0:
        end = _end_of(source, least, num_least, SIZE)
    return _draw_above(source, least, end, uniform_of(own, max_rows), SIZE)


@triton.jit
def _of_bits(bits):
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _threshold(source, goal, low, BY_COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The bits of the least weight needed to make up `goal`, in number or mass, and number or mass of those above it.

    It is not below the bits `low`, which are not 0. All in float64.
    """
    high = 0x3F800000  # 1, the largest weight
    amount_above = 0.0 * goal  # a float64
    while low < high:
        middle = low + (high - low) // 2
        amount, below, above = _measure(source, middle, BY_COUNT, SIZE)
        # Where no weight is left below, what is above must be enough: a sum in another order may miss it by its last bit.
        is_enough = (amount >= goal) | (below < low)
        low = tl.where(is_enough, above, low)
        high = tl.where(is_enough, high, below)
        amount_above = tl.where(is_enough, amount_above, amount)
    return high, amount_above


@triton.jit
def _measure(source, key, BY_COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Number or mass of the weights whose bits are above `key`, in float64, and the bits next to it: below or equal, above."""
    amounts = tl.full((SIZE,), 0, tl.int32 if BY_COUNT else tl.float64)
    below = tl.full((SIZE,), 0, tl.int32)
    above = tl.full((SIZE,), 0x3F800000, tl.int32)
    for first in range(0, source[1], SIZE):
        weights = weights_at(source, first + tl.arange(0, SIZE))
        bits = bits_of(weights)
        is_above = bits > key
        if BY_COUNT:
            amounts += is_above.to(tl.int32)
        else:
            amounts += tl.where(is_above, weights, 0.0).to(tl.float64)
        below = tl.maximum(below, tl.where(is_above, 0, bits))
        above = tl.minimum(above, tl.where(is_above, bits, 0x3F800000))
    return tl.sum(amounts, axis=0).to(tl.float64), tl.max(below, axis=0), tl.min(above, axis=0)


@triton.jit
def _end_of(source, key, wanted, SIZE: tl.constexpr):
    """The place behind the first `wanted` weights whose bits are `key`."""
    seen, end = 0, 0
    for first in range(0, source[1], SIZE):
        places = first + tl.arange(0, SIZE)
        is_equal = (bits_of(weights_at(source, places)) == key).to(tl.int32)
        is_wanted = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) <= wanted)
        end = tl.maximum(end, tl.max(tl.where(is_wanted, places + 1, 0), axis=0))
        seen += tl.sum(is_equal, axis=0)
    return end


@triton.jit
def _draw_above(source, key, end, uniform, SIZE: tl.constexpr):
    """Draw from the weights whose bits are above `key`, and those before `end` whose bits are equal to it."""
    total = 0.0 * uniform  # a float64
    for first in range(0, source[1], SIZE):
        total += tl.sum(_kept(source, first + tl.arange(0, SIZE), key, end), axis=0)
    target = total * uniform
    before = 0.0 * uniform
    place = 0
    for first in range(0, source[1], SIZE):
        kept = _kept(source, first + tl.arange(0, SIZE), key, end)
        mass = tl.sum(kept, axis=0)
        if (before <= target) & (mass > 0):
            place = first + first_reaching(before + tl.cumsum(kept, axis=0), kept, target, SIZE)
        before += mass
    return place


@triton.jit
def _kept(source, places, key, end):
    weights = weights_at(source, places)
    bits = bits_of(weights)
    return tl.where((bits > key) | ((bits == key) & (places < end)), weights, 0.0).to(tl.float64)


VARIANTS: list[Variant] = variants_of(draw_filtered)
