"""Static, continuous and chunked scheduling on the same Poisson arrivals: `repertory bench table`, on a small random model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from repertory import Engine
from repertory.actors.commands.benching import arrivals, table
from repertory.actors.commands.benching.drive import Advance, BenchEngine
from repertory.protocol.config import EngineConfig

from ..gpu import Gpu
from ..report import Report
from ..shapes import SMOLLM2, TINY, RandomWeights, write_model

NUM_REQUESTS = 600
"""Enough for a few seconds at what a GPU serves of a small model."""

TINY_LENGTHS = arrivals.Lengths(chat=(4, 12), document=(40, 60), book=100, short_answer=(2, 3), long_answer=(6, 8))


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    plan = gpu.sized(
        table.Plan(NUM_REQUESTS, None, None, 1, arrivals.Lengths()),
        table.Plan(24, 40.0, None, 1, TINY_LENGTHS),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), gpu.sized(SMOLLM2, TINY), weights=False, max_position_embeddings=8192)
        config = gpu.config(
            model, dtype=gpu.sized("bfloat16", "float32"), max_num_seqs=gpu.sized(64, 8),
            max_num_batched_tokens=gpu.sized(1024, 64), max_model_len=gpu.sized(8192, 256),
            num_device_blocks=gpu.sized(8192, 256), num_host_blocks=0,
        )  # fmt: skip
        found = asyncio.run(table.compare(plan, config, factory=_factory(gpu), step=partial(_step, report)))
    _show(report, found)


def _factory(gpu: Gpu) -> Any:
    """Engines whose device is inline, all with the same weights."""
    load = RandomWeights()

    def engine(config: EngineConfig) -> AbstractAsyncContextManager[BenchEngine]:
        opened = Engine(config, open_device=lambda settings, _: gpu.open(settings, load=load)[0])
        return cast("AbstractAsyncContextManager[BenchEngine]", opened)

    return engine


@contextmanager
def _step(report: Report, name: str, num_parts: int) -> Iterator[Advance]:
    report.say(f"{name}: {num_parts} requests")
    yield lambda: None


def _show(report: Report, found: table.Found) -> None:
    for one in found.outcomes:
        ttft = f"TTFT P50 {one.p50_ttft_ms:.3g}, P99 {one.p99_ttft_ms:.3g} ms"
        note = f"{ttft}; TBT P50 {one.p50_tbt_ms:.3g}, P99 {one.p99_tbt_ms:.3g} ms"
        report.figure(f"{one.name}, {found.rate:.0f} requests/s", one.output_throughput, "tok/s", note=note)
    ratios = table.ratios(found.outcomes)
    report.figure("continuous / static, throughput", ratios["throughput_continuous_over_static"], "x")
    report.figure("chunked / continuous, P99 of TBT", ratios["p99_tbt_chunked_over_continuous"], "x")
    report.detail("outcomes", msgspec.to_builtins(found.outcomes))
    report.detail("ratios", ratios)
