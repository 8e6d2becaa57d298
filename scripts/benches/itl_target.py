"""Whether `target_itl_ms` holds, and what it costs the prompts that wait for it: `scripts/bench itl-target`.

The demo model on the CPU. Eight streams decode while prompts of 4,096 tokens come one at a time, first with a fixed budget of
512 tokens a step, then with a target of twice the decode-only step that the first part measured. A gap is what a
stream's reader waits between two tokens; counted are those in which a long prompt was being prefilled. The prediction error is
|predicted / taken - 1| of a step on the device, over all steps in which a prompt was prefilled. Other processes on the
machine lengthen steps that nobody can predict: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from typing import NamedTuple

from repertory import Engine, EngineConfig
from repertory.actors.commands.benching.drive import stream, warm_up
from repertory.actors.commands.benching.metrics import Timeline, percentile
from repertory.actors.commands.benching.workloads import token_ids
from repertory.protocol.messages import StepDone

NUM_STREAMS = 8
STREAM_PROMPT_TOKENS = 64
MOST_STREAM_TOKENS = 6000
FIXED_BUDGET = 512
FACTOR = 2.0
LEAST_TOKENS = 40
"""That each stream has before the first long prompt comes, and between two of them."""
AIM_ERROR, AIM_P90, AIM_P99 = 0.15, 1.1, 1.4


class Step(NamedTuple):
    """A step on the device, as the scheduler saw it. Seconds."""

    predicted_s: float | None
    taken_s: float
    num_prefill_tokens: int


class Part(NamedTuple):
    """What one setting gave. Milliseconds, but for the error."""

    decode_step: float
    gaps: list[float]
    ttfts: list[float]
    errors: list[float]
    chunks: list[int]


def watch(engine: Engine) -> list[Step]:
    """The engine's steps from here on."""
    core = engine._company.scheduler.core  # type: ignore[union-attr]  # it is open
    steps: list[Step] = []
    original = core.on_step_done

    def on_step_done(message: StepDone, now: float) -> None:
        draft = core._steps.get(message.step_id)
        if draft is not None and draft.rows:
            steps.append(Step(core.predicted_s(message), message.seconds, draft.num_prefill_tokens))
        original(message, now)

    core.on_step_done = on_step_done  # type: ignore[method-assign]  # of this one only
    return steps


async def measure(config: EngineConfig, num_prompts: int, prompt_tokens: int) -> Part:
    """Run the streams, and the long prompts beside them."""
    async with Engine(config) as engine:
        await warm_up(engine)
        steps = watch(engine)
        timelines: dict[int, Timeline] = {}
        readers = [asyncio.create_task(read(engine, index, timelines)) for index in range(NUM_STREAMS)]
        long: list[Timeline] = []
        for number in range(num_prompts):
            await tokens_more(timelines, readers)
            long.append(await stream(engine, token_ids(prompt_tokens, 65_000 + number), 1))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    prefills = [step for step in steps if step.num_prefill_tokens]
    return Part(
        decode_step=1e3 * statistics.median(step.taken_s for step in steps if not step.num_prefill_tokens),
        gaps=[1e3 * gap for one in long for timeline in timelines.values() for gap in gaps_during(timeline, one)],
        ttfts=[1e3 * one.ttft_s for one in long],
        errors=[abs(step.predicted_s / step.taken_s - 1) for step in prefills if step.predicted_s is not None],
        chunks=[step.num_prefill_tokens for step in prefills],
    )


async def read(engine: Engine, index: int, timelines: dict[int, Timeline]) -> None:
    """One stream, until it is cancelled."""

    def note(timeline: Timeline) -> None:
        timelines[index] = timeline

    await stream(engine, token_ids(STREAM_PROMPT_TOKENS, 60_000 + index), MOST_STREAM_TOKENS, note=note)


async def tokens_more(timelines: dict[int, Timeline], readers: list[asyncio.Task[None]]) -> None:
    """Wait until every stream has had `LEAST_TOKENS` more."""
    first = {index: timelines[index].num_output if index in timelines else 0 for index in range(NUM_STREAMS)}
    while any(index not in timelines or timelines[index].num_output < first[index] + LEAST_TOKENS for index in first):
        for reader in readers:
            if reader.done():
                reader.result()
                raise RuntimeError("a stream has ended: MOST_STREAM_TOKENS is too small for so many prompts")
        await asyncio.sleep(0.01)


def gaps_during(timeline: Timeline, long: Timeline) -> list[float]:
    """Gaps of a stream that overlap the prefill of `long`, in seconds."""
    begin, end = long.sent_s, long.sent_s + long.ttft_s
    pairs = zip(timeline.at_s, timeline.at_s[1:], strict=False)
    return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


def show(name: str, part: Part, target_ms: float) -> None:
    """One line of the table."""
    gaps = [percentile(part.gaps, share) for share in (0.5, 0.9, 0.99)]
    ratios = f"{gaps[1] / target_ms:>7.2f} {gaps[2] / target_ms:>7.2f}"
    error = f"{percentile(part.errors, 0.5):>8.1%} {percentile(part.errors, 0.9):>8.1%}"
    print(
        f"{name:<14} {part.decode_step:>9.1f} {' '.join(f'{gap:>8.1f}' for gap in gaps)} {ratios} {error} "
        f"{statistics.median(part.chunks):>6.0f} {statistics.median(part.ttfts):>9.0f}"
    )


def main() -> None:
    """Measure both settings in turn and print them."""
    parser = argparse.ArgumentParser(prog="scripts/bench itl-target", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="long prompts per setting (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="their length (default: 4096)")
    parser.add_argument("--factor", type=float, default=FACTOR, help="target, in decode-only steps (default: 2)")
    arguments = parser.parse_args()
    began = time.perf_counter()
    config = EngineConfig(model="demo", device="cpu", max_num_batched_tokens=FIXED_BUDGET, log_level="warning")
    fixed = asyncio.run(measure(config, arguments.prompts, arguments.prompt_tokens))
    target_ms = arguments.factor * fixed.decode_step
    config = EngineConfig(
        model="demo", device="cpu", max_num_batched_tokens=FIXED_BUDGET, log_level="warning", target_itl_ms=target_ms
    )
    held = asyncio.run(measure(config, arguments.prompts, arguments.prompt_tokens))
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"load average {loads} on {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s; milliseconds")
    print(
        f"target {target_ms:.1f}: {arguments.factor:g} x the decode-only step; {NUM_STREAMS} streams, "
        f"{arguments.prompts} prompts of {arguments.prompt_tokens} tokens each"
    )
    print(
        f"{'setting':<14} {'decode':>9} {'gap P50':>8} {'P90':>8} {'P99':>8} {'P90/tgt':>7} {'P99/tgt':>7} "
        f"{'err P50':>8} {'err P90':>8} {'chunk':>6} {'TTFT':>9}"
    )
    show(f"budget {FIXED_BUDGET}", fixed, target_ms)
    show("target_itl_ms", held, target_ms)
    cost = statistics.median(held.ttfts) / statistics.median(fixed.ttfts)
    print(f"the target costs a long prompt {cost:.2f} x its TTFT")
    print(f"aims: error P90 under {AIM_ERROR:.0%}, gap P90 at most {AIM_P90:g} and P99 at most {AIM_P99:g} x the target")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
