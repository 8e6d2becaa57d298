"""RequestStream: leaving it in any way ends its request; reading it slowly loses nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from contextlib import nullcontext

import pytest

from repertory import SamplingParams
from repertory.tests.engine.stage import PATIENCE_S, Stage, answer_of, greedy, last_of, prompt_of, read_all, until

ENDLESS = greedy(4000)


@pytest.fixture
async def s(stage) -> Stage:
    return await stage(block_size=4, num_device_blocks=2000)


async def check_gone(s: Stage) -> None:
    """The request was aborted, not finished: it has given everything back long before its last token."""
    await until(lambda: not s.engine._company.scheduler.core.num_live)
    assert (await s.engine.stats()).num_steps < 3000
    await s.check_clean()


# ---- leaving ------------------------------------------------------------------------------------


async def test_dropping_the_last_reference_aborts(s):
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    del stream
    await check_gone(s)


async def test_dropping_a_stream_that_was_never_read_aborts(s):
    s.engine.generate(prompt_of(9), ENDLESS)
    await check_gone(s)


async def test_leaving_the_loop_and_dropping_the_stream_aborts(s):
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    async for _ in stream:
        break
    del stream
    await check_gone(s)


async def test_leaving_the_loop_alone_does_not_abort_and_reading_may_go_on(s):
    stream = s.engine.generate(prompt_of(9), greedy(50))
    async for _ in stream:
        break
    assert answer_of(await last_of(stream)) == s.alone(prompt_of(9), greedy(50))
    await s.check_clean()


async def test_a_stream_in_a_cycle_is_aborted_by_the_garbage_collector(s):
    holder = {"stream": s.engine.generate(prompt_of(9), ENDLESS)}
    holder["self"] = holder
    await anext(holder["stream"])
    del holder
    gc.collect()
    await check_gone(s)


async def test_the_last_reference_may_go_in_another_thread(s):
    streams = [s.engine.generate(prompt_of(9), ENDLESS)]
    await anext(streams[0])
    thread = threading.Thread(target=streams.clear)
    thread.start()
    thread.join()
    await check_gone(s)


async def test_cancelling_whoever_waits_aborts(s):
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    waiting = asyncio.ensure_future(anext(stream))
    await s.gate.arrival()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    s.gate.open()
    await check_gone(s)
    assert await read_all(stream) == [], "a stream that was left has ended"


async def test_a_timeout_aborts(s):
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    s.gate.open()
    await check_gone(s)


async def test_closing_twice_and_reading_after_that_is_harmless(s):
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await check_gone(s)


async def test_closing_wakes_whoever_waits(s):
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), ENDLESS)
    reading = asyncio.ensure_future(read_all(stream))
    await s.gate.arrival()
    await stream.aclose()
    assert await reading == []
    s.gate.open()
    await check_gone(s)


@pytest.mark.parametrize("fails", [False, True])
async def test_leaving_the_context_aborts_and_passes_errors_on(s, fails):
    async def use():
        async with stream:
            await anext(stream)
            if fails:
                raise LookupError("the caller's own")

    stream = s.engine.generate(prompt_of(9), ENDLESS)
    with pytest.raises(LookupError) if fails else nullcontext():
        await use()
    assert await read_all(stream) == []
    await check_gone(s)


async def test_a_finished_stream_may_be_closed_dropped_and_read_again(s):
    stream = s.engine.generate(prompt_of(9), greedy())
    await read_all(stream)
    assert await read_all(stream) == []
    await stream.aclose()
    del stream
    await s.check_clean()


# ---- two readers --------------------------------------------------------------------------------


async def test_two_tasks_that_wait_on_one_stream_are_told_apart(s):
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), greedy(), "shared")
    first = asyncio.ensure_future(last_of(stream))
    await s.gate.arrival()
    with pytest.raises(RuntimeError, match="shared: two tasks iterate over one stream"):
        await anext(stream)
    s.gate.open()
    assert answer_of(await first) == s.alone(prompt_of(9)), "the one that waited is not disturbed"
    await s.check_clean()


async def test_a_stream_may_be_begun_in_one_task_and_finished_in_another(s):
    stream = s.engine.generate(prompt_of(9), greedy(30))
    await asyncio.create_task(anext(stream))
    assert answer_of(await asyncio.create_task(last_of(stream))) == s.alone(prompt_of(9), greedy(30))
    await s.check_clean()


# ---- what comes out -----------------------------------------------------------------------------


async def step_by_step(s, **params):
    """All outputs of a request whose reader takes each before the next step runs."""
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), greedy(6, **params))
    outputs = []
    for _ in range(6):
        await s.gate.step()
        outputs.append(await anext(stream))
    s.gate.open()
    assert await read_all(stream) == []
    return outputs


async def test_cumulative_outputs_hold_everything_so_far(stage):
    s = await stage(max_steps_in_flight=1)
    outputs = await step_by_step(s)
    expected = s.alone(prompt_of(9), greedy(6))
    assert [output.outputs[0].token_ids for output in outputs] == [expected.token_ids[: n + 1] for n in range(6)]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert answer_of(outputs[-1]) == expected
    await s.check_clean()


async def test_deltas_hold_only_what_is_new(stage):
    s = await stage(max_steps_in_flight=1)
    outputs = await step_by_step(s, output_kind="delta")
    expected = s.alone(prompt_of(9), greedy(6))
    assert [output.outputs[0].token_ids for output in outputs] == [[token] for token in expected.token_ids]
    assert "".join(output.outputs[0].text for output in outputs) == expected.text
    assert outputs[-1].outputs[0].finish_reason == "length"
    await s.check_clean()


async def test_final_only_gives_one_output(s):
    outputs = await read_all(s.engine.generate(prompt_of(9), greedy(6, output_kind="final_only")))
    assert [answer_of(output) for output in outputs] == [s.alone(prompt_of(9), greedy(6))]
    await s.check_clean()


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_a_reader_that_comes_late_finds_everything_merged_in_one(s, kind):
    stream = s.engine.generate(prompt_of(9), greedy(40, output_kind=kind))
    await until(lambda: not len(s.engine._company.dispatcher))
    outputs = await read_all(stream)
    assert [answer_of(output) for output in outputs] == [s.alone(prompt_of(9), greedy(40))]
    await s.check_clean()


async def test_a_reader_that_pauses_now_and_then_loses_nothing(s):
    stream = s.engine.generate(prompt_of(9), greedy(100, output_kind="delta"))
    outputs = []
    async for output in stream:
        outputs.append(output)
        for _ in range(len(outputs) * 7 % 23):
            await asyncio.sleep(0)
    expected = s.alone(prompt_of(9), greedy(100))
    assert list(itertools.chain(*(output.outputs[0].token_ids for output in outputs))) == expected.token_ids
    assert "".join(output.outputs[0].text for output in outputs) == expected.text
    await s.check_clean()


async def test_outputs_are_the_readers_own(s):
    stream = s.engine.generate(prompt_of(9), greedy(10))
    async for output in stream:
        seen = list(output.outputs[0].token_ids)
        output.outputs[0].token_ids.clear()
    assert seen == s.alone(prompt_of(9), greedy(10)).token_ids
    await s.check_clean()


async def test_the_prompt_is_read_as_it_was_at_the_call(s):
    prompt, messages = prompt_of(9), [{"role": "user", "content": "hi"}]
    streams = [s.engine.generate(prompt, greedy()), s.engine.generate(messages, greedy())]
    prompt.append(5)
    messages.append({"role": "nobody"})
    outputs = [await last_of(stream) for stream in streams]
    assert outputs[0].prompt_token_ids == prompt_of(9)
    assert "nobody" not in outputs[1].prompt
    await s.check_clean()


async def test_an_output_says_what_the_prompt_became(s):
    outputs = [await s.ask(prompt) for prompt in ("hello", [5, 6, 7], [{"role": "user", "content": "hi"}])]
    assert [output.prompt for output in outputs] == [
        "hello",
        None,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    decoded = s.engine.tokenizer.decode(outputs[0].prompt_token_ids)
    assert decoded == "hello"
    await s.check_clean()


async def test_any_unicode_goes_in_and_labels_come_back(s):
    label = "naïve 日本 😀 \x00 \ud800"
    output = await s.ask("😀 日本語 cre\u0300me \x00 \u202e", request_id=label)
    assert (output.request_id, output.prompt) == (label, "😀 日本語 cre\u0300me \x00 \u202e")
    assert s.engine.generate("x", request_id="mine").request_id == "mine"
    own = s.engine.generate("x"), s.engine.generate("x")
    assert own[0].request_id != own[1].request_id
    del own
    await check_gone(s)


async def test_metrics_are_in_order_and_never_go_back(s):
    outputs = await asyncio.gather(*(read_all(s.engine.generate(prompt_of(9, n), greedy(12))) for n in range(5)))
    for streamed in outputs:
        first, last = streamed[0].metrics, streamed[-1].metrics
        times = [last.arrival, last.queued, last.first_scheduled, last.first_token, last.last_token, last.finished]
        assert times == sorted(times)
        assert (first.arrival, first.first_token) == (last.arrival, last.first_token)
        assert last.num_preemptions == 0
    await s.check_clean()


async def test_a_stream_needs_the_engines_own_loop(s):
    errors = []

    def elsewhere():
        for call in (lambda: s.engine.generate("x"), lambda: asyncio.run(on_another_loop())):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    async def on_another_loop():
        s.engine.generate("x")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert len(errors) == 2
    assert "event loop" in errors[0]
    assert "engine's own event loop" in errors[1]
    await s.check_clean()


async def test_parameters_of_another_type_are_refused_at_the_call(s):
    for wrong in ({"max_tokens": 5}, 5, SamplingParams):
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            s.engine.generate("x", wrong)
    for wrong in (5, [1], b"label", object()):
        with pytest.raises(ValueError, match="request_id must be text"):
            s.engine.generate("x", request_id=wrong)
    async with asyncio.timeout(PATIENCE_S):
        assert answer_of(await s.ask(prompt_of(5))) == s.alone(prompt_of(5))
    await s.check_clean()
