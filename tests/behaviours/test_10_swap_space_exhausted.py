"""10. When the host has no room for what memory pressure sends there, it is computed again, and nobody notices."""

from __future__ import annotations

import pytest

from repertory.tests.engine.stage import greedy, prompt_of, seeded

REQUESTS = [
    (prompt_of(6, 1), greedy(18)),
    (prompt_of(5, 2), seeded(3, 7)),
    (prompt_of(7, 3), seeded(4, 13, n=2)),
    (prompt_of(9, 4), greedy(7)),
]
"""Of 6, 3, 5 and 4 blocks of 4 tokens."""


def token_ids(output):
    return [completion.token_ids for completion in output.outputs]


def alone(s, request):
    prompt, params = request
    return [s.device.reference(prompt, params, params.max_tokens, index=index) for index in range(params.n)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "auto", "heuristic"])
@pytest.mark.parametrize("num_host_blocks", [2, 0])
async def test_what_does_not_fit_is_recomputed_and_counted(stage, log_lines, num_host_blocks, mode, in_flight):
    s = await stage(
        block_size=4,
        num_device_blocks=8,
        num_host_blocks=num_host_blocks,
        preemption_mode=mode,
        max_steps_in_flight=in_flight,
    )
    s.admit_carelessly()
    outputs = await s.ask_all(REQUESTS)
    assert [token_ids(output) for output in outputs] == [alone(s, request) for request in REQUESTS]
    assert all(completion.finish_reason == "length" for output in outputs for completion in output.outputs)
    stats = await s.engine.stats()
    assert sum(stats.num_preemptions.values()) > 0
    reasons = [line["reason"] for line in log_lines if line["event"] == "scheduler.preempted"]
    assert reasons.count("host full") == stats.num_swap_fallbacks
    if mode == "swap":
        assert stats.num_swap_fallbacks > 0
        assert stats.num_swap_fallbacks == stats.num_preemptions["recompute"] - reasons.count("nothing to swap")
    assert not [line for line in log_lines if line["log_level"] == "error"]
    await s.check_clean()


@pytest.mark.parametrize("num_host_blocks", [2, 20])
async def test_every_copy_may_fail_and_all_is_recomputed(stage, num_host_blocks):
    s = await stage(
        block_size=4,
        num_device_blocks=8,
        num_host_blocks=num_host_blocks,
        preemption_mode="swap",
        fail_copies=lambda copy: True,
    )
    s.admit_carelessly()
    outputs = await s.ask_all(REQUESTS)
    assert [token_ids(output) for output in outputs] == [alone(s, request) for request in REQUESTS]
    stats = await s.engine.stats()
    assert stats.num_failed_copies > 0
    assert stats.swap_out_bytes == stats.swap_in_bytes == 0
    await s.check_clean()
