"""Masks, biases and penalties: as transformers and the formulas have them, in torch and in C, however the log came about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.gpu.sampling import SamplingRow, sample
from repertory.gpu.sampling_apply import apply_edits, apply_masks
from repertory.gpu.sampling_edits import LogitEdits, packed_mask, unpacked_mask
from repertory.protocol.messages import Barred, NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.sampling.edit_reference import edits_of, expected_logits, row_of
from repertory.tests.sampling.paths import Sample, names, opened

VOCAB = 200
PROMPT = [3, 3, 17, 42, 5, 60, 199]
OUTPUT = [8, 17, 8, 8, 120, 0, 9, 17]
BARRED = Barred(ends=[2, 50], bad_words=[[7], [17, 30], [9, 17, 31], [17, 9, 17, 32], [60, 33], [3, 3, 17, 34, 35]])

PARAMETERS: list[tuple[dict[str, Any], Barred | None]] = [
    ({"presence_penalty": 1.5}, None),
    ({"presence_penalty": -2.0}, None),
    ({"frequency_penalty": 0.7}, None),
    ({"frequency_penalty": -0.3}, None),
    ({"repetition_penalty": 1.8}, None),
    ({"repetition_penalty": 0.4}, None),
    ({"logit_bias": {5: 3.0, 8: -100.0, 150: 100.0}}, None),
    ({"allowed_token_ids": [0, 31, 32, 63, 64, 8, 8]}, None),
    ({"allowed_token_ids": [199]}, None),
    ({}, Barred(bad_words=BARRED.bad_words)),
    ({"min_tokens": 9}, Barred(ends=[2, 50])),
    ({"min_tokens": 8}, Barred(ends=[2, 50])),
    (
        {
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3, "logit_bias": {17: 2.0, 2: 50.0},
            "allowed_token_ids": [2, 8, 17, 30, 31, 32, 40, 50, 120], "min_tokens": 100,
        },
        BARRED,
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=names())
def path(request: pytest.FixtureRequest) -> Iterator[Sample]:
    with opened(request.param) as found:
        yield found


@pytest.mark.parametrize(("fields", "barred"), PARAMETERS, ids=str)
def test_logits_are_changed_as_the_reference_changes_them(fields: dict[str, Any], barred: Barred | None) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    for output in (OUTPUT, [], OUTPUT[:1], OUTPUT[:3]):
        params = SamplingParams(temperature=0.0, **fields)
        edits = edits_of(params, PROMPT, output, barred)
        assert edits is not None
        changed = logits.clone()
        apply_edits(changed, [(1, edits), (3, edits)])
        for i in (1, 3):
            torch.testing.assert_close(changed[i], expected_logits(logits[i], params, PROMPT, output, barred))
        assert torch.equal(changed[[0, 2, 4]], logits[[0, 2, 4]])


@pytest.mark.parametrize(("fields", "barred"), PARAMETERS, ids=str)
def test_greedy_rows_choose_the_best_of_what_is_left(path: Sample, fields: dict[str, Any], barred: Barred | None) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    before = logits.clone()
    params = SamplingParams(temperature=0.0, **fields)
    found = path(logits, [row_of(params, PROMPT, OUTPUT, barred)] * 64)
    expected = torch.stack([expected_logits(row, params, PROMPT, OUTPUT, barred) for row in logits])
    assert found.token_ids == expected.argmax(dim=-1).tolist()
    assert torch.equal(logits, before), "they are the model's"


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 20, "top_p": 0.9}], ids=str)
def test_random_draws_follow_the_changed_distribution(path: Sample, filters: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    fields, barred = PARAMETERS[-1]
    params = SamplingParams(temperature=0.9, seed=5, **{**fields, "min_tokens": 0, "logit_bias": {17: 2.0}, **filters})
    row, count = row_of(params, PROMPT, OUTPUT, barred), 8000
    found = path(logits.repeat(count, 1), [row._replace(position=i) for i in range(count)])
    probs = np.exp(expected_logits(logits, params, PROMPT, OUTPUT, barred).double().numpy() / 0.9)
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    probs[order[np.cumsum(probs[order]) - probs[order] >= params.top_p]] = 0
    expected = probs / probs.sum() * count
    observed = np.bincount(found.token_ids, minlength=VOCAB)
    assert (observed[expected == 0] == 0).all()
    likely = expected > 5
    degrees = likely.sum() - 1
    assert degrees >= 1
    assert ((observed - expected)[likely] ** 2 / expected[likely]).sum() < degrees + 4 * np.sqrt(2 * degrees)


def test_a_grammars_mask_and_the_allowed_ids_both_hold(path: Sample) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    params = SamplingParams(temperature=0.0, allowed_token_ids=[5, 40, 90, 199])
    row = row_of(params, PROMPT, [])
    mask = packed_mask([3, 40, 90, 120])
    plain = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    assert path(logits, [row, row._replace(allowed_mask=mask), plain._replace(allowed_mask=mask)]).token_ids == [199, 90, 120]


def test_a_row_that_has_no_token_left_fails_alone(path: Sample) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[3, 77] = float("nan")
    logits[4] = -torch.inf
    params = SamplingParams(temperature=0.0, allowed_token_ids=[2], min_tokens=3, seed=1)
    empty = row_of(params, PROMPT, [], Barred(ends=[2]))
    plain = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    # Where the model's logits are at fault that is what is said, though a mask hides it.
    found = path(logits, [plain, empty, plain, empty, empty])
    assert found.failed == [1, 3, 4]
    assert list(found.exhausted) == [1]
    assert [found.token_ids[i] for i in (0, 2)] == logits[[0, 2]].argmax(dim=-1).tolist()
    hot = SamplingRow(SamplingParams(temperature=1.0, seed=3, top_k=4), 0, 0, empty.edits)
    assert list(path(logits[:2], [hot, plain]).exhausted) == [0]


def test_a_bias_that_leaves_float32_fails_its_row_alone(path: Sample) -> None:
    logits = torch.full((2, VOCAB), 3e38)
    params = SamplingParams(temperature=0.0, repetition_penalty=0.01)
    found = path(logits, [row_of(params, PROMPT, []), SamplingRow(SamplingParams(temperature=0.0), 0, 0)])
    assert (found.failed, list(found.exhausted)) == ([0], [])


def test_logprobs_are_the_models_own(path: Sample) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=[11])
    found = path(logits, [row_of(params, PROMPT, []), row_of(params, PROMPT, [])])
    for i in range(2):
        likeliest = logits[i].topk(2)
        assert found.logprobs[i].token_ids == [11, *likeliest.indices.tolist()]
        assert found.logprobs[i].logprobs[0] == pytest.approx(logits[i].log_softmax(-1)[11].item(), abs=1e-5)


def test_whoever_asks_for_nothing_has_no_edits() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.0, top_k=3, min_tokens=0), SamplingParams(logit_bias={})):
        assert edits_of(params, PROMPT, OUTPUT) is None


def test_an_empty_log_of_output_gets_no_presence_or_frequency_penalty() -> None:
    edits = edits_of(SamplingParams(presence_penalty=2.0, frequency_penalty=2.0), PROMPT, [])
    assert edits is not None and len(edits.seen_ids) == 0


tokens = st.lists(st.integers(0, 40), max_size=120)


@given(
    prompt=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    output=tokens,
    cuts=st.sets(st.integers(0, 119)),
    penalties=st.tuples(st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, -0.25]), st.sampled_from([1.0, 1.7])),
    phrases=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_growing_with_the_log_gives_what_the_whole_log_gives(
    prompt: list[int], output: list[int], cuts: set[int], penalties: tuple[float, float, float], phrases: list[list[int]]
) -> None:
    presence, frequency, repetition = penalties
    barred = Barred([1], phrases)
    params = SamplingParams(
        temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, min_tokens=30
    )
    grown = LogitEdits(NewRow(1, prompt, len(prompt), params, [], barred=barred))
    log = list(prompt)
    logits = torch.randn(1, 41, generator=torch.Generator().manual_seed(0))
    for i, token in enumerate([*output, None]):
        if i in cuts or token is None:  # a step that samples, perhaps after a preemption; and one at the end
            grown.catch_up(log)
            found, rebuilt = logits.clone(), logits.clone()
            apply_edits(found, [(0, grown)])
            apply_edits(rebuilt, [(0, edits_of(params, prompt, log[len(prompt) :], barred))])
            assert torch.equal(found, rebuilt)
            torch.testing.assert_close(found[0], expected_logits(logits[0], params, prompt, log[len(prompt) :], barred))
        if token is not None:
            log.append(token)


@given(st.sets(st.integers(0, 99), max_size=30), st.integers(1, 130))
def test_packed_masks_hold_what_was_packed(token_ids: set[int], size: int) -> None:
    mask = unpacked_mask(packed_mask(sorted(token_ids)), size)
    assert np.flatnonzero(mask).tolist() == sorted(token for token in token_ids if token < size)
    logits = torch.zeros(1, size)
    apply_masks(logits, [(0, packed_mask(sorted(token_ids)))])
    assert torch.equal(logits[0] == 0, torch.from_numpy(mask))


def test_seeds_are_asked_for_whatever_is_edited() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(1, VOCAB), [row_of(SamplingParams(presence_penalty=1.0), PROMPT, OUTPUT)])
