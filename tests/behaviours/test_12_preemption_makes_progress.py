"""12. Requests that do not fit together all end, the oldest first, after a bounded number of preemptions."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from repertory.tests.engine.stage import answer_of, greedy, prompt_of

SETTINGS = [
    {},
    {"max_num_seqs": 1},
    {"max_num_batched_tokens": 1},
    {"max_steps_in_flight": 1},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority"},
    {"scheduling_policy": "longest-prefix"},
    {"scheduling_policy": "fair-share"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("is_careless", [False, True], ids=["with a reserve", "without one"])
async def test_all_end_as_alone_with_a_bounded_number_of_preemptions(stage, log_lines, count, settings, is_careless):
    s = await stage(block_size=4, num_device_blocks=10, **settings)
    if is_careless:
        s.admit_carelessly()
    # 24 tokens are six blocks: each fits into ten, no two do.
    requests = [(prompt_of(6, seed), greedy(18)) for seed in range(count)]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    preempted = [line for line in log_lines if line["event"] == "scheduler.preempted"]
    assert len(preempted) <= count * 6
    assert len(preempted) == sum(output.metrics.num_preemptions for output in outputs)
    if settings.get("max_num_seqs") == 1:
        assert not preempted
    assert outputs[0].metrics.num_preemptions == 0, "the oldest gives way to nobody"
    check_each_gained_between(preempted)
    await s.check_clean()


@pytest.mark.parametrize("num_host_blocks", [0, 3, 100])
@pytest.mark.parametrize("mode", ["auto", "recompute", "swap", "heuristic"])
@pytest.mark.parametrize("settings", [{}, {"max_steps_in_flight": 1}, {"enable_prefix_caching": False}], ids=str)
async def test_all_end_in_every_mode_with_any_host_pool(stage, log_lines, mode, num_host_blocks, settings):
    s = await stage(block_size=4, num_device_blocks=10, preemption_mode=mode, num_host_blocks=num_host_blocks, **settings)
    s.admit_carelessly()
    requests = [(prompt_of(6, seed), greedy(18)) for seed in range(5)]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    preempted = [line for line in log_lines if line["event"] == "scheduler.preempted"]
    assert 0 < len(preempted) <= 5 * 6
    stats = await s.engine.stats()
    assert sum(stats.num_preemptions.values()) == len(preempted)
    if mode == "recompute" or not num_host_blocks:
        assert stats.num_preemptions["swap"] == 0
    if not num_host_blocks:
        assert stats.swap_out_bytes == stats.swap_in_bytes == 0
    if mode == "swap" and num_host_blocks == 100:
        assert stats.num_preemptions["recompute"] == 0
    assert outputs[0].metrics.num_preemptions == 0, "the oldest gives way to nobody"
    check_each_gained_between(preempted)
    await s.check_clean()


def check_each_gained_between(preempted):
    """Whoever is preempted again has more tokens than the time before."""
    tokens = defaultdict(list)
    for line in preempted:
        tokens[line["request_id"]].append(line["num_tokens"])
    assert all(before < after for counts in tokens.values() for before, after in itertools.pairwise(counts))


async def test_they_end_in_the_order_of_their_arrival(stage):
    s = await stage(block_size=4, num_device_blocks=10)
    outputs = await s.ask_all([(prompt_of(6, seed), greedy(18)) for seed in range(6)])
    finished = [output.metrics.finished for output in outputs]
    assert finished == sorted(finished)
    await s.check_clean()


@pytest.mark.parametrize("lengths", [(39, 39), (36, 4), (4, 36), (20, 21, 3), (1, 1, 38)])
async def test_requests_of_any_size_that_fit_alone_end(stage, lengths):
    s = await stage(block_size=4, num_device_blocks=10)
    requests = [(prompt_of(length, seed), greedy(40 - length)) for seed, length in enumerate(lengths)]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    await s.check_clean()


async def test_blocks_of_two_steps_in_flight_are_never_promised_twice(stage):
    # One block beyond the prompts: each growth takes a block from somebody.
    s = await stage(block_size=1, num_device_blocks=12)
    requests = [(prompt_of(3, seed), greedy(9)) for seed in range(5)]
    outputs = await s.ask_all(requests)
    assert [answer_of(output) for output in outputs] == [s.alone(*request) for request in requests]
    await s.check_clean()
