"""The C kernels draw what torch draws, for any mix of parameters, and both follow the distribution that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repertory.gpu.sampling import SamplingRow, sample
from repertory.gpu.sampling_edits import packed_mask
from repertory.protocol.messages import Barred
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.test_sampling import expected_probabilities
from repertory.tests.sampling.edit_reference import row_of
from repertory.tests.sampling.paths import Sample, names, opened

INF = float("inf")
KERNELS = [name for name in names() if name != "torch"]


@pytest.fixture(scope="module", params=KERNELS)
def path(request: pytest.FixtureRequest) -> Iterator[Sample]:
    with opened(request.param) as found:
        yield found


def draws(path: Sample, logits: Tensor, params: SamplingParams, count: int) -> list[int]:
    """Tokens at `count` output positions, all from the same logits."""
    found = path(logits.repeat(count, 1), [SamplingRow(params, 0, i) for i in range(count)])
    assert found.failed == []
    return found.token_ids


def as_tokens(vocab: int) -> st.SearchStrategy[int]:
    return st.integers(0, vocab - 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[SamplingRow]]:
    """Rows of logits, in the magnitudes and with the ties that models give, each with parameters of its own."""
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 50, 511, 512, 513, 1500, 3000]))
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32))))
    logits *= draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 50.0]))
    rounding = draw(st.sampled_from(["none", "bfloat16", "whole"]))
    logits = {"none": logits, "bfloat16": logits.bfloat16().float(), "whole": logits.round()}[rounding]
    rows = [draw(_rows(vocab, i)) for i in range(8)]
    return logits, rows


@st.composite
def _rows(draw: st.DrawFn, vocab: int, position: int) -> SamplingRow:
    some = st.lists(as_tokens(vocab), max_size=8)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0, 3.0, 1e38])),
        top_p=draw(st.sampled_from([1.0, 1e-30, 0.3, 0.5, 0.9, 0.9999, 1 - 1e-12])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 20, 1200, 2**70])),
        min_p=draw(st.sampled_from([0.0, 1e-30, 0.01, 0.5, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        logit_bias=draw(st.none() | st.dictionaries(as_tokens(vocab), st.floats(-100, 100, width=32), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(as_tokens(vocab), min_size=1, max_size=8)),
        min_tokens=4,
    )
    barred = draw(st.none() | st.builds(Barred, some, st.lists(st.lists(as_tokens(vocab), min_size=1, max_size=2), max_size=3)))
    row = row_of(params, [0, *draw(some)], draw(some), barred, position=position)
    mask = draw(st.none() | st.lists(as_tokens(vocab), max_size=60))
    return row if mask is None else row._replace(allowed_mask=packed_mask(mask))


@given(batches())
@settings(max_examples=60, deadline=None, derandomize=True)  # else one run in some ten thousand would meet a draw on a border
def test_any_mix_of_parameters_gives_torchs_tokens(path: Sample, batch: tuple[Tensor, list[SamplingRow]]) -> None:
    logits, rows = batch
    expected, found = sample(logits, rows), path(logits, rows)
    assert found.failed == expected.failed
    assert list(found.exhausted) == list(expected.exhausted)
    drawn = [i for i in range(len(rows)) if i not in expected.failed]
    assert [found.token_ids[i] for i in drawn] == [expected.token_ids[i] for i in drawn]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, seed=-5),
        SamplingParams(temperature=1.3, min_p=0.15, seed=2),
        SamplingParams(temperature=1.0, top_k=5, seed=3),
        SamplingParams(temperature=1.0, top_p=0.6, seed=4),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.8, min_p=0.05, seed=5),
        SamplingParams(temperature=2.0, top_k=10**6, top_p=0.95, seed=6),
    ],
)
def test_draws_follow_the_filtered_distribution(path: Sample, params: SamplingParams) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    count = 20_000
    observed = np.bincount(draws(path, logits, params, count), minlength=50)
    expected = expected_probabilities(logits, params) * count
    assert (observed[expected == 0] == 0).all()
    likely = expected > 5
    degrees = likely.sum() - 1
    assert degrees > 1
    assert ((observed - expected)[likely] ** 2 / expected[likely]).sum() < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 8, "top_p": 0.6}, {"top_k": 1}], ids=str)
def test_of_equal_weights_the_lowest_ids_stay(name: str, params: dict[str, Any]) -> None:
    logits = torch.zeros(2000)
    logits[[100, 1500]] = 1.0  # above the equals
    logits[700:1500] -= 3.0
    logits[1501:] -= 3.0
    kept = {**params}.get("top_k", 10**9)
    asked = SamplingParams(temperature=1.0, seed=3, **params)
    probs = np.exp(logits.double().numpy() - 1)
    order = np.argsort(-probs, kind="stable")[:kept]
    probs = probs[order] / probs[order].sum()
    order = order[np.cumsum(probs) - probs < params.get("top_p", 1.0)]
    with opened(name) as path:
        assert set(draws(path, logits, asked, 1000)) <= set(order.tolist())
        if len(order) < 10:
            assert set(draws(path, logits, asked, 1000)) == set(order.tolist())


@pytest.mark.parametrize("name", names())
def test_all_tokens_alike_and_cut_anywhere(name: str) -> None:
    """Nothing between the largest and the smallest for a search to find, and all of it at once."""
    logits = torch.zeros(3000)
    with opened(name) as path:
        for top_k in (1, 2, 1023, 1024, 1025, 2999, 3000):
            tokens = draws(path, logits, SamplingParams(seed=1, top_k=top_k), 100)
            assert max(tokens) < top_k
            assert top_k < 100 or max(tokens) > top_k * 0.8
        tokens = draws(path, logits, SamplingParams(seed=1, top_p=0.25), 100)
        assert 600 < max(tokens) < 750


def test_weights_of_every_size_are_told_apart(path: Sample) -> None:
    """From 1 down to nothing in steps of a factor: whatever is asked for lies somewhere else for the search."""
    for step in (0.001, 0.05, 1.0, 40.0):
        logits = -step * torch.arange(600.0)[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
        rows = [
            SamplingRow(SamplingParams(temperature=1.0, seed=i, top_k=k, top_p=p), 0, 0)
            for i, (k, p) in enumerate((k, p) for k in (0, 1, 2, 7, 300, 599) for p in (1e-9, 0.2, 0.9, 0.99999, 1.0))
        ]
        many = logits.repeat(len(rows), 1)
        assert path(many, rows).token_ids == sample(many, rows).token_ids


def test_masked_and_unfit_rows_are_as_in_torch(path: Sample) -> None:
    logits = torch.full((5, 777), -INF)
    logits[0, [4, 776]] = torch.tensor([0.0, 0.1])
    logits[1, 5] = INF
    logits[2] = 0.0
    logits[2, 776] = float("nan")
    logits[4, 776] = -3e38
    for params in (SamplingParams(seed=1), SamplingParams(temperature=0.0), SamplingParams(seed=1, top_k=3, top_p=0.9)):
        rows = [SamplingRow(params, 0, i) for i in range(5)]
        found, expected = path(logits, rows), sample(logits, rows)
        assert found.failed == expected.failed == [1, 2, 3]
        assert [found.token_ids[i] for i in (0, 4)] == [expected.token_ids[i] for i in (0, 4)]


@pytest.mark.skipif(not KERNELS, reason="the C kernels are not built")
def test_a_rows_token_does_not_depend_on_neighbours_place_or_threads() -> None:
    logits = torch.randn(40, 2048, generator=torch.Generator().manual_seed(3)) * 3
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=42),
        SamplingParams(temperature=1.0, seed=42, top_k=40),
        SamplingParams(temperature=1.2, seed=-(2**63), top_p=0.9),
        SamplingParams(temperature=1.5, seed=7, top_k=99, top_p=0.99, frequency_penalty=1.0),
    ]
    rows = [row_of(kinds[i % 5], [1, 2, 3], [4] * (i % 3)) for i in range(40)]
    with opened(KERNELS[-1]) as alone, opened(KERNELS[-1], num_threads=3) as together:
        expected = [alone(logits[i : i + 1], rows[i : i + 1]).token_ids[0] for i in range(40)]
        assert together(logits, rows).token_ids == expected
        order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
        assert together(logits[order], [rows[i] for i in order]).token_ids == [expected[i] for i in order]


def test_rows_may_lie_apart(path: Sample) -> None:
    wide = torch.full((6, 128), float("nan"))
    logits = wide[:, :100]
    logits.copy_(torch.randn(6, 100, generator=torch.Generator().manual_seed(5)))
    rows = [SamplingRow(SamplingParams(seed=2, top_p=0.9), 0, i) for i in range(6)]
    assert path(logits, rows).token_ids == sample(logits, rows).token_ids


def test_a_random_draw_without_a_seed_is_a_fault_of_the_sender(path: Sample) -> None:
    with pytest.raises(ValueError, match="seed"):
        path(torch.zeros(1, 50), [SamplingRow(SamplingParams(), 0, 0)])
    assert path(torch.zeros(1, 50), [SamplingRow(SamplingParams(temperature=0.0), 0, 0)]).token_ids == [0]
