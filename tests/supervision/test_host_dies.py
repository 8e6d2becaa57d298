"""The device host dies at every kind of moment: every request goes on as if nothing had happened, and nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from repertory import SamplingParams
from repertory.protocol.messages import RunStep

from .conftest import DEFAULTS, Hosts
from .crowd import MARK, alone, begin, crowd, read, results
from .faulty_host import Fault

pytestmark = pytest.mark.alone

Until = Callable[..., Awaitable[None]]

WAYS = list(itertools.product(["kill", "stop", "raise"], ["before", "during", "after"]))
CRASHES = [way for way in WAYS if way != ("raise", "during")] + [("panic", "before"), ("exit", "during")]


def many_deaths(count: int, *, steps: tuple[int, int], ways: list[tuple[str, str]], seed: int = 0) -> list[Fault]:
    """One fault in each of the first `count` lives, at a step drawn from the range, every way in turn.

    The first step of a life gives its requests a token each: without it a third death in a row, by chance while one of them
    is alone, would be taken for that one's doing.
    """
    draw = random.Random(seed)
    ordered = [ways[number % len(ways)] for number in range(count)]
    draw.shuffle(ordered)
    return [
        Fault(how, when, life=life, step=draw.randint(*steps))  # type: ignore[arg-type]
        for life, (how, when) in enumerate(ordered, 1)
    ]


async def test_the_host_of_a_real_model_dies_20_times_under_50_requests(hosts: Hosts) -> None:
    requests = crowd(50, max_tokens=32)
    expected = await alone(hosts.models["cpu"], requests, **DEFAULTS["cpu"])
    faults = many_deaths(20, steps=(2, 9), ways=CRASHES)
    engine = await hosts.open("cpu", *faults, max_num_seqs=8, heartbeat_timeout_s=1.5)
    assert await results(begin(engine, requests), limit_s=240) == expected
    assert hosts.num_deeds == 20
    assert (await engine.stats()).num_restarts >= 20
    assert await engine.audit() == []


async def test_a_host_with_one_step_in_flight_dies_10_times_under_50_requests(hosts: Hosts) -> None:
    requests = crowd(50, max_tokens=32, seed=1)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    faults = many_deaths(10, steps=(2, 9), ways=CRASHES, seed=1)
    engine = await hosts.open("simulated", *faults, max_num_seqs=8, heartbeat_timeout_s=0.5, max_steps_in_flight=1)
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 10
    assert (await engine.stats()).num_restarts >= 10
    assert await engine.audit() == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_a_host_dies_20_times_in_many_runs(hosts: Hosts, seed: int) -> None:
    requests = crowd(50, max_tokens=32, seed=10 + seed)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    blocks = [40, 256][seed // 4 % 2]
    engine = await hosts.open(
        "simulated",
        *many_deaths(20, steps=(3, 12), ways=CRASHES, seed=10 + seed),
        max_num_seqs=3 + seed // 2,
        max_steps_in_flight=1 + seed % 2,
        num_device_blocks=blocks,
        heartbeat_timeout_s=0.5,
    )
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 20
    assert await engine.audit() == []


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_one_request_whose_step_always_kills_the_host_fails_alone(hosts: Hosts, in_flight: int) -> None:
    requests = crowd(12, max_tokens=40)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    fault = Fault("kill", "before", token=MARK, is_last=False)
    engine = await hosts.open("simulated", fault, max_steps_in_flight=in_flight)
    culprit = ([20, MARK, 21], SamplingParams(temperature=0.0, output_kind="delta"))
    tasks = begin(engine, [*requests[:6], culprit, *requests[6:]])
    found = await results(tasks)
    failed = found.pop(6)
    assert found == expected
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "the device died 4 times" in str(failed.stop_reason)
    assert hosts.num_deeds <= 4
    assert await engine.audit() == []


async def test_two_that_kill_the_host_fail_and_nobody_with_them(hosts: Hosts) -> None:
    requests = crowd(6, max_tokens=30)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", Fault("raise", "after", token=MARK, is_last=False))
    culprit = ([20, MARK, 21], SamplingParams(temperature=0.0, output_kind="delta"))
    found = await results(begin(engine, [culprit, *requests, culprit]))
    assert [found[0].finish_reason, found[-1].finish_reason] == ["error", "error"]
    assert found[1:-1] == expected
    assert hosts.num_deeds <= 2 * 4  # each two among others, and two alone
    assert await engine.audit() == []


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
async def test_the_replacement_dies_while_it_starts_twice_in_a_row(hosts: Hosts, how: str) -> None:
    requests = crowd(10)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    faults = [Fault("kill", life=1, step=5), *(Fault(how, "opening", life=life) for life in (2, 3))]  # type: ignore[arg-type]
    engine = await hosts.open("simulated", *faults)
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 3
    assert (await engine.stats()).num_restarts == 1
    assert await engine.audit() == []


async def test_a_replacement_that_is_stopped_while_it_starts_is_replaced_too(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repertory.actors.devices.process.OPENING_SILENCE_S", 1.5)
    requests = crowd(10)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open(
        "simulated", Fault("kill", life=1, step=5), Fault("stop", "opening", life=2), heartbeat_timeout_s=0.5
    )
    assert await results(begin(engine, requests)) == expected
    assert await engine.audit() == []


async def test_a_host_that_dies_during_a_drain_is_replaced_and_the_drain_comes_to_its_end(hosts: Hosts, until: Until) -> None:
    requests = crowd(10)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", Fault("kill", step=8), step_s=0.005)
    tasks = begin(engine, requests)
    await until(lambda: engine._company.scheduler.core.num_live == len(requests))
    assert await engine.drain(timeout_s=30)
    assert await results(tasks) == expected
    assert hosts.num_deeds == 1
    assert await engine.audit() == []


async def test_a_host_that_dies_in_the_middle_of_a_prefill(hosts: Hosts) -> None:
    prompt = [20 + number % 70 for number in range(300)]
    long = (prompt, SamplingParams(temperature=0.0, max_tokens=10, output_kind="delta"))
    requests = [long, *crowd(4)]
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    faults = [Fault("kill", "after", life=1, step=4), Fault("raise", life=2, step=9)]
    engine = await hosts.open("simulated", *faults, max_num_batched_tokens=16)
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 2
    assert await engine.audit() == []


async def test_requests_paused_by_their_readers_sleep_through_a_death(hosts: Hosts, until: Until) -> None:
    requests = crowd(6, max_tokens=20, seed=1)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", Fault("kill", token=MARK), credit_window=2)
    streams = [engine.generate(*request) for request in requests]
    core = engine._company.scheduler.core
    await until(lambda: len(core.queues.paused) == core.num_live)
    # Nothing runs: somebody else's step is the death of the device.
    other = ([20, MARK], SamplingParams(temperature=0.0, max_tokens=1, output_kind="delta"))
    (answer,) = await results(begin(engine, [other]))
    assert answer.finish_reason == "length"
    assert hosts.num_deeds == 1
    assert await results([asyncio.ensure_future(read(stream)) for stream in streams]) == expected
    assert await engine.audit() == []


async def test_a_death_with_nothing_to_do_is_a_restart_and_nothing_else(hosts: Hosts, until: Until) -> None:
    requests = crowd(3)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated")
    for life in (1, 2):
        await until(lambda life=life: len(hosts.pids) == life and engine._company.scheduler.core.device_is_ready)
        os.kill(hosts.pids[-1], signal.SIGKILL)
        await until(lambda: not engine._company.scheduler.core.device_is_ready)
    assert await results(begin(engine, requests)) == expected
    assert (await engine.stats()).num_restarts == 2
    assert await engine.audit() == []


async def test_a_host_that_says_too_much_lives_on(hosts: Hosts) -> None:
    requests = crowd(3)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", Fault("babble", step=3), heartbeat_timeout_s=1.0)
    assert await results(begin(engine, requests)) == expected
    assert (await engine.stats()).num_restarts == 0
    assert await engine.audit() == []


# ---- silence, and what is none --------------------------------------------------------------------


@pytest.mark.parametrize(("step", "limit"), [(14, "LEAST_OVERDUE_S"), (3, "UNPREDICTED_S")])
async def test_a_step_that_hangs_while_the_host_beats_on_is_overdue(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, log_lines: list[dict], step: int, limit: str
) -> None:
    monkeypatch.setattr(f"repertory.actors.devices.process.{limit}", 0.5)
    requests = crowd(4)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", Fault("hang", life=1, step=step))
    assert await results(begin(engine, requests)) == expected
    (lost,) = [line for line in log_lines if line["event"] == "device.lost"]
    assert "a step is overdue" in lost["reason"]
    assert await engine.audit() == []


async def block_and_see(hosts: Hosts, seconds: float, **settings: Any) -> None:
    """Block the application's loop for so long, twice, in the very turn in which a step is sent. Nobody must die of it."""
    requests = crowd(8, max_tokens=14)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    engine = await hosts.open("simulated", step_s=0.25, **settings)  # longer than from one judgement to the next
    tasks = begin(engine, requests)
    scheduler = engine._company.scheduler
    really, count = scheduler._device, itertools.count()

    def send(step: RunStep, predicted_s: float | None) -> None:
        really(step, predicted_s)
        if next(count) in (2, 9):
            time.sleep(seconds)

    scheduler._device = send
    assert await results(tasks) == expected
    assert next(count) > 9
    assert (await engine.stats()).num_restarts == 0
    assert await engine.audit() == []


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_a_blocked_loop_of_the_application_kills_nobody(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    monkeypatch.setattr("repertory.actors.devices.process.LEAST_OVERDUE_S", 0.6)
    monkeypatch.setattr("repertory.actors.devices.process.UNPREDICTED_S", 0.6)
    await block_and_see(hosts, 1.5, heartbeat_timeout_s=0.4, max_steps_in_flight=in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2])
async def test_a_loop_of_the_application_blocked_for_15_seconds_kills_nobody(hosts: Hosts, in_flight: int) -> None:
    await block_and_see(hosts, 15.0, max_steps_in_flight=in_flight)
