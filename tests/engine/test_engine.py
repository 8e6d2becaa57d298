"""Engine: its life in somebody else's loop, and what it says about itself."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from repertory import (
    ConfigError,
    Engine,
    EngineConfig,
    EngineDeadError,
    EngineDrainingError,
    ModelLoadError,
    NeverFitsError,
    QueueFullError,
)
from repertory.gpu.simulated import SimulatedExecutor
from repertory.tests.engine.stage import PATIENCE_S, answer_of, greedy, last_of, prompt_of, until


def device_threads():
    return [thread for thread in threading.enumerate() if thread.name == "repertory-compute"]


@pytest.fixture
def engine(paper_model, log_lines):
    """An engine that has not been started."""
    return Engine(model=str(paper_model), device="simulated", worker="inline")


# ---- start and end ------------------------------------------------------------------------------


async def test_an_engine_may_start_in_one_task_and_close_in_another(engine):
    await asyncio.create_task(engine.start())
    await asyncio.create_task(last_of(engine.generate("hello", greedy())))
    await asyncio.create_task(engine.aclose())
    await engine.aclose()
    assert not device_threads()


async def test_settings_and_a_config_are_the_same_and_not_both(paper_model):
    config = EngineConfig(model=str(paper_model), device="simulated", max_num_seqs=3)
    assert Engine(config).config == Engine(model=str(paper_model), device="simulated", max_num_seqs=3).config
    with pytest.raises(TypeError):
        Engine(config, max_num_seqs=4)


async def test_an_engine_starts_once(engine):
    async with engine:
        with pytest.raises(RuntimeError, match="started once"):
            await engine.start()
    with pytest.raises(RuntimeError, match="started once"):
        await engine.start()


async def test_before_the_start_and_after_the_end_every_call_says_so(engine):
    with pytest.raises(EngineDeadError, match="has not been started"):
        engine.generate("x")
    async with engine:
        await engine.check_health()
    for call in (engine.check_health, engine.stats, engine.audit, engine.drain, engine.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="closed"):
            await call()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("x")


async def test_closing_an_engine_that_never_started_is_harmless(engine):
    await engine.aclose()


async def test_requests_that_have_not_ended_at_the_close_are_told(stage):
    s = await stage()
    streams = [s.engine.generate(prompt_of(9, seed), greedy(4000)) for seed in range(3)]
    await anext(streams[0])
    readers = [asyncio.ensure_future(last_of(stream)) for stream in streams]
    await asyncio.sleep(0)
    await s.engine.aclose()
    for reader in readers:
        with pytest.raises(EngineDeadError, match="has been closed"):
            await reader


async def test_a_caller_cancelled_while_closing_leaves_the_engine_closing(stage):
    s = await stage()
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), greedy())
    await s.gate.arrival()
    closing = asyncio.ensure_future(s.engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    s.gate.open()
    with pytest.raises(EngineDeadError):
        await last_of(stream)
    await s.engine.aclose()
    assert not device_threads()


async def test_somebody_who_cancels_every_task_ends_the_engine_in_order(stage):
    s = await stage()
    stream = s.engine.generate(prompt_of(9), greedy(4000))
    await anext(stream)
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "repertory-engine")
    task.cancel()
    with pytest.raises(EngineDeadError, match="cancelled"):
        await last_of(stream)
    with pytest.raises(EngineDeadError):
        await s.engine.check_health()
    await s.engine.aclose()
    assert not device_threads()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "/nowhere/at/all"}, ModelLoadError, "/nowhere/at/all"),
        ({"max_model_len": 10_000_000}, ConfigError, "max_model_len"),
        ({"chat_template": "/nowhere/template"}, ConfigError, "chat_template"),
        ({"scheduling_policy": "fcsf"}, ConfigError, "did you mean 'fcfs'"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_keeps_an_engine_from_starting_is_raised_and_no_thread_stays(paper_model, log_lines, settings, error, words):
    engine = Engine(**{"model": str(paper_model), "device": "simulated", "worker": "inline", **settings})
    with pytest.raises(error, match=words):
        await engine.start()
    assert not device_threads()
    with pytest.raises(EngineDeadError, match="did not start"):
        engine.generate("x")
    await engine.aclose()


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 0}, {"device": "tpu"}, {"device": "cuda"}, {"block_size": "many"}, {"seed": 2**80}], ids=str
)
async def test_a_setting_that_is_wrong_is_refused_at_once(paper_model, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Engine(model=str(paper_model), **settings)


@pytest.mark.parametrize("error", [RuntimeError("no device"), OSError(5, "device gone"), MemoryError("no room")], ids=repr)
async def test_a_device_that_cannot_be_opened_is_raised_as_it_is(paper_model, log_lines, error):
    def open_device(config, model_dir):
        raise error

    engine = Engine(model=str(paper_model), open_device=open_device)
    interval = sys.getswitchinterval()
    with pytest.raises(type(error), match=str(error.args[-1])):
        await engine.start()
    assert not device_threads()
    assert sys.getswitchinterval() == interval
    await engine.aclose()


async def test_a_start_that_is_cancelled_leaves_nothing(paper_model, log_lines):
    opening, go_on = threading.Event(), threading.Event()

    def open_device(config, model_dir):
        opening.set()
        assert go_on.wait(PATIENCE_S)
        return SimulatedExecutor(vocab_size=320)

    engine = Engine(model=str(paper_model), open_device=open_device)
    starting = asyncio.ensure_future(engine.start())
    await until(opening.is_set)
    starting.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.aclose()
    assert not device_threads()


def test_without_asyncio_the_start_says_so(engine):
    starting = engine.start()
    with pytest.raises(RuntimeError, match="needs asyncio"):
        starting.send(None)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_the_switch_interval_is_set_back_when_the_last_engine_ends(paper_model, log_lines, order):
    interval = sys.getswitchinterval()
    engines = [Engine(model=str(paper_model), device="simulated", worker="inline") for _ in range(2)]
    for engine in engines:
        await engine.start()
        assert sys.getswitchinterval() < interval
    await engines[order[0]].aclose()
    assert sys.getswitchinterval() < interval, "the other one still needs it"
    await engines[order[1]].aclose()
    assert sys.getswitchinterval() == pytest.approx(interval)


async def test_two_engines_in_one_loop_do_not_know_of_each_other(stage):
    one, two = await stage(block_size=4), await stage(block_size=8)
    tasks = [s.begin(prompt_of(9), greedy(20), request_id="same") for s in (one, two)]
    await one.engine.abort("other")
    assert [answer_of(await task) for task in tasks] == [one.alone(prompt_of(9), greedy(20))] * 2
    await one.engine.aclose()
    assert answer_of(await two.ask(prompt_of(5))) == two.alone(prompt_of(5))
    await two.check_clean()


# ---- controls and facts -------------------------------------------------------------------------


async def test_drain_finishes_what_runs_and_refuses_what_comes(stage):
    s = await stage()
    s.gate.shut()
    running = s.begin(prompt_of(9), greedy(10))
    await s.gate.arrival()
    draining = asyncio.ensure_future(s.engine.drain())
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(EngineDrainingError):
            await s.ask(prompt_of(5))
    assert not draining.done()
    s.gate.open()
    assert await draining
    assert answer_of(await running) == s.alone(prompt_of(9), greedy(10))
    assert await s.engine.drain()
    await s.check_clean()


async def test_drain_says_when_its_time_was_not_enough(stage):
    s = await stage()
    s.gate.shut()
    running = s.begin(prompt_of(9), greedy(10))
    await s.gate.arrival()
    assert not await s.engine.drain(timeout_s=0.001)
    s.gate.open()
    assert answer_of(await running) == s.alone(prompt_of(9), greedy(10))
    await s.check_clean()


async def test_drain_does_not_wait_for_an_engine_that_is_closed_meanwhile(stage):
    s = await stage()
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), greedy(10))
    await s.gate.arrival()
    draining = asyncio.ensure_future(s.engine.drain())
    await asyncio.sleep(0)
    s.gate.open()
    s.device.on_step = fail
    with pytest.raises(EngineDeadError):
        async with asyncio.timeout(PATIENCE_S):
            await draining
    with pytest.raises(EngineDeadError):
        await last_of(stream)


def fail(step):
    raise OSError("the device is on fire")


async def test_resetting_the_prefix_cache_forgets_what_nobody_holds(stage):
    s = await stage(block_size=4)
    await s.ask(prompt_of(13, 1))
    s.gate.shut()
    running = s.begin(prompt_of(13, 2), greedy(20))
    await s.gate.step()
    await s.gate.arrival()
    await s.engine.reset_prefix_cache()
    stats = await s.engine.stats()
    assert stats.device_blocks.cached == 0
    assert stats.device_blocks.referenced > 0
    s.gate.open()
    assert (await s.ask(prompt_of(13, 1))).num_cached_tokens == 0
    assert answer_of(await running) == s.alone(prompt_of(13, 2), greedy(20))
    assert (await s.ask(prompt_of(13, 2))).num_cached_tokens == 12
    await s.check_clean()


async def test_stats_add_up_at_every_moment(stage):
    s = await stage(block_size=4, num_device_blocks=16, max_num_seqs=3)
    tasks = [s.begin(prompt_of(9, seed), greedy(12)) for seed in range(12)]
    before = await s.engine.stats()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        stats = await s.engine.stats()
        blocks = stats.device_blocks
        assert blocks.free + blocks.cached + blocks.referenced == blocks.total == 16
        assert min(blocks.free, blocks.cached, blocks.referenced) >= 0
        assert stats.num_running <= 3
        assert stats.num_running + stats.num_waiting + stats.num_preempted <= 12
        for counter in ("prefix_cache_queries", "prefix_cache_hits", "num_steps", "num_computed_tokens"):
            assert getattr(stats, counter) >= getattr(before, counter)
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        before = stats
    assert before.prefix_cache_queries == 12 * 9
    await s.check_clean()


async def test_each_request_has_one_line_at_its_end(stage, log_lines):
    s = await stage()
    await s.ask(prompt_of(9), greedy(4), request_id="a")
    stream = s.engine.generate(prompt_of(9), greedy(4000), "b")
    await anext(stream)
    await s.engine.abort("b")
    await last_of(stream)
    with pytest.raises(NeverFitsError):
        await s.ask(prompt_of(5000), request_id="c")
    await s.check_clean()
    lines = [line for line in log_lines if line["event"].startswith("request.")]
    assert [(line["event"], line["label"], line.get("finish_reason")) for line in lines] == [
        ("request.finished", "a", "length"),
        ("request.finished", "b", "abort"),
        ("request.refused", "c", None),
    ]
    assert (lines[0]["num_prompt_tokens"], lines[0]["num_output_tokens"]) == (9, 4)
    assert all(lines[0][span] >= 0 for span in ("queue_s", "prefill_s", "decode_s", "ttft_s", "e2e_s"))


async def test_requests_beyond_the_queue_are_refused_and_those_in_it_served(stage):
    s = await stage(max_num_seqs=1, max_num_queued=2)
    s.gate.shut()
    running = s.begin(prompt_of(9), greedy(10))
    await s.gate.arrival()
    queued = [s.begin(prompt_of(5, seed)) for seed in range(2)]
    core = s.engine._company.scheduler.core
    await until(lambda: len(core.queues.waiting) == 2)
    for _ in range(3):
        with pytest.raises(QueueFullError, match="max_num_queued") as caught:
            await s.ask(prompt_of(5, 9))
        assert caught.value.http_status == 429
    s.gate.open()
    assert answer_of(await running) == s.alone(prompt_of(9), greedy(10))
    assert [answer_of(await task) for task in queued] == [s.alone(prompt_of(5, seed)) for seed in range(2)]
    assert answer_of(await s.ask(prompt_of(5, 9))) == s.alone(prompt_of(5, 9))
    await s.check_clean()


async def test_a_flood_in_one_turn_of_the_loop_is_refused_not_lost(stage):
    s = await stage(max_num_queued=4, max_num_seqs=2)
    streams = [s.engine.generate(prompt_of(3, seed % 50), greedy(1)) for seed in range(600)]
    ends = await asyncio.gather(*map(last_of, streams), return_exceptions=True)
    assert len(ends) == 600
    refused = [end for end in ends if isinstance(end, BaseException)]
    assert {type(end) for end in refused} <= {QueueFullError}
    assert 600 > len(refused) > 0
    await s.check_clean()


async def test_a_blocked_loop_is_logged_with_a_hint(stage, log_lines):
    await stage()
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - what the warning is about
    await until(lambda: any(line["event"] == "loop.lag" for line in log_lines))
    (line,) = [line for line in log_lines if line["event"] == "loop.lag"]
    assert line["lag_s"] > 0.05
    assert "LLM" in line["hint"]
