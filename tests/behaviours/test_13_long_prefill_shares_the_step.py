"""13. A long prompt takes its share of the steps: decodes go on in every one, short prompts do not wait for it."""

from __future__ import annotations

import asyncio

import pytest

from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, until

SIZES = {"block_size": 16, "num_device_blocks": 1600, "max_model_len": 14_000, "max_num_seqs": 8}
DECODER = prompt_of(4, 1)
SHORT = prompt_of(10, 2)


def rows_of(s, seq_id: int) -> dict[int, tuple[int, int]]:
    """The rows of the request that came as number `seq_id`: (start, count) by the number of their step."""
    return {step_id: (start, count) for step_id, rows in s.device.steps for row_id, start, count in rows if row_id == seq_id}


def first_token_step(rows: dict[int, tuple[int, int]], num_prompt_tokens: int) -> int:
    """The step that computes the prompt's last token, and samples the first of the output."""
    return next(step_id for step_id, (start, count) in rows.items() if start + count == num_prompt_tokens)


async def serve(s, long_length: int, *, decode_tokens: int) -> tuple[int, int]:
    """A decoding request, a long prompt, five steps later a short one. Checks all answers; returns
    how many steps the short one's first token took, and how many the long prompt did."""
    long = prompt_of(long_length, 3)
    decoder_stream = s.engine.generate(DECODER, greedy(decode_tokens))
    await anext(decoder_stream)
    s.gate.shut()
    decoding = asyncio.ensure_future(last_of(decoder_stream))
    prefilling = s.begin(long, greedy(2))
    while not any(new.num_prompt_tokens == long_length for new in (await s.gate.arrival()).admitted):
        s.gate.let_through()
    for _ in range(5):
        s.gate.let_through()
        await s.gate.arrival()
    core = s.engine._company.scheduler.core
    before = core.num_steps
    answering = s.begin(SHORT, greedy(2))
    queues = core.queues
    await until(lambda: any(seq.num_prompt_tokens == len(SHORT) for seq in (*queues.waiting, *queues.running)))
    s.gate.open()
    outputs = [await task for task in (decoding, prefilling, answering)]
    assert [answer_of(output) for output in outputs] == [
        s.alone(DECODER, greedy(decode_tokens)),
        s.alone(long, greedy(2)),
        s.alone(SHORT, greedy(2)),
    ]
    decoder_rows, long_rows, short_rows = (rows_of(s, seq_id) for seq_id in (1, 2, 3))
    short_steps = first_token_step(short_rows, len(SHORT)) - before
    long_steps = first_token_step(long_rows, long_length) - min(long_rows) + 1
    assert list(decoder_rows) == list(range(min(decoder_rows), max(decoder_rows) + 1)), "a token in every step"
    assert all(count >= 1 for _, rows in s.device.steps for _, _, count in rows), "no chunk is empty"
    return short_steps, long_steps


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_the_wait_of_a_short_prompt_does_not_depend_on_the_long_one(stage, steps_in_flight):
    waits = []
    for long_length in (3_200, 6_400):
        s = await stage(**SIZES, max_num_batched_tokens=64, max_steps_in_flight=steps_in_flight)
        short_steps, long_steps = await serve(s, long_length, decode_tokens=300)
        assert long_steps <= 2 * long_length / 62, "half of each step at least"
        waits.append(short_steps)
        await s.check_clean()
    assert max(waits) <= 2 + steps_in_flight


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
async def test_answers_do_not_depend_on_the_chunk(stage, chunk):
    s = await stage(**SIZES, max_num_batched_tokens=chunk)
    short_steps, _ = await serve(s, 300, decode_tokens=200)
    # Two prefills share what the decodes leave, which is one token at least: every other step has one of the short's.
    assert short_steps <= 2 * len(SHORT) + 4
    await s.check_clean()


async def test_a_chunk_smaller_than_the_number_of_running_requests_starves_nobody(stage):
    s = await stage(**SIZES, max_num_batched_tokens=3)
    requests = [(prompt_of(20 + seed, seed), greedy(12)) for seed in range(12)]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    await s.check_clean()


@pytest.mark.parametrize(("chunk", "long_length"), [(64, 1_600), (6, 150)])
async def test_a_steady_flow_of_short_prompts_does_not_hold_up_the_long_one(stage, chunk, long_length):
    s = await stage(**SIZES, max_num_batched_tokens=chunk)
    requests = [(prompt_of(long_length, 3), greedy(1)), *((prompt_of(10, number), greedy(4)) for number in range(4, 90))]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    rows = rows_of(s, 2)  # the first that came held the device
    first = first_token_step(rows, long_length)
    # Seven more run beside it: what their decodes leave of a step is shared, and it gets half or more.
    assert first - min(rows) <= 2 * long_length / max(2, chunk - 7) + 10
    assert max(step_id for step_id, _ in s.device.steps) > first, "the flow ran dry: nothing was tested"
    await s.check_clean()


async def test_without_chunking_a_prompt_runs_whole_beside_the_decodes(stage):
    s = await stage(**SIZES, max_num_batched_tokens=64, enable_chunked_prefill=False)
    decoding = s.begin(DECODER, greedy(60))
    long = s.begin(prompt_of(900, 3), greedy(2))
    short = s.begin(SHORT, greedy(2))
    assert answer_of(await long) == s.alone(prompt_of(900, 3), greedy(2))
    assert answer_of(await short) == s.alone(SHORT, greedy(2))
    assert answer_of(await decoding) == s.alone(DECODER, greedy(60))
    assert (0, 900) in rows_of(s, 2).values()
    await s.check_clean()
