"""A frontend in a process of its own: `python -m repertory.tests.served.reader ENDPOINT HOW NUM_REQUESTS`.

It starts endless requests, reads a token of each, prints `reading`, and then, by HOW: "reads" on for ever, "stops" reading
them (its loop turns), or "hangs" (its loop does not).
"""

from __future__ import annotations

import asyncio
import sys
import threading

from repertory import RequestStream, SamplingParams, connect
from repertory.tests.engine.stage import prompt_of

COMMAND = (sys.executable, "-m", "repertory.tests.served.reader")


async def read(endpoint: str, how: str, num_requests: int) -> None:
    kind = "final_only" if how == "hangs" else "delta"  # what has no credit to run out of
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, output_kind="delta")
    async with connect(endpoint) as engine:
        streams = [engine.generate(prompt_of(9, seed), params) for seed in range(num_requests)]
        for stream in streams:
            await anext(stream)
        unread = engine.generate(prompt_of(9, num_requests), SamplingParams(max_tokens=None, ignore_eos=True, output_kind=kind))
        print("reading", flush=True)  # noqa: T201 - to the test
        if how == "hangs":
            threading.Event().wait()
        if how == "stops":
            await asyncio.Event().wait()
        await asyncio.gather(*map(read_on, streams), read_on(unread))


async def read_on(stream: RequestStream) -> None:
    async for _ in stream:
        pass


if __name__ == "__main__":
    asyncio.run(read(sys.argv[1], sys.argv[2], int(sys.argv[3])))
