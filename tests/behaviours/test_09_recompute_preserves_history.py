"""9. A request that is preempted, for recompute or by swap, again and again, is to its reader as if it had run alone."""

from __future__ import annotations

import asyncio
import functools

import pytest

from repertory.tests.engine.stage import answer_of, greedy, prompt_of, read_all, seeded

NUM_TOKENS = 60


async def crowd(stage, **settings):
    """Room for little more than one of them at full length: the later ones are preempted more than once."""
    s = await stage(block_size=4, num_device_blocks=24, **settings)
    s.admit_carelessly()
    return s


def requests(kind):
    params = [greedy(NUM_TOKENS), seeded(7, NUM_TOKENS)][kind == "seeded"]
    return [(prompt_of(10, seed), params) for seed in range(8)]


SWAP = {"preemption_mode": "swap", "num_host_blocks": 200}
SETTINGS = [{}, {"max_num_batched_tokens": 3}, {"max_steps_in_flight": 1}]


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("settings", [*SETTINGS, *(SWAP | settings for settings in SETTINGS)], ids=str)
async def test_every_token_comes_once_and_as_alone(stage, kind, settings):
    s = await crowd(stage, **settings)
    asked = requests(kind)
    outputs = await s.ask_all(asked)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in asked]
    assert max(output.metrics.num_preemptions for output in outputs) >= 2, "the pool is too large for this test"
    stats = await s.engine.stats()
    assert sum(stats.num_preemptions.values()) == sum(output.metrics.num_preemptions for output in outputs)
    assert (stats.num_preemptions["swap"] > 0) == ("preemption_mode" in settings)
    assert stats.num_swap_fallbacks == 0, "who had no full block had nothing to swap"
    await s.check_clean()


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("settings", [{}, SWAP], ids=str)
async def test_streamed_deltas_have_no_gap_and_no_repetition(stage, kind, settings):
    s = await crowd(stage, **settings)
    asked = [(prompt, type(params)(**{**as_fields(params), "output_kind": "delta"})) for prompt, params in requests(kind)]
    streams = await s.submit_together(asked)
    s.gate.open()
    streamed = await asyncio.gather(*map(read_all, streams))
    assert any(outputs[-1].metrics.num_preemptions >= 2 for outputs in streamed)
    for outputs, request in zip(streamed, asked, strict=True):
        expected = s.alone(*request)
        assert [token for output in outputs for token in output.outputs[0].token_ids] == expected.token_ids
        assert "".join(output.outputs[0].text for output in outputs) == expected.text
        assert len(outputs[-1].prompt_token_ids) == 10
        assert all(first.num_cached_tokens == outputs[0].num_cached_tokens for first in outputs), "counted at admission"
        times = {output.metrics.first_token for output in outputs}
        assert len(times) == 1, "the first token is the first delivered"
    await s.check_clean()


@pytest.mark.parametrize("settings", [{}, SWAP], ids=str)
async def test_a_half_matched_stop_string_survives(stage, log_lines, settings):
    s = await crowd(stage, **settings)
    asked = requests("greedy")
    stops = []
    for prompt, params in asked:
        text = s.alone(prompt, params).text
        stops.append(text[len(text) * 3 // 4 :][:6])
    with_stops = [
        (prompt, type(params)(**{**as_fields(params), "stop": [stop]}))
        for (prompt, params), stop in zip(asked, stops, strict=True)
    ]
    outputs = await s.ask_all(with_stops)
    assert any(line["num_preemptions"] for line in log_lines if line["event"] == "request.finished")
    for output, (prompt, params), stop in zip(outputs, asked, stops, strict=True):
        text = s.alone(prompt, params).text
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason == stop
        assert output.outputs[0].text == text[: text.index(stop)]
    await s.check_clean()


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("settings", [*SETTINGS, SWAP], ids=str)
async def test_everything_that_hangs_on_earlier_tokens_goes_on(stage, kind, settings):
    """Penalties and min_tokens count what was generated before a preemption, and so does what the text waits for."""
    rich = {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "bad_words": ["ab", "Q"],
        "logprobs": 2,
    }
    make = greedy if kind == "greedy" else functools.partial(seeded, 7)
    ample = await stage(block_size=4)
    asked = []
    for seed in range(8):
        prompt, params = prompt_of(10, seed), make(NUM_TOKENS, min_tokens=40, output_kind="delta", **rich)
        text = joined(await read_all(ample.engine.generate(prompt, params)))[1]
        # The second stop is there before min_tokens, and stays in the text.
        stops = [text[len(text) * 4 // 5 :][:5], text[5:8]]
        asked.append((prompt, type(params)(**{**as_fields(params), "stop": stops})))
    alone = [joined(await read_all(ample.engine.generate(*request))) for request in asked]
    assert all(reason == "stop" and len(tokens) > 40 for tokens, _, _, reason in alone)
    s = await crowd(stage, **settings)
    streams = await s.submit_together(asked)
    s.gate.open()
    streamed = await asyncio.gather(*map(read_all, streams))
    assert max(outputs[-1].metrics.num_preemptions for outputs in streamed) >= 2
    assert [joined(outputs) for outputs in streamed] == alone
    await s.check_clean()


def joined(outputs):
    """All deltas of a stream as one: ids, text, logprobs, and how it ended."""
    parts = [output.outputs[0] for output in outputs]
    ids = [token for part in parts for token in part.token_ids]
    logprobs = [details for part in parts for details in part.logprobs]
    return ids, "".join(part.text for part in parts), logprobs, parts[-1].finish_reason


def as_fields(params):
    """Parameters as keywords."""
    return {name: getattr(params, name) for name in params.__struct_fields__}
