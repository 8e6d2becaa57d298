"""14. A strictly higher priority does not wait for a slot; an equal one does; and the lowest is passed only so often."""

from __future__ import annotations

import asyncio

import pytest

from repertory.actors.scheduling.ageing import MOST_PASSED
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, until

SETTINGS = {"scheduling_policy": "priority", "block_size": 4, "num_device_blocks": 400}
LOW_TOKENS = 200
FEW_STEPS = 4


def steps_of(s, seq_id: int) -> list[int]:
    """Numbers of the steps with a row of the request that came as number `seq_id`."""
    return [step_id for step_id, rows in s.device.steps for row_id, _, _ in rows if row_id == seq_id]


async def decoding(s, count: int, **generate) -> list[asyncio.Task]:
    """`count` requests of 200 tokens that have their first token."""
    streams = [s.engine.generate(prompt_of(6, seed), greedy(LOW_TOKENS), **generate) for seed in range(count)]
    for stream in streams:
        await anext(stream)
    return [asyncio.ensure_future(last_of(stream)) for stream in streams]


def preempted(log_lines) -> list[str]:
    return [line["request_id"] for line in log_lines if line["event"] == "scheduler.preempted"]


@pytest.mark.parametrize("seqs", [1, 2])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
async def test_a_higher_one_starts_within_a_few_steps_and_the_victim_resumes(stage, log_lines, seqs, steps_in_flight, mode):
    s = await stage(
        **SETTINGS, max_num_seqs=seqs, max_steps_in_flight=steps_in_flight, preemption_mode=mode, num_host_blocks=400
    )
    lows = await decoding(s, seqs, priority=5)
    core = s.engine._company.scheduler.core
    s.gate.shut()
    asking = s.begin(prompt_of(9, 50), greedy(7), priority=4)
    await until(lambda: core.num_live == seqs + 1)
    before = core.num_steps
    s.gate.open()
    high = await asking
    assert min(steps_of(s, seqs + 1)) <= before + FEW_STEPS
    assert answer_of(high) == s.alone(prompt_of(9, 50), greedy(7))
    assert not all(low.done() for low in lows), "it did not wait for them to end"
    outputs = [await low for low in lows]
    assert [answer_of(output) for output in outputs] == [s.alone(prompt_of(6, n), greedy(LOW_TOKENS)) for n in range(seqs)]
    assert [output.metrics.num_preemptions for output in outputs] == [0] * (seqs - 1) + [1]
    assert len(preempted(log_lines)) == 1
    await s.check_clean()


@pytest.mark.parametrize("seqs", [1, 2])
@pytest.mark.parametrize("priority", [5, 6])
async def test_an_equal_or_lower_one_waits_for_a_slot(stage, log_lines, seqs, priority):
    s = await stage(**SETTINGS, max_num_seqs=seqs)
    lows = await decoding(s, seqs, priority=5)
    late = await s.ask(prompt_of(9, 50), greedy(7), priority=priority)
    assert answer_of(late) == s.alone(prompt_of(9, 50), greedy(7))
    assert preempted(log_lines) == []
    # It begins when the first of them has had its last token.
    assert min(steps_of(s, seqs + 1)) > min(max(steps_of(s, seq_id)) for seq_id in range(1, seqs + 1))
    for low in lows:
        await low
    await s.check_clean()


async def test_of_several_the_lowest_that_runs_gives_way(stage, log_lines):
    s = await stage(**SETTINGS, max_num_seqs=2)
    (lowest,) = await decoding(s, 1, priority=9)
    middle = s.begin(prompt_of(7, 40), greedy(LOW_TOKENS), priority=5)
    high = await s.ask(prompt_of(9, 50), greedy(7), priority=0)
    assert high.metrics.num_preemptions == 0
    outputs = [await lowest, await middle]
    assert [output.metrics.num_preemptions for output in outputs] == [1, 0]
    assert answer_of(outputs[0]) == s.alone(prompt_of(6, 0), greedy(LOW_TOKENS))
    await s.check_clean()


@pytest.mark.parametrize("seqs", [1, 2])
async def test_under_unending_high_arrivals_the_low_one_ends_within_the_ageing_bound(stage, seqs):
    s = await stage(**SETTINGS, max_num_seqs=seqs)
    (low,) = await decoding(s, 1, priority=5)
    num_begun = 0

    async def client() -> None:
        """One after the other, without a pause, until the low one has ended."""
        nonlocal num_begun
        while not low.done():
            num_begun += 1
            assert num_begun < 1000, "the low one is starved"
            await s.ask(prompt_of(6, 10 + num_begun % 80), greedy(4), priority=0)

    await asyncio.gather(*(client() for _ in range(2 * seqs + 1)))
    assert answer_of(await low) == s.alone(prompt_of(6, 0), greedy(LOW_TOKENS))
    rows = set(steps_of(s, 1))
    begun: dict[int, int] = {}
    for step_id, step_rows in s.device.steps:
        for row_id, _, _ in step_rows:
            begun.setdefault(row_id, step_id)
    passing = [row_id for row_id, step_id in begun.items() if step_id < max(rows) and step_id not in rows]
    assert 1 <= len(passing) <= MOST_PASSED + seqs, "as many as may pass it, and those that ran beside it"
    assert 1 <= (await low).metrics.num_preemptions <= len(passing), "it may come back between two of them"
    await s.check_clean()
