"""What a core in another process costs against one in the same: `scripts/bench link`.

Streams decode side by side on the simulated device, each read by a task of its own: once with everything but the device in this
process, once with the core in its own, joined by `connect`. Both are measured in turns in one run; CPU time counts, as it
depends little on what else the machine does. Microseconds of CPU time a token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from repertory import Engine, SamplingParams, connect
from repertory.actors.frontends.face import EngineFace
from repertory.actors.serving.child import Child
from repertory.actors.serving.lines import CoreOrders
from repertory.actors.serving.server import CORE_COMMAND, private_endpoint
from repertory.protocol.config import EngineConfig
from repertory.tests.tiny_model import make_tiny_model

PROMPT_TOKENS = 12
PATIENCE_S = 600.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench link", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), weights=False)
        for _ in range(options.rounds):
            asyncio.run(measure(config_for(model, options.streams), options.streams, options.tokens, found))
    print(f"{options.streams} streams of {options.tokens} tokens, medians of {options.rounds} rounds, us of CPU time a token")
    print(f"  embedded   everything      {statistics.median(found['embedded']):6.1f}")
    print(f"  connected  frontend        {statistics.median(found['frontend']):6.1f}")
    print(f"             core            {statistics.median(found['core']):6.1f}")
    rounds = zip(found["embedded"], found["frontend"], found["core"], strict=True)
    ratios = [(frontend + core) / embedded for embedded, frontend, core in rounds]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"  connected / embedded       {statistics.median(ratios):6.2f}   ({shown})")


def config_for(model: Path, num_streams: int) -> EngineConfig:
    """Room for all streams at once."""
    return EngineConfig(
        model=str(model), device="simulated", num_device_blocks=100 * num_streams, max_num_seqs=num_streams, log_level="error"
    )


async def measure(config: EngineConfig, num_streams: int, num_tokens: int, found: dict[str, list[float]]) -> None:
    """One round: embedded, then connected."""
    total = num_streams * num_tokens
    async with Engine(config) as engine:
        await decode(engine, num_streams, num_tokens)
        found["embedded"].append(1e6 * await decode(engine, num_streams, num_tokens) / total)
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(private_endpoint())
        core = Child(CORE_COMMAND, CoreOrders(endpoint, config), patience_s=PATIENCE_S)
        stack.push_async_callback(core.end)
        await core.start()
        end = asyncio.ensure_future(core.ended())
        remote = await stack.enter_async_context(connect(endpoint))
        await decode(remote, num_streams, num_tokens)
        before = cpu_s(core)
        found["frontend"].append(1e6 * await decode(remote, num_streams, num_tokens) / total)
        found["core"].append(1e6 * (cpu_s(core) - before) / total)
        end.cancel()


async def decode(engine: EngineFace, num_streams: int, num_tokens: int) -> float:
    """Read all streams to their ends; this process's CPU seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta")

    async def read(number: int) -> None:
        async for _ in engine.generate([5 + number % 90] * PROMPT_TOKENS, params):
            pass

    started = time.process_time()
    await asyncio.gather(*map(read, range(num_streams)))
    return time.process_time() - started


def cpu_s(child: Child) -> float:
    """CPU seconds of a child so far."""
    times = psutil.Process(child.pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
