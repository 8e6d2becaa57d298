"""A latency model from recorded steps: what made the durations is found again, and never with the wrong sign."""

from __future__ import annotations

import random

import numpy as np
import pytest

from repertory.actors.simulation.fitting import fit, not_negative_fit
from repertory.protocol.errors import ValidationError
from repertory.protocol.trace import CopyEnded, Planned, StepEnded


def steps(seconds_of, count=400, seed=1):
    draw = random.Random(seed)
    for step_id in range(1, count + 1):
        rows = draw.randint(1, 64)
        load = (draw.choice([0, 0, draw.randint(1, 512)]), draw.randint(rows, 40_000), rows)
        yield Planned(at=0.0, step_id=step_id, epoch=1, load=load)
        yield StepEnded(at=0.0, step_id=step_id, epoch=1, seconds=seconds_of(load, draw))


def exactly(load, draw):
    return 0.006 + 40e-6 * load[0] + 5e-9 * load[1] + 20e-6 * load[2]


def test_weights_are_found_again():
    found = fit(steps(exactly))
    latency = found.latency
    assert (latency.step_s, latency.token_s) == pytest.approx((0.006, 40e-6))
    assert (latency.attended_s, latency.row_s) == pytest.approx((5e-9, 20e-6))
    assert found.num_steps == 400
    assert found.p90_error < 1e-9


def test_noise_and_a_few_steps_that_took_for_ever_do_little():
    def disturbed(load, draw):
        return exactly(load, draw) * draw.uniform(0.95, 1.05) + (3.0 if draw.random() < 0.01 else 0.0)

    found = fit(steps(disturbed, count=2000))
    assert found.latency.step_s == pytest.approx(0.006, rel=0.05)
    assert found.latency.token_s == pytest.approx(40e-6, rel=0.05)
    assert found.median_error < 0.04


def test_no_weight_is_below_zero_whatever_was_measured():
    def falling(load, draw):
        return 0.05 - 1e-4 * load[2]

    latency = fit(steps(falling)).latency
    assert min(latency.step_s, latency.token_s, latency.attended_s, latency.row_s) >= 0


def test_the_fit_is_the_best_of_those_without_a_negative_weight():
    draw = np.random.default_rng(3)
    for _ in range(20):
        features, measured = draw.normal(size=(30, 3)), draw.normal(size=30)
        found = not_negative_fit(features, measured)
        least = np.square(features @ found - measured).sum()
        for other in draw.exponential(size=(500, 3)) * draw.integers(0, 2, size=(500, 3)):
            assert least <= np.square(features @ other - measured).sum() + 1e-9


def test_lanes_have_rates_of_their_own_and_a_start():
    copies = [
        CopyEnded(at=0.0, copy_id=number, epoch=1, direction=lane, num_bytes=number * 1000, seconds=2e-5 + number * 1000 / rate)
        for lane, rate in (("out", 1e9), ("in", 4e9))
        for number in range(1, 40)
    ]
    latency = fit([*steps(exactly), *copies]).latency
    assert (latency.copy_s, latency.out_rate, latency.in_rate) == pytest.approx((2e-5, 1e9, 4e9), rel=1e-6)


def test_too_few_steps_are_refused_and_steps_of_another_epoch_do_not_count():
    answered = list(steps(exactly, count=20))
    strangers = [StepEnded(at=0.0, step_id=record.step_id, epoch=2, seconds=1.0) for record in answered[1::2]]
    with pytest.raises(ValidationError, match=r"0 steps are too few .*--step-ms"):
        fit([*answered[::2], *strangers])
