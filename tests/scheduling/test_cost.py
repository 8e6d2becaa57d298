"""What preemption costs, and how it is decided: arithmetic on facts, with no engine near."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Literal, get_args

import pytest

from repertory.actors.scheduling.cost import (
    CALIBRATION_COPIES,
    GUESS_RATE,
    LEAST_RATE,
    LEAST_SHARE,
    MOST_RATE,
    PRIOR_SHARE,
    CostModel,
    Decision,
    Victim,
    per_block,
)
from repertory.actors.scheduling.step_time import Load, StepTimeModel, attended
from repertory.protocol.config import PreemptionMode
from repertory.protocol.ids import CopyId, Epoch
from repertory.protocol.messages import CopyDone

KIB = 1024
BLOCK_BYTES = 16 * 128 * KIB
"""Llama-3.1-8B in bfloat16: 128 KiB of KV a token, blocks of 16."""
TOKEN_S = 40e-6
"""And 40 us of prefill a token."""
BUDGET = 2048


def llama_seconds(load: Load) -> float:
    return 0.012 + TOKEN_S * load.num_prefill_tokens + 3e-10 * load.num_attended + 2e-5 * load.num_rows


def taught(num_steps: int = 200) -> StepTimeModel:
    """A step-time model that has seen prompts and decodes of various lengths."""
    model, rng = StepTimeModel(), random.Random(0)
    for _ in range(num_steps):
        count, start, rows = rng.choice((0, 64, 512, 1900)), rng.randrange(4000), rng.randrange(1, 100)
        load = Load(count, (attended(start, count) if count else 0) + rows * 900, rows)
        model.learn(load, llama_seconds(load) * rng.uniform(0.98, 1.02))
    return model


def costs(step_time: StepTimeModel | None = None) -> CostModel:
    return CostModel(step_time or taught(), block_bytes=BLOCK_BYTES, block_size=16, token_budget=BUDGET)


def copied(
    direction: Literal["out", "in"], num_bytes: int, seconds: float, *, ok: bool = True, waited_s: float = 0.0
) -> CopyDone:
    return CopyDone(Epoch(1), CopyId(1), direction, num_bytes, seconds, waited_s, ok)


def expose(cost: CostModel, share: float) -> None:
    """Let a second of copying each way be waited for in this share."""
    cost.on_copy_done(copied("out", 0, 1.0))
    cost.on_copy_done(copied("in", 0, 1.0))
    cost.on_fetch_waited(share)
    for _ in range(20):
        cost.on_step_waited(share / 20)


def victim(num_tokens: int = 4000, *, output: int = 1000, **facts: int) -> Victim:
    """A request whose full blocks are all lost on return, and none of which has a copy on the host."""
    tail = (num_tokens - 1) % 16 + 1
    blocks = num_tokens // 16 if tail < 16 else num_tokens // 16 - 1
    values = {
        "num_uncached_tokens": num_tokens,
        "num_tail_tokens": tail,
        "num_blocks_to_save": blocks,
        "num_blocks_to_fetch": blocks,
        "num_host_blocks": 10_000,
    }
    return Victim(num_tokens - output, output, **(values | facts))


# ---- rates ----------------------------------------------------------------------------------------


def test_before_anything_is_measured_the_rate_is_a_guess_and_the_first_copy_replaces_it() -> None:
    cost = costs()
    assert cost.rate("out") == cost.rate("in") == GUESS_RATE
    cost.on_copy_done(copied("out", 10**9, 0.05))
    assert cost.rate("out") == pytest.approx(20e9)
    assert cost.rate("in") == GUESS_RATE


def test_a_calibration_counts_as_some_copies_and_is_not_thrown_away_by_the_first() -> None:
    cost = costs()
    cost.calibrate(20e9, 10e9)
    assert (cost.rate("out"), cost.rate("in")) == (20e9, 10e9)
    cost.on_copy_done(copied("out", 10**6, 1e6 / 5e9))
    expected = 1 / ((CALIBRATION_COPIES / 20e9 + 1 / 5e9) / (CALIBRATION_COPIES + 1))
    assert cost.rate("out") == pytest.approx(expected)


def test_a_second_calibration_replaces_what_copies_have_said() -> None:
    cost = costs()
    for _ in range(50):
        cost.on_copy_done(copied("in", 10**6, 1.0))
    cost.calibrate(1e9, 3e9)
    assert cost.rate("in") == 3e9
    cost.on_copy_done(copied("in", 10**6, 1e6 / 3e9))
    assert cost.rate("in") == pytest.approx(3e9)


def test_a_lane_that_becomes_four_times_as_slow_is_followed() -> None:
    cost = costs()
    for rate in (20e9, 5e9):
        for _ in range(60):
            cost.on_copy_done(copied("out", 10**8, 1e8 / rate))
    assert cost.rate("out") == pytest.approx(5e9, rel=0.02)


def test_many_small_copies_that_mostly_take_their_start_do_not_hide_what_large_ones_reach() -> None:
    cost = costs()
    for index in range(100):
        num_bytes = 10**9 if index % 4 == 0 else 10**5
        cost.on_copy_done(copied("out", num_bytes, 1e-3 + num_bytes / 20e9))
    assert cost.rate("out") > 15e9


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 0.0), (0, 1.0)])
def test_a_copy_of_nothing_says_nothing_of_the_rate(num_bytes: int, seconds: float) -> None:
    cost = costs()
    cost.on_copy_done(copied("out", num_bytes, seconds))
    assert cost.rate("out") == GUESS_RATE


@pytest.mark.parametrize("seconds", [0.0, 1e-300, 1e300, math.inf])
def test_rates_stay_believable_whatever_a_copy_took(seconds: float) -> None:
    cost = costs()
    for _ in range(3):
        cost.on_copy_done(copied("in", 10**6, seconds))
        assert LEAST_RATE <= cost.rate("in") <= MOST_RATE
        assert 0 <= cost.swap_s(10**9, 10**9) < math.inf


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 5e-324, 1e300])
def test_calibrated_rates_that_cannot_be_are_held_to_what_is_believable(rate: float) -> None:
    cost = costs()
    cost.calibrate(rate, rate)
    assert LEAST_RATE <= cost.rate("out") <= MOST_RATE
    assert 0 < cost.swap_s(1, 1) < math.inf
    assert cost.choose("auto", victim()).mode in ("swap", "recompute")


def test_failed_copies_say_nothing_of_the_rate() -> None:
    cost = costs()
    cost.on_copy_done(copied("out", 10**9, 1e-6, ok=False))
    assert cost.rate("out") == GUESS_RATE


# ---- queues ---------------------------------------------------------------------------------------


def test_what_is_sent_stands_in_its_lane_until_it_is_done() -> None:
    cost = costs()
    cost.calibrate(1e9, 2e9)
    cost.on_copy_sent("out", 10**9)
    cost.on_copy_sent("out", 2 * 10**9)
    assert cost.queue_s("out") == pytest.approx(3.0)
    assert cost.queue_s("in") == 0.0
    cost.on_copy_done(copied("out", 10**9, 1.0))
    assert cost.queue_s("out") == pytest.approx(2.0)


def test_a_failed_copy_leaves_the_queue_whole_whatever_it_says_it_has_copied() -> None:
    cost = costs()
    cost.on_copy_sent("in", 10**9)
    cost.on_copy_done(copied("in", 17, 0.1, ok=False))
    assert cost.queue_s("in") == 0.0


def test_a_copy_that_never_was_sent_takes_nothing_from_the_queue() -> None:
    cost = costs()
    cost.on_copy_done(copied("in", 10**9, 0.1))
    assert cost.queue_s("in") == 0.0
    cost.on_copy_sent("in", 10**9)
    assert cost.queue_s("in") > 0.0


def test_a_lost_device_takes_its_queues_with_it_but_not_what_was_measured() -> None:
    cost = costs()
    cost.on_copy_done(copied("out", 10**9, 0.1))
    cost.on_copy_sent("out", 10**12)
    cost.reset()
    assert cost.queue_s("out") == 0.0
    cost.on_copy_sent("out", 10**9)
    cost.on_copy_sent("out", 10**9)
    cost.on_copy_done(copied("out", 10**9, 0.1))
    assert cost.queue_s("out") == pytest.approx(0.1)
    assert cost.rate("out") == pytest.approx(10e9)


def test_a_queue_makes_swapping_dearer_until_computing_again_is_cheaper() -> None:
    cost = costs()
    cost.calibrate(20e9, 20e9)
    expose(cost, 1.0)
    assert cost.choose("auto", victim()).mode == "swap"
    cost.on_copy_sent("out", 40 * 10**9)
    assert cost.choose("auto", victim()).mode == "recompute"


def test_a_lane_with_nothing_to_copy_is_not_waited_for() -> None:
    cost = costs()
    cost.on_copy_sent("out", 40 * 10**9)
    assert cost.swap_s(0, 0) == 0.0
    assert cost.swap_s(0, 10**9) < cost.swap_s(1, 10**9)


# ---- the exposed share ----------------------------------------------------------------------------


def test_copies_that_nobody_waits_for_become_nearly_free_but_never_quite() -> None:
    cost = costs()
    assert cost.exposed_share("out") == cost.exposed_share("in") == PRIOR_SHARE
    for _ in range(100):
        cost.on_copy_done(copied("out", 10**8, 0.1))
    assert cost.exposed_share("out") == LEAST_SHARE
    assert cost.exposed_share("in") == PRIOR_SHARE
    assert cost.swap_s(10**9, 0) > 0


def test_the_share_is_what_was_waited_over_what_was_copied() -> None:
    cost = costs()
    for _ in range(400):
        cost.on_copy_done(copied("out", 10**8, 0.1))
        cost.on_copy_done(copied("in", 10**8, 0.1))
        cost.on_step_waited(0.03)
        cost.on_fetch_waited(0.07)
    assert cost.exposed_share("out") == pytest.approx(0.3, abs=0.01)
    assert cost.exposed_share("in") == pytest.approx(0.7, abs=0.01)


def test_no_more_than_all_of_a_copy_is_exposed_and_waits_before_any_copy_are_harmless() -> None:
    cost = costs()
    cost.on_step_waited(1e9)
    cost.on_fetch_waited(1e9)
    assert cost.exposed_share("out") == cost.exposed_share("in") == 1.0


def test_a_share_measured_long_ago_goes_back_to_what_is_assumed() -> None:
    for share in (0.0, 1.0):
        cost = costs()
        expose(cost, share)
        measured = cost.exposed_share("in")
        assert abs(measured - share) < 0.06
        for _ in range(3000):
            cost.on_step_waited(0.0)
        assert cost.exposed_share("in") == pytest.approx(PRIOR_SHARE, abs=0.01)
        assert cost.exposed_share("out") == pytest.approx(PRIOR_SHARE, abs=0.01)


# ---- computing again ------------------------------------------------------------------------------


def test_a_prefill_costs_what_it_adds_to_a_step_with_its_attention() -> None:
    cost = costs()
    for start, count in ((0, 100), (0, 2000), (3000, 1000)):
        true = TOKEN_S * count + 3e-10 * attended(start, count)
        assert cost.recompute_s(start, count) == pytest.approx(true, rel=0.1)


def test_alone_its_steps_count_whole_one_for_each_budget() -> None:
    cost = costs()
    for count, num_steps in ((1, 1), (BUDGET, 1), (BUDGET + 1, 2), (10 * BUDGET, 10)):
        extra = cost.recompute_s(0, count, alone=True) - cost.recompute_s(0, count)
        assert extra == pytest.approx(num_steps * 0.012, rel=0.2)


def test_nothing_to_compute_costs_nothing() -> None:
    for cost in (costs(), costs(StepTimeModel())):
        assert cost.recompute_s(1000, 0) == 0.0
        assert cost.recompute_s(1000, 0, alone=True) == 0.0


# ---- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "mode"), [(2e9, "recompute"), (20e9, "swap"), (50e9, "swap")])
def test_an_8b_models_victim_is_swapped_over_a_fast_link_and_computed_again_over_a_slow_one(rate: float, mode: str) -> None:
    cost = costs()
    cost.calibrate(rate, rate)
    expose(cost, 1.0)
    decision = cost.choose("auto", victim())
    assert decision.mode == mode
    assert decision.reason == "cheaper"
    one_way_s = 4000 * 128 * KIB / rate
    assert decision.swap_s == pytest.approx(2 * one_way_s, rel=0.05)
    assert decision.recompute_s == pytest.approx(4000 * TOKEN_S, rel=0.1)


def test_over_a_slow_link_that_nobody_waits_for_it_is_swapped() -> None:
    cost = costs()
    cost.calibrate(2e9, 2e9)
    expose(cost, 0.0)
    assert cost.choose("auto", victim()).mode == "swap"


def test_what_has_a_copy_on_the_host_costs_half_a_round_trip() -> None:
    cost = costs()
    cost.calibrate(5e9, 5e9)
    expose(cost, 1.0)
    new, saved = (cost.choose("auto", victim(num_blocks_to_save=blocks)) for blocks in (249, 0))
    assert saved.swap_s < 0.55 * new.swap_s
    assert (new.mode, saved.mode) == ("recompute", "swap")


def test_what_the_cache_will_keep_makes_computing_again_cheap() -> None:
    cost = costs()
    cost.calibrate(20e9, 20e9)
    expose(cost, 1.0)
    assert cost.choose("auto", victim(num_uncached_tokens=200)).mode == "recompute"


def test_tokens_behind_a_long_context_are_dearer_to_compute_again() -> None:
    cost = costs()
    decisions = [cost.choose("auto", victim(tokens, num_uncached_tokens=200)) for tokens in (200, 100_000)]
    assert decisions[1].recompute_s == pytest.approx(cost.recompute_s(99_800, 200))
    assert decisions[1].recompute_s > 1.5 * decisions[0].recompute_s


def test_both_costs_contain_the_tail_that_both_modes_compute() -> None:
    cost = costs()
    short, long = (cost.choose("auto", victim(4000, num_tail_tokens=tail)) for tail in (1, 1001))
    tail_s = cost.recompute_s(2999, 1001) - cost.recompute_s(3999, 1)
    assert long.swap_s - short.swap_s == pytest.approx(tail_s)
    assert long.recompute_s == short.recompute_s


def test_a_victim_with_nothing_to_swap_is_computed_again_in_every_mode() -> None:
    cost = costs()
    tiny = victim(16, output=16, num_blocks_to_save=0, num_blocks_to_fetch=0)
    for mode in get_args(PreemptionMode):
        assert cost.choose(mode, tiny).mode == "recompute"
    assert cost.choose("swap", tiny).reason == "nothing to swap"
    assert cost.choose("recompute", tiny).reason == "configured"


def test_the_mode_that_is_asked_for_wins_and_both_costs_are_told_all_the_same() -> None:
    cost = costs()
    decisions = [cost.choose(mode, victim()) for mode in get_args(PreemptionMode)]
    assert {(decision.swap_s, decision.recompute_s) for decision in decisions} == {decisions[0][1:3]}
    assert cost.choose("recompute", victim())[::3] == ("recompute", "configured")
    assert cost.choose("swap", victim())[::3] == ("swap", "configured")


@pytest.mark.parametrize("mode", ["auto", "swap", "heuristic"])
def test_without_room_on_the_host_it_is_computed_again_and_that_is_said(mode: PreemptionMode) -> None:
    cost = costs()
    cost.calibrate(50e9, 50e9)
    assert cost.choose(mode, victim(num_host_blocks=249)).mode == "swap"
    for room in (248, 1, 0):
        assert cost.choose(mode, victim(num_host_blocks=room))[::3] == ("recompute", "host full")


def test_a_full_host_is_no_reason_for_what_would_be_computed_again_anyway() -> None:
    cost = costs()
    assert cost.choose("recompute", victim(num_host_blocks=0)).reason == "configured"
    assert cost.choose("heuristic", victim(4000, output=100, num_host_blocks=0)).reason == "short output"


def test_a_full_host_does_not_matter_to_what_it_already_holds() -> None:
    assert costs().choose("swap", victim(num_blocks_to_save=0, num_host_blocks=0)).mode == "swap"


@pytest.mark.parametrize(
    ("prompt", "output", "mode"),
    [
        (100, 19, "recompute"),
        (100, 20, "swap"),
        (5, 0, "recompute"),
        (5, 1, "swap"),
        (4, 0, "recompute"),
        (10**9, 2 * 10**8, "swap"),
    ],
)
def test_the_heuristic_computes_again_below_a_fifth_of_the_prompt(prompt: int, output: int, mode: str) -> None:
    facts = victim(prompt + output, output=output, num_blocks_to_save=1, num_blocks_to_fetch=1)
    assert costs().choose("heuristic", facts).mode == mode


def test_a_lane_that_only_fails_is_no_longer_chosen_and_is_trusted_again_when_it_works() -> None:
    cost = costs()
    cost.calibrate(50e9, 50e9)
    assert cost.choose("auto", victim()).mode == "swap"
    for _ in range(30):
        cost.on_copy_done(copied("out", 0, 1e-5, ok=False))
    decision = cost.choose("auto", victim())
    assert decision.mode == "recompute"
    assert decision.swap_s > decision.recompute_s
    assert cost.choose("swap", victim()).mode == "swap"
    assert cost.choose("auto", victim(num_blocks_to_save=0)).mode == "swap", "the lane in does not fail"
    for _ in range(10):
        cost.on_copy_done(copied("out", 10**8, 1e8 / 50e9))
    assert cost.choose("auto", victim()).mode == "swap"


def test_a_lane_in_that_only_fails_makes_swapping_dearer_than_computing_again() -> None:
    cost = costs()
    cost.calibrate(50e9, 50e9)
    for _ in range(30):
        cost.on_copy_done(copied("in", 0, 1e-5, ok=False))
    decision = cost.choose("auto", victim())
    assert decision.mode == "recompute"
    assert decision.swap_s > decision.recompute_s


def test_before_anything_is_measured_decisions_are_finite_and_positive() -> None:
    cost = costs(StepTimeModel())
    for tokens in (17, 4000, 10**6):
        decision = cost.choose("auto", victim(tokens, output=1))
        assert 0 < decision.swap_s < math.inf
        assert 0 < decision.recompute_s < math.inf


@pytest.mark.parametrize("num_steps", [0, 1, 7, 8, 9, 40])
def test_costs_grow_with_bytes_and_with_tokens_however_little_was_seen(num_steps: int) -> None:
    cost = costs(taught(num_steps))
    sizes = [0, 1, 10, 16, 17, 1000, 2047, 2048, 2049, 10**5, 10**7]
    for previous, size in pairwise(sizes):
        assert cost.swap_s(size, 0) > cost.swap_s(previous, 0)
        assert cost.swap_s(0, size) > cost.swap_s(0, previous)
        assert cost.fetch_s(size) > cost.fetch_s(previous)
        assert cost.recompute_s(500, size) > cost.recompute_s(500, previous)
        assert cost.recompute_s(size, 100) >= cost.recompute_s(previous, 100)
        assert cost.recompute_s(0, size, alone=True) >= cost.recompute_s(0, size)


def test_huge_requests_do_not_overflow() -> None:
    decision = costs().choose("auto", victim(10**12, num_host_blocks=10**12))
    assert 0 < decision.swap_s < math.inf
    assert 0 < decision.recompute_s < math.inf


def test_asking_changes_nothing() -> None:
    cost = costs()
    cost.on_copy_sent("in", 10**6)
    answers = [(cost.choose("auto", victim()), cost.fetch_or_recompute(640, 100), cost.queue_s("in")) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


# ---- fetching -------------------------------------------------------------------------------------


def test_on_return_the_cheaper_of_fetching_and_computing_is_taken() -> None:
    for rate, fetches in ((1e9, False), (20e9, True)):
        cost = costs()
        cost.calibrate(rate, rate)
        expose(cost, 1.0)
        choice = cost.fetch_or_recompute(1600, 0)
        assert choice.fetch is fetches
        assert choice.fetch_s == pytest.approx(1600 * 128 * KIB / rate, rel=0.05)


def test_a_long_context_before_it_speaks_for_fetching() -> None:
    cost = costs()
    cost.calibrate(2.6e9, 2.6e9)
    expose(cost, 1.0)
    assert not cost.fetch_or_recompute(1600, 0).fetch
    assert cost.fetch_or_recompute(1600, 100_000).fetch


def test_part_of_a_block_is_fetched_as_a_whole_one() -> None:
    cost = costs()
    assert cost.fetch_or_recompute(1, 0).fetch_s == cost.fetch_or_recompute(16, 0).fetch_s
    assert cost.fetch_or_recompute(17, 0).fetch_s == pytest.approx(2 * cost.fetch_or_recompute(16, 0).fetch_s)


def test_alone_both_ways_count_whole() -> None:
    cost = costs()
    cost.calibrate(20e9, 20e9)
    expose(cost, 0.0)
    beside, alone = cost.fetch_or_recompute(1600, 0), cost.fetch_or_recompute(1600, 0, alone=True)
    assert alone.fetch_s == pytest.approx(beside.fetch_s / LEAST_SHARE, rel=0.01)
    assert alone.recompute_s == pytest.approx(beside.recompute_s + 0.012, rel=0.05)


def test_a_lane_in_that_only_fails_is_not_fetched_from() -> None:
    cost = costs()
    cost.calibrate(50e9, 50e9)
    assert cost.fetch_or_recompute(1600, 0).fetch
    for _ in range(60):
        cost.on_copy_done(copied("in", 0, 0.0, ok=False))
    assert not cost.fetch_or_recompute(1600, 0).fetch


def test_nothing_on_the_host_is_not_fetched() -> None:
    assert costs().fetch_or_recompute(0, 100) == (0, False, 0.0, 0.0)


# ---- ranking --------------------------------------------------------------------------------------


def test_victims_are_ranked_by_what_the_chosen_way_costs_for_each_block_freed() -> None:
    swap = Decision("swap", 1.0, 4.0, "cheaper")
    recompute = Decision("recompute", 1.0, 4.0, "configured")
    assert per_block(swap, 2) == 0.5
    assert per_block(recompute, 2) == 2.0
    assert per_block(swap, 0) == math.inf


def test_a_victim_that_shares_most_of_its_blocks_ranks_behind_one_that_frees_them_all() -> None:
    cost = costs()
    facts = victim()
    decision = cost.choose("auto", facts)
    assert per_block(decision, 10) > per_block(decision, 249)


def test_after_a_disturbance_the_next_copy_alone_says_how_fast_a_lane_is() -> None:
    model = costs()
    for _ in range(50):
        model.on_copy_sent("out", 10**9)
        model.on_copy_done(CopyDone(Epoch(1), CopyId(1), "out", 10**9, 0.1))
    assert model.rate("out") == pytest.approx(1e10, rel=0.01)
    model.measure_again()
    model.on_copy_sent("out", 10**9)
    model.on_copy_done(CopyDone(Epoch(1), CopyId(2), "out", 10**9, 1.0))
    assert model.rate("out") == pytest.approx(1e9)
