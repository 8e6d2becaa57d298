"""Drives this engine through its public API: its device in a process of its own, one compute thread."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from driving import Arrivals, Channel, Job, job_of

from repertory import Engine, EngineConfig, RequestOutput, SamplingParams


def greedy(max_tokens: int, *, streaming: bool) -> SamplingParams:
    """Answers of exactly `max_tokens` tokens."""
    kind = "delta" if streaming else "final_only"
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)  # type: ignore[arg-type]  # either literal


async def run(engine: Engine, job: Job) -> dict[str, Any]:
    """Submit all of the job's prompts at once and note when output comes."""
    params = greedy(job.max_tokens, streaming=len(job.prompts) == 1)
    began = time.perf_counter()
    streams = [engine.generate(prompt, params) for prompt in job.prompts]
    arrivals = await asyncio.gather(*(read(stream, began) for stream in streams))
    return {"seconds": time.perf_counter() - began, "arrivals": arrivals}


async def read(stream: AsyncIterator[RequestOutput], began: float) -> Arrivals:
    """Read a stream to its end."""
    return [(time.perf_counter() - began, len(output.outputs[0].token_ids)) async for output in stream]


async def run_with_arrival(engine: Engine, job: Job) -> dict[str, Any]:
    """Workload E: a long prompt arrives when all streams decode; its first token ends everything."""
    began = time.perf_counter()
    params = greedy(job.max_tokens, streaming=True)
    arrivals: list[Arrivals] = [[] for _ in job.prompts]
    waiting = set(range(len(job.prompts)))
    all_decode = asyncio.Event()

    async def follow(index: int) -> None:
        num_tokens = 0
        async for output in engine.generate(job.prompts[index], params):
            arrivals[index].append((time.perf_counter() - began, len(output.outputs[0].token_ids)))
            num_tokens += len(output.outputs[0].token_ids)
            if num_tokens >= job.tokens_before:
                waiting.discard(index)
                if not waiting:
                    all_decode.set()

    followers = [asyncio.create_task(follow(index)) for index in range(len(job.prompts))]
    await all_decode.wait()
    arrived = time.perf_counter() - began
    async with engine.generate(job.long_prompt, greedy(2, streaming=True)) as stream:
        await anext(stream)
        answered = time.perf_counter() - began
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)
    while (await engine.stats()).num_running:  # noqa: ASYNC110 - nothing tells when aborts have been carried out
        await asyncio.sleep(0.01)
    return {"seconds": answered, "arrivals": arrivals, "arrived_s": arrived, "answered_s": answered}


async def serve(channel: Channel, config: EngineConfig) -> None:
    """Answer jobs; the loop stays free between them, for the actors."""
    async with Engine(config) as engine:
        channel.say(ready=f"repertory {version('repertory')}")
        while (request := await asyncio.to_thread(channel.next_request)) is not None:
            job = job_of(request)
            channel.answer(job, await (run_with_arrival if job.long_prompt else run)(engine, job))


def main() -> None:
    """The driver: `drive_repertory.py MODEL [--budget N]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--budget", type=int)
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model,
        dtype="bfloat16",
        device="cpu",
        worker="process",
        num_threads=1,
        max_num_batched_tokens=options.budget,
        log_level="warning",
    )
    asyncio.run(serve(Channel(), config))


if __name__ == "__main__":
    main()
