"""30. A parameter out of bounds is refused by name at once, before anything is made for the request."""

from __future__ import annotations

import math
import time
import tracemalloc
from typing import Any

import pytest

from repertory import LLM, BeamSearchParams, SamplingParams, ValidationError
from repertory.tests.engine.stage import greedy, prompt_of

WRONG = [
    {"n": 10**6},
    {"n": 10**100},
    {"n": 0},
    {"logprobs": 320},
    {"logprobs": -1},
    {"prompt_logprobs": 320},
    {"prompt_logprobs": -1},
    {"max_tokens": 10**12},
    {"stop": ["x"] * 100_000},
    {"stop": "x" * 2**20},
    {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    {"logit_bias": {5: 100.5}},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {5: 10**400}},
    {"logit_bias": [5]},
    {"allowed_token_ids": [5] * 100_000},
    {"allowed_token_ids": []},
    {"bad_words": ["x"] * 100_000},
    {"bad_words": ["x" * 2**20]},
    {"bad_words": ["  "]},
    {"bad_words": [""]},
    {"bad_words": "x"},
    {"presence_penalty": 2.1},
    {"presence_penalty": math.nan},
    {"frequency_penalty": -2.1},
    {"frequency_penalty": True},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e6},
    {"repetition_penalty": math.inf},
    {"min_tokens": 10**12},
    {"temperature": math.inf},
    {"temperature": -0.1},
    {"top_p": math.nan},
    {"top_p": 1.5},
    {"min_p": 2.0},
    {"seed": 2**64},
]


@pytest.mark.alone
@pytest.mark.parametrize("params", WRONG, ids=lambda params: next(iter(params)))
async def test_it_is_refused_within_a_second_and_takes_no_memory(stage: Any, params: dict[str, Any]) -> None:
    s = await stage(block_size=4)
    asked = SamplingParams(**params)
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(ValidationError) as caught:
        await s.ask(prompt_of(5), asked)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.monotonic() - started < 1
    assert most < 1 << 20
    (field,) = params
    assert caught.value.field == field
    assert field in str(caught.value) and len(str(caught.value)) < 300
    assert s.device.steps == []
    assert s.engine._company.scheduler.core.table._last_seq_id == 0, "no sequence was made"
    await s.check_clean()


@pytest.mark.parametrize("label", ["x" * 65_536, "\N{SNOWMAN}" * 2000])
async def test_a_long_request_id_is_refused(stage: Any, label: str) -> None:
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await s.ask(prompt_of(5), greedy(), request_id=label)
    assert caught.value.field == "request_id"
    await s.check_clean()


async def test_others_see_nothing_of_it(stage: Any) -> None:
    s = await stage(block_size=4)
    running = s.begin(prompt_of(9), greedy(30))
    for params in WRONG:
        with pytest.raises(ValidationError):
            await s.ask(prompt_of(5), SamplingParams(**params))
    assert (await running).outputs[0].token_ids == s.alone(prompt_of(9), greedy(30)).token_ids
    await s.check_clean()


@pytest.mark.parametrize("params", [{"n": 10**6}, {"logprobs": 320}], ids=lambda params: next(iter(params)))
def test_the_blocking_interface_has_the_same_bounds(paper_model: Any, params: dict[str, Any]) -> None:
    with LLM(model=str(paper_model), device="simulated", worker="inline") as llm:
        with pytest.raises(ValidationError) as caught:
            llm.generate(["a"] * 3, SamplingParams(**params))
        assert caught.value.field == next(iter(params))
        with pytest.raises(ValidationError, match="beam_width"):
            llm.beam_search("a", BeamSearchParams(beam_width=10**6))
