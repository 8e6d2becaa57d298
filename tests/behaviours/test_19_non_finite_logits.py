"""19. A row of NaN ends its own request, with an error that says so; nothing it wrote is offered to others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from repertory import Engine, SamplingParams
from repertory.gpu.sampling import SamplingRow, sample
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of
from repertory.tests.tiny_model import make_tiny_model

PROMPTS = [prompt_of(9, seed) for seed in range(10)]
SETTINGS = {
    "device": "cpu", "worker": "inline", "dtype": "float32", "num_threads": 1, "block_size": 4, "num_device_blocks": 128,
    "log_level": "warning",
}  # fmt: skip


def model_with_a_hole(folder: Path, token: int | None) -> Path:
    """A model whose logits are NaN wherever `token` has been read."""
    model = make_tiny_model(folder, tie_word_embeddings=False)
    if token is not None:
        tensors = load_file(model / "model.safetensors")
        embedding = tensors["model.embed_tokens.weight"].copy()
        embedding[token] = np.nan
        save_file(tensors | {"model.embed_tokens.weight": embedding}, model / "model.safetensors", metadata={"format": "pt"})
    return model


async def answers(model: Path, backend: str, prompts: list[list[int]], *, together: bool) -> tuple[list, int]:
    async with Engine(model=str(model), attention_backend=backend, **SETTINGS) as engine:
        params = greedy(12, ignore_eos=True)
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.ensure_future(last_of(engine.generate(prompt, params))))
            if not together:
                await asyncio.wait(tasks)
        outputs = [await task for task in tasks]
        assert await engine.audit() == []
        return [output.outputs[0] for output in outputs], (await engine.stats()).num_non_finite_rows


@pytest.mark.parametrize("backend", ["torch", "auto"])
async def test_a_model_that_turns_nan_at_the_second_step_ends_that_request_alone(tmp_path: Path, backend: str) -> None:
    good, num_failed = await answers(model_with_a_hole(tmp_path / "good", None), backend, PROMPTS, together=False)
    assert num_failed == 0
    read = [{*prompt, *answer.token_ids} for prompt, answer in zip(PROMPTS, good, strict=True)]
    bad = next(i for i in range(2, 10) if good[i].token_ids[0] not in read[0] | read[1] | {*PROMPTS[i]})
    token = good[bad].token_ids[0]
    three = [PROMPTS[0], PROMPTS[bad], PROMPTS[1]]
    found, num_failed = await answers(model_with_a_hole(tmp_path / "bad", token), backend, three, together=True)
    assert [found[0].token_ids, found[2].token_ids] == [good[0].token_ids, good[1].token_ids]
    assert found[1].finish_reason == "error"
    assert "not finite" in str(found[1].stop_reason)
    assert found[1].token_ids == [token]
    assert num_failed == 1


@pytest.mark.parametrize(
    "params", [greedy(12), SamplingParams(temperature=0.9, seed=1, max_tokens=12)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_what_the_failing_step_wrote_is_not_offered(stage, params, steps_in_flight):
    s = await stage(block_size=4, max_steps_in_flight=steps_in_flight)
    prompt = prompt_of(7)
    first = s.alone(prompt, params).token_ids[0]
    lengths = {}

    def rows_that_fail(step):
        lengths.update({new.seq_id: new.num_prompt_tokens for new in step.admitted})
        rows = zip(step.seq_ids, step.starts, strict=True)
        return [seq_id for seq_id, start in rows if start == lengths[seq_id] == len(prompt)]

    s.device.fail_rows = rows_that_fail
    others = [s.begin(prompt_of(6, 9), greedy(20)), s.begin(prompt_of(5, 8), greedy(20))]
    failed = (await last_of(s.engine.generate(prompt, params))).outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", [first])
    s.device.fail_rows = None
    again = await s.ask([*prompt, first, 5])
    assert again.num_cached_tokens == 4, "the block that the step before it proved, and no more"
    assert answer_of(again) == s.alone([*prompt, first, 5])
    assert answer_of(await others[0]) == s.alone(prompt_of(6, 9), greedy(20))
    assert answer_of(await others[1]) == s.alone(prompt_of(5, 8), greedy(20))
    assert (await s.engine.stats()).num_non_finite_rows == 1
    await s.check_clean()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_no_error_and_a_row_of_nothing_else_is(temperature: float) -> None:
    infinity = float("inf")
    logits = torch.tensor(
        [[-infinity, -3.0, -infinity], [-infinity] * 3, [float("nan"), 1.0, 2.0], [1.0, infinity, 0.0], [0.0, 1.0, -infinity]]
    )
    row = SamplingRow(SamplingParams(temperature=temperature, seed=3), 0, 0)
    found = sample(logits, [row] * 5)
    assert found.failed == [1, 2, 3]
    assert found.token_ids[0] == 1
    assert found.token_ids[4] in (0, 1)
