"""22 to 24, 27, 29 and 30 for a frontend whose core is another process: what holds for an embedded engine holds here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from repertory import EngineError, NeverFitsError, RequestError, SamplingParams, ValidationError
from repertory.actors.frontends.remote import RemoteEngine
from repertory.protocol.outputs import EngineStats
from repertory.tests.behaviours.test_30_bounded_parameters import WRONG
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, seeded
from repertory.tests.served.conftest import ENDLESS, SIMULATED, Core, OpenCore, stats_until
from repertory.tests.supervision.crowd import alone, begin, crowd, results

pytestmark = pytest.mark.alone

ENDLESSLY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")

CheckClean = Callable[[Any], Awaitable[None]]


def is_idle(stats: EngineStats) -> bool:
    return not (stats.num_running or stats.num_waiting or stats.num_paused or stats.num_preempted)


async def test_22_an_output_takes_what_room_there_is(open_core: OpenCore, check_clean: CheckClean) -> None:
    core: Core = await open_core(max_model_len=16, num_device_blocks=16)
    engine = await core.connect()
    for length, max_tokens, expected in [(14, None, 2), (14, 1, 1), (14, 10, 2), (15, None, 1), (15, 10, 1), (1, None, 15)]:
        answer = answer_of(await last_of(engine.generate(prompt_of(length), greedy(max_tokens))))
        assert (len(answer.token_ids), answer.finish_reason) == (expected, "length")
    for length in (16, 17, 1000):
        with pytest.raises(NeverFitsError, match="max_model_len is 16"):
            await last_of(engine.generate(prompt_of(length), greedy(1)))
    await check_clean(engine)


async def test_23_an_abort_never_reaches_a_newer_request_with_its_label(open_core: OpenCore, check_clean: CheckClean) -> None:
    core: Core = await open_core()
    engine, other = await core.connect(), await core.connect()
    elsewhere = asyncio.ensure_future(last_of(other.generate(prompt_of(9, 1), greedy(40), "same")))
    for _ in range(10):
        first = engine.generate(prompt_of(9), ENDLESSLY, "same")
        await engine.abort("same")
        second = asyncio.ensure_future(last_of(engine.generate(prompt_of(9), greedy(5), "same")))
        assert (await last_of(first)).outputs[0].finish_reason == "abort"
        assert (await second).outputs[0].finish_reason == "length"
    assert (await elsewhere).outputs[0].finish_reason == "length"
    await engine.abort("nobody's")
    await check_clean(engine)
    assert await other.audit() == []


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["delta", "final_only"])
async def test_24_whoever_goes_stops_the_work_on_all_its_sequences(
    open_core: OpenCore, check_clean: CheckClean, kind: str, n: int
) -> None:
    core: Core = await open_core(**ENDLESS, max_model_len=4096)
    engine = await core.connect()
    stream = engine.generate(prompt_of(9), seeded(1, 4000, n=n, output_kind=kind, ignore_eos=True))
    await stats_until(engine, lambda stats: stats.num_running + stats.num_paused == n)
    await stream.aclose()
    assert await stats_until(engine, is_idle) < 1.0
    await check_clean(engine)


@pytest.mark.parametrize("prompt", ["x" * 20_000_000, [{"role": "user", "content": "y"}] * 5_000], ids=["text", "chat"])
async def test_27_a_huge_prompt_holds_up_nobody(open_core: OpenCore, prompt: Any) -> None:
    core: Core = await open_core(**ENDLESS, max_model_len=4096)
    engine = await core.connect()
    await last_of(engine.generate([{"role": "user", "content": "warm"}], greedy(1)))
    stream = engine.generate(prompt_of(9), ENDLESSLY)
    huge = asyncio.ensure_future(last_of(engine.generate(prompt, greedy(1))))
    longest_s = 0.0
    while not huge.done():
        started = time.monotonic()
        await engine.check_health()
        output = await anext(stream)
        longest_s = max(longest_s, time.monotonic() - started)
        assert not output.finished
    with pytest.raises(NeverFitsError):
        await huge
    assert longest_s < 1.0, "the gaps of somebody else's tokens"
    await stream.aclose()


async def test_29_one_bad_request_fails_alone(open_core: OpenCore, paper_model: Path, check_clean: CheckClean) -> None:
    core: Core = await open_core()
    first, second = await core.connect(), await core.connect()
    requests = crowd(6)
    expected = await alone(paper_model, requests, **SIMULATED)
    good = begin(first, requests[:3]), begin(second, requests[3:])
    bad: list[tuple[RemoteEngine, Any, SamplingParams]] = [
        (first, [{"role": "user"}, {"content": 5}], greedy()),
        (second, [320], greedy()),
        (first, prompt_of(9), greedy(structured_outputs={"json": 5})),
        (second, "", greedy()),
    ]
    for engine, prompt, params in bad:
        with pytest.raises((RequestError, EngineError)):
            await last_of(engine.generate(prompt, params))
    assert await results([*good[0], *good[1]]) == expected
    await check_clean(first)
    assert await second.audit() == []


async def test_30_parameters_out_of_bounds_are_refused_here_and_never_sent(
    open_core: OpenCore, check_clean: CheckClean
) -> None:
    core: Core = await open_core()
    engine = await core.connect()
    for params in WRONG:
        started = time.monotonic()
        with pytest.raises(ValidationError, match=next(iter(params))):
            await last_of(engine.generate(prompt_of(3), SamplingParams(**params)))
        assert time.monotonic() - started < 1.0
    assert (await engine.stats()).num_steps == 0
    await check_clean(engine)
