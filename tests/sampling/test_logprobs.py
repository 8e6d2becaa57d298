"""Logprobs: those of the model's own logits, for whoever asks and nobody else, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory import CompletionOutput, Engine, SamplingParams, ValidationError
from repertory.gpu.logprobs import token_logprobs
from repertory.gpu.sampling import SamplingRow, sample
from repertory.tests.conformance.reference import load_directory, threads
from repertory.tests.engine.stage import greedy, prompt_of, seeded

PROMPTS = [[5, 6, 7], [60, 3, 77, 200, 41, 5, 9, 9, 12], [33] * 17]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return load_directory(tiny_model)


@pytest.fixture(params=["torch", "auto"])
async def engine(tiny_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with Engine(
        model=str(tiny_model), dtype="float32", device="cpu", worker="inline", attention_backend=request.param,
        num_device_blocks=100, num_threads=1, log_level="warning", max_num_batched_tokens=8,
    ) as engine:  # fmt: skip
        yield engine


async def last(engine: Engine, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    outputs = [output async for output in engine.generate(prompt, params)]
    return outputs[-1].outputs[0]


def expected(model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab_size]: log-probabilities before each of the answer's tokens."""
    with threads(), torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids[:-1]]), logits_to_keep=len(token_ids)).logits[0]
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True),
        SamplingParams(temperature=1.7, seed=3, max_tokens=8, logprobs=20, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, top_k=4, top_p=0.9, max_tokens=8, logprobs=1, ignore_eos=True),
    ],
    ids=["greedy", "only the token", "hot", "filtered"],
)
async def test_they_are_what_transformers_gives(engine: Engine, reference: Any, params: SamplingParams) -> None:
    beside = SamplingParams(temperature=0.5, seed=1, max_tokens=8, ignore_eos=True)
    results = await asyncio.gather(*(last(engine, prompt, one) for prompt in PROMPTS for one in (params, beside)))
    for prompt, completion in zip(PROMPTS, results[::2], strict=True):
        table = expected(reference, prompt, completion.token_ids)
        assert completion.logprobs is not None and len(completion.logprobs) == 8
        for row, token, found in zip(table, completion.token_ids, completion.logprobs, strict=True):
            likeliest = row.topk(params.logprobs or 1)
            assert list(found) == list(dict.fromkeys([token, *likeliest.indices.tolist()[: params.logprobs]]))
            for other, logprob in found.items():
                assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-4)
                assert logprob.rank == 1 + int((row > row[other]).sum())
                assert logprob.decoded_token == engine.tokenizer.decode([other], skip_special_tokens=False)
        own = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own))
    assert all(completion.logprobs is None and completion.cumulative_logprob is None for completion in results[1::2])


async def test_asking_changes_no_token(engine: Engine) -> None:
    for make in (greedy, lambda **params: seeded(7, **params)):
        asked = await last(engine, PROMPTS[1], make(max_tokens=20, logprobs=3, ignore_eos=True))
        plain = await last(engine, PROMPTS[1], make(max_tokens=20, ignore_eos=True))
        assert asked.token_ids == plain.token_ids


async def test_every_kind_of_output_has_its_own_tokens_logprobs(engine: Engine) -> None:
    whole = await last(engine, PROMPTS[0], greedy(9, logprobs=2, ignore_eos=True))
    joined, sums = [], []
    async for output in engine.generate(PROMPTS[0], greedy(9, logprobs=2, ignore_eos=True, output_kind="delta")):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        joined += completion.logprobs
        sums.append(completion.cumulative_logprob)
    assert joined == whole.logprobs
    assert sums[-1] == whole.cumulative_logprob
    final = await last(engine, PROMPTS[0], greedy(9, logprobs=2, ignore_eos=True, output_kind="final_only"))
    assert final.logprobs == whole.logprobs


@pytest.mark.parametrize("count", [-1, 21, 320, 10**9, 1.5, True, "5"])
async def test_counts_out_of_range_are_refused_by_name(stage: Any, count: Any) -> None:
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await s.ask(prompt_of(5), SamplingParams(logprobs=count))
    assert caught.value.field == "logprobs"
    await s.check_clean()


async def test_a_stop_string_cuts_them_with_its_tokens(stage: Any) -> None:
    s = await stage(block_size=4)
    plain = (await s.ask(prompt_of(9), greedy(30, logprobs=1))).outputs[0]
    stop = plain.text[10:13]
    cut = (await s.ask(prompt_of(9), greedy(30, logprobs=1, stop=stop))).outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.logprobs == plain.logprobs[: len(cut.token_ids)]
    await s.check_clean()


async def test_preemptions_and_neighbours_change_none(stage: Any) -> None:
    ample = await stage(block_size=4)
    params = [greedy(30, logprobs=4), seeded(3, 30, logprobs=4), greedy(30)]
    alone = [(await ample.ask(prompt_of(9, seed), one)).outputs[0] for seed, one in enumerate(params)]
    tight = await stage(block_size=4, num_device_blocks=12)
    tight.admit_carelessly()
    together = await asyncio.gather(*(tight.ask(prompt_of(9, seed), one) for seed, one in enumerate(params)))
    stats = await tight.engine.stats()
    assert sum(stats.num_preemptions.values()) > 0
    for output, one in zip(together, alone, strict=True):
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == (one.token_ids, one.logprobs)
    await tight.check_clean()


# ---- the numbers alone ----------------------------------------------------------------------------


def test_a_row_that_fails_has_none_and_the_others_have_theirs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [float("nan"), 0.0, 0.0], [5.0, float("-inf"), 4.0]])
    params = SamplingParams(temperature=0.0, logprobs=2)
    found = sample(logits, [SamplingRow(params, 0, 0)] * 3)
    assert found.failed == [1]
    assert sorted(found.logprobs) == [0, 2]
    assert found.logprobs[2].token_ids == [0, 0, 2]


def test_nobody_asks_and_nothing_is_computed() -> None:
    assert sample(torch.randn(4, 9), [SamplingRow(SamplingParams(temperature=0.0), 0, 0)] * 4).logprobs == {}


def test_masked_tokens_and_more_than_the_vocabulary_are_no_trouble() -> None:
    (found,) = token_logprobs(torch.tensor([[3.0, float("-inf"), 1.0]]), [1], [20])
    assert found.token_ids == [1, 0, 2, 1]
    assert found.rank == 3
    assert found.logprobs[0] == float("-inf")
    assert sum(torch.tensor(found.logprobs[1:]).exp().tolist()) == pytest.approx(1.0)


def test_ties_share_a_rank() -> None:
    found = token_logprobs(torch.zeros(2, 4), [3, 0], [0, 0])
    assert [one.rank for one in found] == [1, 1]


def test_huge_logits_do_not_overflow() -> None:
    (found,) = token_logprobs(torch.tensor([[3e38, 1.0]]), [0], [1])
    assert found.logprobs == [0.0, 0.0]
