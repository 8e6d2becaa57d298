"""Host microseconds a step costs, end to end through the actors, by actor: `scripts/bench overhead`.

The device costs nothing: it answers every row with the same token. What is left is the engine itself, with
requests that decode, each read by a task of its own. All actors share one thread: an actor's time is the CPU
time of that thread in the steps of the actor's coroutine; "reading" is what remains, the clients' tasks and the
event loop itself. Medians over windows of a run. Only "wall" knows of a device host, or of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from repertory import Engine, EngineConfig, SamplingParams
from repertory.actors import device_host
from repertory.actors.detokenizer import Detokenizer
from repertory.actors.devices.keeper import DeviceKeeper
from repertory.actors.devices.process import ProcessDevice
from repertory.actors.frontends.dispatcher import Dispatcher
from repertory.actors.scheduler import Scheduler
from repertory.actors.scheduling.core import SchedulerCore
from repertory.gpu.executor import Capacity
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone
from repertory.tests.tiny_model import make_tiny_model

AIM_CORE_US = 1200.0
AIM_PLAN_APPLY_US = 3.0
AIM_AT = 256
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
MODEL_LENGTH = 100_000
VOCAB_SIZE = 320
TOKEN = 50
"""Any that is neither special nor an end."""
WINDOW = 25
WARM_UP_WINDOWS = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")


class ConstantExecutor:
    """Implements `Executor`: no model, no memory, the same token for every row that samples."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_device_blocks is not None
        self._num_device_blocks = config.num_device_blocks
        self._sequences: set[SequenceId] = set()

    @property
    def capacity(self) -> Capacity:
        """Sizes that hold the whole run."""
        return Capacity(
            device="constant",
            num_device_blocks=self._num_device_blocks,
            num_host_blocks=0,
            block_size=BLOCK_SIZE,
            block_bytes=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=MODEL_LENGTH,
        )

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not released."""
        return len(self._sequences)

    def run_step(self, step: RunStep) -> StepDone:
        """Answer `step` at once."""
        self._sequences.difference_update(step.released)
        self._sequences.update(new.seq_id for new in step.admitted)
        sampled = [seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples]
        return StepDone(step.epoch, step.step_id, sampled, [TOKEN] * len(sampled), 0.0)

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """There is no host tier to copy to."""
        return CopyDone(copy.epoch, copy.copy_id, copy.direction, 0, 0.0, ok=False, reason="there is no host tier")

    @property
    def watch(self) -> None:
        """Nobody else is looked for."""
        return None

    def interrupt(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Nothing to give back."""


def open_constant(config: EngineConfig, model_dir: Path) -> ConstantExecutor:
    """The device opener, here and in the device host."""
    return ConstantExecutor(config)


class Stopwatch:
    """CPU seconds of this thread by name, of functions and of the steps of coroutines."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def function(self, owner: type | ModuleType, method: str, name: str) -> None:
        """Time every call of a method, or of a module's function."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **options)
            finally:
                self.seconds[name] += time.thread_time() - began

        setattr(owner, method, timed)

    def coroutine(self, owner: type, method: str, name: str) -> None:
        """Time what every call of an async method runs, without its waits."""
        original: Callable[..., Awaitable[Any]] = getattr(owner, method)

        @functools.wraps(original)
        async def timed(*args: Any, **options: Any) -> Any:
            return await _Timed(original(*args, **options), self, name)

        setattr(owner, method, timed)


class _Timed:
    """Awaits another awaitable, and times each of its steps."""

    def __init__(self, inner: Awaitable[Any], stopwatch: Stopwatch, name: str) -> None:
        self._inner, self._stopwatch, self._name = inner, stopwatch, name

    def __await__(self) -> Generator[Any, None, Any]:
        steps = self._inner.__await__()
        resume: Callable[[], Any] = functools.partial(next, steps)
        while True:
            began = time.thread_time()
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            finally:
                self._stopwatch.seconds[self._name] += time.thread_time() - began
            try:
                yield awaited
            except BaseException as error:  # a cancellation is the inner one's to handle
                assert isinstance(steps, Generator)
                resume = functools.partial(steps.throw, error)
            else:
                resume = functools.partial(next, steps)


class Edge(NamedTuple):
    """What had been used up at the end of a window."""

    wall_s: float
    cpu_s: float
    seconds: dict[str, float]


class Windows:
    """Takes note at every `WINDOW`th step while all requests decode."""

    def __init__(self, stopwatch: Stopwatch, num_running: int, num_windows: int) -> None:
        self._stopwatch = stopwatch
        self._num_running = num_running
        self._num_left = num_windows + WARM_UP_WINDOWS + 1
        self._num_steps = 0
        self._edges: list[Edge] = []
        self.full = asyncio.Event()

    def on_step(self, message: StepDone) -> None:
        """A step was answered, on the event loop's thread."""
        if len(message.seq_ids) < self._num_running:
            return
        self._num_steps += 1
        if self._num_steps % WINDOW == 0 and self._num_left:
            self._num_left -= 1
            self._edges.append(Edge(time.perf_counter(), time.thread_time(), dict(self._stopwatch.seconds)))
        if not self._num_left:
            self.full.set()

    def medians(self) -> dict[str, float]:
        """Microseconds a step, by name."""
        edges = self._edges[WARM_UP_WINDOWS:]
        names = {name for edge in edges for name in edge.seconds}
        rows = [
            {"wall": after.wall_s - before.wall_s, "cpu": after.cpu_s - before.cpu_s}
            | {name: after.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in names}
            for before, after in itertools.pairwise(edges)
        ]
        return {name: statistics.median(row[name] for row in rows) / WINDOW * 1e6 for name in rows[0]}


def wrap_actors(stopwatch: Stopwatch) -> None:
    """Time the actors of every engine of this process from now on."""
    stopwatch.coroutine(Scheduler, "run", "scheduler")
    stopwatch.coroutine(Detokenizer, "run", "detokenizer")
    stopwatch.coroutine(Dispatcher, "run", "dispatcher")
    stopwatch.coroutine(ProcessDevice, "_listen", "receive")
    stopwatch.function(SchedulerCore, "plan", "plan")
    stopwatch.function(SchedulerCore, "on_step_done", "apply")
    stopwatch.function(DeviceKeeper, "send", "send")


async def measure(stopwatch: Stopwatch, model: Path, worker: str, num_running: int, num_windows: int) -> dict[str, float]:
    """Microseconds a step of `num_running` decodes, by name."""
    windows = Windows(stopwatch, num_running, num_windows)
    original = DeviceKeeper._on_answer

    def on_answer(keeper: DeviceKeeper, message: StepDone | CopyDone) -> None:
        if isinstance(message, StepDone):
            windows.on_step(message)
        original(keeper, message)

    setattr(DeviceKeeper, "_on_answer", on_answer)  # noqa: B010 - for this engine only
    try:
        async with build_engine(model, worker, num_running, num_windows) as engine:
            readers = [asyncio.create_task(read(engine, number)) for number in range(num_running)]
            await windows.full.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    finally:
        setattr(DeviceKeeper, "_on_answer", original)  # noqa: B010
    return windows.medians()


def build_engine(model: Path, worker: str, num_running: int, num_windows: int) -> Engine:
    """An engine on the constant device, with memory for the whole run."""
    num_tokens = PROMPT_TOKENS + WINDOW * (num_windows + WARM_UP_WINDOWS + 1) + 8192  # with the reserve for growth
    config = EngineConfig(
        model=str(model),
        device="simulated",
        worker=worker,  # type: ignore[arg-type]  # one of its two words
        log_level="warning",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_running * num_tokens // BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_TOKENS,
    )
    if worker == "inline":
        return Engine(config, open_device=open_constant)
    return Engine(config, host_command=(sys.executable, str(Path(__file__).resolve())))


async def read(engine: Engine, number: int) -> None:
    """One client."""
    prompt = [3 + (number + position * (number + 1)) % 256 for position in range(PROMPT_TOKENS)]
    async for _ in engine.generate(prompt, PARAMS):
        pass


COLUMNS = ("wall", "cpu", "core", "plan", "apply", "sched. rest", "send", "receive", "detokenizer", "dispatcher", "reading")


def columns(times: dict[str, float]) -> dict[str, float]:
    """The table's columns. After "core" (the scheduler and its link) come those that each microsecond of the thread is in."""
    found = defaultdict(float, times)
    actors = ("scheduler", "receive", "detokenizer", "dispatcher")
    found["reading"] = found["cpu"] - sum(found[actor] for actor in actors)
    found["sched. rest"] = found["scheduler"] - found["plan"] - found["apply"] - found["send"]
    found["core"] = found["plan"] + found["apply"] + found["sched. rest"] + found["send"] + found["receive"]
    return found


def main() -> None:
    """Print a table of microseconds a step."""
    parser = argparse.ArgumentParser(prog="scripts/bench overhead", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256], help="running decodes")
    parser.add_argument("--steps", type=int, default=500, help="measured steps per line (default: 500)")
    parser.add_argument("--workers", nargs="+", default=["inline", "process"], choices=["inline", "process"])
    arguments = parser.parse_args()
    stopwatch = Stopwatch()
    wrap_actors(stopwatch)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; microseconds a step")
    print(f"{'worker':<8} {'running':>7} " + " ".join(f"{name:>11}" for name in COLUMNS) + f" {'plan+apply/request':>19}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), weights=False, vocab_size=VOCAB_SIZE, max_position_embeddings=MODEL_LENGTH)
        (model / "tokenizer_config.json").write_text("{}")  # no chat template: nothing here chats
        for worker in arguments.workers:
            for num_running in arguments.running:
                times = columns(asyncio.run(measure(stopwatch, model, worker, num_running, arguments.steps // WINDOW)))
                each = (times["plan"] + times["apply"]) / num_running
                row = " ".join(f"{times[name]:>11.1f}" for name in COLUMNS)
                print(f"{worker:<8} {num_running:>7} {row} {each:>19.2f}", flush=True)
    print(f"aims at {AIM_AT} running: core at most {AIM_CORE_US:g}, plan+apply/request at most {AIM_PLAN_APPLY_US:g}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("ipc://"):
        os._exit(device_host.main(open_constant))
    main()
