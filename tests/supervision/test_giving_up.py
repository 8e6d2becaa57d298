"""When no device comes back, when the engine is closed in the middle, when the application is killed: an end, and no trace."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from repertory import EngineDeadError, SamplingParams

from .conftest import DEFAULTS, Hosts
from .crowd import Result, alone, begin, crowd, results
from .faulty_host import Fault

pytestmark = pytest.mark.alone

Until = Callable[..., Awaitable[None]]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, output_kind="delta")


async def deaths_of(tasks: list[asyncio.Task[Result]]) -> list[BaseException]:
    """How each reader ended, all of them with an error."""
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, EngineDeadError) for end in ends), ends
    return [end for end in ends if isinstance(end, BaseException)]


# ---- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_deaths_without_progress_end_the_engine_for_everybody(hosts: Hosts, max_restarts: int) -> None:
    engine = await hosts.open("simulated", Fault("kill", is_last=False), max_restarts=max_restarts)
    for end in await deaths_of(begin(engine, crowd(10))):
        assert "died too often without progress" in str(end)
        assert "SIGKILL" in str(end)
    assert hosts.num_deeds == max_restarts + 1
    with pytest.raises(EngineDeadError, match="too often"):
        await engine.check_health()
    with pytest.raises(EngineDeadError, match="too often"):
        engine.generate("hello")


async def test_a_token_gained_in_between_makes_the_budget_as_new(hosts: Hosts) -> None:
    requests = crowd(6)
    expected = await alone(hosts.models["simulated"], requests, **DEFAULTS["simulated"])
    faults = [Fault("kill", life=life, step=4) for life in range(1, 6)]
    engine = await hosts.open("simulated", *faults, max_restarts=1)
    assert await results(begin(engine, requests)) == expected
    assert hosts.num_deeds == 5
    assert await engine.audit() == []


async def test_a_device_that_cannot_be_opened_again_ends_the_engine_after_as_many_tries(hosts: Hosts) -> None:
    faults = [Fault("kill", life=1, step=6), *(Fault("raise", "opening", life=life) for life in range(2, 9))]
    engine = await hosts.open("simulated", *faults, max_restarts=2)
    for end in await deaths_of(begin(engine, [([20, 21], ENDLESS)] * 3)):
        assert "it did not open again" in str(end)
        assert "on fire" in str(end)
    assert len(hosts.pids) == 3
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_a_model_that_has_gone_meanwhile_ends_the_engine_and_is_named(hosts: Hosts, tmp_path: Path, until: Until) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in hosts.models["simulated"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    hosts.models["simulated"] = model
    engine = await hosts.open("simulated", max_restarts=1)
    tasks = begin(engine, [([20, 21], ENDLESS)])
    await until(lambda: engine._company.keeper.num_sequences == 1)
    (model / "config.json").unlink()
    os.kill(hosts.pids[-1], signal.SIGKILL)
    (end,) = await deaths_of(tasks)
    assert "config.json" in str(end)


# ---- closed in the middle -------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["stopped", "backing off", "opening", "just ready"])
async def test_an_engine_is_closed_whatever_its_device_is_at(hosts: Hosts, until: Until, moment: str) -> None:
    faults = [Fault("hang", "opening", life=2)] if moment == "opening" else []
    engine = await hosts.open("simulated", *faults)
    tasks = begin(engine, [([20, 21], ENDLESS)] * 3)
    keeper = engine._company.keeper
    await until(lambda: keeper.num_sequences > 0)
    os.kill(hosts.pids[-1], signal.SIGSTOP if moment == "stopped" else signal.SIGKILL)
    if moment == "backing off":
        await until(lambda: keeper._device is None)
    elif moment == "opening":
        await until(lambda: len(hosts.pids) == 2)
    elif moment == "just ready":
        await until(lambda: engine._company.scheduler.core.num_restarts == 1)
    started = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - started < 4.0
    await deaths_of(tasks)
    await hosts.check_nothing_is_left()


async def test_a_close_that_is_cancelled_still_gives_everything_back(hosts: Hosts, until: Until) -> None:
    engine = await hosts.open("simulated")
    tasks = begin(engine, [([20, 21], ENDLESS)])
    await until(lambda: engine._company.keeper.num_sequences > 0)
    os.kill(hosts.pids[-1], signal.SIGSTOP)  # so that closing takes its time
    assert engine._task is not None
    engine._task.cancel()
    await asyncio.sleep(0)
    engine._task.cancel()
    await engine.aclose()
    await deaths_of(tasks)
    await hosts.check_nothing_is_left()


# ---- the application is killed --------------------------------------------------------------------


PARENT = """
import asyncio, sys
from repertory import Engine, SamplingParams
from repertory.tests.supervision.faulty_host import COMMAND
async def main():
    async with Engine(model=sys.argv[1], device="simulated", host_command=COMMAND, log_level="error") as engine:
        stream = engine.generate([20, 21], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
        async for output in stream:
            if len(output.outputs[0].token_ids) > 5:
                print("generating", flush=True)
                break
        async for output in stream:
            pass
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["computing", "stopped", "hanging", "opening"])
async def test_the_host_goes_with_an_application_that_is_killed(hosts: Hosts, tmp_path: Path, until: Until, state: str) -> None:
    faults = {
        "hanging": [Fault("hang", step=12)],
        "opening": [Fault("kill", life=1, step=12), Fault("hang", "opening", life=2)],
    }
    hosts.prepare(*faults.get(state, []), step_s=0.01)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environ = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(hosts.models["simulated"]), stdout=asyncio.subprocess.PIPE, env=environ
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        assert await parent.stdout.readline() == b"generating\n"
    if state in ("hanging", "opening"):
        await until(lambda: hosts.num_deeds == len(faults[state]))
    if state == "stopped":
        os.kill(hosts.pids[-1], signal.SIGSTOP)
    assert hosts.left
    parent.kill()
    await parent.wait()
    await hosts.check_nothing_is_left()
