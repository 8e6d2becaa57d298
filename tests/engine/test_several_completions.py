"""`n` completions of one prompt, in every kind of output, each with its own end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from repertory import RequestOutput, RequestStream, SamplingParams, ValidationError
from repertory.actors.text.detokenizer_core import DetokenizerCore
from repertory.protocol.sampling import MAX_N
from repertory.tests.engine.stage import PATIENCE_S, greedy, last_of, prompt_of, read_all, seeded, until


def alone(s: Any, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], str]]:
    """What each sequence gives by itself: its stream is that of its index."""
    found = []
    for index in range(params.n):
        token_ids = s.device.reference(prompt, params, params.max_tokens, index=index)
        found.append((token_ids, s.decode(prompt, token_ids)))
    return found


def given(output: RequestOutput) -> list[tuple[list[int], str]]:
    return [(completion.token_ids, completion.text) for completion in output.outputs]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
async def test_every_kind_of_output_has_all_of_them_in_order(stage: Any, kind: str) -> None:
    s = await stage(block_size=4)
    params = seeded(5, 20, n=4, output_kind=kind)
    outputs = await read_all(s.engine.generate(prompt_of(9), params))
    assert all([completion.index for completion in output.outputs] == [0, 1, 2, 3] for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind == "final_only":
        assert len(outputs) == 1
    if kind == "delta":
        joined = [([], "")] * 4
        for output in outputs:
            joined = [(ids + more, text + new) for (ids, text), (more, new) in zip(joined, given(output), strict=True)]
    else:
        joined = given(outputs[-1])
    assert joined == alone(s, prompt_of(9), params)
    assert outputs[-1].num_cached_tokens == 0
    assert outputs[-1].metrics.finished is not None
    await s.check_clean()


async def test_greedy_ones_are_equal(stage: Any) -> None:
    s = await stage(block_size=4)
    output = await s.ask(prompt_of(9), greedy(8, n=3))
    assert given(output) == [given(output)[0]] * 3
    await s.check_clean()


async def test_those_that_end_early_keep_their_ends_while_the_others_go_on(stage: Any) -> None:
    s = await stage(block_size=4)
    params = seeded(5, 40, n=4)
    texts = [text for _, text in alone(s, prompt_of(9), params)]
    pieces = (texts[2][place : place + 3] for place in range(3, len(texts[2]) - 3))
    stop = next(piece for piece in pieces if not any(piece in texts[index] for index in (0, 1, 3)))
    cut = texts[2][: texts[2].index(stop)]
    outputs = await read_all(s.engine.generate(prompt_of(9), seeded(5, 40, n=4, stop=stop)))
    last = outputs[-1].outputs
    assert [(one.finish_reason, one.stop_reason) for one in last] == [("length", None)] * 2 + [("stop", stop), ("length", None)]
    assert last[2].text == cut
    assert [last[index].text for index in (0, 1, 3)] == [texts[index] for index in (0, 1, 3)]
    ended = [output for output in outputs if output.outputs[2].finish_reason is not None]
    assert len(ended) > 5 and not ended[0].finished, "its end is told while the others go on"
    assert {output.outputs[2].text for output in ended} == {cut}
    await s.check_clean()


async def test_the_prompt_is_computed_once(stage: Any) -> None:
    s = await stage(block_size=16)
    await s.ask(prompt_of(30), seeded(1, 9, n=4))
    stats = await s.engine.stats()
    assert stats.num_computed_tokens == 30 + 3 + 4 * 8
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (30, 0)
    await s.check_clean()


async def test_a_small_pool_makes_them_preempt_each_other_and_changes_nothing(stage: Any) -> None:
    s = await stage(block_size=4, num_device_blocks=10)
    s.admit_carelessly()
    params = seeded(9, 24, n=4)
    output = await s.ask(prompt_of(9), params)
    assert given(output) == alone(s, prompt_of(9), params)
    assert output.metrics.num_preemptions > 0
    await s.check_clean()


async def test_a_slow_reader_of_several_gets_every_token(stage: Any) -> None:
    s = await stage(block_size=4, credit_window=3)
    params = seeded(9, 25, n=3)
    stream = s.engine.generate(prompt_of(9), params)
    core = s.engine._company.scheduler.core
    await until(lambda: len(core.queues.paused) == 3)
    assert given(await last_of(stream)) == alone(s, prompt_of(9), params)
    await s.check_clean()


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_dropping_the_stream_ends_all_of_them(stage: Any, num_outputs: int) -> None:
    s = await stage(block_size=4, max_num_seqs=2)
    stream: RequestStream | None = s.engine.generate(prompt_of(9), seeded(1, 2000, n=3))
    for _ in range(num_outputs):
        await anext(stream)
    stream = None
    await until(lambda: s.engine._company.scheduler.core.num_live == 0)
    await s.check_clean()


async def test_an_abort_while_they_wait_is_one_end_of_all(stage: Any) -> None:
    s = await stage(block_size=4, max_num_seqs=1)
    s.gate.shut()
    held = s.begin(prompt_of(5), greedy(3))
    await s.gate.arrival()
    stream = s.engine.generate(prompt_of(9), seeded(1, 9, n=3), "victim")
    await until(lambda: len(s.engine._company.scheduler.core.queues.waiting) == 3)
    await s.engine.abort("victim")
    (output,) = await read_all(stream)
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    s.gate.open()
    await held
    await s.check_clean()


async def test_one_that_turns_not_finite_fails_the_request_and_no_other(stage: Any) -> None:
    s = await stage(block_size=4)
    failing: set[int] = set()
    s.device.fail_rows = lambda step: failing & set(step.seq_ids)
    other = s.begin(prompt_of(9, 1), greedy(30))
    stream = s.engine.generate(prompt_of(9, 2), seeded(1, 200, n=3))
    await anext(stream)
    core = s.engine._company.scheduler.core
    failing |= {seq.seq_id for seq in core.queues.running if seq.index == 1}
    last = await last_of(stream)
    assert [completion.finish_reason for completion in last.outputs] == ["error"] * 3
    assert all("not finite" in str(completion.stop_reason) for completion in last.outputs)
    assert (await other).outputs[0].token_ids == s.alone(prompt_of(9, 1), greedy(30)).token_ids
    await s.check_clean()


async def test_they_are_refused_together(stage: Any) -> None:
    s = await stage(block_size=4)
    for n in (0, -1, MAX_N + 1, 10**6, 10**30, True, 1.5, "2", None):
        with pytest.raises(ValidationError) as caught:
            await s.ask(prompt_of(5), SamplingParams(n=n))
        assert caught.value.field == "n"
    assert s.device.steps == []
    output = await s.ask(prompt_of(5), greedy(2, n=MAX_N))
    assert len(output.outputs) == MAX_N
    await s.check_clean()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 20, 2))
async def test_a_detokenizer_that_crashes_is_not_noticed(
    stage: Any, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    s = await stage(block_size=4, max_num_seqs=4)
    params = [seeded(seed, 12 + seed, n=3) for seed in range(3)]
    stop = alone(s, prompt_of(9), params[0])[1][1][4:8]
    params[0] = seeded(0, 12, n=3, stop=stop)
    expected = [given(await s.ask(prompt_of(9), one)) for one in params]
    num_messages, really = 0, DetokenizerCore.on_tokens

    def on_tokens(core: DetokenizerCore, message: Any) -> Any:
        nonlocal num_messages
        num_messages += 1
        crashes = num_messages in (number, number + 3)
        if crashes and when == "before":
            raise RuntimeError("a bug")
        done = really(core, message)
        if crashes:
            raise RuntimeError("a bug")
        return done

    monkeypatch.setattr(DetokenizerCore, "on_tokens", on_tokens)
    terminals: Counter[int] = Counter()
    dispatch = s.engine._company.dispatcher.on_text_out
    s.engine._company.dispatcher.on_text_out = lambda message: (
        terminals.update(delta.request_id for delta in message.deltas if delta.is_terminal),
        dispatch(message),
    )
    async with asyncio.timeout(PATIENCE_S):
        outputs = await asyncio.gather(*(last_of(s.engine.generate(prompt_of(9), one)) for one in params))
    assert [given(output) for output in outputs] == expected
    assert sorted(terminals.values()) == [1, 1, 1]
    detokenizer = s.engine._company.detokenizer
    await s.check_clean()
    assert not detokenizer.told and not detokenizer._replayed
    assert len(s.engine._company.scheduler.core.telling.histories) == 0
