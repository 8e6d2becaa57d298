import random

from repertory.actors.scheduling.step_time import LEAST_STEPS, Load, StepTimeModel, attended


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
