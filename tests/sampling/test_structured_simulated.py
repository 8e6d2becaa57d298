"""Structured outputs on the simulated device: the engine round it, to the last block and the last table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from repertory import ValidationError
from repertory.gpu.simulated import SimulatedExecutor
from repertory.gpu.structured import Grammars
from repertory.protocol.structured import StructuredOutputs
from repertory.tests.engine.stage import EOS, greedy, prompt_of, read_all, seeded

PLATE = StructuredOutputs(regex=r"[A-Z]{2}-[0-9]{3,4}")
WORDS = StructuredOutputs(regex=r"([a-z]{1,6} ){1,6}\.")


@pytest.fixture
def grammars(paper_model: Path) -> Grammars:
    return Grammars(paper_model / "tokenizer.json", vocab_size=320, eos_token_ids=[EOS])


def until_its_end(device: SimulatedExecutor, prompt: list[int], params: Any, index: int = 0) -> list[int]:
    token_ids = device.reference(prompt, params, params.max_tokens, index=index)
    return token_ids[: token_ids.index(EOS) + 1] if EOS in token_ids else token_ids


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_answers_equal_those_of_the_request_alone(stage: Any, grammars: Grammars, steps_in_flight: int) -> None:
    s = await stage(block_size=4, grammars=grammars, max_steps_in_flight=steps_in_flight)
    params = seeded(3, 40, structured_outputs=WORDS, n=3)
    output = await s.ask(prompt_of(9), params)
    assert [one.token_ids for one in output.outputs] == [until_its_end(s.device, prompt_of(9), params, i) for i in range(3)]
    assert all(re.fullmatch(r"([a-z]{1,6} ){1,6}\.", one.text) and one.finish_reason == "stop" for one in output.outputs)
    await s.check_clean()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_requests_answer_as_alone(stage: Any, grammars: Grammars, mode: str) -> None:
    sizes = {"num_device_blocks": 12, "num_host_blocks": 40 if mode == "swap" else 0, "preemption_mode": mode}
    s = await stage(block_size=4, grammars=grammars, **sizes)
    s.admit_carelessly()
    requests = [(prompt_of(5, seed), seeded(seed, 30, structured_outputs=WORDS if seed % 3 else None)) for seed in range(6)]
    outputs = await s.ask_all(requests)
    assert sum((await s.engine.stats()).num_preemptions.values()) > 2
    for (prompt, params), output in zip(requests, outputs, strict=True):
        expected = s.device.reference(prompt, params, 30)
        if params.structured_outputs is not None:
            expected = until_its_end(s.device, prompt, params)
        assert output.outputs[0].token_ids == expected
    await s.check_clean()


async def test_a_grammar_that_fails_in_the_middle_ends_its_request_alone(
    stage: Any, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = await stage(block_size=4, grammars=grammars)
    monkeypatch.setattr("repertory.gpu.grammars._MAX_ITEMS_IN_ROW", 20)
    wanted = StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {} for i in range(60)}, "required": ["p59"]})
    stream = s.engine.generate(prompt_of(7, 9), greedy(400, structured_outputs=wanted))
    outputs = await read_all(stream)
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert "items" in str(outputs[-1].outputs[0].stop_reason)
    assert outputs[-1].outputs[0].token_ids, "it did not fail at its beginning"
    await s.check_clean()


async def test_a_device_without_a_tokenizer_says_so(stage: Any) -> None:
    s = await stage(block_size=4)
    output = await s.ask(prompt_of(5), greedy(5, structured_outputs=PLATE))
    assert output.outputs[0].finish_reason == "error"
    assert "structured_outputs is not supported" in output.outputs[0].stop_reason
    await s.check_clean()


async def test_a_model_without_an_end_token_has_no_structured_outputs(stage: Any, grammars: Grammars) -> None:
    s = await stage(block_size=4, grammars=grammars)
    s.engine._company.resolver.eos_token_ids = ()
    with pytest.raises(ValidationError, match="end token"):
        await s.ask(prompt_of(5), greedy(5, structured_outputs=PLATE))
    await s.check_clean()
