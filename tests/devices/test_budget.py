from repertory.actors.devices.budget import RestartBudget


def test_the_waits_double_up_to_a_limit() -> None:
    budget = RestartBudget(max_restarts=10, window_s=60)
    assert [budget.on_death(0.0) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_one_death_more_than_allowed_within_the_window_is_the_end() -> None:
    budget = RestartBudget(max_restarts=2, window_s=60)
    assert budget.on_death(0.0) is not None
    assert budget.on_death(1.0) is not None
    assert budget.on_death(2.0) is None


def test_deaths_outside_the_window_do_not_count() -> None:
    budget = RestartBudget(max_restarts=1, window_s=60)
    for minute in range(10):
        assert budget.on_death(minute * 61.0) == 0.1


def test_a_token_makes_the_budget_as_new() -> None:
    budget = RestartBudget(max_restarts=1, window_s=60)
    for second in range(10):
        assert budget.on_death(float(second)) == 0.1
        budget.on_progress()


def test_with_no_restarts_allowed_the_first_death_is_the_end() -> None:
    assert RestartBudget(max_restarts=0, window_s=60).on_death(0.0) is None
