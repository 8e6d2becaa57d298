"""Statistics and reports: every number counts what it says, once."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.reports import Finished, Preempted

from .world import World


def test_a_snapshot_accounts_for_every_request_and_every_block() -> None:
    world = World(blocks=20, max_num_seqs=2)
    for number in range(3):
        world.submit([number] * 9, max_tokens=4)
    world.step()
    stats = world.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (2, 1, 0)
    blocks = stats.device_blocks
    assert (blocks.total, blocks.cached, blocks.referenced) == (20, 0, 6)
    assert blocks.free + blocks.cached + blocks.referenced == blocks.total
    assert (stats.num_steps, stats.num_computed_tokens) == (1, 18)
    world.run()
    stats = world.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
    assert stats.device_blocks.referenced == 0


def test_queries_and_hits_count_a_request_once_however_often_it_looks_up() -> None:
    world = World(blocks=8, max_num_batched_tokens=3)
    world.without_reserve()
    for number in range(4):
        world.submit([number] * 9, max_tokens=12)
    world.run()
    stats = world.core.stats()
    assert sum(stats.num_preemptions.values()) > 0
    assert stats.prefix_cache_queries == 4 * 9
    assert stats.prefix_cache_hits == 0, "what a request finds of its own after a preemption is no hit"
    assert all(opening.num_cached_tokens == 0 for opening in world.opens.values())
    world.check_outputs()


def test_what_is_found_between_chunks_counts_as_a_hit_too() -> None:
    world = World(max_num_batched_tokens=8)
    prompt = list(range(32))
    first, second = world.submit([*prompt, 100], max_tokens=1), world.submit([*prompt, 101], max_tokens=1)
    world.run()
    stats = world.core.stats()
    assert stats.prefix_cache_queries == 66
    assert stats.prefix_cache_hits == sum(world.opens[request].num_cached_tokens for request in (first, second))
    assert stats.prefix_cache_hits + stats.num_computed_tokens == 66


def test_an_account_of_a_request_adds_up() -> None:
    world = World(max_num_seqs=1, max_num_batched_tokens=4, step_s=0.5)
    world.submit([1] * 4, max_tokens=3)
    world.step()
    request = world.submit([2] * 9, max_tokens=4)  # queued at 0.5
    world.run()
    [account] = [report for report in world.reports if isinstance(report, Finished) and report.request_id == request]
    assert account.label == f"request {request}"
    assert account.finish_reason == "length"
    assert account.queue_s == pytest.approx(1.0)  # two more tokens of the first
    assert account.prefill_s == pytest.approx(1.5)  # 4 + 4 + 1 tokens
    assert account.decode_s == pytest.approx(1.5)
    assert account.ttft_s == pytest.approx(2.5)
    assert account.e2e_s == pytest.approx(4.0)
    assert (account.num_prompt_tokens, account.num_output_tokens, account.num_chunks) == (9, 4, 3)
    assert (account.num_cached_tokens, account.num_preemptions, account.problem) == (0, 0, None)


def test_an_account_of_a_request_that_never_ran_has_no_times_but_its_own() -> None:
    world = World(max_num_seqs=1)
    world.submit([1], max_tokens=50)
    world.step()
    waiting = world.submit([2])
    world.step()
    world.abort(waiting)
    [account] = [report for report in world.reports if isinstance(report, Finished)]
    assert (account.queue_s, account.prefill_s, account.decode_s, account.ttft_s) == (None, None, None, None)
    assert account.e2e_s == pytest.approx(world.step_s)
    assert account.finish_reason == "abort"


def test_a_report_of_a_preemption_says_what_it_freed() -> None:
    world = World(blocks=4)
    world.without_reserve()
    world.submit([1] * 4, max_tokens=12)
    victim = world.submit([2] * 4, max_tokens=12)
    while not world.preempted():
        world.step()
    [report] = [report for report in world.reports if isinstance(report, Preempted)]
    assert (report.request_id, report.mode, report.num_preemptions) == (victim, "recompute", 1)
    assert report.num_tokens == 4 + len(world.tokens[victim])
    assert report.num_freed_blocks == 2
    world.run()
    assert world.ends[victim].num_preemptions >= 1


def test_first_token_time_is_that_of_the_first_delivery_however_often_it_is_preempted() -> None:
    world = World(blocks=5)
    world.without_reserve()
    world.submit([1] * 4, max_tokens=14)
    world.submit([2] * 4, max_tokens=14)
    world.run()
    accounts = {report.request_id: report for report in world.reports if isinstance(report, Finished)}
    assert accounts[2].num_preemptions > 0
    assert accounts[2].ttft_s == pytest.approx(world.step_s)


def test_an_open_comes_with_the_end_of_the_prompt_and_its_times() -> None:
    world = World()
    world.now = 3.0
    request = world.submit(list(range(100)), max_tokens=1)
    world.run()
    opening = world.opens[request]
    assert opening.prompt_tail == list(range(100))[-len(opening.prompt_tail) :]
    assert 0 < len(opening.prompt_tail) < 100
    assert (opening.num_prompt_tokens, opening.num_cached_tokens) == (100, 0)
    assert (opening.queued_s, opening.first_scheduled_s) == (3.0, 3.0)
