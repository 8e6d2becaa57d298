"""Prompts on their way to the scheduler: large ones hold nobody up, and none is lost or counted twice."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from repertory import NeverFitsError, QueueFullError, RequestError, SamplingParams
from repertory.actors.mailbox import Mailbox
from repertory.actors.text.prompts import PromptReader
from repertory.actors.tokenizer import Tokenizer
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Abort, Admit, Submit, Tokenized
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, until

pytestmark = pytest.mark.alone

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
    await until(lambda: boxes[full].num_senders == 1)
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
