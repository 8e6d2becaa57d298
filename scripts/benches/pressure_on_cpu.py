"""Memory pressure on the CPU executor with the demo model: `scripts/bench pressure --real`.

Bursts of requests that want four times the KV pool, through a whole engine with its device in a process of its own, under
`recompute` (no host tier), `swap` and `auto` in turn. Times are the clock's, so they are as good as the machine is quiet;
each figure is the median of the runs, with the least and the most.

Tokens computed again count at the seconds that one token more adds to a prefill, measured in each run before the burst.
What steps waited for copies, and how long nothing ran, is what the scheduler tells its cost model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repertory import Engine, EngineConfig, SamplingParams
from repertory.protocol.config import PreemptionMode
from repertory.scripts.benches.pressure import MODES, Outcome, percentiles

BLOCK_SIZE = 16
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (128, 256)
ARRIVALS_PER_S = 20.0
WANTED_TO_POOL = 4
SHORT, LONG = 32, 512
"""Tokens of the prompts whose difference tells what a token of a prefill costs."""
PREFILLS = 5
VOCAB_SIZE = 40_000
"""Ids are drawn from the model's ordinary ones."""


class Job(NamedTuple):
    """A request, and when it comes."""

    at_s: float
    prompt: list[int]
    max_tokens: int

    @property
    def num_blocks(self) -> int:
        """KV blocks that it grows to."""
        return -(-(len(self.prompt) + self.max_tokens) // BLOCK_SIZE)


def serve_for_real(num_requests: int, seed: int, repetitions: int) -> int:
    """Serve the same burst `repetitions` times under each mode and print what it came to; always 0."""
    jobs = burst(num_requests, seed)
    num_blocks = max(sum(job.num_blocks for job in jobs) // WANTED_TO_POOL, max(job.num_blocks for job in jobs))
    runs: dict[PreemptionMode, list[Outcome]] = {mode: [] for mode in MODES}
    for _, mode in track([(turn, mode) for turn in range(repetitions) for mode in MODES], "serving"):
        runs[mode].append(asyncio.run(serve(mode, jobs, num_blocks)))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{num_requests} requests that grow to {sum(job.num_blocks for job in jobs)} blocks, a pool of {num_blocks}; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        highlight=False,
    )
    console.print(show(runs))
    return 0


def burst(count: int, seed: int) -> list[Job]:
    """Prompts without common beginnings, outputs that are longer than they are."""
    draw = random.Random(seed)
    jobs, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(ARRIVALS_PER_S)
        prompt = draw.choices(range(100, VOCAB_SIZE), k=draw.randint(*PROMPT_TOKENS))
        jobs.append(Job(now, prompt, draw.randint(*OUTPUT_TOKENS)))
    return jobs


async def serve(mode: PreemptionMode, jobs: Sequence[Job], num_blocks: int) -> Outcome:
    """One engine, one burst."""
    config = EngineConfig(
        model="demo",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        preemption_mode=mode,
        log_level="error",
        **({"kv_offloading_size": 0.0} if mode == "recompute" else {}),  # type: ignore[arg-type]
    )
    async with Engine(config) as engine:
        token_s = await prefill_token_s(engine)
        before = await engine.stats()
        began = time.perf_counter()
        times = await asyncio.gather(*(client(engine, job) for job in jobs))
        took_s = time.perf_counter() - began
        stats = await engine.stats()
    waited_s, still_s = stats.step_wait_s - before.step_wait_s, stats.fetch_wait_s - before.fetch_wait_s
    needed = sum(len(job.prompt) + job.max_tokens - 1 for job in jobs)
    recomputed_s = (stats.num_computed_tokens - before.num_computed_tokens - needed) * token_s
    return Outcome(
        lost_s=recomputed_s + waited_s + still_s,
        recomputed_s=recomputed_s,
        waited_s=waited_s,
        still_s=still_s,
        tokens_per_s=sum(job.max_tokens for job in jobs) / took_s,
        ttft_s=percentiles([came[0] - asked for asked, came in times]),
        itl_s=percentiles([after - before for _, came in times for before, after in itertools.pairwise(came)]),
        num_bytes=stats.swap_out_bytes + stats.swap_in_bytes,
        num_preemptions=stats.num_preemptions,
    )


async def client(engine: Engine, job: Job) -> tuple[float, list[float]]:
    """Ask when it is time; return when that was, and when each of the outputs came."""
    await asyncio.sleep(job.at_s)
    asked = time.perf_counter()
    came = []
    async for output in engine.generate(job.prompt, params_for(job.max_tokens)):
        came.append(time.perf_counter())
        done = output.outputs[0]
        if done.finish_reason not in (None, "length"):
            raise RuntimeError(f"a request ended with {done.finish_reason}: {done.stop_reason}")
    return asked, came


async def prefill_token_s(engine: Engine) -> float:
    """Seconds that a token more makes a prefill longer."""
    draw = random.Random(0)
    times: dict[int, list[float]] = {SHORT: [], LONG: []}
    for _ in range(PREFILLS):
        for length, found in times.items():
            began = time.perf_counter()
            async for _ in engine.generate(draw.choices(range(100, VOCAB_SIZE), k=length), params_for(1)):
                pass
            found.append(time.perf_counter() - began)
    short_s, long_s = (statistics.median(found) for found in times.values())
    return max(0.0, long_s - short_s) / (LONG - SHORT)


def params_for(max_tokens: int) -> SamplingParams:
    """Greedy, to the last token."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind="delta")


ROWS: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("lost, s of the device", ".2f", lambda run: run.lost_s),
    ("= again", ".2f", lambda run: run.recomputed_s),
    ("+ steps wait", ".3f", lambda run: run.waited_s),
    ("+ nothing runs", ".3f", lambda run: run.still_s),
    ("tok/s", ".0f", lambda run: run.tokens_per_s),
    ("TTFT P50 s", ".2f", lambda run: run.ttft_s[0]),
    ("TTFT P99 s", ".2f", lambda run: run.ttft_s[1]),
    ("ITL P50 ms", ".1f", lambda run: run.itl_s[0] * 1e3),
    ("ITL P99 ms", ".1f", lambda run: run.itl_s[1] * 1e3),
    ("GB moved", ".2f", lambda run: run.num_bytes / 1e9),
    ("recomputed", ".0f", lambda run: run.num_preemptions["recompute"]),
    ("swapped", ".0f", lambda run: run.num_preemptions["swap"]),
)
"""Figures of a run: name, format, where it is."""


def show(runs: dict[PreemptionMode, list[Outcome]]) -> Table:
    """The runs as a table: medians, the least and the most."""
    table = Table(title=f"memory pressure on the CPU: median (least..most) of {len(runs['auto'])}")
    table.add_column("")
    for mode in runs:
        table.add_column(mode, justify="right")
    for name, form, figure in ROWS:
        table.add_row(name, *(spread([figure(run) for run in some], form) for some in runs.values()))
    return table


def spread(values: Sequence[float], form: str) -> str:
    """`median (least..most)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


if __name__ == "__main__":
    sys.exit(serve_for_real(24, seed=1, repetitions=5))
