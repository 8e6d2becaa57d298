"""Draws on the device are those of `gpu.sampling.sample`, token for token.

Both are deterministic, so equality is demanded of every draw, with no tolerance. It could be missed only where a draw, or
the mass at which top-p stops, falls between two float64 sums of other order or two float32 exponentials of other rounding:
about one draw in ten million, and not one of those here. The exponential is numpy's in the interpreter and torch's in the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.draws import (
    NO_TOP_K,
    Column,
    DeviceSampler,
    DrawParameters,
    Status,
    TorchSampler,
    TritonSampler,
)
from repertory.gpu.sampling import SamplingRow, sample, uniforms
from repertory.protocol.sampling import SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")

CPU = torch.device("cpu")
INF = float("inf")
JUST_BELOW_ONE = 1 - 2.0**-53

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 100.0, "top_p": 0.99},
    {"temperature": 1e-4, "top_p": 0.5},
    {"min_p": 0.1},
    {"temperature": 100.0},
    {"top_k": 2**40, "top_p": 0.3},
    {"temperature": 1e-5},
    {"top_p": 1e-30},
    {"min_p": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 400},
    {"temperature": 3.0, "top_k": 900, "top_p": 0.999},
]


def sampler_of(vocab: int, *, max_rows: int = 16, part: int = 4096, max_candidates: int = 4096) -> TritonSampler:
    return TritonSampler(max_rows=max_rows, vocab_size=vocab, device=CPU, part=part, max_candidates=max_candidates)


def random_rows(count: int, *, seed: int, kinds: Sequence[dict[str, Any]] = KINDS) -> list[SamplingRow]:
    """Rows of all `kinds` in turn, each with its own random stream."""
    seeds = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count).tolist()
    return [
        SamplingRow(SamplingParams(seed=own, **kinds[(seed + i) % len(kinds)]), i % 3, 10 * i) for i, own in enumerate(seeds)
    ]


def random_logits(rows: int, vocab: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def drawn(sampler: DeviceSampler, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[int]]:
    """Tokens and statuses of `rows`; a row behind them must not be touched."""
    count = len(rows)
    parameters = DrawParameters(torch.full((len(Column), count + 1), -1))
    parameters.write(rows)
    tokens, statuses = torch.full((count + 1,), -7, dtype=torch.int32), torch.full((count + 1,), -7, dtype=torch.int32)
    sampler.draw(logits, parameters.table, num_rows=count, tokens=tokens, statuses=statuses)
    assert (tokens[-1], statuses[-1]) == (-7, -7)
    return tokens[:-1].tolist(), statuses[:-1].tolist()


def assert_as_reference(sampler: DeviceSampler, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw and compare; returns the tokens."""
    before = logits.clone()
    expected = sample(logits.float(), rows)
    tokens, statuses = drawn(sampler, logits, rows)
    assert statuses == [int(Status.NOT_FINITE) if i in expected.failed else int(Status.DRAWN) for i in range(len(rows))]
    assert tokens == [0 if i in expected.failed else token for i, token in enumerate(expected.token_ids)]
    assert torch.equal(logits.nan_to_num(5.0), before.nan_to_num(5.0))
    return tokens


def seed_of(number: float) -> int:
    """The seed whose `uniforms(seed, 0, 0)` is `number`: the finalisers of SplitMix64 turned back."""
    word = 2**64
    golden, first, second = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    state = int(number * 2**53) << 11
    for _ in range(3):
        state ^= state >> 31 ^ state >> 62
        state = state * pow(second, -1, word) % word
        state ^= state >> 27 ^ state >> 54
        state = state * pow(first, -1, word) % word
        state ^= state >> 30 ^ state >> 60
        state = (state - golden) % word
    assert uniforms([state], [0], [0]) == [number]
    return state


# A part and a room for candidates that are small make a small vocabulary go through all that a large one does.
@pytest.mark.parametrize(
    ("vocab", "num_rows", "sizes", "dtype"),
    [
        (1, 8, {}, torch.float32),
        (2, 8, {}, torch.float32),
        (50, 16, {}, torch.bfloat16),
        (50, 16, {"part": 32, "max_candidates": 16}, torch.float32),
        (1000, 6, {}, torch.float32),
        (1000, 8, {"part": 256, "max_candidates": 256}, torch.float16),
        (4097, 8, {}, torch.bfloat16),
        (4097, 6, {"max_candidates": 1024}, torch.float32),
        (49152, 3, {}, torch.float32),
    ],
)
def test_every_draw_is_the_references(vocab: int, num_rows: int, sizes: dict[str, int], dtype: torch.dtype) -> None:
    logits = random_logits(num_rows, vocab, dtype, seed=vocab)
    assert_as_reference(sampler_of(vocab, **sizes), logits, random_rows(num_rows, seed=vocab + 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_two_thousand_draws_are_the_references(seed: int) -> None:
    sampler = sampler_of(300, max_rows=100, part=128, max_candidates=64)
    rows = random_rows(100, seed=seed)
    logits = random_logits(100, 300, torch.float32, seed=seed)
    assert_as_reference(sampler, logits if seed % 2 else (logits * 4).round() / 4, rows)


@pytest.mark.parametrize("sizes", [{"part": 32, "max_candidates": 16}, {"part": 64, "max_candidates": 64}])
def test_of_equal_weights_those_with_the_lowest_ids_stay(sizes: dict[str, int]) -> None:
    kinds = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 9, "top_p": 0.7},
        {"top_p": 0.4},
        {"top_p": 1e-9},
        {"min_p": 1.0, "top_k": 4},
        {"temperature": 100.0, "top_k": 20},
    ]
    logits = random_logits(8, 50, torch.float32, seed=5).div(3).round()
    assert_as_reference(sampler_of(50, **sizes), logits, random_rows(8, seed=16, kinds=kinds))


@pytest.mark.parametrize("sizes", [{"part": 8, "max_candidates": 4}, {"part": 16, "max_candidates": 16}])
def test_top_p_of_equal_weights_counts_them_exactly(sizes: dict[str, int]) -> None:
    # The last token that is kept is drawn by the largest number: it tells how many are.
    seed = seed_of(JUST_BELOW_ONE)
    shares = [0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.999, 1.0]
    rows = [SamplingRow(SamplingParams(top_p=share, seed=seed), 0, 0) for share in shares]
    tokens = assert_as_reference(sampler_of(10, **sizes), torch.full((len(rows), 10), 3.0), rows)
    assert tokens == [0, 0, 2, 4, 5, 6, 9, 9]


def test_top_p_is_a_share_of_what_top_k_left_of_equal_weights() -> None:
    logits = torch.log(torch.tensor([0.5, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5])).expand(6, -1)
    seed = seed_of(JUST_BELOW_ONE)
    kinds = [(3, 1.0), (4, 1.0), (4, 0.9), (4, 0.8), (4, 0.5), (2, 0.5)]
    rows = [SamplingRow(SamplingParams(top_k=k, top_p=p, seed=seed), 0, 0) for k, p in kinds]
    # Kept in falling order: ids 1, 4, 0, 2 with 1, 1, 0.5, 0.5; the highest of their ids is drawn.
    tokens = assert_as_reference(sampler_of(8, part=4, max_candidates=4), logits, rows)
    assert tokens == [4, 4, 4, 4, 4, 1]
    least_last = torch.log(torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])).expand(6, -1)
    assert assert_as_reference(sampler_of(8, part=4, max_candidates=8), least_last, rows) == [2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("number", [0.0, JUST_BELOW_ONE])
@pytest.mark.parametrize("sizes", [{}, {"part": 128, "max_candidates": 64}])
def test_the_ends_of_the_random_numbers_draw_the_first_and_the_last_that_is_kept(number: float, sizes: dict[str, int]) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 100.0, "top_p": 0.999}]
    # Where weights lie far apart their sums are rounded, and a sum in one order is above that in another.
    kinds += [{"temperature": 0.3}, {"temperature": 0.3}, {"temperature": 0.3}, {"temperature": 0.4, "top_k": 250}]
    rows = [SamplingRow(SamplingParams(seed=seed_of(number), **kind), 0, 0) for kind in kinds]
    logits = random_logits(len(rows), 300, torch.float32, seed=8)
    logits[:, [0, 299]] = -INF  # never drawn, though they are the first and the last
    assert_as_reference(sampler_of(300, **sizes), logits, rows)


@pytest.mark.parametrize("kind", [{}, {"top_k": 4}, {"top_p": 0.99}])
def test_a_number_on_the_border_of_two_tokens_draws_the_second(kind: dict[str, Any]) -> None:
    rows = [SamplingRow(SamplingParams(seed=seed_of(number), **kind), 0, 0) for number in (0.25, 0.5, 0.75)]
    logits = torch.tensor([1.0, -INF, 1.0, 1.0, -INF, 1.0]).expand(3, -1)
    assert assert_as_reference(sampler_of(6, part=2, max_candidates=8), logits, rows) == [2, 3, 5]


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_all_of_top_k_are_candidates_however_they_lie_about_the_levels(top_k: int) -> None:
    logits = torch.log(torch.tensor([[1.0, 0.5, 0.2, 0.06, 0.01, 1e-6]]))
    rows = [SamplingRow(SamplingParams(top_k=top_k, seed=seed_of(JUST_BELOW_ONE)), 0, 0)]
    assert assert_as_reference(sampler_of(6, part=8, max_candidates=8), logits, rows) == [top_k - 1]


@pytest.mark.parametrize("sampler", [sampler_of(50, part=16, max_candidates=16), TorchSampler()])
def test_rows_that_are_not_finite_fail_alone(sampler: DeviceSampler) -> None:
    logits = random_logits(14, 50, torch.float32, seed=3)
    for i in (0, 7):
        logits[i, 33] = float("nan")
        logits[i + 1, 49] = INF
        logits[i + 2] = -INF
        logits[i + 3, 1:] = -INF
        logits[i + 4, :-1] = -INF
        logits[i + 5, 2:40] = -INF
    kinds = [*[{"temperature": 0.0}] * 7, *[{"top_p": 0.9, "top_k": 20}] * 5, {}, {}]
    rows = random_rows(14, seed=0, kinds=kinds)
    tokens = assert_as_reference(sampler, logits, rows)
    assert [tokens[3], tokens[4], tokens[10], tokens[11]] == [0, 49, 0, 49]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 10}])
@pytest.mark.parametrize("failure", [float("nan"), INF, -INF])
def test_no_kind_of_row_hides_a_logit_that_is_not_finite(kind: dict[str, Any], failure: float) -> None:
    logits = torch.full((1, 9), -INF)
    logits[0, 8] = failure
    sampler = sampler_of(9, part=4, max_candidates=4)
    assert drawn(sampler, logits, random_rows(1, seed=0, kinds=[kind])) == ([0], [int(Status.NOT_FINITE)])


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.float16, 65504.0), (torch.float32, 2e-38)]
)
def test_extreme_logits_are_drawn_as_the_reference_does(dtype: torch.dtype, largest: float) -> None:
    logits = random_logits(6, 50, torch.float32, seed=9)
    logits[:, ::3] = largest
    logits[:, 1::3] = -largest
    assert_as_reference(sampler_of(50, part=32, max_candidates=16), logits.to(dtype), random_rows(6, seed=3))


def test_a_huge_temperature_makes_all_weights_one() -> None:
    logits = torch.tensor([100.0, -100.0, -INF, 0.0]).expand(6, -1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1e38},
        {"temperature": 1e30, "top_k": 2},
        {"temperature": 1e38, "top_p": 0.4},
    ]
    assert_as_reference(sampler_of(4), logits, random_rows(6, seed=0, kinds=kinds))


def test_rows_apart_from_each_other_amid_other_memory() -> None:
    memory = torch.full((8, 131), float("nan"))
    logits = memory[:, 17:67]
    logits.copy_(random_logits(8, 50, torch.float32, seed=4))
    assert_as_reference(sampler_of(50, part=32, max_candidates=16), logits, random_rows(8, seed=2))


def test_a_step_leaves_nothing_behind_for_the_next() -> None:
    sampler = sampler_of(50, part=32, max_candidates=16)
    for seed in (1, 3, 14):
        assert_as_reference(sampler, random_logits(5, 50, torch.float32, seed=seed), random_rows(5, seed=seed))


def test_rows_that_pad_a_step_are_greedy() -> None:
    rows = random_rows(2, seed=1, kinds=[{"top_p": 0.9}])
    logits = random_logits(5, 50, torch.float32, seed=6)
    for sampler in (sampler_of(50), TorchSampler()):
        parameters = DrawParameters(torch.full((len(Column), 5), -1))
        parameters.write(rows)
        tokens, statuses = torch.full((5,), -7), torch.full((5,), -7, dtype=torch.int32)
        sampler.draw(logits, parameters.table, num_rows=5, tokens=tokens, statuses=statuses)
        assert tokens.tolist() == sample(logits[:2], rows).token_ids + logits[2:].argmax(dim=-1).tolist()
        assert statuses.tolist() == [0] * 5


def test_a_step_without_draws_does_nothing() -> None:
    tokens, statuses = torch.full((2,), -7), torch.full((2,), -7, dtype=torch.int32)
    table = torch.zeros((len(Column), 2), dtype=torch.int64)
    for sampler in (sampler_of(50), TorchSampler()):
        sampler.draw(torch.zeros(0, 50), table, num_rows=0, tokens=tokens, statuses=statuses)
        assert tokens.tolist() == statuses.tolist() == [-7, -7]


def test_the_torch_sampler_draws_from_the_table_what_the_rows_ask_for() -> None:
    for seed in range(4):
        rows = random_rows(16, seed=seed)
        assert_as_reference(TorchSampler(), random_logits(16, 300, torch.bfloat16, seed=seed), rows)


def test_parameters_are_written_by_column() -> None:
    parameters = DrawParameters(torch.full((len(Column), 3), -1))
    params = SamplingParams(temperature=0.7, min_p=0.1, top_p=0.9, top_k=2**40, seed=2**64 - 1)
    parameters.write([SamplingRow(params, 3, 4), SamplingRow(SamplingParams(temperature=1e-6), 5, 6)])
    table = parameters.table
    floats = table.view(torch.float64)
    columns = (Column.TEMPERATURE, Column.MIN_P, Column.TOP_P)
    assert [floats[column].tolist() for column in columns] == [[0.7, 0, 0], [0.1, 0, 0], [0.9, 0, 0]]
    assert table[Column.TOP_K].tolist() == [NO_TOP_K, 0, 0]
    assert [table[column, 0].item() for column in (Column.SEED, Column.SEQUENCE, Column.POSITION)] == [-1, 3, 4]


def test_what_does_not_fit_is_refused() -> None:
    parameters = DrawParameters(torch.zeros((len(Column), 2), dtype=torch.int64))
    greedy = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    with pytest.raises(ValueError, match="3 rows do not fit a table of 2"):
        parameters.write([greedy] * 3)
    with pytest.raises(ValueError, match="no seed"):
        parameters.write([greedy, SamplingRow(SamplingParams(temperature=1.0), 0, 0)])
    for table in (torch.zeros(7, 2), torch.zeros((6, 2), dtype=torch.int64), torch.zeros((2, 7), dtype=torch.int64).T):
        with pytest.raises(ValueError, match="a table of draws"):
            DrawParameters(table)
    sampler, tokens = sampler_of(50, max_rows=1), torch.zeros(2, dtype=torch.int32)
    for logits in (torch.zeros(2, 50), torch.zeros(1, 49), torch.zeros(50, 1).expand(50, 50)):
        with pytest.raises(ValueError, match=r"logits are|memory for 1"):
            sampler.draw(logits, parameters.table, num_rows=len(logits), tokens=tokens, statuses=tokens)
