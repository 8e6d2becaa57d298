"""A request that is wrong, or meets a fault on its way, ends alone. Nothing it brings holds up the loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from repertory import NeverFitsError, QueueFullError, RequestError, SamplingParams, ValidationError
from repertory.actors.mailbox import Mailbox
from repertory.actors.text.decode import TextDecoder
from repertory.actors.text.prompts import PromptReader
from repertory.actors.tokenizer import Tokenizer
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Abort, Admit, Submit, Tokenized
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, read_all, until

GOOD = [(prompt_of(9, seed), greedy(12)) for seed in range(3)]


async def beside_good_ones(s, bad):
    """Run `bad()` while three good requests are in flight; return what it returned. The good ones answer as alone."""
    s.gate.shut()
    good = [s.begin(*request) for request in GOOD]
    await s.gate.arrival()
    doing = asyncio.ensure_future(bad())
    for _ in range(20):
        await asyncio.sleep(0)
    s.gate.open()
    try:
        return await doing
    finally:
        assert [answer_of(await task) for task in good] == [s.alone(*request) for request in GOOD]
        await s.check_clean()


WRONG_INPUT = [
    [{"role": "user", "content": "a"}, 5],
    [{"role": "user"}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"content": "nobody"}],
    [{}],
    "\ud800",
    [5, "x"],
    {"role": "user"},
    b"bytes",
]


@pytest.mark.parametrize("prompt", WRONG_INPUT, ids=repr)
async def test_wrong_input_is_refused_alone(stage, prompt):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt))
    assert caught.value.field in ("prompt", "messages")


@pytest.mark.parametrize(
    "params",
    [{"n": 10**6}, {"max_tokens": 10**12}, {"stop": ["x"] * 100_000}, {"stop": "x" * 10**6}, {"logprobs": 21},
     {"top_p": float("nan")}, {"output_kind": "all"}, {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, {"seed": 2**70}],
    ids=lambda params: next(iter(params)),
)  # fmt: skip
async def test_wrong_parameters_are_refused_alone_by_name(stage, params):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), SamplingParams(**params)))
    assert caught.value.field == next(iter(params))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", ["priority", "tenant", "cache_salt"])
async def test_a_wrong_envelope_is_refused_alone_by_name(stage, field):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError) as caught:
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), **{field: object()}))
    assert caught.value.field == field


async def test_a_label_of_64_kb_is_refused_alone(stage):
    s = await stage(block_size=4)
    with pytest.raises(ValidationError, match="request_id"):
        await beside_good_ones(s, lambda: s.ask(prompt_of(5), request_id="x" * 65_536))


async def test_a_tokenizer_that_raises_fails_that_request_alone(stage, monkeypatch):
    s = await stage(block_size=4)
    read = PromptReader.read

    def read_or_raise(reader, prompt):
        if prompt == "boom":
            raise LookupError("the tokenizer has a bug")
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", read_or_raise)
    output = await beside_good_ones(s, lambda: s.ask("boom"))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.token_ids, output.finished) == ("error", [], True)
    assert "the tokenizer has a bug" in completion.stop_reason


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_a_detokenizer_that_raises_fails_that_request_alone(stage, monkeypatch, at, kind):
    s = await stage(block_size=4)
    bad = prompt_of(7, 9)
    token = s.alone(bad, greedy(20)).token_ids[at - 1]
    assert not any(token in s.alone(*request).token_ids for request in GOOD)
    step = TextDecoder.step

    def step_or_raise(decoder, token_id):
        if token_id == token:
            raise LookupError("the detokenizer has a bug")
        return step(decoder, token_id)

    monkeypatch.setattr(TextDecoder, "step", step_or_raise)
    output = await beside_good_ones(s, lambda: s.ask(bad, greedy(20, output_kind=kind)))
    completion = output.outputs[0]
    assert (completion.finish_reason, output.finished) == ("error", True)
    assert "the detokenizer has a bug" in completion.stop_reason


@pytest.mark.parametrize("step", ["first", "later"])
async def test_logits_that_are_not_finite_fail_that_request_alone(stage, step):
    s = await stage(block_size=4)
    bad = prompt_of(7, 9)
    ids = {}

    def rows_that_fail(message):
        ids.update({new.seq_id: new.num_prompt_tokens for new in message.admitted})
        starts = zip(message.seq_ids, message.starts, strict=True)
        return [seq_id for seq_id, start in starts if ids[seq_id] == len(bad) and (step == "first" or start > 9)]

    s.device.fail_rows = rows_that_fail
    outputs = await beside_good_ones(s, lambda: read_all(s.engine.generate(bad, greedy(20))))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    completion = outputs[-1].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("error", "the model's logits are not finite")
    assert completion.token_ids == s.alone(bad, greedy(20)).token_ids[: 0 if step == "first" else 4]


async def test_parameters_that_leave_no_token_fail_that_request_and_its_prompt_stays_cached(stage):
    s = await stage(block_size=4)
    prompt = prompt_of(13, 9)
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=[2], min_tokens=2, max_tokens=4)  # 2 is the model's end
    completion = (await last_of(s.engine.generate(prompt, nothing))).outputs[0]
    assert (completion.finish_reason, completion.token_ids) == ("error", [])
    assert "no token is left" in completion.stop_reason
    again = await last_of(s.engine.generate(prompt, greedy(2)))
    assert again.num_cached_tokens == 12


# ---- what is large ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 20_000_000,
        [{"role": "user", "content": "x" * 20_000_000}],
        [{"role": "user", "content": [{"type": "text", "text": "x" * 20_000_000}]}],
        [5] * 2_000_000,
        [{"role": "user", "content": "x"}] * 5_000,
    ],
    ids=["text", "chat", "chat in parts", "ids", "5,000 messages"],
)
async def test_a_huge_prompt_is_refused_and_the_loop_goes_on_meanwhile(stage, prompt, monkeypatch):
    s = await stage()
    await s.ask([{"role": "user", "content": "warm"}])
    gaps, read, readers = [], PromptReader.read, set()

    def watched_read(reader, prompt):
        readers.add(threading.current_thread())
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", watched_read)

    async def turn():
        before = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            gaps.append(now - before)
            before = now

    turning = asyncio.ensure_future(turn())
    running = s.begin(prompt_of(9), greedy(200))
    started = time.monotonic()
    with pytest.raises(NeverFitsError):
        await s.ask(prompt)
    assert time.monotonic() - started < 2
    turning.cancel()
    assert threading.current_thread() not in readers
    assert max(gaps) < 0.25, "a machine that does other things too: what is on the loop by mistake takes seconds"
    assert answer_of(await running) == s.alone(prompt_of(9), greedy(200))
    await s.check_clean()


async def test_a_short_prompt_does_not_wait_for_a_long_one(stage, monkeypatch):
    s = await stage()
    read = PromptReader.read
    running = asyncio.get_running_loop()
    done = asyncio.Event()

    def slow_read(reader, prompt):
        if len(prompt) > 40_000:
            asyncio.run_coroutine_threadsafe(done.wait(), running).result(3)
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", slow_read)
    long = s.engine.generate("x" * 50_000, greedy())
    await until(lambda: s.engine._company.tokenizer.num_reading == 1)
    assert answer_of(await s.ask(prompt_of(5))) == s.alone(prompt_of(5))
    done.set()
    with pytest.raises(RequestError):
        await last_of(long)
    await s.check_clean()


# ---- the tokenizer's own order ------------------------------------------------------------------


class OneToken:
    """Reads any prompt as one token."""

    def resolve(self, submit):
        admit = Admit(submit.request_id, submit.label, [5], submit.params, 0.0)
        return Tokenized(submit.request_id, None, [5]), admit


@pytest.mark.parametrize("full", ["frontend", "scheduler"])
async def test_an_abort_that_comes_while_the_tokenizer_waits_for_room_is_not_lost(full):
    boxes = {name: Mailbox(name, 1 if name == full else 8) for name in ("inbox", "scheduler", "detokenizer", "frontend")}
    filler = object()
    assert boxes[full].post_nowait(filler)
    actor = Tokenizer(OneToken(), **boxes)
    running = asyncio.ensure_future(actor.run())
    request = RequestId(1)
    boxes["inbox"].post_nowait(Submit(request, "a", "x", SamplingParams(), 0.0))
    waiting = boxes[full]._send
    await until(lambda: waiting.statistics().tasks_waiting_send == 1)
    boxes["inbox"].post_nowait(Abort(request))
    for _ in range(20):
        await asyncio.sleep(0)
    received = await boxes[full].take()
    for _ in range(20):
        await asyncio.sleep(0)
    received += await boxes[full].take(timeout_s=0)
    to_scheduler = received if full == "scheduler" else await boxes["scheduler"].take(timeout_s=0)
    to_scheduler = [message for message in to_scheduler if message is not filler]
    refused = await boxes["detokenizer"].take(timeout_s=0)
    if full == "frontend":
        assert to_scheduler == [], "it ended where it was"
        assert [message.request_id for message in refused] == [request]
    else:
        assert [type(message) for message in to_scheduler] == [Admit, Abort], "in this order"
        assert refused == []
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for box in boxes.values():
        box.close()


async def test_a_full_way_in_is_refused_and_nothing_is_posted_twice(stage):
    s = await stage()
    bound = s.engine._company.submissions.bound
    streams = [s.engine.generate(prompt_of(2), greedy(1)) for _ in range(bound + 1)]
    with pytest.raises(QueueFullError, match="on their way"):
        await anext(streams.pop())
    del streams
    await until(lambda: s.engine._company.is_idle)
    await s.check_clean()
