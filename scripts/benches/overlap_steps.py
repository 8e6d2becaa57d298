"""How long the device waits between steps, with one and with two in flight: `scripts/bench overlap-steps`.

The demo model on the CPU, in a process of its own and inline, with 1 and with 32 requests that only decode.
The device's side takes the time: from the end of a step to the start of the next it is idle. Settings take
turns, so that whatever else the machine does meets all of them. "share" is the idle time's part of the whole,
the median over windows of a run, as are "gap" and "step"; "least" is the shortest gap of a window: what the
engine itself needs, where a busy machine takes the processor away in most of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from repertory import Engine, EngineConfig, SamplingParams
from repertory.actors import device_host
from repertory.actors.device import open_executor
from repertory.gpu.executor import Capacity, Executor
from repertory.protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone

AIM = 0.02
PROMPT_TOKENS = 48
WARM_UP_STEPS = 10
WINDOW = 10


class Span(NamedTuple):
    """One step on the device: when it ran (seconds), over how many rows and tokens."""

    start: float
    end: float
    num_rows: int
    num_tokens: int


class RecordingExecutor:
    """An executor that takes the time of every step, and writes all of them down in the step after the last request."""

    def __init__(self, inner: Executor, record: Path) -> None:
        self._inner = inner
        self._record = record
        self._spans: list[Span] = []

    @property
    def capacity(self) -> Capacity:
        """The inner one's."""
        return self._inner.capacity

    @property
    def num_sequences(self) -> int:
        """The inner one's."""
        return self._inner.num_sequences

    def run_step(self, step: RunStep) -> StepDone:
        """Run the step."""
        start = time.perf_counter()
        done = self._inner.run_step(step)
        self._spans.append(Span(start, time.perf_counter(), len(step.seq_ids), sum(step.num_tokens)))
        if not step.seq_ids:
            self._record.write_bytes(msgspec.json.encode(self._spans))
        return done

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Run the copy."""
        return self._inner.copy_blocks(copy)

    @property
    def watch(self) -> None:
        """Nobody else is looked for."""
        return None

    def interrupt(self) -> None:
        """Interrupt the inner one."""
        self._inner.interrupt()

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()


class Setting(NamedTuple):
    """What is compared."""

    worker: str
    num_running: int
    max_steps_in_flight: int


class Idle(NamedTuple):
    """Of a window: the idle share, the shortest and the median gap, and the median step, in seconds."""

    share: float
    least_gap_s: float
    gap_s: float
    step_s: float


def measure(setting: Setting, num_steps: int, record: Path) -> list[Idle]:
    """Idle times of about `num_steps` decode steps, by window."""
    asyncio.run(decode(build_engine(setting, record), setting.num_running, num_steps))
    spans = msgspec.json.decode(record.read_bytes(), type=list[Span])
    record.unlink()
    return idle_windows(spans, setting.num_running)


def build_engine(setting: Setting, record: Path) -> Engine:
    """An engine on the CPU whose device takes the time."""
    config = EngineConfig(
        model="demo",
        device="cpu",
        worker=setting.worker,  # type: ignore[arg-type]  # one of its two words
        max_steps_in_flight=setting.max_steps_in_flight,
        max_num_seqs=setting.num_running,
        max_num_batched_tokens=setting.num_running * PROMPT_TOKENS,
        log_level="warning",
    )
    if setting.worker == "process":
        return Engine(config, host_command=(sys.executable, str(Path(__file__).resolve()), str(record)))
    return Engine(config, open_device=lambda config, model_dir: RecordingExecutor(open_executor(config, model_dir), record))


async def decode(engine: Engine, num_running: int, num_steps: int) -> None:
    """Run all requests to their ends, and the step after them."""
    # Two more: the first token comes of the prompt's step, and a window needs the step after it.
    num_tokens = WARM_UP_STEPS + num_steps + 2
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta")
    async with engine:
        await asyncio.gather(*(read(engine, number, params) for number in range(num_running)))
        await engine.audit()  # waits until the device has been told that all have ended


async def read(engine: Engine, number: int, params: SamplingParams) -> None:
    """One client."""
    prompt = [100 + (number * 7919 + position * 104729) % 40_000 for position in range(PROMPT_TOKENS)]
    async for _ in engine.generate(prompt, params):
        pass


def idle_windows(spans: list[Span], num_running: int) -> list[Idle]:
    """Idle shares over the steps in which every request decodes."""
    decodes = [span for span in spans if span.num_rows == span.num_tokens == num_running][WARM_UP_STEPS:]
    windows = []
    for first in range(0, len(decodes) - WINDOW, WINDOW):
        window = decodes[first : first + WINDOW + 1]
        gaps = [after.start - before.end for before, after in itertools.pairwise(window)]
        whole = window[-1].start - window[0].start
        windows.append(
            Idle(
                share=sum(gaps) / whole,
                least_gap_s=min(gaps),
                gap_s=statistics.median(gaps),
                step_s=statistics.median(span.end - span.start for span in window),
            )
        )
    return windows


def main() -> None:
    """Print a table of idle shares."""
    parser = argparse.ArgumentParser(prog="scripts/bench overlap-steps", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32], help="running decodes")
    parser.add_argument("--steps", type=int, default=200, help="measured steps per line (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="turns in which they are measured (default: 2)")
    parser.add_argument("--workers", nargs="+", default=["process", "inline"], choices=["process", "inline"])
    arguments = parser.parse_args()
    settings = [Setting(*one) for one in itertools.product(arguments.workers, arguments.running, (1, 2))]
    found: dict[Setting, list[Idle]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for setting in settings:
                found[setting] += measure(setting, arguments.steps // arguments.rounds, Path(folder, "spans"))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'worker':<8} {'running':>7} {'in flight':>9} {'step ms':>9} {'least us':>9} {'gap us':>8} {'share':>7}  aim")
    for setting, windows in found.items():
        share, least_gap_s, gap_s, step_s = (statistics.median(column) for column in zip(*windows, strict=True))
        aim = f"under {AIM:.0%}" if setting.max_steps_in_flight == 2 else ""
        print(
            f"{setting.worker:<8} {setting.num_running:>7} {setting.max_steps_in_flight:>9} {step_s * 1e3:>9.2f} "
            f"{least_gap_s * 1e6:>9.0f} {gap_s * 1e6:>8.0f} {share:>7.2%}  {aim}".rstrip()
        )


def host() -> int:
    """Be the device host: `overlap_steps.py RECORD ENDPOINT`."""
    record = Path(sys.argv.pop(1))
    return device_host.main(lambda config, model_dir: RecordingExecutor(open_executor(config, model_dir), record))


if __name__ == "__main__":
    if sys.argv[-1].startswith("ipc://"):
        os._exit(host())
    main()
