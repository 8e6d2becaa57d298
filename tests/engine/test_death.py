"""A device or an actor that fails ends the engine: everybody is told, nobody waits for ever, the caller lives on."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from repertory import EngineDeadError
from repertory.tests.engine.stage import answer_of, greedy, last_of, prompt_of, read_all, until


def burn(step):
    raise OSError("the device is on fire")


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
async def test_every_reader_gets_the_tokens_that_came_and_then_the_error(stage, kind):
    s = await stage(max_steps_in_flight=1)
    s.gate.shut()
    streams = [s.engine.generate(prompt_of(9, seed), greedy(50, output_kind=kind), f"{seed}") for seed in range(3)]
    waiting = asyncio.ensure_future(read_all(s.engine.generate(prompt_of(9, 7), greedy(50, output_kind="final_only"))))
    deliveries = s.engine._company.dispatcher._deliveries
    while not all(len(d.completions[0].token_ids) >= 2 for d in deliveries.values() if d.kind == kind):
        await s.gate.step()
    await s.gate.arrival()
    counts = [len(d.completions[0].token_ids) for d in deliveries.values() if d.kind == kind]
    s.gate._inner = burn
    s.gate.open()
    for stream, seed, count in zip(streams, range(3), counts, strict=True):
        output = await anext(stream)
        assert output.outputs[0].token_ids == s.alone(prompt_of(9, seed), greedy(50)).token_ids[:count]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the device is on fire"):
                await anext(stream)
    with pytest.raises(EngineDeadError):
        await waiting


async def test_a_dead_engine_refuses_everything_and_says_why(stage, log_lines):
    s = await stage()
    s.device.on_step = burn
    with pytest.raises(EngineDeadError, match=r"step 1 failed: OSError: the device is on fire"):
        await s.ask(prompt_of(5))
    for call in (s.engine.check_health, s.engine.stats, s.engine.drain, s.engine.audit):
        with pytest.raises(EngineDeadError, match="on fire"):
            await call()
    with pytest.raises(EngineDeadError, match="on fire"):
        s.engine.generate(prompt_of(5))
    await s.engine.aclose()
    (line,) = [line for line in log_lines if line["event"] == "engine.dead"]
    assert "on fire" in line["reason"]


async def test_the_callers_task_is_not_cancelled(stage):
    s = await stage()
    s.device.on_step = burn
    task = asyncio.current_task()
    stream = s.engine.generate(prompt_of(5))
    with pytest.raises(EngineDeadError):
        await last_of(stream)
    await s.engine.aclose()
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_each_reader_gets_an_error_of_its_own_that_keeps_nobody_alive(stage):
    s = await stage()
    s.gate.shut()
    streams = [s.engine.generate(prompt_of(5, seed)) for seed in range(2)]
    s.gate._inner = burn
    s.gate.open()
    errors = await asyncio.gather(*map(last_of, streams), return_exceptions=True)
    assert errors[0] is not errors[1]
    gone = [weakref.ref(stream) for stream in streams]
    del streams, errors
    await asyncio.sleep(0)  # the loop itself holds the answer for the rest of this turn
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


async def test_a_step_that_fails_ends_the_steps_behind_it(stage):
    s = await stage()
    s.gate.shut()
    stream = s.engine.generate(prompt_of(9), greedy(50))
    await s.gate.arrival()
    core = s.engine._company.scheduler.core
    await until(lambda: core.num_in_flight == 2)
    s.gate._inner = burn
    s.gate.open()
    with pytest.raises(EngineDeadError):
        await read_all(stream)
    assert s.device.steps == []
    await s.engine.aclose()


async def test_a_fault_of_memory_is_caught_and_named(stage):
    # What a wrong block table would do: the device notices and the engine stops rather than answer wrongly.
    s = await stage(block_size=4)
    stream = s.engine.generate(prompt_of(9), greedy(50))
    await anext(stream)
    for seq in s.engine._company.scheduler.core.queues.running:
        seq.holding.changed.append(0)
        seq.holding.block_table[0] = 200
    with pytest.raises(EngineDeadError, match="MemoryFault"):
        await last_of(stream)


@pytest.mark.parametrize("actor", ["detokenizer", "dispatcher", "tokenizer", "scheduler"])
async def test_an_actor_that_fails_ends_the_engine_for_everybody(stage, actor):
    s = await stage()
    stream = s.engine.generate(prompt_of(9), greedy(2000))
    await anext(stream)
    broken = getattr(s.engine._company, actor)

    async def take(*, timeout_s=None):
        raise ZeroDivisionError("a bug in an actor")

    broken.inbox.take = take
    other = s.engine.generate(prompt_of(5), greedy(2000))
    for one in (stream, other):
        with pytest.raises(EngineDeadError, match="a bug in an actor"):
            await last_of(one)
    with pytest.raises(EngineDeadError):
        await s.engine.check_health()


async def test_an_engine_may_be_replaced_after_its_death(stage):
    dead = await stage()
    dead.device.on_step = burn
    with pytest.raises(EngineDeadError):
        await dead.ask(prompt_of(5))
    await dead.engine.aclose()
    s = await stage()
    assert answer_of(await s.ask(prompt_of(5))) == s.alone(prompt_of(5))
    await s.check_clean()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_cannot_be_closed_does_not_hold_up_the_end(stage):
    s = await stage()
    await s.ask(prompt_of(5))

    def close():
        raise OSError("the device does not let go")

    s.device.close = close
    async with asyncio.timeout(3):
        await s.engine.aclose()
