"""Policies are found by name, and a name that is none is told from a typo."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.policies import installed_policies, load_policy
from repertory.protocol.errors import ConfigError

from .world import World


@pytest.mark.parametrize("name", installed_policies())
def test_every_installed_policy_serves_requests(name: str) -> None:
    world = World(scheduling_policy=name)
    for number in range(4):
        world.submit([number] * 5)
    world.run()
    world.check_outputs()


def test_first_come_first_served_and_static_are_installed() -> None:
    assert {"fcfs", "static"} <= set(installed_policies())


def test_a_typo_is_answered_with_the_name_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'static'") as caught:
        load_policy("statik")
    assert caught.value.key == "scheduling_policy"
    assert "fcfs" in str(caught.value)


@pytest.mark.parametrize("name", ["", "zzzzzz", "../fcfs", "__init__", "FCFS"])
def test_what_is_no_policy_is_refused_without_being_imported(name: str) -> None:
    with pytest.raises(ConfigError, match="is not installed"):
        World(scheduling_policy=name)


def test_the_baseline_takes_longer_for_uneven_requests_than_continuous_batching() -> None:
    def steps(policy: str) -> int:
        world = World(scheduling_policy=policy, max_num_seqs=4)
        for number in range(16):
            world.submit([number], max_tokens=40 if number % 4 == 0 else 4)
        return world.run()

    assert steps("static") > 1.5 * steps("fcfs")
