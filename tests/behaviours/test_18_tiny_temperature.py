"""18. A tiny temperature gives the greedy tokens: nothing overflows, nothing is refused; an impossible one is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from repertory import SamplingParams, ValidationError
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.sampling import Sampled, sample
from repertory.tests.engine.stage import answer_of, last_of, prompt_of

TINY = [0, 0.0, -0.0, 1e-300, 1e-30, 1e-6, 1e-5, 1e-4, 1e-3]
BEST, SECOND = 77, 5


def at(temperature: float, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=42, max_tokens=12, ignore_eos=True, **params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_tiny_temperatures_give_the_greedy_tokens(real, check_clean, dtype):
    engine = await real(dtype=dtype, max_num_seqs=1)
    answers = [answer_of(await last_of(engine.generate(prompt_of(9), at(temperature)))) for temperature in TINY]
    assert all(answer == answers[0] for answer in answers)
    assert len(set(answers[0].token_ids)) > 1
    assert answers[0].text
    await check_clean(engine)


class PeakedPath:
    """In place of a model: logits in 16 bits, largest 30, second 29.5, the others far below, one masked."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        logits = torch.full((1, vocab_size), -30.0, dtype=dtype)
        logits[0, SECOND], logits[0, BEST], logits[0, 0] = 29.5, 30.0, -math.inf
        self.logits = logits.float()

    def compute(self, rows, draws, shared, *, before_draws):
        return sample(self.logits.repeat(len(draws), 1), draws) if draws else Sampled([], [])

    def close(self):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
async def test_large_16_bit_logits_half_apart_draw_the_largest(real, check_clean, dtype, filters):
    engine = await peaked(real, dtype)
    streams = [engine.generate(prompt_of(5), at(temperature, **filters)) for temperature in TINY]
    for stream in streams:
        completion = (await last_of(stream)).outputs[0]
        assert completion.token_ids == [BEST] * 12
        assert completion.finish_reason == "length"
    await check_clean(engine)


async def peaked(real, dtype):
    def open_device(config, model_dir):
        device = CpuExecutor(model_dir, config=config)
        device._path.close()
        device._path = PeakedPath(device.capacity.vocab_size, dtype)
        return device

    return await real(open_device=open_device)


async def test_a_usual_temperature_does_draw_the_second(real, check_clean):
    # Else the tests above would pass with sampling switched off.
    engine = await peaked(real, torch.bfloat16)
    drawn = (await last_of(engine.generate(prompt_of(5), SamplingParams(temperature=1.0, seed=1, max_tokens=40)))).outputs[0]
    assert set(drawn.token_ids) == {BEST, SECOND}
    await check_clean(engine)


@pytest.mark.parametrize("temperature", [-1, -1e-9, math.nan, math.inf, -math.inf, "0", None, True])
async def test_a_temperature_that_is_none_is_refused(stage, temperature):
    s = await stage()
    with pytest.raises(ValidationError, match="temperature") as caught:
        await s.ask(prompt_of(5), SamplingParams(temperature=temperature))
    assert (caught.value.field, caught.value.http_status) == ("temperature", 400)
    assert answer_of(await s.ask(prompt_of(5))) == s.alone(prompt_of(5))
    await s.check_clean()
