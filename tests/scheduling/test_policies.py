"""Policies are found by name, and a name that is none is told from a typo."""

from __future__ import annotations

from pathlib import Path

import pytest

from repertory.actors.scheduling.policies import installed_policies, load_policy
from repertory.actors.scheduling.sequence import Sequence
from repertory.protocol.errors import ConfigError
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Admit
from repertory.protocol.sampling import SamplingParams

from .world import World


@pytest.mark.parametrize("name", installed_policies())
def test_every_installed_policy_serves_requests(name: str) -> None:
    world = World(scheduling_policy=name)
    for number in range(4):
        world.submit([number] * 5)
    world.run()
    world.check_outputs()


def test_all_of_the_documented_ones_are_installed() -> None:
    assert set(installed_policies()) == {"fcfs", "fair-share", "longest-prefix", "priority", "static"}


THIRD_PARTY = """
class ShortestFirst:
    def __init__(self):
        self.heard = []

    def priority_class(self, admit):
        return len(admit.token_ids)

    def admits_beside(self, num_running):
        return True
"""


def test_another_package_brings_a_policy_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_policies.py").write_text(THIRD_PARTY)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[repertory.policies]\nshortest-first = their_policies:ShortestFirst\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "shortest-first" in installed_policies()
    world = World(scheduling_policy="shortest-first", max_num_seqs=1)
    long, short = world.submit([1] * 9, max_tokens=1), world.submit([2] * 2, max_tokens=1)
    world.run()
    assert list(world.ends) == [short, long], "two methods are all that a policy needs"
    with pytest.raises(ConfigError, match="did you mean 'shortest-first'"):
        load_policy("shortest_first")


@pytest.mark.parametrize("name", ["fcfs", "static"])
def test_a_policy_that_asks_for_nothing_is_told_nothing(name: str) -> None:
    core = World(scheduling_policy=name).core
    assert core.queues.chooser is None and core.cache.tree.watcher is None and core._work_counter is None


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


class RaisesOverSome:
    """A policy that has a say in who is next, and a mistake in it."""

    def priority_class(self, admit: Admit) -> int:
        return 0

    def admits_beside(self, num_running: int) -> bool:
        return True

    def on_queued(self, seq: Sequence) -> None:
        if seq.admit.label == "boom" and seq.index == 1:
            raise LookupError("the policy has a bug")

    def on_admitted(self, seq: Sequence) -> None:
        pass

    def on_left(self, seq: Sequence) -> None:
        pass

    def next_of(self, waiting: list[Sequence], recovery: list[Sequence]) -> Sequence | None:
        return (recovery or waiting or [None])[0]


def test_a_policy_that_raises_over_a_request_in_the_queue_leaves_nothing_of_it() -> None:
    world = World()
    world.core.queues.chooser = RaisesOverSome()
    world.submit([5, 6, 7])
    bad = Admit(RequestId(99), "boom", [5, 6, 7, 8], SamplingParams(n=3, temperature=0.0, max_tokens=3), 0.0)
    with pytest.raises(LookupError):
        world.core.on_admit(bad, 0.0)
    assert world.core.num_live == 1
    assert world.core.audit() == []
    world.run()
    world.check_outputs()
    world.check_nothing_is_left()
