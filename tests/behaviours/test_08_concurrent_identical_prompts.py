"""8. Equal prompts that start together all answer as alone, and what they share is counted once."""

from __future__ import annotations

import asyncio

import pytest

from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, read_all, seeded

FOUR = [seeded(seed, 12) for seed in range(4)]


@pytest.mark.parametrize("length", [8, 9, 12, 14])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_four_equal_prompts_with_different_seeds_answer_as_alone(stage, length, steps_in_flight):
    s = await stage(block_size=4, max_steps_in_flight=steps_in_flight)
    prompt = prompt_of(length)
    outputs = await s.ask_all([(prompt, one) for one in FOUR])
    assert [answer_of(output) for output in outputs] == [s.alone(prompt, one) for one in FOUR]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4, "the continuations diverge"
    await s.check_clean()


async def test_shared_blocks_are_counted_once_in_every_total(stage):
    s = await stage(block_size=4)
    streams = await s.submit_together([(prompt_of(9), one) for one in FOUR])
    readers = [asyncio.ensure_future(read_all(stream)) for stream in streams]
    running = s.engine._company.scheduler.core.queues.running
    most = 0
    while not all(reader.done() for reader in readers):
        s.gate.let_through()
        await asyncio.sleep(0.001)  # the device's thread gets the interpreter
        assert await s.engine.audit() == []
        stats = await s.engine.stats()
        blocks = stats.device_blocks
        assert blocks.free + blocks.cached + blocks.referenced == blocks.total
        if stats.num_running == 4 and all(len(seq.holding.block_table) >= 3 for seq in running):
            most = max(most, blocks.referenced)
            own = sum(len(seq.holding.block_table) - 2 for seq in running)
            assert blocks.referenced <= 2 + own, "the two full blocks of the prompt are everybody's"
    assert most >= 6, "the four have never been seen together"
    s.gate.open()
    await s.check_clean()


@pytest.mark.parametrize("leaver", [0, 1, 3])
async def test_one_of_them_leaving_takes_nothing_from_the_others(stage, leaver):
    s = await stage(block_size=4, num_device_blocks=24, max_steps_in_flight=1)
    prompt = prompt_of(9)
    streams = await s.submit_together([(prompt, one) for one in FOUR])
    readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
    for _ in range(2):
        await s.gate.step()
    await s.gate.arrival()
    await streams[leaver].aclose()
    # Whoever comes now gets the blocks that the leaver gave back.
    newcomer = s.begin(prompt_of(9, 5), greedy(8))
    s.gate.open()
    answers = await asyncio.gather(*readers, return_exceptions=True)
    del answers[leaver]
    assert [answer_of(answer) for answer in answers] == [s.alone(prompt, one) for i, one in enumerate(FOUR) if i != leaver]
    assert answer_of(await newcomer) == s.alone(prompt_of(9, 5), greedy(8))
    await s.check_clean()


async def test_prompts_with_a_common_part_split_what_another_runs_on(stage):
    s = await stage(block_size=4)
    stem = prompt_of(16)
    requests = [(stem[:end] + prompt_of(6, seed), seeded(seed, 10)) for seed, end in enumerate((16, 12, 8, 4, 15, 11))]
    outputs = await s.ask_all([*requests, *requests])
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests] * 2
    await s.check_clean()
