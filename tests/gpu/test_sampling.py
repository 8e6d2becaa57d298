"""Sampling: exact where it is greedy, right in distribution where it is not, and each row for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from repertory.gpu.sampling import SamplingRow, sample, uniforms
from repertory.protocol.sampling import SamplingParams

VOCAB = 50
INF = float("inf")


def draws(logits: Tensor, params: SamplingParams, count: int, *, first: int = 0) -> list[int]:
    """Tokens at `count` consecutive output positions, all from the same logits."""
    rows = [SamplingRow(params, 0, first + i) for i in range(count)]
    result = sample(logits.expand(count, -1), rows)
    assert result.failed == []
    return result.token_ids


def expected_probabilities(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """The definition, in ten lines: temperature, min-p, top-k, top-p."""
    scaled = logits.double().numpy() / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 1500, 2**40])
def test_vocabularies_larger_than_the_sorted_part_are_filtered_exactly(top_p: float, top_k: int) -> None:
    vocab = 3000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 0.5
    params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k, seed=9)
    kept = expected_probabilities(logits, params) > 0
    tokens = draws(logits, params, 400)
    assert kept[tokens].all()
    # The end of the distribution must stay reachable too: the highest of many numbers falls near it.
    order = np.argsort(-logits.numpy())
    rank_of = np.argsort(order)
    if kept.sum() > 1 and (top_k or top_p < 1.0):
        assert rank_of[tokens].max() > 0.9 * (kept.sum() - 1)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_give_the_greedy_token(temperature: float) -> None:
    logits = torch.full((1, VOCAB), 29.5).to(torch.bfloat16).float()
    logits[0, 33] = 30.0
    for top_p in (1.0, 0.9):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=0)
        assert draws(logits[0], params, 200) == [33] * 200


def test_a_huge_temperature_is_uniform_over_the_unmasked_tokens() -> None:
    logits = torch.tensor([100.0, -100.0, -INF, 0.0])
    counts = np.bincount(draws(logits, SamplingParams(temperature=1e38, seed=0), 3000), minlength=4)
    assert counts[2] == 0
    assert (np.abs(counts[[0, 1, 3]] - 1000) < 150).all()


def test_top_p_of_nearly_nothing_and_min_p_of_one_keep_the_best_token() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    for params in (SamplingParams(top_p=1e-30, seed=0), SamplingParams(min_p=1.0, seed=0), SamplingParams(top_k=1, seed=0)):
        assert set(draws(logits, params, 50)) == {int(logits.argmax())}


def test_a_rows_token_does_not_depend_on_neighbours_or_place() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=42),
        SamplingParams(temperature=1.0, top_k=40, seed=42),
        SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, seed=-(2**63)),
        SamplingParams(temperature=1.5, top_p=0.99999, seed=2**63 - 1),
    ]
    logits = torch.randn(40, 2048, generator=generator) * 3
    rows = [SamplingRow(kinds[i % len(kinds)], i % 3, i) for i in range(40)]
    alone = [sample(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(40)]
    assert sample(logits, rows).token_ids == alone
    order = torch.randperm(40, generator=generator).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order]).token_ids
    assert shuffled == [alone[i] for i in order]


def test_only_rows_that_are_not_finite_fail() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    alone = sample(logits, [SamplingRow(SamplingParams(seed=1), 0, i) for i in range(6)]).token_ids
    logits[1, 7] = float("nan")
    logits[2] = -INF
    logits[4, 0] = INF
    for params in (SamplingParams(seed=1), SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, seed=1)):
        result = sample(logits, [SamplingRow(params, 0, i) for i in range(6)])
        assert result.failed == [1, 2, 4]
        if params.temperature and params.top_p == 1.0:
            assert [result.token_ids[i] for i in (0, 3, 5)] == [alone[i] for i in (0, 3, 5)]


@pytest.mark.parametrize("vocab", [1, 7, 49_157])
def test_one_nan_anywhere_in_a_row_is_found(vocab: int) -> None:
    places = sorted({0, vocab // 3, vocab - 1})
    logits = torch.zeros(len(places) + 1, vocab)
    for row, place in enumerate(places):
        logits[row, place] = float("nan")
    rows = [SamplingRow(SamplingParams(temperature=0.0), 0, 0)] * len(logits)
    assert sample(logits, rows).failed == list(range(len(places)))


def test_masked_tokens_are_never_drawn_and_do_not_fail_a_row() -> None:
    logits = torch.full((VOCAB,), -INF)
    logits[[4, 9]] = torch.tensor([0.0, 0.1])
    for params in (SamplingParams(seed=1), SamplingParams(top_p=0.99, seed=1), SamplingParams(top_k=30, seed=1)):
        assert set(draws(logits, params, 100)) == {4, 9}
    assert draws(logits, SamplingParams(temperature=0.0), 1) == [9]


def test_a_random_draw_without_a_seed_is_a_fault_of_the_sender() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(1, VOCAB), [SamplingRow(SamplingParams(), 0, 0)])


def test_random_numbers_are_a_pure_function_of_seed_sequence_and_position() -> None:
    one = uniforms([7], [2], [11])
    assert uniforms([1, 7, 7], [0, 2, 2], [0, 11, 12])[1] == one[0]
    keys = [(seed, index, position) for seed in (-1, 0, 1, 2**63 - 1) for index in range(10) for position in range(100)]
    numbers = uniforms(*map(list, zip(*keys, strict=True)))
    assert len(set(numbers)) == len(keys)


def test_random_numbers_are_chained_splitmix64_hashes() -> None:
    """The stream is part of the contract: changing it changes every seeded answer."""

    def plain(*words: int) -> float:
        mask, state = 2**64 - 1, 0
        for word in words:
            state = ((state ^ (word & mask)) + 0x9E3779B97F4A7C15) & mask
            state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
            state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
            state ^= state >> 31
        return (state >> 11) / 2**53

    for words in ((7, 2, 11), (-1, 0, 0), (2**63 - 1, 5, 10**6)):
        assert uniforms(*[[word] for word in words]) == [plain(*words)]


def test_random_numbers_are_uniform_along_positions_seeds_and_sequences() -> None:
    count, bins = 20_000, 100
    counting, zeros = list(range(count)), [0] * count
    for streams in ((zeros, zeros, counting), (counting, zeros, zeros), (zeros, counting, zeros)):
        numbers = np.array(uniforms(*streams))
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed = np.histogram(numbers, bins=bins, range=(0, 1))[0]
        assert ((observed - count / bins) ** 2 / (count / bins)).sum() < bins + 5 * np.sqrt(2 * bins)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
