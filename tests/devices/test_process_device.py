"""The device in a process of its own: it opens, computes, dies in every way, and leaves nothing behind."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from repertory.actors.devices import process
from repertory.actors.devices.process import ProcessDevice
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import EngineDeadError, ModelLoadError
from repertory.protocol.ids import BlockId, SequenceId, StepId
from repertory.protocol.messages import CopyDone, Fences, NewRow, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams
from repertory.tests.supervision.faulty_host import COMMAND, VARIABLE, Fault, Plan
from repertory.tests.tiny_model import make_tiny_model

from .work import EPOCH, copy_of, empty_step, fences, until

pytestmark = pytest.mark.alone

PARAMS = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


def config_for(model_dir: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(model_dir), device="simulated", num_device_blocks=16, **settings)  # type: ignore[arg-type]


def step(number: int, *, start: int, count: int, admitted: bool = False) -> RunStep:
    one = SequenceId(1)
    return RunStep(
        EPOCH,
        StepId(number),
        Fences(StepId(number - 1)),
        [one],
        [start],
        [count],
        [1],
        admitted=[NewRow(one, [5, 6, 7], 3, PARAMS, [BlockId(0)])] if admitted else [],
    )


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_removed(folder: str) -> bool:
    return not Path(folder).exists()


async def test_it_opens_runs_steps_in_order_and_closes_without_a_trace(model_dir: Path) -> None:
    answers: list[StepDone | CopyDone] = []
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=answers.append)
    capacity = await device.open()
    pid, folder = device.pid, device.folder
    assert capacity.num_device_blocks == 16
    assert pid is not None
    assert folder is not None
    assert oct(os.stat(folder).st_mode)[-3:] == "700"
    device.send(step(1, start=0, count=3, admitted=True), None)
    device.send(step(2, start=3, count=1), None)
    await until(lambda: len(answers) == 2)
    assert [answer.step_id for answer in answers if isinstance(answer, StepDone)] == [1, 2]
    assert isinstance(answers[-1], StepDone) and answers[-1].num_sequences == 1
    await device.aclose()
    await device.aclose()
    assert is_gone(pid)
    assert is_removed(folder)


async def test_a_model_that_cannot_be_loaded_is_reported_in_the_childs_words(tmp_path: Path) -> None:
    device = ProcessDevice(EPOCH, config_for(tmp_path), tmp_path, on_answer=lambda done: None)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        await device.open()
    await device.aclose()


async def test_a_host_that_ends_while_it_starts_is_quoted(model_dir: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no accelerator today')")
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=lambda done: None, command=command)
    with pytest.raises(EngineDeadError, match=r"status 1\nno accelerator today"):
        await device.open()
    await device.aclose()


async def test_a_killed_host_is_noticed_within_two_seconds(model_dir: Path) -> None:
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=lambda done: None)
    await device.open()
    started = time.monotonic()
    assert device.pid is not None
    os.kill(device.pid, signal.SIGKILL)
    assert "SIGKILL" in await device.lost()
    assert time.monotonic() - started < 2.0
    await device.aclose()


async def test_a_stopped_host_is_noticed_by_its_silence_and_ended_by_force(model_dir: Path) -> None:
    config = config_for(model_dir, heartbeat_timeout_s=0.5)
    device = ProcessDevice(EPOCH, config, model_dir, on_answer=lambda done: None)
    await device.open()
    pid = device.pid
    assert pid is not None
    started = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    assert "silent" in await device.lost()
    assert time.monotonic() - started < 0.5 + 2.0
    await device.aclose()
    assert is_gone(pid)


async def test_a_step_that_raises_ends_the_host(model_dir: Path) -> None:
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=lambda done: None)
    await device.open()
    device.send(step(1, start=0, count=3), None)  # a sequence the device was never told of
    assert "step 1 failed" in await device.lost()
    await device.aclose()


async def test_a_blocked_loop_of_ours_does_not_make_the_host_dead(model_dir: Path) -> None:
    device = ProcessDevice(EPOCH, config_for(model_dir, heartbeat_timeout_s=0.3), model_dir, on_answer=lambda done: None)
    await device.open()
    lost = asyncio.create_task(device.lost())
    time.sleep(1.5)  # noqa: ASYNC251 - the fault under test
    await asyncio.sleep(0.5)
    assert not lost.done()
    lost.cancel()
    await device.aclose()


async def test_bytes_that_are_no_message_are_dropped_by_the_host(model_dir: Path) -> None:
    answers: list[StepDone | CopyDone] = []
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=answers.append)
    await device.open()
    link = device._socket
    assert link is not None
    for frame in (b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.", b"\x92\xa7RunStep\x01", os.urandom(200)):
        await link.send(frame)
    device.send(step(1, start=0, count=3, admitted=True), None)
    await until(lambda: len(answers) == 1)
    assert isinstance(answers[0], StepDone) and answers[0].token_ids, "the step after them was run as if they had not come"
    await device.aclose()


async def test_the_host_does_not_outlive_a_parent_that_is_killed(model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, pathlib\n"
        "from repertory.actors.devices.process import ProcessDevice\n"
        "from repertory.protocol.config import EngineConfig\n"
        "async def main():\n"
        "    model = pathlib.Path(sys.argv[1])\n"
        "    config = EngineConfig(model=str(model), device='simulated', num_device_blocks=16)\n"
        "    device = ProcessDevice(1, config, model, on_answer=print)\n"
        "    await device.open()\n"
        "    print(device.pid, device.folder, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    for stopped in (False, True):
        parent = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(model_dir), stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid_text, folder = (await parent.stdout.readline()).decode().split()
        if stopped:
            os.kill(int(pid_text), signal.SIGSTOP)
        parent.kill()
        await parent.wait()
        await until(lambda pid=int(pid_text): is_gone(pid))  # type: ignore[misc]
        assert is_removed(folder)


# ---- copies -----------------------------------------------------------------------------------------


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plan of a faulty host goes."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    return tmp_path / "plan"


def plan(file: Path, *faults: Fault) -> None:
    file.write_bytes(msgspec.json.encode(Plan(list(faults))))


async def test_steps_and_copies_travel_over_one_link_and_wait_for_each_other(model_dir: Path) -> None:
    answers: list[StepDone | CopyDone] = []
    config = config_for(model_dir, num_host_blocks=4)
    device = ProcessDevice(EPOCH, config, model_dir, on_answer=answers.append)
    assert (await device.open()).num_host_blocks == 4
    device.send(step(1, start=0, count=3, admitted=True), None)
    device.send(copy_of("out", 1, fences(1)), None)
    device.send(copy_of("in", 1, fences(0, 1)), None)
    device.send(copy_of("in", 2, block=99), None)
    device.send(empty_step(2, 1, 2), None)
    await until(lambda: len(answers) == 5)
    assert [answer.step_id for answer in answers if isinstance(answer, StepDone)] == [1, 2]
    (out,) = [answer for answer in answers if isinstance(answer, CopyDone) and answer.direction == "out"]
    first, second = [answer for answer in answers if isinstance(answer, CopyDone) and answer.direction == "in"]
    assert (out.ok, first.ok, second.ok) == (True, True, False)
    assert out.num_bytes > 0
    assert "block 99 of a host pool of 4" in second.reason
    await device.aclose()


async def test_a_host_that_is_killed_with_copies_outstanding_is_lost(model_dir: Path, faults: Path) -> None:
    plan(faults, Fault("kill", "copying", step=2))
    answers: list[StepDone | CopyDone] = []
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=answers.append, command=COMMAND)
    await device.open()
    device.send(copy_of("in", 1, fences(9)), None)
    device.send(copy_of("out", 1), None)
    device.send(copy_of("out", 2), None)
    device.send(copy_of("out", 3), None)
    async with asyncio.timeout(60):
        assert "SIGKILL" in await device.lost()
    assert all(isinstance(answer, CopyDone) and (answer.direction, answer.copy_id) == ("out", 1) for answer in answers)
    await device.aclose()


@pytest.mark.parametrize("predicted_s", [0.001, None])
async def test_a_stalled_lane_ends_in_a_lost_device_by_the_copys_own_time(
    model_dir: Path, faults: Path, monkeypatch: pytest.MonkeyPatch, predicted_s: float | None
) -> None:
    monkeypatch.setattr(process, "LEAST_OVERDUE_S", 0.4)
    monkeypatch.setattr(process, "UNPREDICTED_S", 0.4)
    plan(faults, Fault("hang", "copying", step=1))
    answers: list[StepDone | CopyDone] = []
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=answers.append, command=COMMAND)
    await device.open()
    device.send(copy_of("out", 1), predicted_s)
    device.send(empty_step(1, copy_out=1), 0.0)
    async with asyncio.timeout(60):
        assert (await device.lost()).startswith("a copy out is overdue")
    assert answers == []
    await device.aclose()


async def test_a_lane_that_raises_ends_the_host(model_dir: Path) -> None:
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=lambda done: None)
    await device.open()
    device.send(copy_of("in", 7), None)
    async with asyncio.timeout(60):
        assert await device.lost() == "copy in 7 failed: ValueError: copy in 7 follows number 0 of its lane"
    await device.aclose()


async def test_a_device_closes_at_once_whatever_its_lanes_wait_for(model_dir: Path, faults: Path) -> None:
    plan(faults, Fault("hang", "copying", step=2))
    answers: list[StepDone | CopyDone] = []
    device = ProcessDevice(EPOCH, config_for(model_dir), model_dir, on_answer=answers.append, command=COMMAND)
    await device.open()
    pid = device.pid
    assert pid is not None
    device.send(copy_of("in", 1, fences(9)), None)
    device.send(copy_of("out", 1), None)
    device.send(copy_of("out", 2), None)
    device.send(empty_step(1, copy_in=1), None)
    await until(lambda: len(answers) == 1)
    started = time.monotonic()
    await device.aclose()
    assert time.monotonic() - started < 3.0
    assert is_gone(pid)
