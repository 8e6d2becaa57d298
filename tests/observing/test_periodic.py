"""The periodic line: what it says of a period, and when it says nothing. The clock is the test's."""

import pytest

from repertory.actors.mailbox import Mailbox
from repertory.actors.observing.loads import load_of
from repertory.actors.observing.periodic import PeriodicStatistics
from repertory.protocol.messages import DeviceLost
from repertory.tests.scheduling.world import World


class Desk:
    """A scheduler, an inbox, and the line about them."""

    def __init__(self, **settings):
        self.world = World(**{"blocks": 32, "max_num_seqs": 2, **settings})
        self.inbox = Mailbox("scheduler", 9)
        self.statistics = PeriodicStatistics(
            self.world.core, lambda: [load_of(self.inbox), load_of(self.inbox)], clock=lambda: self.world.now
        )


@pytest.fixture
def lines(log_lines):
    return lambda: [line for line in log_lines if line["event"] == "engine.stats"]


def test_an_idle_engine_says_nothing(lines):
    desk = Desk()
    desk.statistics.tick()
    assert lines() == []


def test_the_last_period_with_work_is_told_though_nobody_is_left(lines):
    desk = Desk()
    desk.world.submit([1, 2, 3, 4, 5], max_tokens=6)
    desk.world.run()
    desk.world.now += 2.0
    desk.statistics.tick()
    (line,) = lines()
    seconds = desk.world.now
    assert line["prompt_throughput"] == pytest.approx(5 / seconds, abs=0.1)
    assert line["generation_throughput"] == pytest.approx(6 / seconds, abs=0.1)
    assert line["step_s"] == pytest.approx(0.01)
    assert line["num_steps"] == 6
    assert line["prefix_cache_hit_rate"] == 0
    assert (line["num_running"], line["slowest"]) == (0, [])
    desk.world.now += 10.0
    desk.statistics.tick()
    assert len(lines()) == 1


def test_each_period_counts_only_what_happened_in_it(lines):
    desk = Desk()
    prompt = list(range(9))
    desk.world.submit(prompt, max_tokens=2)
    desk.world.run()
    desk.world.now += 10.0
    desk.statistics.tick()
    desk.world.submit(prompt, max_tokens=2)
    desk.world.run()
    desk.world.now += 10.0
    desk.statistics.tick()
    first, second = lines()
    assert first["prefix_cache_hit_rate"] == 0
    assert second["prefix_cache_hit_rate"] == pytest.approx(8 / 9, abs=1e-3)
    assert second["prompt_throughput"] < first["prompt_throughput"]
    assert first["generation_throughput"] == pytest.approx(second["generation_throughput"], abs=0.1)


def test_the_slowest_are_the_oldest_with_what_they_do_now(lines):
    desk = Desk()
    world = desk.world
    world.submit([1] * 8, max_tokens=50)
    world.step()
    world.now += 1.0
    world.submit([2] * 8, max_tokens=50)
    world.step()
    for number in range(3, 9):
        world.now += 1.0
        world.submit([number] * 8)
    desk.inbox.post_nowait(1)
    desk.statistics.tick()
    (line,) = lines()
    assert (line["num_running"], line["num_waiting"]) == (2, 6)
    assert [one["stage"] for one in line["slowest"]] == ["decode", "decode", "queue"]
    assert [one["label"] for one in line["slowest"]] == ["request 1", "request 2", "request 3"]
    ages = [one["age_s"] for one in line["slowest"]]
    assert ages == sorted(ages, reverse=True)
    assert line["inbox_depths"] == {"scheduler": 2}
    assert line["device_kv_usage"] == pytest.approx(6 / 32, abs=0.1)
    assert line["host_kv_usage"] == 0


def test_while_the_device_is_away_requests_wait_for_its_restart(lines):
    desk = Desk()
    desk.world.submit([1] * 8, max_tokens=50)
    desk.world.step()
    desk.world.core.on_device_lost(DeviceLost(desk.world.core.epoch, "test"), desk.world.now)
    desk.world.now += 10.0
    desk.statistics.tick()
    (line,) = lines()
    assert line["slowest"][0]["stage"] == "restart"
    assert line["num_preempted"] == 1


def test_a_failure_of_the_counting_is_told_once(log_lines):
    desk = Desk()
    desk.world.core.telling.counts.histograms = None
    desk.world.submit([1, 2, 3], max_tokens=3)
    desk.world.run()
    desk.statistics.tick()
    desk.statistics.tick()
    failures = [line for line in log_lines if line["event"] == "metrics.failed"]
    assert len(failures) == 1
    assert "NoneType" in failures[0]["reason"]
