"""The table of three schedulers: the same arrivals for each, and figures that follow from the times."""

from types import SimpleNamespace

import anyio
import pytest

from repertory.actors.commands.benching import show, table
from repertory.actors.commands.benching.arrivals import Lengths, Request
from repertory.actors.commands.benching.metrics import Timeline
from repertory.protocol.config import EngineConfig

SMALL = Lengths(chat=(4, 8), document=(20, 30), book=100, short_answer=(2, 3), long_answer=(8, 9))
SETTINGS = EngineConfig(model="demo", max_num_seqs=64)


@pytest.fixture
def compare(quick_engine):
    """Runs the table on fake engines; returns (what it found, the engines, the bars)."""

    def run(plan, settings=SETTINGS):
        engines, bars = [], []

        def factory(config):
            engines.append(quick_engine())
            return engines[-1].open(config)

        def step(label, total):
            bars.append([label, total, 0])
            return show.progress(label, total, SimpleNamespace(isatty=lambda: False, write=None, flush=None))

        return anyio.run(lambda: table.compare(plan, settings, factory=factory, step=step)), engines, bars

    return run


def measured(engine):
    """What an engine was asked after its warm-up."""
    return [(tuple(prompt), params) for prompt, params in engine.asked[4:]]


def test_every_setting_gets_the_same_requests_in_an_engine_of_its_own(compare):
    found, engines, bars = compare(table.Plan(30, 2000.0, 16, 1, SMALL))
    assert [outcome.name for outcome in found.outcomes] == ["static", "continuous", "continuous + chunked"]
    assert len(engines) == 3
    first, second, third = ({(prompt, params.max_tokens) for prompt, params in measured(engine)} for engine in engines)
    assert first == second == third
    assert len(first) == 30
    assert [bar[:2] for bar in bars] == [["static", 30], ["continuous", 30], ["continuous + chunked", 30]]
    assert not any(engine.num_open or engine.num_streams for engine in engines)


def test_the_settings_differ_in_the_policy_in_chunks_and_in_the_size_of_a_static_batch(compare):
    _, engines, _ = compare(table.Plan(3, 2000.0, 16, 1, SMALL))
    configs = [engine.configs[0] for engine in engines]
    assert [(config.scheduling_policy, config.enable_chunked_prefill) for config in configs] == [
        ("static", False), ("fcfs", False), ("fcfs", True),
    ]  # fmt: skip
    assert [config.max_num_seqs for config in configs] == [16, 64, 64]
    assert [config.scheduling_delay_s for config in configs] == [16 / 2000.0, 0, 0]


def test_a_static_batch_is_not_above_the_limit_of_the_others(compare):
    found, engines, _ = compare(table.Plan(3, 2000.0, 16, 1, SMALL), EngineConfig(model="demo", max_num_seqs=5))
    assert [engine.configs[0].max_num_seqs for engine in engines] == [5, 5, 5]
    assert [outcome.max_num_seqs for outcome in found.outcomes] == [5, 5, 5]


def test_all_settings_have_the_same_limit_unless_another_is_asked_for(compare):
    _, engines, _ = compare(table.Plan(3, 2000.0, None, 1, SMALL))
    assert [engine.configs[0].max_num_seqs for engine in engines] == [64, 64, 64]


def test_a_static_batch_is_gathered_for_a_second_at_most_and_ones_own_delay_wins(compare):
    _, engines, _ = compare(table.Plan(1, 10.0, 16, 1, SMALL))
    assert engines[0].configs[0].scheduling_delay_s == 1.0
    _, engines, _ = compare(table.Plan(2, 2000.0, 16, 1, SMALL), EngineConfig(model="demo", scheduling_delay_s=0.25))
    assert [engine.configs[0].scheduling_delay_s for engine in engines] == [0.25] * 3


def test_without_a_rate_it_is_measured_first(compare):
    found, engines, bars = compare(table.Plan(5, None, 16, 1, SMALL))
    assert len(engines) == 4
    assert bars[0][:2] == ["measuring the rate", table.CALIBRATION_REQUESTS]
    assert len(measured(engines[0])) == table.CALIBRATION_REQUESTS
    assert found.rate > 0


def test_time_counts_from_when_a_request_was_due(quick_engine):
    engine = quick_engine()

    async def run():
        async with engine.open(None):
            return await table.replay(engine, [Request(0.0, [20], 3), Request(0.05, [21], 2)], lambda: None)

    (first, second), use = anyio.run(run)
    assert second.sent_s - first.sent_s == pytest.approx(0.05)
    assert second.at_s[0] >= second.sent_s
    assert (first.num_output, second.num_output) == (3, 2)
    assert set(use.kv_shares) == {0.25}


def test_figures_follow_from_the_times():
    timelines = [
        Timeline(sent_s=0.0, num_prompt=10, at_s=[0.1, 0.2, 0.4], num_output=3),
        Timeline(sent_s=1.0, num_prompt=4000, at_s=[2.0, 2.5, 5.0], num_output=3),
    ]
    found = table.outcome("x", timelines, table.Use(kv_shares=[0.1, 0.5], running=[1, 2]), limit=7)
    assert found.output_throughput == pytest.approx(6 / 5.0)
    assert found.p50_ttft_ms == pytest.approx(550.0)
    assert found.book_ttft_ms == pytest.approx(1000.0)
    assert found.p50_tbt_ms == pytest.approx(350.0)
    assert (found.mean_kv_share, found.peak_kv_share) == (0.3, 0.5)
    assert (found.mean_concurrency, found.peak_concurrency) == (1.5, 2)


def test_ratios_are_each_setting_over_the_one_before():
    def outcome(throughput, p99_ttft_ms, p99_tbt_ms):
        return SimpleNamespace(output_throughput=throughput, p99_ttft_ms=p99_ttft_ms, p99_tbt_ms=p99_tbt_ms)

    outcomes = [outcome(10.0, 100.0, 1.0), outcome(25.0, 50.0, 4.0), outcome(30.0, 10.0, 1.0)]
    assert table.ratios(outcomes) == {
        "throughput_continuous_over_static": 2.5,
        "throughput_chunked_over_continuous": 1.2,
        "p99_ttft_chunked_over_continuous": 0.2,
        "p99_tbt_chunked_over_continuous": 0.25,
    }
    assert "continuous / static 2.50" in table.ratio_lines(outcomes)
