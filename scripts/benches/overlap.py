"""What copies between the tiers cost the steps that they run beside: `scripts/bench overlap`.

The CPU executor with the demo model, driven as a device host drives it: one thread computes, one copies out, one copies
in. Decodes of 8 and of 32 rows at a context of 512 tokens, and a prefill of 512, run with idle lanes and with both
lanes busy all the time, in turn in one run. Steps and copies touch different blocks; a step beside copies names as its
fences those that were sent beside the step before it, as the scheduler's do at the latest.

    idle, busy        median duration of a step, waits not included; slower: busy / idle
    core              of busy - idle: in which the compute thread was ready and another had its core. The rest is computing
                      itself, which takes longer where copies want the same memory
    wait              that a step waited for copies
    GB/s              what each lane moved beside the steps
    hidden            1 - (busy - idle + wait) / copying: of the seconds that the two lanes copied while a step ran (each by
                      its own clock, `CopyDone.seconds`), the share that lengthened no step
    against a stop    the same, against the seconds that the same bytes take both lanes when no step runs

Other processes compete with both and show in `core`: it takes a quiet machine.
With one compute thread on two cores, steps should become at most 10% longer, and 90% of the copying should be hidden.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from repertory.gpu.cpu.library import open_library
from repertory.gpu.cpu.memory import huge_empty
from repertory.gpu.executor import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import BlockId, SequenceId
from repertory.protocol.messages import (
    CopyDirection,
    CopyDone,
    Fences,
    NewRow,
)
from repertory.protocol.sampling import SamplingParams
from repertory.scripts.benches.overlapping.driving import DIRECTIONS, LANE_BLOCKS, Driver, Ran

MOST_SLOWER, LEAST_HIDDEN = 1.10, 0.90
CONTEXT, ROOM = 512, 256
BLOCK_SIZE = 16
WINDOW = 4
SEQUENCE_BLOCKS = (CONTEXT + ROOM) // BLOCK_SIZE
READ_BYTES = 1 << 28
ALONE_S = 0.5
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Work(NamedTuple):
    """A step that can be run again and again, after what it is given."""

    name: str
    run: Callable[[Fences], Awaitable[Ran]]


def decodes(driver: Driver, num_rows: int, lengths: list[int]) -> Work:
    """One token for each of the first sequences, whose contexts (`lengths`) grow by it."""

    async def run(after: Fences) -> Ran:
        ran = await driver.step([(1 + i, lengths[i], 1) for i in range(num_rows)], after=after)
        lengths[:num_rows] = [length + 1 for length in lengths[:num_rows]]
        return ran

    return Work(f"decode {num_rows} x {CONTEXT}", run)


def prefill(driver: Driver, prompt: list[int], blocks: list[BlockId], first_id: int) -> Work:
    """A prompt, computed whole, by a new sequence on the same blocks each time."""
    ids = map(SequenceId, itertools.count(first_id))

    async def run(after: Fences) -> Ran:
        new = NewRow(next(ids), prompt, len(prompt), GREEDY, blocks)
        ran = await driver.step([(new.seq_id, 0, len(prompt))], after=after, admitted=[new])
        await driver.step([], released=[new.seq_id])
        return ran

    return Work(f"prefill {len(prompt)}", run)


async def works(driver: Driver, vocab_size: int, rows: list[int]) -> list[Work]:
    """The steps to measure, on scattered blocks and contexts that have been computed."""
    draw = random.Random(0)
    most, size = max(rows), SEQUENCE_BLOCKS
    blocks = draw.sample(range((most + 1) * size), k=(most + 1) * size)
    tables = [[BlockId(block) for block in blocks[i * size : (i + 1) * size]] for i in range(most + 1)]
    for number in range(1, most + 1):
        prompt = draw.choices(range(vocab_size), k=CONTEXT - 1)
        new = NewRow(SequenceId(number), prompt, len(prompt), GREEDY, tables[number - 1])
        await driver.step([(number, 0, len(prompt))], admitted=[new])
    lengths = [CONTEXT - 1] * most
    chunk = prefill(driver, draw.choices(range(vocab_size), k=CONTEXT), tables[most], first_id=most + 1)
    return [*(decodes(driver, count, lengths) for count in rows), chunk]


class Found(NamedTuple):
    """Steps with idle and with busy lanes, and copies (when they had ended) beside the latter."""

    idle: list[Ran]
    busy: list[Ran]
    copies: list[tuple[float, CopyDone]]


async def measure(driver: Driver, work: Work, num_windows: int) -> Found:
    """`num_windows` windows of steps with idle lanes and as many with busy ones, in turn."""
    found = Found([], [], [])
    await work.run(Fences())
    for _ in range(num_windows):
        found.idle.extend([await work.run(Fences()) for _ in range(WINDOW)])
        first = {lane: len(lane.done) for lane in driver.lanes.values()}
        driver.start_lanes()
        before = Fences()
        for _ in range(WINDOW):
            sent = driver.sent()
            found.busy.append(await work.run(before))
            before = sent
        await driver.stop_lanes()
        found.copies.extend(done for lane, start in first.items() for done in lane.done[start:])
    return found


class Result(NamedTuple):
    """What a kind of step came to. Seconds a step, shares, bytes a second."""

    idle_s: float
    busy_s: float
    core_s: float
    waited_s: float
    rates: dict[CopyDirection, float]
    hidden: float
    against_a_stop: float

    @property
    def slower(self) -> float:
        """How many times as long a step takes beside copies."""
        return self.busy_s / self.idle_s


def reckon(found: Found, alone_rate: float) -> Result:
    """Medians, and the copies that the busy steps met."""
    idle_s, busy_s = (statistics.median(ran.step_s for ran in steps) for steps in (found.idle, found.busy))
    off_core = [statistics.median(ran.step_s - ran.cpu_s for ran in steps) for steps in (found.idle, found.busy)]
    waited_s = statistics.fmean(ran.waited_s for ran in found.busy)
    beside = [(_share(found.busy, ended, done), done) for ended, done in found.copies]
    copied_s = sum(share * done.seconds for share, done in beside) / len(found.busy)
    moved = {
        direction: sum(share * done.num_bytes for share, done in beside if done.direction == direction)
        for direction in DIRECTIONS
    }
    in_steps_s = sum(ran.end - ran.start for ran in found.busy)
    lost_s = busy_s - idle_s + waited_s
    return Result(
        idle_s=idle_s,
        busy_s=busy_s,
        core_s=off_core[1] - off_core[0],
        waited_s=waited_s,
        rates={direction: moved[direction] / in_steps_s for direction in DIRECTIONS},
        hidden=1 - lost_s / copied_s,
        against_a_stop=1 - lost_s / (sum(moved.values()) / len(found.busy) / alone_rate),
    )


def _share(steps: list[Ran], ended: float, done: CopyDone) -> float:
    """The part of a copy that ran while one of `steps` did."""
    began = ended - done.seconds
    return sum(max(0.0, min(ended, ran.end) - max(began, ran.start)) for ran in steps) / done.seconds


async def reading(driver: Driver) -> tuple[float, float, float]:
    """Bytes a second at which a thread reads memory: alone; beside both lanes, by its own time and by the clock."""
    memory = huge_empty([READ_BYTES // 8], torch.int64).zero_()
    library = open_library()

    def read() -> tuple[float, float]:
        start, running = time.perf_counter(), time.thread_time()
        library.read_memory(memory.data_ptr(), memory.numel())
        return memory.nbytes / (time.thread_time() - running), memory.nbytes / (time.perf_counter() - start)

    alone = [await asyncio.to_thread(read) for _ in range(7)]
    driver.start_lanes()
    beside = [await asyncio.to_thread(read) for _ in range(7)]
    await driver.stop_lanes()
    own, clock = (statistics.median(column) for column in zip(*beside, strict=True))
    return statistics.median(rate for rate, _ in alone), own, clock


async def run(options: argparse.Namespace, console: Console) -> None:
    """Measure and print everything."""
    config = EngineConfig(
        model="demo",
        block_size=BLOCK_SIZE,
        num_threads=options.threads,
        num_device_blocks=(max(options.rows) + 1) * SEQUENCE_BLOCKS + 2 * LANE_BLOCKS,
        num_host_blocks=2 * LANE_BLOCKS,
    )
    driver = Driver(config)
    try:
        capacity = await driver.threads.start()
        await driver.copy_alone(ALONE_S)  # the first copies find the system's pages
        alone_rate = await driver.copy_alone(ALONE_S)
        say_machine(console, capacity, config, alone_rate, await reading(driver))
        results = {
            work.name: reckon(await measure(driver, work, options.windows), alone_rate)
            for work in await works(driver, capacity.vocab_size, options.rows)
        }
    finally:
        await driver.threads.aclose()
    console.print(show(results))
    judge(results, console)


def say_machine(
    console: Console, capacity: Capacity, config: EngineConfig, alone_rate: float, read: tuple[float, float, float]
) -> None:
    """What the figures below were measured on."""
    alone, own, clock = (rate / 1e9 for rate in read)
    console.print(
        f"{capacity.device}, {config.compute_threads} compute thread(s) on {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}\n"
        f"both lanes and no steps: {alone_rate / 1e9:.1f} GB/s together\n"
        f"one thread reads {alone:.1f} GB/s; beside both lanes {own:.1f} GB/s of its own time, {clock:.1f} GB/s by the clock",
        highlight=False,
    )


def show(results: dict[str, Result]) -> Table:
    """The results as a table."""
    table = Table(title="steps with both copy lanes idle and busy")
    columns = ("step", "idle ms", "busy ms", "slower", "core ms", "wait ms", "out GB/s", "in GB/s", "hidden", "against a stop")
    for column in columns:
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            *(f"{value * 1e3:.1f}" for value in (result.idle_s, result.busy_s)),
            f"{result.slower:.2f}",
            *(f"{value * 1e3:.2f}" for value in (result.core_s, result.waited_s)),
            *(f"{result.rates[direction] / 1e9:.1f}" for direction in DIRECTIONS),
            f"{result.hidden:.0%}",
            f"{result.against_a_stop:.0%}",
        )
    return table


def judge(results: dict[str, Result], console: Console) -> None:
    """Say which aims are met."""
    for name, result in results.items():
        slower = f"{result.slower:.2f} times as long (at most {MOST_SLOWER:.2f})"
        hidden = f"{result.hidden:.0%} of the copying hidden (at least {LEAST_HIDDEN:.0%})"
        for words, is_met in ((slower, result.slower <= MOST_SLOWER), (hidden, result.hidden >= LEAST_HIDDEN)):
            console.print(f"{name}: {words}: {'met' if is_met else 'MISSED'}", highlight=False)


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="rows of the decode steps (default: 8 32)")
    parser.add_argument("--windows", type=int, default=8, help=f"windows of {WINDOW} steps, idle and busy each (default: 8)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: 1)")
    options = parser.parse_args()
    if len(options.rows) * (2 * WINDOW * options.windows + 1) > ROOM:
        parser.error(f"contexts would grow by more than {ROOM} tokens: fewer rows or windows")
    asyncio.run(run(options, Console(width=None if sys.stdout.isatty() else 120)))


if __name__ == "__main__":
    main()
