"""23. The client's id is a label: it may repeat, and an abort reaches those that have it now, never a later one."""

from __future__ import annotations

import asyncio

from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, read_all


async def test_two_requests_with_one_id_both_complete_on_their_own(stage):
    s = await stage(block_size=4)
    first = s.begin(prompt_of(9, 1), greedy(20), request_id="same")
    second = s.begin(prompt_of(11, 2), greedy(15), request_id="same")
    outputs = [await first, await second]
    assert answer_of(outputs[0]) == s.alone(prompt_of(9, 1), greedy(20))
    assert answer_of(outputs[1]) == s.alone(prompt_of(11, 2), greedy(15))
    assert [output.request_id for output in outputs] == ["same", "same"]
    await s.check_clean()


async def test_equal_requests_with_one_id_do_not_share_a_stream(stage):
    s = await stage(block_size=4)
    streams = [s.engine.generate(prompt_of(9), greedy(10, output_kind="delta"), "same") for _ in range(3)]
    for outputs in await asyncio.gather(*map(read_all, streams)):
        token_ids = [token for output in outputs for token in output.outputs[0].token_ids]
        assert token_ids == s.alone(prompt_of(9), greedy(10)).token_ids
    await s.check_clean()


async def test_an_abort_followed_at_once_by_a_request_with_the_same_id_leaves_the_new_one_alone(stage):
    s = await stage(block_size=4)
    for _ in range(5):
        old = s.engine.generate(prompt_of(9, 1), greedy(200), "same")
        await anext(old)
        await s.engine.abort("same")
        new = s.engine.generate(prompt_of(9, 2), greedy(10), "same")
        assert (await last_of(old)).outputs[0].finish_reason == "abort"
        assert answer_of(await last_of(new)) == s.alone(prompt_of(9, 2), greedy(10))
    await s.check_clean()


async def test_a_stream_dropped_late_does_not_reach_a_newer_request(stage):
    s = await stage(block_size=4)
    old = s.engine.generate(prompt_of(9, 1), greedy(3), "same")
    await last_of(old)
    new = s.engine.generate(prompt_of(9, 2), greedy(10), "same")
    await anext(new)
    await old.aclose()
    del old
    assert answer_of(await last_of(new)) == s.alone(prompt_of(9, 2), greedy(10))
    await s.check_clean()


async def test_an_abort_ends_all_that_have_the_id_now(stage):
    s = await stage(block_size=4)
    same = [s.engine.generate(prompt_of(9, seed), greedy(200), "same") for seed in range(3)]
    other = s.begin(prompt_of(9, 5), greedy(30), request_id="other")
    await anext(same[0])
    await s.engine.abort("same")
    assert {(await last_of(stream)).outputs[0].finish_reason for stream in same} == {"abort"}
    assert answer_of(await other) == s.alone(prompt_of(9, 5), greedy(30))
    stats = await s.engine.stats()
    assert min(stats.num_running, stats.num_waiting, stats.num_preempted) >= 0
    await s.check_clean()
