"""Drawing the next tokens of a step on the device: what `gpu.sampling.sample` does with rows that no edits or masks change.

The idea. Nothing is sorted and nothing is normalised. What top-k and top-p keep of a row's weights - exp of (logit - maximum)
/ temperature, the largest is 1 - is all weights above a threshold and the first few of those equal to it. Positive floats are
ordered as their bits are, so the threshold is found by halving an interval of bits: a pass counts, or adds up, the weights
above its middle. The draw inverts the cumulative weights of what is kept, in float64 and in the order of the vocabulary.

Most rows need no pass over the whole vocabulary by one program. A row is cut into parts, and a program works on one of them:

| kernel | programs | what it does |
| --- | --- | --- |
| `find_maxima` | rows x parts | largest logit of each part, the lowest id that has it; plus infinity where a logit is not fit |
| `weigh_parts` | rows x parts | number and sum of each part's weights; with top-k or top-p also of those above a few levels |
| `settle` | rows x parts | the token of greedy and failed rows, and of those without top-k and top-p: the part in which the |
|          |              | draw falls finds it. For others the weights above the highest level that is enough are copied out |
| `draw_filtered` | rows | rows with top-k or top-p: threshold and draw, among those candidates (`sampling_filters.py`) |

A level is enough for top-k if k weights are above it, and for top-p alone if those above it add up to the share of all that
top-p wants. If more weights are above it than there is room for (a flat distribution, a k of many thousands),
`draw_filtered` looks through the whole row instead. Where a kernel has nothing to do for a row its programs end at once.

What it costs, by arithmetic, none of it measured. The first three kernels read a row with as many multiprocessors as it has
parts: some microseconds each, also for a single row of 128k logits; the 14 sums of the levels are most of `weigh_parts`.
Among 4,096 candidates a pass is about a microsecond, and a threshold takes a dozen. A pass over 128k logits by one
program, some 35 instructions each on one multiprocessor, takes 20 us; a threshold takes up to some 20 passes, fewer where
weights are equal, and top-k with top-p two thresholds: up to 0.8 ms for a flat row, and no more for as many such rows as
there are multiprocessors.

Invariants:
- Weights are computed again in each pass, and compared by their bits. A compiler finds nothing in them to contract (the
  multiply-adds are written out), so every pass sees the same ones.
- Sums over the vocabulary are float64, and there are no atomics: a row's token depends on its own logits and parameters.
- A sum in another order may round otherwise, also between two passes of one draw. So no search relies on finding what
  a sum promised: a draw is the first token at which the cumulative weights pass the target *or are at their end*.
- A token of weight 0 (masked, below min-p or below the smallest normal float) is never drawn.

Against the reference: sums are in another order and exponentials differ in the last bit, so a draw on the border between
two tokens may give the other one, as in the C kernel (`cpu/kernels/sample.h`, where halving an interval of bits is from).

Rejected: a sort (it moves the vocabulary several times, and needs memory for it); a histogram of a byte of the bits in each
pass (its masses would be float64 atomics, in another order each time); several thresholds in each pass (each is five
instructions, a float64 addition among them: seven cost as much as the weight itself and save two passes of three); and
rejection sampling, as FlashInfer has it (another token than the reference's for the same random number).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..draws import Column
from .launch import INTERPRETED, Variant

LEVELS = 8
"""Levels at which `weigh_parts` counts: above 2^-2, 2^-4 ... 2^-14, and all."""

NUM_WARPS = 8

TEMPERATURE = tl.constexpr(int(Column.TEMPERATURE))
MIN_P = tl.constexpr(int(Column.MIN_P))
TOP_P = tl.constexpr(int(Column.TOP_P))
TOP_K = tl.constexpr(int(Column.TOP_K))
SEED = tl.constexpr(int(Column.SEED))
SEQUENCE = tl.constexpr(int(Column.SEQUENCE))
POSITION = tl.constexpr(int(Column.POSITION))


@triton.jit
def find_maxima(logits, maxima, max_ids, row_stride, vocab, PARTS: tl.constexpr, PART: tl.constexpr):
    """The largest logit of each part and the lowest id that has it; plus infinity where one is NaN or plus infinity.

    `logits` is [rows, vocab] with rows `row_stride` apart. `maxima` float32 and `max_ids` int32 are [rows, PARTS].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    is_nan = values != values  # plus infinity is its own maximum
    maximum = tl.max(tl.where(is_nan, float("inf"), values), axis=0)
    first = tl.min(tl.where(values == maximum, ids, vocab), axis=0)
    tl.store(maxima + row * PARTS + part, maximum)
    tl.store(max_ids + row * PARTS + part, first)


@triton.jit
def weigh_parts(
    logits, parameters, maxima, counts, masses, row_stride, vocab, max_rows,
    PARTS: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Number and sum of each part's weights above each level, for rows that are drawn; the last level is below all.

    `parameters` is int64 [columns, max_rows], `counts` int32 and `masses` float64 [rows, LEVELS, PARTS].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    maximum = tl.max(tl.load(maxima + row * PARTS + tl.arange(0, PARTS)), axis=0)
    if _is_drawn(maximum, parameters + row, max_rows):
        source = source_of(logits + row * row_stride, vocab, maximum, parameters + row, max_rows)
        weights = weights_at(source, part * PART + tl.arange(0, PART))
        cell = row * LEVELS * PARTS + part
        everything = cell + (LEVELS - 1) * PARTS
        tl.store(counts + everything, tl.sum((weights > 0).to(tl.int32), axis=0))
        tl.store(masses + everything, tl.sum(weights.to(tl.float64), axis=0))
        if _is_filtered(parameters + row, max_rows, vocab):
            for level in tl.static_range(LEVELS - 1):
                is_above = bits_of(weights) > _level_bits(level, LEVELS)
                tl.store(counts + cell + level * PARTS, tl.sum(is_above.to(tl.int32), axis=0))
                tl.store(masses + cell + level * PARTS, tl.sum(tl.where(is_above, weights, 0.0).to(tl.float64), axis=0))


@triton.jit
def settle(
    logits, parameters, maxima, max_ids, counts, masses, candidates, candidate_ids, num_candidates, tokens, statuses,
    row_stride, vocab, max_rows,
    PARTS: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Status of each row; tokens of rows without top-k and top-p; candidates of the others.

    `candidates` (of the logits' type) and `candidate_ids` int32 are [rows, CANDIDATES]. `num_candidates` int32 [rows] is 0
    where a token was found, and -1 where there is no room for the candidates. The rest as in the kernels before.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part_maxima = tl.load(maxima + row * PARTS + tl.arange(0, PARTS))
    maximum = tl.max(part_maxima, axis=0)
    is_drawn = _is_drawn(maximum, parameters + row, max_rows)
    num_found = 0
    if is_drawn:
        source = source_of(logits + row * row_stride, vocab, maximum, parameters + row, max_rows)
        cells = row * LEVELS * PARTS
        if _is_filtered(parameters + row, max_rows, vocab):
            wanted, share = top_k_of(parameters + row, max_rows), float_of(parameters + row, TOP_P, max_rows)
            level, num_found = _enough(counts + cells, masses + cells, wanted, share, PARTS, LEVELS)
            if num_found <= CANDIDATES:
                room = (candidates + row * CANDIDATES, candidate_ids + row * CANDIDATES)
                _copy_above(source, level, counts + cells, room, part, PARTS, PART, LEVELS)
            else:
                num_found = -1
        else:
            uniform = uniform_of(parameters + row, max_rows)
            _draw_in_part(source, masses + cells, uniform, tokens + row, part, PARTS, PART, LEVELS)
    if part == 0:
        is_fit = (maximum > float("-inf")) & (maximum < float("inf"))
        ids = tl.load(max_ids + row * PARTS + tl.arange(0, PARTS))
        greedy = tl.min(tl.where(part_maxima == maximum, ids, vocab), axis=0)
        # The token of a row that is drawn may be another program's to write.
        tl.store(tokens + row, tl.where(is_fit, greedy, 0), mask=is_drawn == 0)
        tl.store(statuses + row, tl.where(is_fit, 0, 1))
        tl.store(num_candidates + row, num_found)


# Parameters: `own` points to a row's own entry in the first column.


@triton.jit
def float_of(own, column: tl.constexpr, max_rows):
    return tl.load(own + column * max_rows).to(tl.float64, bitcast=True)


@triton.jit
def top_k_of(own, max_rows):
    return tl.load(own + TOP_K * max_rows).to(tl.int32)


@triton.jit
def _is_drawn(maximum, own, max_rows):
    """Whether the row is fit and not greedy."""
    is_fit = (maximum > float("-inf")) & (maximum < float("inf"))
    return is_fit & (float_of(own, TEMPERATURE, max_rows) > 0)


@triton.jit
def _is_filtered(own, max_rows, vocab):
    return (top_k_of(own, max_rows) < vocab) | (float_of(own, TOP_P, max_rows) < 1)


@triton.jit
def uniform_of(own, max_rows):
    """The row's random number: `gpu.sampling.uniforms`."""
    state = _mix(tl.load(own + SEED * max_rows).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ tl.load(own + SEQUENCE * max_rows).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ tl.load(own + POSITION * max_rows).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


# Weights: a source is (pointer to logits, their number, maximum, temperature, its inverse, the least weight that counts).


@triton.jit
def source_of(values, count, maximum, own, max_rows):
    temperature = float_of(own, TEMPERATURE, max_rows).to(tl.float32)
    least = tl.maximum(float_of(own, MIN_P, max_rows).to(tl.float32), 1.1754943508222875e-38)  # the smallest normal float
    return values, count, maximum, temperature, tl.div_rn(1.0, temperature), least


@triton.jit
def weights_at(source, places):
    """Weights at `places`, int32, in float32; 0 behind the end and below min-p."""
    values, count, maximum, temperature, inverse, least = source
    logits = tl.load(values + places, mask=places < count, other=float("-inf")).to(tl.float32)
    behind = tl.maximum(logits - maximum, -128.0 * temperature)  # of a weight far below the least; no infinity from here on
    # A quotient corrected by what it leaves over is the float that a division gives, in a fifth of the time (Markstein 1990).
    quotient = behind * inverse
    quotient = tl.fma(tl.fma(quotient, -temperature, behind), inverse, quotient)
    weights = tl.minimum(_exp(quotient), 1.0)
    return tl.where(weights >= least, weights, 0.0)


if INTERPRETED:

    @triton.jit
    def _exp(x):
        return tl.exp(x)  # the interpreter has no libdevice

else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)  # `tl.exp` errs by 1e-6 where x is -20: it rounds x * log2(e) to a float


@triton.jit
def bits_of(weights):
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _level_bits(level, LEVELS: tl.constexpr):
    """Bits of 2^(-2 (level + 1)); of 0 for the last level."""
    return tl.where(level == LEVELS - 1, 0, (125 - 2 * level) << 23)


@triton.jit
def first_reaching(cumulative, weights, target, SIZE: tl.constexpr):
    """The first place with a weight at which `cumulative`, [SIZE], is above `target` or as large as it gets."""
    end = tl.max(tl.where(weights > 0, cumulative, 0.0), axis=0)
    is_reached = (weights > 0) & ((cumulative > target) | (cumulative >= end))
    return tl.min(tl.where(is_reached, tl.arange(0, SIZE), SIZE - 1), axis=0)


# Draws from a row's parts, in `settle`.


@triton.jit
def _draw_in_part(source, masses, uniform, token, part, PARTS: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr):
    """Draw from all weights of a row, if it falls into `part`: all programs of a row agree on the one that it is."""
    parts = tl.arange(0, PARTS)
    part_masses = tl.load(masses + (LEVELS - 1) * PARTS + parts)
    # A sum for each part rather than a scan: of few numbers, and never less than the one before.
    is_before = parts[None, :] <= parts[:, None]
    cumulative = tl.sum(tl.where(is_before, part_masses[None, :], 0.0), axis=1)
    target = tl.max(cumulative, axis=0) * uniform
    if part == first_reaching(cumulative, part_masses, target, PARTS):
        before = tl.max(tl.where(parts < part, cumulative, 0.0), axis=0)
        weights = weights_at(source, part * PART + tl.arange(0, PART)).to(tl.float64)
        place = first_reaching(before + tl.cumsum(weights, axis=0), weights, target, PART)
        tl.store(token, part * PART + place)


@triton.jit
def _enough(counts, masses, wanted, share, PARTS: tl.constexpr, LEVELS: tl.constexpr):
    """The highest level above which is all that top-k `wanted` and top-p `share` keep, and the number of weights there."""
    levels = tl.arange(0, LEVELS)
    cells = levels[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    count = tl.sum(tl.load(counts + cells), axis=1)
    mass = tl.sum(tl.load(masses + cells), axis=1)
    all_count, all_mass = tl.max(count, axis=0), tl.max(mass, axis=0)
    # Of fewer than k weights the mass is unknown that top-p is a share of, unless they are all.
    is_enough = tl.where(wanted < all_count, count >= wanted, mass >= share * all_mass) | (levels == LEVELS - 1)
    level = tl.min(tl.where(is_enough, levels, LEVELS - 1), axis=0)
    return level, tl.sum(tl.where(levels == level, count, 0), axis=0)


@triton.jit
def _copy_above(source, level, counts, room, part, PARTS: tl.constexpr, PART: tl.constexpr, LEVELS: tl.constexpr):
    """Copy the logits of `part` whose weights are above `level`, and their ids, behind those of the parts before it."""
    candidates, candidate_ids = room
    parts = tl.arange(0, PARTS)
    level_counts = tl.load(counts + level * PARTS + parts)
    if tl.sum(tl.where(parts == part, level_counts, 0), axis=0) > 0:
        first = tl.sum(tl.where(parts < part, level_counts, 0), axis=0)
        ids = part * PART + tl.arange(0, PART)
        is_above = bits_of(weights_at(source, ids)) > _level_bits(level, LEVELS)
        places = first + tl.cumsum(is_above.to(tl.int32), axis=0) - 1
        logits = tl.load(source[0] + ids, mask=is_above & (ids < source[1]), other=0.0)
        tl.store(candidates + places, logits, mask=is_above)
        tl.store(candidate_ids + places, ids, mask=is_above)


def variants_of(kernel: Any) -> list[Variant]:
    """The forms to compile of a kernel here or in `sampling_filters.py`: a vocabulary of 32 parts, and one of a single part."""
    return [_variant(kernel, "bf16", 128_256), _variant(kernel, "fp32", 50)]


def _variant(kernel: Any, logits: str, vocab: int, *, part: int = 4096) -> Variant:
    parts = 1 << (-(-vocab // part) - 1).bit_length()
    types = {
        "logits": f"*{logits}", "parameters": "*i64", "maxima": "*fp32", "max_ids": "*i32", "counts": "*i32",
        "masses": "*fp64", "candidates": f"*{logits}", "candidate_ids": "*i32", "num_candidates": "*i32",
        "tokens": "*i32", "statuses": "*i32", "row_stride": "i32", "vocab": "i32", "max_rows": "i32",
    }  # fmt: skip
    sizes = {"PARTS": parts, "PART": part, "LEVELS": LEVELS, "CANDIDATES": part}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    return Variant(f"{kernel.__name__} {logits} {vocab}", kernel, signature, constants, num_warps=NUM_WARPS)


VARIANTS: list[Variant] = [*variants_of(find_maxima), *variants_of(weigh_parts), *variants_of(settle)]
