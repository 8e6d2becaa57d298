"""Many more requests than the pool holds: in float32 each still gives the tokens that transformers gives.

Tiny random model, real executor. They are preempted, swapped out and fetched or computed again, in every mode and with
host pools of every size; whatever is lost, mixed up or read too early on the way shows as a wrong token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from repertory import Engine, EngineConfig, SamplingParams
from repertory.actors.device import DeviceOpener
from repertory.gpu.cuda.opening import open_on
from repertory.protocol.config import PreemptionMode
from repertory.protocol.outputs import EngineStats, RequestOutput
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime
from repertory.tests.gpu_cuda.opened import TORCH_ONLY

from .reference import NUM_THREADS, continuations, load_directory
from .running import Case, difference
from .test_against_transformers import CLEAR_GAP

BLOCK_SIZE = 8
NUM_REQUESTS = 48
NUM_TOKENS = 24
AMPLE, TINY, SCANT, NONE = 600, 14, 3, 0
"""Host blocks: for everybody, for about two of the requests, for less than one, for nobody."""
NUM_FITTING = 6
"""Requests of the usual size that the device's pool holds."""
SEED = 11
GPU = "GPU"
"""The GPU's executor, on streams of the CPU that run as late as they may."""


@dataclass(frozen=True)
class Pressed:
    """One way to be short of memory."""

    mode: PreemptionMode
    host: int
    in_flight: int = 2
    worker: Literal["inline", "process"] = "inline"
    caching: bool = True
    budget: int = 512
    backend: str = "auto"

    def __str__(self) -> str:
        host = {AMPLE: "ample", TINY: "tiny", SCANT: "scant", NONE: "no"}[self.host]
        cache = "" if self.caching else ", no cache"
        return (
            f"{self.mode}, {host} host, {self.worker}, {self.in_flight} in flight, budget {self.budget}{cache}, {self.backend}"
        )

    def config(self, model_dir: Path, num_blocks: int) -> EngineConfig:
        return EngineConfig(
            model=str(model_dir),
            device="cpu",
            dtype="float32",
            num_threads=NUM_THREADS,
            worker=self.worker,
            block_size=BLOCK_SIZE,
            num_device_blocks=num_blocks,
            num_host_blocks=self.host,
            preemption_mode=self.mode,
            max_steps_in_flight=self.in_flight,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.caching,
            attention_backend="torch" if self.backend == GPU else self.backend,
            log_level="warning",
        )

    @property
    def open_device(self) -> DeviceOpener | None:
        """What opens another device than that of the configuration."""
        if self.backend != GPU:
            return None
        return lambda config, model_dir: open_on(LazyRuntime(SEED), config, model_dir, facts=TORCH_ONLY)


EVERY = [
    Pressed(mode, host, in_flight)
    for mode in ("swap", "auto", "heuristic", "recompute")
    for host in (AMPLE, TINY, NONE)
    for in_flight in (1, 2)
]
MORE = [
    Pressed("swap", AMPLE, worker="process"),
    Pressed("swap", TINY, worker="process", in_flight=1),
    Pressed("auto", AMPLE, worker="process"),
    Pressed("swap", SCANT),
    Pressed("auto", SCANT, in_flight=1),
    Pressed("swap", AMPLE, caching=False),
    Pressed("swap", TINY, caching=False, in_flight=1),
    Pressed("swap", AMPLE, budget=7),
    Pressed("swap", AMPLE, backend="torch"),
    Pressed("swap", AMPLE, backend=GPU),
    Pressed("swap", TINY, caching=False, backend=GPU),
    Pressed("auto", TINY, budget=16, backend=GPU),
    Pressed("recompute", NONE, 1, backend=GPU),
]
QUICK = {setting for setting in EVERY if setting.in_flight == 2} | set(MORE) | {Pressed("swap", AMPLE, 1)}


def params(case: Case, number: int) -> SamplingParams:
    """Two of three are greedy; the third draws."""
    if number % 3 < 2:
        return case.params(NUM_TOKENS)
    return SamplingParams(
        temperature=0.9, top_p=0.95, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind="final_only"
    )


@pytest.fixture(scope="module")
def crowd(tiny_model: Path) -> list[Case]:
    """Prompts of 5 to 60 tokens, half of them with one of two beginnings, no answer of which hangs on a rounding."""
    draw = random.Random(SEED)
    stems = [draw.choices(range(3, 318), k=40) for _ in range(2)]
    prompts = []
    for number in range(NUM_REQUESTS * 2):
        shared = stems[number % 4][: draw.randint(8, 40)] if number % 4 < 2 else []
        prompts.append(shared + draw.choices(range(3, 318), k=draw.randint(5, 20)))
    found = continuations(load_directory(tiny_model), prompts, NUM_TOKENS)
    clear = [one for one in found if min(one.gaps) > CLEAR_GAP]
    assert len(clear) >= NUM_REQUESTS
    return [Case(f"crowd {number}", one.prompt_ids, one) for number, one in enumerate(clear[:NUM_REQUESTS])]


@pytest.fixture(scope="module")
def drawn(tiny_model: Path, crowd: list[Case]) -> dict[int, list[int]]:
    """What the seeded requests give alone: one after the other, pool ample, no cache, no host tier."""

    async def run() -> dict[int, list[int]]:
        config = Pressed("recompute", NONE, in_flight=1, caching=False).config(tiny_model, 64)
        async with Engine(config) as engine:
            return {
                number: (await finished(engine, case, number)).outputs[0].token_ids
                for number, case in enumerate(crowd)
                if number % 3 == 2
            }

    return asyncio.run(run())


async def finished(engine: Engine, case: Case, number: int) -> RequestOutput:
    [output] = [output async for output in engine.generate(case.prompt, params(case, number))]
    return output


async def run_pressed(setting: Pressed, model_dir: Path, cases: Sequence[Case]) -> tuple[list[RequestOutput], EngineStats]:
    """All at once; then the books must balance on both tiers."""
    lengths = sorted(case.length(NUM_TOKENS) for case in cases)
    usual = -(-lengths[len(lengths) // 2] // BLOCK_SIZE)
    config = setting.config(model_dir, num_blocks=NUM_FITTING * usual)
    async with Engine(config, open_device=setting.open_device) as engine:
        engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0  # type: ignore[method-assign]
        outputs = await asyncio.gather(*(finished(engine, case, number) for number, case in enumerate(cases)))
        stats = await engine.stats()
        await assert_nothing_is_left(engine)
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    assert 0 < sum(stats.num_preemptions.values()) <= len(cases) * max(blocks)
    return outputs, stats


async def assert_nothing_is_left(engine: Engine) -> None:
    core = engine._company.scheduler.core
    async with asyncio.timeout(60):
        while core.num_copies:  # noqa: ASYNC110 - nothing announces the end of the last copy
            await asyncio.sleep(0)
    assert await engine.audit() == []
    await engine.reset_prefix_cache()
    stats = await engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_preempted == stats.num_fetching == 0
    assert stats.device_blocks.free == stats.device_blocks.total
    assert stats.host_blocks.free == stats.host_blocks.total
    assert await engine.audit() == []


def assert_setting_took_effect(setting: Pressed, stats: EngineStats) -> None:
    swaps, moved = stats.num_preemptions["swap"], (stats.swap_out_bytes, stats.swap_in_bytes)
    assert stats.num_failed_copies == 0
    if setting.host == NONE:
        assert (swaps, *moved) == (0, 0, 0)
    if setting.mode == "recompute":
        assert swaps == stats.num_swap_fallbacks == 0
    if setting.mode == "swap":
        assert stats.num_swap_fallbacks > 0 or setting.host > SCANT
        assert stats.num_swap_fallbacks == 0 or setting.host < AMPLE
        assert setting.host != AMPLE or (swaps > 0 and all(moved))


@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in [*EVERY, *MORE]],
    ids=str,
)
async def test_a_crowd_on_a_small_pool_gives_the_tokens_of_transformers(
    tiny_model: Path, crowd: list[Case], drawn: dict[int, list[int]], setting: Pressed
) -> None:
    outputs, stats = await run_pressed(setting, tiny_model, crowd)
    for number, (case, output) in enumerate(zip(crowd, outputs, strict=True)):
        if number in drawn:
            assert output.outputs[0].token_ids == drawn[number], f"{case.name}, drawn"
        else:
            assert difference(case, output, NUM_TOKENS) is None
    assert_setting_took_effect(setting, stats)


@pytest.mark.parametrize("setting", [Pressed("swap", AMPLE), Pressed("swap", SCANT, worker="process")], ids=str)
async def test_real_prompts_on_a_small_pool_give_the_tokens_of_transformers(
    demo_model: Path, real_cases: list[Case], setting: Pressed
) -> None:
    cases = [replace(case, ignore_eos=True, stop_ids=()) for case in real_cases[:10]]
    max_tokens, longest = 32, max(len(case.reference.prompt_ids) + 32 for case in cases)
    async with Engine(setting.config(demo_model, num_blocks=2 * -(-longest // BLOCK_SIZE))) as engine:
        engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0  # type: ignore[method-assign]
        outputs: list[Any] = await asyncio.gather(*(only(engine, case, max_tokens) for case in cases))
        stats = await engine.stats()
        await assert_nothing_is_left(engine)
    assert [difference(case, output, max_tokens) for case, output in zip(cases, outputs, strict=True)] == [None] * 10
    assert_setting_took_effect(setting, stats)


async def only(engine: Engine, case: Case, max_tokens: int) -> RequestOutput:
    [output] = [output async for output in engine.generate(case.prompt, case.params(max_tokens))]
    return output
