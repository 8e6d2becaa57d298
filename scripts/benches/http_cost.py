"""What HTTP costs beside the engine embedded: `scripts/bench http-cost`.

Many streams of one engine on a simulated device in a process of its own, read in turn by tasks of this process and by
clients over HTTP in another process. The cost is CPU time of this process's loop thread, where engine and HTTP frontend
run, a token; the lag is how late the loop wakes a task that sleeps. Rounds alternate between the two, and the medians of
each are compared: only the ratio says anything about another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from repertory import Engine, SamplingParams
from repertory.actors.frontends.http.server import serve_embedded
from repertory.tests.tiny_model import make_tiny_model

PROMPT = [50, 51, 52, 53, 54, 55, 56, 57]
LAG_PERIOD_S = 0.005
DONE = b"data: [DONE]"


class Round(NamedTuple):
    """One way of reading all streams, once."""

    us_per_token: float
    tokens_per_s: float
    lag_p50_ms: float
    lag_p99_ms: float


async def main() -> None:
    """Alternate between the two ways and print what they cost."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), weights=False)
        settings = {
            "max_num_seqs": options.streams,
            "num_device_blocks": options.streams * (options.tokens // 16 + 4),
            "max_num_batched_tokens": 4096,
            "kv_offloading_size": 0,
        }
        engine = Engine(model=str(model), device="simulated", log_level="warning", **settings)
        async with engine, serve_embedded(engine) as url:
            ways: dict[str, Callable[[], Awaitable[None]]] = {
                "embedded": lambda: _read_embedded(engine, options),
                "http": lambda: _read_over_http(url, options),
            }
            found: dict[str, list[Round]] = {name: [] for name in ways}
            for _ in range(options.rounds + 1):
                for name, read in ways.items():
                    found[name].append(await _measured(read, options.streams * options.tokens))
            _report({name: rounds[1:] for name, rounds in found.items()}, options)  # the first ones warm up


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="streams at the same time")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3, help="of each way, beside one to warm up")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.streams, options.tokens, options.rounds) < 1:
        parser.error("--streams, --tokens and --rounds must be at least 1")
    return options


async def _measured(read: Callable[[], Awaitable[None]], num_tokens: int) -> Round:
    lags: list[float] = []
    watching = asyncio.ensure_future(_watch(lags))
    began, cpu_began = time.perf_counter(), time.thread_time()
    await read()
    cpu_s, seconds = time.thread_time() - cpu_began, time.perf_counter() - began
    watching.cancel()
    cuts = statistics.quantiles(lags, n=100)
    return Round(cpu_s / num_tokens * 1e6, num_tokens / seconds, cuts[49] * 1e3, cuts[98] * 1e3)


async def _watch(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - before - LAG_PERIOD_S))


async def _read_embedded(engine: Engine, options: argparse.Namespace) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, output_kind="delta")

    async def one() -> int:
        return sum([len(output.outputs[0].token_ids) async for output in engine.generate(PROMPT, params)])

    counts = await asyncio.gather(*(one() for _ in range(options.streams)))
    assert set(counts) == {options.tokens}


async def _read_over_http(url: str, options: argparse.Namespace) -> None:
    sizes = ["--streams", str(options.streams), "--tokens", str(options.tokens)]
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", url, *sizes)
    if await client.wait():
        raise SystemExit("the client failed")


def _report(found: dict[str, list[Round]], options: argparse.Namespace) -> None:
    print(f"{options.streams} streams of {options.tokens} tokens, medians of {options.rounds} rounds each, in turn")
    print(f"{'':10} {'CPU us/token':>13} {'tokens/s':>10} {'loop lag P50':>13} {'P99 ms':>8}")
    medians = {}
    for name, rounds in found.items():
        cost, rate, p50, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
        medians[name] = cost
        print(f"{name:10} {cost:13.1f} {rate:10.0f} {p50:13.2f} {p99:8.2f}")
    print(f"HTTP adds {medians['http'] - medians['embedded']:.1f} us a token: {medians['http'] / medians['embedded']:.2f} x")


# ---- the clients' process --------------------------------------------------------------------------------


async def be_clients(url: str, options: argparse.Namespace) -> None:
    """Read all streams, each on a connection of its own, doing as little as can be."""
    counts = await asyncio.gather(*(_one_client(url, options.tokens) for _ in range(options.streams)))
    assert all(counts), "an answer was cut short"


async def _one_client(url: str, num_tokens: int) -> bool:
    found = urlsplit(url)
    asked = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection(found.hostname, found.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    tail = b""
    while DONE not in tail:
        piece = await reader.read(65_536)
        if not piece:
            return False
        tail = (tail + piece)[-200:]
    writer.close()
    return True


if __name__ == "__main__":
    chosen = _options()
    asyncio.run(be_clients(chosen.client, chosen) if chosen.client else main())
