"""The formulas, on timelines whose figures can be worked out by hand."""

import math

import numpy as np
import pytest

from repertory.actors.commands.benching.metrics import (
    Timeline,
    latencies_ms,
    num_good,
    parse_objectives,
    percentile,
    spread,
)
from repertory.protocol.errors import ValidationError


def timeline(*at_s, sent_s=10.0, num_output=None, error=None):
    return Timeline(
        sent_s=sent_s, num_prompt=5, at_s=list(at_s), num_output=len(at_s) if num_output is None else num_output, error=error
    )


def test_the_four_latencies_of_a_request():
    one = timeline(10.5, 10.6, 10.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2el_s == pytest.approx(0.9)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx([0.1, 0.3])


def test_tokens_that_come_at_once_count_in_tpot_and_make_one_gap():
    one = timeline(10.5, 10.9, num_output=5)
    assert one.tpot_s == pytest.approx(0.1)
    assert one.gaps_s == pytest.approx([0.4])


def test_a_request_of_one_token_has_no_tpot_and_no_gap():
    one = timeline(10.5)
    assert one.tpot_s is None
    found = latencies_ms([one])
    assert (found["tpot"], found["itl"]) == ([], [])
    assert found["ttft"] == found["e2el"] == pytest.approx([500.0])


def test_what_failed_or_brought_nothing_is_in_no_latency():
    found = latencies_ms([timeline(error="broken"), timeline(10.1, error="broken later"), timeline()])
    assert found == {"ttft": [], "tpot": [], "itl": [], "e2el": []}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_and_deviation_are_numpys(count):
    values = list(np.random.default_rng(count).exponential(size=count))
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
    found = spread(values)
    assert found == pytest.approx((np.mean(values), np.median(values), np.std(values), np.percentile(values, 99)))


def test_no_values_have_no_figures():
    assert math.isnan(percentile([], 0.5))
    assert all(math.isnan(value) for value in spread([]))


def test_a_percentile_does_not_ask_for_an_order_and_leaves_it_alone():
    values = [3.0, 1.0, 2.0]
    assert percentile(values, 0.5) == 2.0
    assert values == [3.0, 1.0, 2.0]


def test_goodput_counts_what_meets_every_objective():
    quick, slow_first, slow_after = timeline(10.1, 10.2), timeline(10.6, 10.7), timeline(10.1, 10.9)
    failed = timeline(10.1, 10.2, error="broken")
    everybody = [quick, slow_first, slow_after, failed]
    assert num_good(everybody, {"ttft": 500.0}) == 2
    assert num_good(everybody, {"ttft": 500.0, "tpot": 500.0}) == 1
    assert num_good(everybody, {"e2el": 899.0}) == 2
    assert num_good([timeline(10.1)], {"tpot": 0.001}) == 1


def test_objectives_are_read_by_name():
    assert parse_objectives(["ttft:200", "tpot:50.5", "e2el:1e4"]) == {"ttft": 200.0, "tpot": 50.5, "e2el": 10_000.0}
    assert parse_objectives([]) == {}


@pytest.mark.parametrize("words", [["ttft"], ["ttft:"], ["ttft:x"], ["ttft:0"], ["ttft:-1"], ["ttft:nan"], ["ttft:inf"],
                                   ["itl:5"], ["TTFT:5"], [":5"], [""], ["ttft:1", "ttft:2"], ["ttft:1:2"]])  # fmt: skip
def test_any_other_objective_is_refused_by_name(words):
    with pytest.raises(ValidationError, match="--goodput"):
        parse_objectives(words)
