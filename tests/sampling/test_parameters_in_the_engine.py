"""Penalties, masks and minimum lengths in the engine: as a plain loop over transformers has them, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory import CompletionOutput, Engine, SamplingParams
from repertory.protocol.messages import Barred
from repertory.tests.conformance.reference import load_directory, threads
from repertory.tests.sampling.edit_reference import expected_logits

EOS = 2
NUM_TOKENS = 24
PROMPTS = [[5, 6, 7], [60, 3, 77, 200, 41, 5, 9, 9, 12], [33] * 17, [90, 91, 5, 90, 91]]

PARAMETERS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {70: 6.0, 71: 5.0, 5: -100.0}},
    "allowed": {"allowed_token_ids": [EOS, 40, 41, 42, 77, 200]},
    "bad words": {"bad_words": ["the", "a", "hello", "in g", "~"]},
    "min tokens": {"min_tokens": 20, "stop_token_ids": list(range(100, 200)), "logit_bias": {EOS: 8.0}},
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {70: 3.0}, "min_tokens": 9,
        "bad_words": ["x", "he"], "allowed_token_ids": list(range(60, 320)), "stop_token_ids": [100, 101],
    },
}  # fmt: skip

OpenEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return load_directory(tiny_model)


@pytest.fixture
async def opened(tiny_model: Path) -> AsyncIterator[OpenEngine]:
    async with AsyncExitStack() as stack:

        async def open_engine(**settings: Any) -> Engine:
            defaults = {
                "model": str(tiny_model), "dtype": "float32", "device": "cpu", "worker": "inline", "num_device_blocks": 100,
                "block_size": 4, "num_threads": 1, "log_level": "error", "kv_offloading_size": 0.0,
            }  # fmt: skip
            return await stack.enter_async_context(Engine(**{**defaults, **settings}))

        yield open_engine


async def last(engine: Engine, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    outputs = [output async for output in engine.generate(prompt, params)]
    return outputs[-1].outputs[0]


def loop_of(model: Any, prompt: list[int], params: SamplingParams, barred: Barred | None) -> list[int]:
    """Greedy decoding, a token at a time, until a stop id."""
    stops = {EOS, *(params.stop_token_ids or ())}
    output: list[int] = []
    while len(output) < NUM_TOKENS and not (output and output[-1] in stops):
        with threads(), torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].clone()
        output.append(int(expected_logits(logits, params, prompt, output, barred).argmax()))
    return output


def ids_barred(engine: Engine, params: SamplingParams) -> Barred:
    """As vLLM makes them: each bad word at a text's beginning and behind a space."""
    words = [lead + word for word in params.bad_words or () for lead in ("", " ")]
    encode = engine.tokenizer.encode
    return Barred([EOS, *(params.stop_token_ids or ())], [encode(word, add_special_tokens=False).ids for word in words])


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_greedy_answers_are_those_of_a_plain_loop(opened: OpenEngine, reference: Any, backend: str) -> None:
    engine = await opened(attention_backend=backend)
    asked = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **fields))
        for fields in PARAMETERS.values()
        for prompt in PROMPTS
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    # All beside each other, plain ones between them.
    outputs = await asyncio.gather(*(last(engine, *one) for pair in asked for one in (pair, (pair[0], plain))))
    changed = 0
    for (prompt, params), output, other in zip(asked, outputs[::2], outputs[1::2], strict=True):
        assert output.token_ids == loop_of(reference, prompt, params, ids_barred(engine, params)), params
        assert other.token_ids == loop_of(reference, prompt, plain, None)
        changed += output.token_ids != other.token_ids
    assert changed > len(asked) / 2, "most of these parameters must make a difference, or nothing is shown"


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_answers_are_the_same_alone_beside_others_preempted_chunked_and_resumed(opened: OpenEngine, kind: str) -> None:
    how = {"temperature": 0.0} if kind == "greedy" else {"temperature": 1.3, "seed": 11, "top_p": 0.95}
    asked = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, **how, **fields))
        for fields in PARAMETERS.values()
        for prompt in PROMPTS[:2]
    ]
    first = await opened()
    alone = [await last(first, *one) for one in asked]
    again = [await last(first, *one) for one in asked]  # on a prefix that is cached by now
    assert [one.token_ids for one in again] == [one.token_ids for one in alone]
    for settings in (
        {},
        {"max_num_batched_tokens": 3},
        {"max_steps_in_flight": 1},
        {"num_device_blocks": 24},
        {"num_device_blocks": 24, "max_num_batched_tokens": 5, "attention_backend": "torch"},
    ):
        engine = await opened(**settings)
        if "num_device_blocks" in settings:
            engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0  # type: ignore[union-attr]
        outputs = await asyncio.gather(*(last(engine, *one) for one in asked))
        assert [(one.token_ids, one.text) for one in outputs] == [(one.token_ids, one.text) for one in alone], settings
        if "num_device_blocks" in settings:
            assert sum((await engine.stats()).num_preemptions.values()) > 2


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_a_request_that_bars_every_token_fails_alone(opened: OpenEngine, backend: str) -> None:
    engine = await opened(attention_backend=backend)
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    expected = await last(engine, PROMPTS[0], plain)
    empty = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=2, allowed_token_ids=[EOS])
    failed, other = await asyncio.gather(last(engine, PROMPTS[0], empty), last(engine, PROMPTS[0], plain))
    assert failed.finish_reason == "error"
    assert "no token is left" in str(failed.stop_reason)
    assert other.token_ids == expected.token_ids
    assert await engine.audit() == []
