import random

import pytest

from repertory.actors.scheduling.step_time import GUESS_TOKEN_S, LEAST_STEPS, Load, StepTimeModel, attended


def true_seconds(load: Load) -> float:
    return 0.02 + 3e-4 * load.num_prefill_tokens + 1e-7 * load.num_attended + 5e-4 * load.num_rows


def random_load(rng: random.Random, *, prefill: bool = True) -> Load:
    return Load(rng.randrange(512) if prefill else 0, rng.randrange(200_000), rng.randrange(1, 64))


def test_it_says_nothing_until_it_has_seen_enough() -> None:
    model = StepTimeModel()
    rng = random.Random(0)
    for _ in range(LEAST_STEPS):
        assert model.predict(random_load(rng)) is None
        load = random_load(rng)
        model.learn(load, true_seconds(load))
    assert model.predict(random_load(rng)) is not None


def test_it_learns_a_linear_device_within_five_percent_under_noise() -> None:
    model = StepTimeModel()
    rng = random.Random(1)
    for _ in range(300):
        load = random_load(rng)
        model.learn(load, true_seconds(load) * rng.uniform(0.95, 1.05))
    errors = sorted(abs((model.predict(load) or 0) / true_seconds(load) - 1) for load in (random_load(rng) for _ in range(200)))
    assert errors[180] < 0.05
    assert 0 < model.error_s < 0.01


def test_it_follows_a_device_that_becomes_twice_as_slow() -> None:
    model = StepTimeModel()
    rng = random.Random(2)
    for factor in (1.0, 2.0):
        for _ in range(400):
            load = random_load(rng)
            model.learn(load, factor * true_seconds(load))
    load = random_load(rng)
    assert abs((model.predict(load) or 0) / (2 * true_seconds(load)) - 1) < 0.05


def test_one_step_that_took_far_too_long_is_forgotten_and_two_are_believed() -> None:
    model = StepTimeModel()
    rng = random.Random(2)
    for _ in range(200):
        load = random_load(rng)
        model.learn(load, true_seconds(load))
    load = random_load(rng)
    before, error_s = model.predict(load), model.error_s
    model.learn(load, 20 * true_seconds(load))
    assert (model.predict(load), model.error_s) == (before, error_s)
    model.learn(load, true_seconds(load))
    assert abs((model.predict(load) or 0) / true_seconds(load) - 1) < 0.01
    for _ in range(2):
        model.learn(load, 20 * true_seconds(load))
    assert (model.predict(load) or 0) > 1.5 * true_seconds(load)


def test_the_first_prefill_is_believed_at_once_however_long_it_takes() -> None:
    model = StepTimeModel()
    rng = random.Random(2)
    for _ in range(200):
        load = random_load(rng, prefill=False)
        model.learn(load, true_seconds(load))
    load = Load(512, 131_328, 4)
    model.learn(load, 1.0)
    assert (model.predict(load) or 0) > 0.5


def test_a_long_time_without_prefills_does_not_spoil_the_next_one() -> None:
    model = StepTimeModel()
    rng = random.Random(3)
    for index in range(5000):
        load = random_load(rng, prefill=index < 100)
        model.learn(load, true_seconds(load) * rng.uniform(0.97, 1.03))
    for _ in range(20):
        load = random_load(rng)
        model.learn(load, true_seconds(load))
    load = Load(400, 50_000, 8)
    assert abs((model.predict(load) or 0) / true_seconds(load) - 1) < 0.1


def test_predictions_are_never_negative() -> None:
    model = StepTimeModel()
    for num_rows in range(1, 30):
        model.learn(Load(0, 0, num_rows), 1.0 / num_rows)
    assert (model.predict(Load(100_000, 10**9, 1000)) or 0) >= 0


def test_attended_counts_the_pairs_of_a_causal_row() -> None:
    for start, count in ((0, 1), (0, 5), (7, 1), (10, 4)):
        assert attended(start, count) == sum(position + 1 for position in range(start, start + count))


# ---- what a prefill adds --------------------------------------------------------------------------


def decode_load(step: int, rng: random.Random, *, steady: bool) -> Load:
    """32 sequences that grow by a token a step and begin anew; steady: always all of them."""
    return Load(0, 32 * (300 + step % 1000), 32 if steady else 32 + rng.randrange(3))


@pytest.mark.parametrize("seed", range(4))
def test_hours_of_decoding_do_not_make_nonsense_of_what_a_prefill_costs(seed: int) -> None:
    model, rng = StepTimeModel(), random.Random(seed)
    for step in range(8000):
        load = Load(256, attended(0, 256) + 9600, 32) if step < 40 else decode_load(step, rng, steady=seed % 2 == 0)
        model.learn(load, true_seconds(load) * rng.uniform(0.9, 1.1))
        if step > 100:
            assert 0.5 < model.prefill_s(0, 256) / (256 * 3e-4 + 1e-7 * attended(0, 256)) < 2
    predicted = model.predict(Load(256, attended(0, 256) + 9600, 32)) or 0
    assert predicted == pytest.approx(true_seconds(Load(256, attended(0, 256) + 9600, 32)), rel=0.2)


def test_a_device_that_becomes_slower_while_it_only_decodes_leaves_the_cost_of_a_prefill_within_bounds() -> None:
    model, rng = StepTimeModel(), random.Random(5)
    for step in range(3000):
        load = Load(256, attended(0, 256) + 9600, 32) if step < 40 else decode_load(step, rng, steady=True)
        model.learn(load, (1 if step < 1500 else 3) * true_seconds(load) * rng.uniform(0.95, 1.05))
        assert 0.2 < model.prefill_s(0, 256) / (256 * 3e-4) < 5


def test_before_any_step_a_prefill_token_has_a_guessed_cost() -> None:
    assert StepTimeModel().prefill_s(0, 10) == pytest.approx(10 * GUESS_TOKEN_S)
    assert StepTimeModel().constant_s == 0.0


def test_while_few_steps_were_seen_a_token_costs_what_the_best_of_them_took_for_one() -> None:
    model = StepTimeModel()
    model.learn(Load(0, 10, 1), 0.02)
    assert model.prefill_s(0, 1) == pytest.approx(0.02)
    model.learn(Load(99, attended(0, 99), 1), 0.05)
    model.learn(Load(0, 1000, 64), 0.06)
    assert model.prefill_s(0, 100) == pytest.approx(0.05)


def test_a_model_that_saw_no_prefill_takes_a_decoded_token_for_one() -> None:
    model = StepTimeModel()
    for rows in range(1, 40):
        model.learn(Load(0, 100 * rows, rows), 0.02 + 1e-3 * rows)
    assert 1e-3 <= model.prefill_s(0, 100) / 100 < 3e-3


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e9])
def test_what_a_prefill_costs_is_positive_and_finite_whatever_was_measured(seconds: float) -> None:
    model, rng = StepTimeModel(), random.Random(6)
    for step in range(50):
        model.learn(random_load(rng), seconds if step % 2 else 0.0)
        assert 0 < model.prefill_s(100, 10) < float("inf")
        assert 0 <= model.constant_s < float("inf")


def test_what_a_prefill_costs_grows_with_its_length_and_its_context_at_every_moment() -> None:
    model, rng = StepTimeModel(), random.Random(7)
    for _ in range(60):
        load = random_load(rng, prefill=rng.random() < 0.3)
        model.learn(load, rng.uniform(0.0, 0.1))  # which says nothing: the fitted weights are noise
        costs = [model.prefill_s(100, count) for count in (0, 1, 16, 512, 100_000)]
        assert costs == sorted(set(costs))
        assert model.prefill_s(0, 64) <= model.prefill_s(100, 64) <= model.prefill_s(100_000, 64)


def test_however_it_was_misled_attending_to_64_positions_never_costs_more_than_a_token() -> None:
    model, rng = StepTimeModel(), random.Random(10)
    for _ in range(40):
        load = random_load(rng)
        model.learn(load, 1e-6 * load.num_attended)  # a device that only attends
        costs = [model.prefill_s(start, 1) for start in (0, 640)]
        assert costs[1] <= 11.1 * costs[0]


def test_a_device_that_becomes_twenty_times_as_slow_is_followed_out_of_all_bounds() -> None:
    model, rng = StepTimeModel(), random.Random(9)
    for step in range(1500):
        load = random_load(rng)
        model.learn(load, (1 if step < 300 else 20) * true_seconds(load) * rng.uniform(0.98, 1.02))
    assert model.prefill_s(1000, 100) == pytest.approx(20 * (100 * 3e-4 + 1e-7 * attended(1000, 100)), rel=0.1)
    assert model.constant_s == pytest.approx(20 * 0.02, rel=0.25)


def test_the_constant_is_never_more_than_the_shortest_of_late_steps_nor_less_than_nothing() -> None:
    model, rng = StepTimeModel(), random.Random(11)
    for step in range(200):
        seconds = rng.uniform(0.01, 0.1)  # which says nothing: the fitted weights are noise
        model.learn(random_load(rng, prefill=step % 3 == 0), seconds)
        assert 0 <= model.constant_s < 0.03 or step < 10


def test_what_a_step_takes_beside_its_load_is_found() -> None:
    model, rng = StepTimeModel(), random.Random(8)
    for _ in range(300):
        load = random_load(rng)
        model.learn(load, true_seconds(load) * rng.uniform(0.98, 1.02))
    assert model.constant_s == pytest.approx(0.02, rel=0.25)
    assert model.prefill_s(1000, 100) == pytest.approx(100 * 3e-4 + 1e-7 * attended(1000, 100), rel=0.1)
