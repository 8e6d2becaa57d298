"""Checks that cannot fail prove nothing: each planted slip is caught, by a rule meant for it, at a seed that passes without it.

`pytest -s` prints the slips with their seeds and the number of steps after which each was caught.
"""

from __future__ import annotations

import msgspec
import pytest

from repertory.actors.simulation.drawing import draw
from repertory.actors.simulation.scenario import Scenario
from repertory.actors.simulation.shrinking import Failure, failure_of, shrunk

from .planted import SLIPS, Slip, planted

MOST_SEEDS = 100


def first_failure(slip: Slip) -> tuple[Scenario, Failure]:
    """The first seed at which a rule that is meant for it catches the slip."""
    others = []
    for seed in range(MOST_SEEDS):
        scenario = slip.trouble(draw(seed))
        # One policy, so that what shows at a seed does not depend on which ones are installed.
        config = msgspec.structs.replace(scenario.config, scheduling_policy="fcfs")
        scenario = msgspec.structs.replace(scenario, config=config)
        failure = failure_of(scenario)
        if failure is not None and failure.rule in slip.rules:
            return scenario, failure
        if failure is not None:
            others.append(failure.message)
    raise AssertionError(f"{slip.name}: {sorted(slip.rules)} saw nothing at {MOST_SEEDS} seeds; others did: {others[:3]}")


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.name)
def test_a_planted_slip_is_caught(slip: Slip, capsys: pytest.CaptureFixture[str]) -> None:
    with planted(slip):
        scenario, failure = first_failure(slip)
    with capsys.disabled():
        print(f"\n  {slip.name}: seed {scenario.seed}, step {failure.num_steps}: {failure.message[:90]}", end=" ")  # noqa: T201 - to be seen
    assert failure_of(scenario) is None, "the seed fails without the slip"


def test_a_failure_is_cut_to_what_it_takes() -> None:
    slip = next(slip for slip in SLIPS if slip.name == "a_victim_may_be_chosen_before_it_has_gained")
    with planted(slip):
        scenario, failure = first_failure(slip)
        small = shrunk(failure)
        assert small == shrunk(failure), "cutting is not repeatable"
    assert small.rule == failure.rule
    assert small.scenario.size < scenario.size
    assert small.story and f"seed {scenario.seed}" in small.report()
