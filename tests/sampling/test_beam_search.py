"""Beam search: what `transformers` finds, for one computed token a beam and step."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    NeverFitsError,
    SamplingParams,
    UnsupportedError,
    ValidationError,
)
from repertory.actors.frontends.beam_search import Search
from repertory.protocol.ids import RequestId
from repertory.protocol.outputs import Logprob
from repertory.tests.conformance.reference import load_directory, threads

COMMON_TOKENS = [2, 9, 20, 52, 71, 140, 190, 205, 221]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return load_directory(tiny_model)


@pytest.fixture(scope="module", params=["torch", "auto"])
def llm(tiny_model: Path, request: pytest.FixtureRequest) -> Any:
    with open_llm(tiny_model, attention_backend=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def ending_llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same weights, with tokens declared ends that beams come across."""
    directory = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(tiny_model, directory)
    for name in ("config.json", "generation_config.json"):
        if (directory / name).exists():
            config = json.loads((directory / name).read_text())
            (directory / name).write_text(json.dumps(config | {"eos_token_id": COMMON_TOKENS}))
    with open_llm(directory) as llm:
        yield llm


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(
        model=str(model), dtype="float32", device="cpu", num_threads=1, log_level="warning",
        **{"num_device_blocks": 400, "worker": "inline", **settings},
    )  # fmt: skip


def audited(llm: LLM) -> list[str]:
    return asyncio.run_coroutine_threadsafe(llm.engine.audit(), llm.engine._task.get_loop()).result()  # type: ignore[union-attr]


def num_computed(llm: LLM) -> int:
    return llm.engine._company.scheduler.core.num_computed_tokens  # type: ignore[union-attr]


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 300) for _ in range(length)] for length in (1, 7, 15, 16, 17, 40)]


def expected(
    model: Any, prompt: list[int], width: int, max_tokens: int, **settings: Any
) -> tuple[list[list[int]], list[float]]:
    with threads(), torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=max_tokens,
            num_beams=width, num_return_sequences=width, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **settings,
        )  # fmt: skip
    ends = settings["eos_token_id"] or []
    sequences = []
    for row in found.sequences.tolist():
        length = next((place + 1 for place, token in enumerate(row) if token in ends and place >= len(prompt)), len(row))
        sequences.append(row[:length])
    return sequences, found.sequences_scores.tolist()


@pytest.mark.parametrize("width", [2, 4])
def test_it_finds_what_transformers_finds(llm: LLM, reference: Any, width: int) -> None:
    outputs = llm.beam_search(prompts(), BeamSearchParams(beam_width=width, max_tokens=24, ignore_eos=True))
    for prompt, output in zip(prompts(), outputs, strict=True):
        sequences, scores = expected(reference, prompt, width, 24, eos_token_id=None)
        assert [found.tokens for found in output.sequences] == sequences
        assert [found.cum_logprob / 24 for found in output.sequences] == pytest.approx(scores, abs=1e-4)
        assert {found.finish_reason for found in output.sequences} == {"length"}


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_one_beam_is_greedy_whatever_the_penalty(llm: LLM, reference: Any, penalty: float) -> None:
    prompt = prompts()[3]
    (output,) = llm.beam_search(prompt, BeamSearchParams(1, max_tokens=12, ignore_eos=True, length_penalty=penalty))
    with threads(), torch.inference_mode():
        reference.generation_config.eos_token_id = None
        greedy = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert [found.tokens for found in output.sequences] == greedy.tolist()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
def test_ends_are_found_and_weighed_as_transformers_does(ending_llm: LLM, reference: Any, width: int, penalty: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=20, length_penalty=penalty)
    outputs = ending_llm.beam_search(prompts(), params)
    ends = ending_llm.engine._company.resolver.eos_token_ids  # type: ignore[union-attr]
    reasons = set()
    for prompt, output in zip(prompts(), outputs, strict=True):
        sequences, scores = expected(
            reference, prompt, width, 20, eos_token_id=list(ends), length_penalty=penalty, early_stopping=False
        )
        assert [found.tokens for found in output.sequences] == sequences
        own = [found.cum_logprob / (len(found.tokens) - len(prompt)) ** penalty for found in output.sequences]
        assert own == pytest.approx(scores, abs=1e-4)
        reasons |= {found.finish_reason for found in output.sequences}
    assert "stop" in reasons or penalty == 2.0


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_step_costs_one_computed_token_a_beam(tiny_model: Path, width: int, block_size: int) -> None:
    with open_llm(tiny_model, block_size=block_size) as llm:
        prompt = prompts()[4]
        llm.beam_search(prompt, BeamSearchParams(width, max_tokens=30, ignore_eos=True))
        assert num_computed(llm) == len(prompt) + 29 * width
        assert audited(llm) == []


def test_what_it_finds_does_not_depend_on_memory(tiny_model: Path) -> None:
    params = BeamSearchParams(4, max_tokens=30, ignore_eos=True)
    with open_llm(tiny_model, block_size=4, num_device_blocks=1000) as ample:
        found = ample.beam_search(prompts(), params)
    with open_llm(tiny_model, block_size=4, num_device_blocks=30) as tight:
        assert [tokens_of(one) for one in tight.beam_search(prompts(), params)] == [tokens_of(one) for one in found]
        assert audited(tight) == []
        stats = asyncio.run_coroutine_threadsafe(tight.engine.stats(), tight.engine._task.get_loop()).result()  # type: ignore[union-attr]
        assert stats.device_blocks.referenced == 0
        assert stats.num_waiting == stats.num_paused == 0


def tokens_of(output: BeamSearchOutput) -> list[list[int]]:
    return [found.tokens for found in output.sequences]


def test_each_token_comes_with_what_it_was_chosen_from(llm: LLM) -> None:
    (output,) = llm.beam_search([prompts()[1]], BeamSearchParams(3, max_tokens=5, ignore_eos=True))
    for found in output.sequences:
        generated = found.tokens[7:]
        assert len(found.logprobs) == len(generated) == 5
        own = [logprobs[token].logprob for logprobs, token in zip(found.logprobs, generated, strict=True)]
        assert sum(own) == pytest.approx(found.cum_logprob)
        assert all(len(logprobs) == 6 for logprobs in found.logprobs)
        assert found.text == llm.engine.tokenizer.decode(found.tokens)
    scores = [found.cum_logprob for found in output.sequences]
    assert scores == sorted(scores, reverse=True)


def test_text_may_be_the_prompt_and_the_length_is_clamped_to_the_room_there_is(tiny_model: Path) -> None:
    with open_llm(tiny_model, max_model_len=12) as llm:
        (output,) = llm.beam_search("hello", BeamSearchParams(2, max_tokens=10**6, ignore_eos=True))
    assert [len(found.tokens) for found in output.sequences] == [12, 12]
    assert output.sequences[0].text.startswith("hello")


@pytest.mark.parametrize(
    ("params", "field", "error"),
    [
        (BeamSearchParams(0), "beam_width", ValidationError),
        (BeamSearchParams(10**6), "beam_width", ValidationError),
        (BeamSearchParams(True), "beam_width", ValidationError),
        (BeamSearchParams(2, max_tokens=0), "max_tokens", ValidationError),
        (BeamSearchParams(2, max_tokens=10**30), "max_tokens", ValidationError),
        (BeamSearchParams(2, length_penalty=float("nan")), "length_penalty", ValidationError),
        (BeamSearchParams(2, length_penalty=10.0**6), "length_penalty", ValidationError),
        (BeamSearchParams(2, length_penalty=32.1), "length_penalty", ValidationError),
        (BeamSearchParams(2, ignore_eos=1), "ignore_eos", ValidationError),  # type: ignore[arg-type]
        (BeamSearchParams(2, temperature=0.5), "temperature", UnsupportedError),
        ({"beam_width": 2}, "params", ValidationError),
    ],
)
def test_wrong_parameters_are_refused_by_name(llm: LLM, params: Any, field: str, error: type[ValidationError]) -> None:
    with pytest.raises(error) as caught:
        llm.beam_search([[5, 6]], params)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", [[], [5, -1], [5, 10**9]])
def test_a_wrong_prompt_is_refused_before_any_search_starts(llm: LLM, prompt: list[int]) -> None:
    before = num_computed(llm)
    with pytest.raises(ValidationError):
        llm.beam_search([[5, 6], prompt], BeamSearchParams(2))
    assert num_computed(llm) == before


def test_a_prompt_that_leaves_no_room_is_refused(tiny_model: Path) -> None:
    with open_llm(tiny_model, max_model_len=12) as llm, pytest.raises(NeverFitsError):
        llm.beam_search([[5] * 12], BeamSearchParams(2))


# ---- the rules, without an engine -----------------------------------------------------------------


def answer(*tokens: tuple[int, float]) -> dict[int, Logprob]:
    return {token: Logprob(logprob) for token, logprob in tokens}


def test_an_end_that_is_not_among_the_first_beams_is_dropped() -> None:
    search = Search(BeamSearchParams(2, max_tokens=9), eos_token_ids=[0], max_tokens=9)
    search.take([(RequestId(1), answer((5, -0.1), (6, -0.2), (0, -0.3), (7, -0.4)))])
    assert search.finished == []
    assert [beam.token_ids for beam in search.beams] == [[5], [6]]


def test_a_search_ends_when_no_beam_can_do_better_than_what_is_finished() -> None:
    search = Search(BeamSearchParams(1, max_tokens=9), eos_token_ids=[0], max_tokens=9)
    search.take([(RequestId(1), answer((0, -0.1), (6, -2.0)))])
    assert search.is_over
    assert [beam.token_ids for beam in search.finished] == [[0]]


def test_it_goes_on_while_a_beam_can() -> None:
    search = Search(BeamSearchParams(1, max_tokens=9, length_penalty=2.0), eos_token_ids=[0], max_tokens=9)
    search.take([(RequestId(1), answer((0, -1.0), (6, -1.1)))])
    assert search.is_over, "its length now is what counts, not what it may come to"
    search = Search(BeamSearchParams(1, max_tokens=9), eos_token_ids=[0], max_tokens=9)
    search.take([(RequestId(1), answer((6, -1.1), (0, -1.2)))])
    assert not search.is_over and search.finished == []


def test_beams_and_logprobs_come_through_a_process(tiny_model: Path) -> None:
    with open_llm(tiny_model) as inline, open_llm(tiny_model, worker="process") as process:
        params = BeamSearchParams(2, max_tokens=6, ignore_eos=True)
        assert process.beam_search(prompts(), params) == inline.beam_search(prompts(), params)
        asked = SamplingParams(temperature=0.9, seed=4, max_tokens=6, n=3, logprobs=2)
        assert [one.outputs for one in process.generate(prompts(), asked)] == [
            one.outputs for one in inline.generate(prompts(), asked)
        ]
