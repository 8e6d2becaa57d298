"""Prompt logprobs: each prompt token's own, whatever is cached, however the prompt is cut, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from repertory import Engine, Logprob, RequestOutput, SamplingParams, ValidationError
from repertory.gpu.simulated import SimulatedExecutor
from repertory.gpu.slots import Slot
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import check_prompt_logprobs
from repertory.tests.conformance.reference import load_directory, threads
from repertory.tests.engine.stage import Stage, answer_of, greedy, last_of, prompt_of, read_all, seeded, until
from repertory.tests.tiny_model import make_tiny_model

PROMPTS = [[5], [5, 6], [60, 3, 77, 200, 41, 5, 9, 9, 12], [33] * 17, [*range(10, 85)]]

Found = list[dict[int, Logprob] | None] | None
OpenStage = Callable[..., Awaitable[Stage]]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return load_directory(tiny_model)


def expected(model: Any, prompt: list[int]) -> torch.Tensor:
    """float32 [tokens - 1, vocab_size]: log-probabilities in the place of each prompt token but the first."""
    with threads(), torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)


def check(model: Any, prompt: list[int], found: Found, count: int) -> None:
    assert found is not None and len(found) == len(prompt)
    assert found[0] is None
    for row, token, entry in zip(expected(model, prompt), prompt[1:], found[1:], strict=True):
        assert entry is not None
        assert list(entry) == list(dict.fromkeys([token, *row.topk(max(1, count)).indices.tolist()[:count]]))
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert logprob.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("budget", [1, 7, 64, 512])
@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_they_are_what_transformers_gives_alone_and_beside_others(
    tiny_model: Path, reference: Any, backend: str, budget: int
) -> None:
    async with Engine(
        model=str(tiny_model), dtype="float32", device="cpu", worker="inline", attention_backend=backend, block_size=4,
        num_device_blocks=200, num_threads=1, log_level="warning", max_num_batched_tokens=budget,
    ) as engine:  # fmt: skip
        asking = greedy(3, prompt_logprobs=4, ignore_eos=True)
        drawing = seeded(5, 3, prompt_logprobs=0, logprobs=1, ignore_eos=True)
        plain = seeded(1, 12, ignore_eos=True)
        requests = [(prompt, params) for prompt in PROMPTS for params in (asking, plain, drawing)]
        for outputs in (
            [await last_of(engine.generate(*request)) for request in requests[:6]],
            await asyncio.gather(*(last_of(engine.generate(*request)) for request in requests)),
        ):
            for (prompt, params), output in zip(requests, outputs, strict=False):
                if params.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    check(reference, prompt, output.prompt_logprobs, params.prompt_logprobs)
        assert await engine.audit() == []


def made_up(s: Stage, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], list[float], int]]:
    """What the simulated device says of a prompt, computed without its memory."""
    slot = Slot(NewRow(SequenceId(0), prompt, len(prompt), params, []))
    device: SimulatedExecutor = s.device
    tokens = torch.tensor(prompt).numpy()
    entries = [device.prompt_logprobs(tokens[:at], slot, prompt[at]) for at in range(1, len(prompt))]
    return [(entry.token_ids, entry.logprobs, entry.rank) for entry in entries]


def check_made_up(s: Stage, prompt: list[int], params: SamplingParams, output: RequestOutput) -> None:
    found = output.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for entry, (token_ids, logprobs, rank) in zip(found[1:], made_up(s, prompt, params), strict=True):
        assert entry is not None
        assert list(entry) == list(dict.fromkeys(token_ids))
        assert entry[token_ids[0]].logprob == logprobs[0]
        assert entry[token_ids[0]].rank == rank


async def test_several_completions_have_one_prompt_and_it_is_computed_once(stage: OpenStage) -> None:
    s = await stage(block_size=4)
    params = greedy(6, n=5, prompt_logprobs=2)
    output = await s.ask(prompt_of(14), params)
    check_made_up(s, prompt_of(14), params, output)
    assert all(completion.token_ids for completion in output.outputs)
    assert s.device.num_computed_tokens < 14 + 5 * 6 + 5
    await s.check_clean()


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
async def test_preemptions_in_the_middle_of_prompts_lose_none(stage: OpenStage, mode: str) -> None:
    s = await stage(block_size=4, num_device_blocks=14, num_host_blocks=10, preemption_mode=mode, max_num_batched_tokens=5)
    s.admit_carelessly()
    requests = [(prompt_of(11 + seed, seed), greedy(25, prompt_logprobs=seed)) for seed in range(4)]
    for _ in range(2):  # the second time most of it is cached
        for (prompt, params), output in zip(requests, await s.ask_all(requests), strict=True):
            check_made_up(s, prompt, params, output)
            assert answer_of(output) == s.alone(prompt, params)
    assert sum((await s.engine.stats()).num_preemptions.values()) > 0
    await s.check_clean()


async def test_a_prompt_cut_into_chunks_beside_its_twins_takes_nothing_from_them(stage: OpenStage) -> None:
    s = await stage(block_size=4, max_num_batched_tokens=6)
    requests = [(prompt_of(21), greedy(4, prompt_logprobs=1)), (prompt_of(21), greedy(4))] * 3
    for (prompt, params), output in zip(requests, await s.ask_all(requests), strict=True):
        assert answer_of(output) == s.alone(prompt, params)
        if params.prompt_logprobs is not None:
            check_made_up(s, prompt, params, output)
            assert output.num_cached_tokens == 0
    await s.check_clean()


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_every_kind_of_output_has_them_from_the_first_on(stage: OpenStage, kind: Any) -> None:
    s = await stage(block_size=4, max_num_batched_tokens=4)
    params = greedy(8, prompt_logprobs=3, output_kind=kind)
    for output in await read_all(s.engine.generate(prompt_of(13), params)):
        check_made_up(s, prompt_of(13), params, output)


async def test_an_abort_between_chunks_leaves_nothing_behind(stage: OpenStage) -> None:
    s = await stage(block_size=4, max_num_batched_tokens=4)
    s.gate.shut()
    stream = s.engine.generate(prompt_of(30), greedy(8, prompt_logprobs=3))
    await s.gate.step()
    await s.gate.step()
    await stream.aclose()
    s.gate.open()
    await until(lambda: s.engine._company.is_idle)
    await s.check_clean()


async def test_a_detokenizer_that_crashes_says_them_again(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    from repertory.actors.text.detokenizer_core import DetokenizerCore

    s = await stage(block_size=4)
    calls, on_tokens = [0], DetokenizerCore.on_tokens

    def crash_sometimes(core: DetokenizerCore, message: Any) -> Any:
        calls[0] += 1
        if calls[0] in (1, 4):
            raise LookupError("not this one's fault")
        return on_tokens(core, message)

    monkeypatch.setattr(DetokenizerCore, "on_tokens", crash_sometimes)
    params = greedy(9, prompt_logprobs=2)
    outputs = await read_all(s.engine.generate(prompt_of(13), params))
    assert calls[0] > 4
    assert answer_of(outputs[-1]) == s.alone(prompt_of(13), params)
    check_made_up(s, prompt_of(13), params, outputs[-1])
    await s.check_clean()


@pytest.mark.parametrize("count", [-1, 21, 10**9, 1.5, True, "5"])
async def test_counts_out_of_range_are_refused_by_name(stage: OpenStage, count: Any) -> None:
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await s.ask(prompt_of(5), SamplingParams(prompt_logprobs=count))
    assert caught.value.field == "prompt_logprobs"
    await s.check_clean()


@pytest.mark.parametrize(("n", "num_tokens", "count"), [(1, 2500, 99), (1, 100_001, 1), (10, 5_001, 3), (1, 200_001, 0)])
def test_what_an_answer_could_not_hold_is_refused_with_the_numbers(n: int, num_tokens: int, count: int) -> None:
    params = SamplingParams(n=n, prompt_logprobs=count)
    with pytest.raises(ValidationError, match=f"prompt_logprobs {count} of {num_tokens} prompt tokens") as caught:
        check_prompt_logprobs(params, num_tokens)
    assert caught.value.field == "prompt_logprobs"
    check_prompt_logprobs(params, 200_000 // n // (count + 1))
    check_prompt_logprobs(SamplingParams(n=128), 10**6)


async def test_the_engine_refuses_it_before_it_is_queued(stage: OpenStage) -> None:
    s = await stage(block_size=4, max_model_len=4096, num_device_blocks=1100)
    with pytest.raises(ValidationError, match="more than 200000"):
        await s.ask(prompt_of(4000), greedy(1, n=3, prompt_logprobs=20))
    await s.check_clean()


OVERFLOWING = 100
"""A token at which the last layer's feed-forward overflows: its logits are not finite, and all others' are."""


def model_that_overflows(folder: Path) -> Path:
    model = make_tiny_model(folder, tie_word_embeddings=False)
    tensors = {name: tensor.copy() for name, tensor in load_file(model / "model.safetensors").items()}
    flag = 5  # a dimension that nothing but this token's embedding writes
    tensors["model.embed_tokens.weight"][:, flag] = 0
    tensors["model.embed_tokens.weight"][OVERFLOWING, flag] = 1
    for layer in range(3):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"][flag, :] = 0
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.2.mlp.{name}.weight"][0, :] = 0
        tensors[f"model.layers.2.mlp.{name}.weight"][0, flag] = 1e25
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_a_prompt_that_is_not_finite_in_the_middle_fails_that_request_alone(tmp_path: Path, backend: str) -> None:
    prompt = list(range(10, 50))
    prompt[5] = OVERFLOWING
    async with Engine(
        model=str(model_that_overflows(tmp_path / "model")), dtype="float32", device="cpu", worker="inline",
        attention_backend=backend, block_size=4, num_device_blocks=200, num_threads=1, log_level="error",
        max_num_batched_tokens=16,
    ) as engine:  # fmt: skip
        plain = await last_of(engine.generate(prompt, greedy(3, ignore_eos=True)))
        assert plain.outputs[0].finish_reason == "length", "what comes after the token is finite"
        beside = asyncio.ensure_future(last_of(engine.generate([30, 31, 32], greedy(60, ignore_eos=True))))
        asked = await last_of(engine.generate(prompt, greedy(3, prompt_logprobs=1, ignore_eos=True)))
        assert (await beside).outputs[0].finish_reason == "length"
        assert asked.outputs[0].finish_reason == "error"
        assert "not finite" in str(asked.outputs[0].stop_reason)
        assert await engine.audit() == []
