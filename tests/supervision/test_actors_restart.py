"""A Tokenizer or Detokenizer that crashes is started again, and no reader notices."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from repertory import Engine, EngineDeadError
from repertory.actors.text.detokenizer_core import DetokenizerCore
from repertory.protocol.errors import ValidationError
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import TextOut
from repertory.tests.engine.stage import Answer, Stage, greedy, last_of, prompt_of, seeded, until

from .conftest import DEFAULTS, Hosts
from .crowd import Request, Result, alone, begin, crowd, results
from .faulty_host import Fault


class Bug(Exception):
    """What a test lets an actor crash with."""


class Crashes:
    """Makes the detokenizer's core raise at the messages of given numbers, before or after it has done its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Collection[int], *, when: str = "before") -> None:
        self.num_messages = 0
        self.num_crashes = 0
        for name in ("on_tokens", "on_refused"):
            monkeypatch.setattr(DetokenizerCore, name, self._wrapped(getattr(DetokenizerCore, name), at, when))

    def _wrapped(self, really: Callable[..., Any], at: Collection[int], when: str) -> Callable[..., Any]:
        def method(core: DetokenizerCore, message: Any) -> Any:
            self.num_messages += 1
            crashes = self.num_messages in at
            if crashes and when == "before":
                self.num_crashes += 1
                raise Bug("before")
            done = really(core, message)
            if crashes:
                self.num_crashes += 1
                raise Bug("after")
            return done

        return method


class Terminals:
    """Counts the terminals that reach the frontend."""

    def __init__(self, engine: Engine) -> None:
        self.counts: Counter[RequestId] = Counter()
        dispatcher = engine._company.dispatcher
        really = dispatcher.on_text_out

        def on_text_out(message: TextOut) -> None:
            self.counts.update(delta.request_id for delta in message.deltas if delta.finish_reason is not None)
            really(message)

        dispatcher.on_text_out = on_text_out

    def check(self, count: int) -> None:
        """As many requests, each told once that it has ended."""
        assert len(self.counts) == count
        assert set(self.counts.values()) == {1}


async def expected_of(stage: Any, requests: Sequence[Request]) -> list[Result]:
    """What the requests give one after another on a stage of their own."""
    s = await stage(block_size=4, max_num_seqs=1, enable_prefix_caching=False)
    return [(await results(begin(s.engine, [request])))[0] for request in requests]


async def check_over(s: Stage) -> None:
    """Nothing is left, in any account."""
    await s.check_clean()
    detokenizer = s.engine._company.detokenizer
    assert not detokenizer.told and not len(detokenizer.core) and not detokenizer._asked and not detokenizer._replayed
    assert len(s.engine._company.scheduler.core.telling.histories) == 0


MOMENTS = [[1], [2], [3, 4], [3, 5], [7, 20, 33], [10, 11, 12, 13, 14], [1, 2, 3, 4, 5], [40], [45, 60]]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", MOMENTS, ids=str)
async def test_a_detokenizer_that_crashes_is_not_noticed_by_30_streams(
    stage: Any, monkeypatch: pytest.MonkeyPatch, at: list[int], when: str
) -> None:
    requests = crowd(30, max_tokens=20)
    expected = await expected_of(stage, requests)
    s = await stage(block_size=4, max_num_seqs=12, num_device_blocks=200)
    crashes, terminals = Crashes(monkeypatch, at, when=when), Terminals(s.engine)
    assert await results(begin(s.engine, requests)) == expected
    assert crashes.num_crashes == len(at)
    terminals.check(30)
    await check_over(s)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 26))
async def test_a_crash_at_any_message_of_a_short_run(
    stage: Any, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    requests = crowd(5, max_tokens=8, seed=7)
    expected = await expected_of(stage, requests)
    s = await stage(block_size=4, max_num_seqs=2)
    Crashes(monkeypatch, [number, number + 2], when=when)
    terminals = Terminals(s.engine)
    assert await results(begin(s.engine, requests)) == expected
    terminals.check(5)
    await check_over(s)


@pytest.mark.parametrize("number", range(1, 26))
async def test_a_crash_before_anything_was_written_down(stage: Any, number: int) -> None:
    requests = crowd(5, max_tokens=8, seed=7)
    expected = await expected_of(stage, requests)
    s = await stage(block_size=4, max_num_seqs=2)
    detokenizer, terminals, num_calls = s.engine._company.detokenizer, Terminals(s.engine), 0
    really = detokenizer._handle

    async def handle(message: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (number, number + 2):
            raise Bug("at once")
        await really(message)

    detokenizer._handle = handle
    assert await results(begin(s.engine, requests)) == expected
    terminals.check(5)
    await check_over(s)


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
async def test_every_kind_of_output_is_whole_after_a_crash(stage: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    s = await stage(block_size=4)
    Crashes(monkeypatch, [4, 9, 10])
    streams = [s.engine.generate(prompt_of(9, seed), seeded(seed, 20, output_kind=kind)) for seed in range(8)]

    async def read(stream: Any) -> Answer:
        text, token_ids, reason = "", [], None
        async for output in stream:
            completion = output.outputs[0]
            text = text + completion.text if kind == "delta" else completion.text
            token_ids = token_ids + completion.token_ids if kind == "delta" else completion.token_ids
            reason = completion.finish_reason
        return Answer(token_ids, text, reason)

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*map(read, streams))
    assert answers == [s.alone(prompt_of(9, seed), seeded(seed, 20)) for seed in range(8)]
    await check_over(s)


async def test_requests_aborted_around_a_crash_end_once(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage(block_size=4)
    crashes, terminals = Crashes(monkeypatch, [5, 6, 12], when="after"), Terminals(s.engine)
    streams = [s.engine.generate(prompt_of(9, seed), greedy(60), f"{seed}") for seed in range(12)]

    async def live(number: int) -> Any:
        reader = asyncio.ensure_future(last_of(streams[number]))
        if number % 2:
            await until(lambda: crashes.num_messages >= 4 + number)
            await s.engine.abort(f"{number}")
        return await reader

    outputs = await asyncio.gather(*map(live, range(12)))
    for number, output in enumerate(outputs):
        expected = s.alone(prompt_of(9, number), greedy(60))
        completion = output.outputs[0]
        assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
        assert completion.finish_reason in (("abort", "length") if number % 2 else ("length",))
        if completion.finish_reason == "length":
            assert completion.text == expected.text
    terminals.check(12)
    await check_over(s)


async def test_a_crash_while_readers_are_out_of_credit(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage(block_size=4, credit_window=3)
    Crashes(monkeypatch, [3, 8])
    streams = [s.engine.generate(prompt_of(9, seed), greedy(20)) for seed in range(4)]
    core = s.engine._company.scheduler.core
    await until(lambda: len(core.queues.paused) == 4)
    outputs = await asyncio.gather(*map(last_of, streams))
    assert [output.outputs[0].token_ids for output in outputs] == [
        s.alone(prompt_of(9, seed), greedy(20)).token_ids for seed in range(4)
    ]
    await check_over(s)


async def test_a_refusal_at_which_the_detokenizer_crashes_still_ends_its_request(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = await stage(block_size=4)
    terminals = Terminals(s.engine)
    Crashes(monkeypatch, [1])
    with pytest.raises(ValidationError, match="99999"):
        await last_of(s.engine.generate([99999]))
    terminals.check(1)
    await check_over(s)


async def test_histories_are_emptied_and_do_not_grow(stage: Any) -> None:
    s = await stage(block_size=4)
    core = s.engine._company.scheduler.core
    for _ in range(3):
        await results(begin(s.engine, crowd(10, max_tokens=6)))
        await check_over(s)
    assert len(core.telling.histories) == 0


async def test_six_crashes_within_a_minute_end_the_engine(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage(block_size=4)
    Crashes(monkeypatch, range(5, 11))
    streams = [s.engine.generate(prompt_of(9, seed), greedy(500)) for seed in range(3)]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="the detokenizer crashed 6 times in 60 s: Bug"):
            await last_of(stream)
    with pytest.raises(EngineDeadError):
        await s.engine.check_health()


async def test_what_is_no_exception_ends_the_engine_and_nobody_waits_for_ever(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def on_tokens(core: Any, message: Any) -> None:
        raise Panic("Rust")

    s = await stage(block_size=4)
    monkeypatch.setattr(DetokenizerCore, "on_tokens", on_tokens)
    with pytest.raises(EngineDeadError, match="Panic"):
        await last_of(s.engine.generate(prompt_of(9), greedy(500)))
    with pytest.raises(EngineDeadError):
        await s.engine.check_health()


# ---- the tokenizer --------------------------------------------------------------------------------


def crash_once(actor: Any, name: str, *, at: Collection[int], error: BaseException | None = None) -> None:
    """Let an actor's method or attribute's method raise at its calls of these numbers."""
    owner, _, method = name.rpartition(".")
    target = getattr(actor, owner) if owner else actor
    really, calls = getattr(target, method), iter(range(1, 1_000_000))

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in at:
            raise error or Bug(name)
        return really(*args, **kwargs)

    setattr(target, method, maybe)


@pytest.mark.parametrize("at", [[1], [2, 3], [5, 6, 7, 8, 9]], ids=str)
async def test_a_tokenizer_that_crashes_is_not_noticed_by_30_streams(stage: Any, at: list[int]) -> None:
    requests = crowd(30, max_tokens=12)
    expected = await expected_of(stage, requests)
    s = await stage(block_size=4, num_device_blocks=200)
    terminals = Terminals(s.engine)
    crash_once(s.engine._company.tokenizer, "_send_all", at=at)
    assert await results(begin(s.engine, requests)) == expected
    terminals.check(30)
    await check_over(s)


async def test_aborts_are_not_lost_with_a_tokenizer(stage: Any) -> None:
    s = await stage(block_size=4, credit_window=8)
    terminals = Terminals(s.engine)
    streams = [s.engine.generate(prompt_of(9, seed), greedy(3000), f"{seed}") for seed in range(4)]
    core = s.engine._company.scheduler.core
    await until(lambda: len(core.queues.paused) == 4)
    crash_once(s.engine._company.tokenizer, "_send_all", at=[1, 3])
    for number in range(4):
        await s.engine.abort(f"{number}")
    outputs = await asyncio.gather(*map(last_of, streams))
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    terminals.check(4)
    await check_over(s)


async def test_a_panic_while_a_prompt_is_read_fails_that_request_alone(stage: Any) -> None:
    class Panic(BaseException):
        pass

    s = await stage(block_size=4)
    crash_once(s.engine._company.resolver, "resolve", at=[2], error=Panic("in Rust"))
    tasks = [s.begin(prompt_of(9, seed), greedy(9)) for seed in range(5)]
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [end for end in ends if isinstance(end, BaseException) or end.outputs[0].finish_reason == "error"]
    assert len(failed) == 1
    reason = str(failed[0]) if isinstance(failed[0], BaseException) else str(failed[0].outputs[0].stop_reason)
    assert "Panic: in Rust" in reason
    await check_over(s)


async def test_both_crash_and_the_device_dies_under_the_same_requests(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = crowd(20, max_tokens=20)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open(
        "simulated", Fault("kill", "after", life=1, step=9), Fault("raise", life=2, step=4), max_num_seqs=8
    )
    crashes, terminals = Crashes(monkeypatch, [4, 9, 10, 15], when="after"), Terminals(engine)
    crash_once(engine._company.tokenizer, "_send_all", at=[3])
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 2
    assert crashes.num_crashes >= 3, "how many messages there are is the loop's affair"
    terminals.check(20)
    assert await engine.audit() == []
