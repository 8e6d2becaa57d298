"""Greedy tokens of the whole engine in float32 against plain torch, token for token.

The reference computes every token from the beginning of its sequence. Prompts after which some token wins by so little that
rounding could decide are left out before the engine runs: by the reference alone, so nothing of the engine decides what it
is asked. How little that is comes of the same model in float64.

The engine runs them twice: with room for all, and with so little that it must preempt, by swap. In both, prompts are longer
than a step's budget (chunks), groups of them begin alike (shared prefixes), and decode steps are captured where they can be.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from repertory import Engine, SamplingParams
from repertory.protocol.outputs import EngineStats

from ..gpu import Gpu, WatchedRuntime
from ..plain import PlainLlama
from ..report import Report
from ..shapes import SMOLLM2, TINY, write_model

MARGIN = 8.0
"""By how many times the difference between float32 and float64 a token must win."""

BLOCK_SIZE, SMALL_BLOCK = 16, 4
MAX_LEN = 256


class Case(NamedTuple):
    """A prompt, and what plain torch continues it with."""

    prompt: list[int]
    expected: list[int]


class Outcome(NamedTuple):
    """What an engine made of the prompts, and what it did meanwhile."""

    token_ids: list[list[int]]
    stats: EngineStats
    num_replays: int


def run(report: Report, gpu: Gpu) -> None:
    """The part."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), gpu.sized(SMOLLM2, TINY))
        report.say("model written")
        cases = _cases(report, gpu, model)
        _check(report, gpu, cases, "with room for all", partial(_run_engine, gpu, model, cases, num_device_blocks=2048))
        # A quarter of what all want together, not counting what they share; in small blocks, so that a copy has several.
        num_tokens = sum(len(case.prompt) + len(case.expected) for case in cases) // 4
        num_blocks = max(num_tokens, MAX_LEN) // SMALL_BLOCK
        tight = {"num_device_blocks": num_blocks, "block_size": SMALL_BLOCK, "preemption_mode": "swap"}
        _check(report, gpu, cases, "preempted by swap", partial(_run_engine, gpu, model, cases, **tight), is_tight=True)


def _cases(report: Report, gpu: Gpu, model: Path) -> list[Case]:
    """Prompts and their continuations, without those that rounding could decide."""
    num_groups, members, num_tokens = gpu.sized((4, 16, 48), (2, 3, 16) if gpu.is_interpreted else (3, 4, 32))
    plain = PlainLlama(model, device=gpu.device)
    vocab_size = gpu.sized(SMOLLM2, TINY).vocab_size
    groups = [_group(number, members, vocab_size) for number in range(num_groups)]
    rounding = _rounding(gpu, model, plain, groups[0][:2])
    cases: list[Case] = []
    for prompts in groups:
        continued = plain.continued(prompts, num_tokens)
        columns = zip(prompts, continued.token_ids, continued.least_gaps, strict=True)
        cases += [Case(prompt, tokens) for prompt, tokens, gap in columns if gap > MARGIN * rounding]
    report.detail("float32_rounding", rounding)
    report.detail("prompts_left_out", num_groups * members - len(cases))
    report.say(f"{len(cases)} prompts of {num_groups * members}; float32 is {rounding:.1e} from float64")
    if len(cases) < num_groups * members // 4:
        raise RuntimeError(f"rounding decides the continuations of all but {len(cases)} prompts: nothing is left to compare")
    return cases


def _group(number: int, members: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one length that begin alike, in a whole number of blocks and some tokens more."""
    draw = random.Random(number)
    shared = draw.choices(range(3, vocab_size), k=2 * BLOCK_SIZE + 5 * number)
    return [shared + draw.choices(range(3, vocab_size), k=14 + 9 * number) for _ in range(members)]


def _rounding(gpu: Gpu, model: Path, plain: PlainLlama, prompts: list[list[int]]) -> float:
    exact = PlainLlama(model, device=gpu.device, dtype=torch.float64).logits(prompts)
    return float((plain.logits(prompts).double() - exact).abs().max())


def _run_engine(gpu: Gpu, model: Path, cases: list[Case], **settings: Any) -> Outcome:
    return asyncio.run(_complete(gpu, model, cases, settings))


async def _complete(gpu: Gpu, model: Path, cases: list[Case], settings: dict[str, Any]) -> Outcome:
    """All prompts at once."""
    runtimes: list[WatchedRuntime] = []

    def open_device(config: Any, _: Path) -> Any:
        executor, runtime = gpu.open(config)
        runtimes.append(runtime)
        return executor

    common = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "max_num_batched_tokens": 48, "num_host_blocks": 2048}
    max_num_seqs = 8 if gpu.is_interpreted else 32
    config = gpu.config(model, dtype="float32", max_num_seqs=max_num_seqs, **common | settings)
    params = SamplingParams(temperature=0.0, max_tokens=len(cases[0].expected), ignore_eos=True)

    async def complete(engine: Engine, case: Case) -> list[int]:
        async for output in engine.generate(case.prompt, params):
            found = output.outputs[0].token_ids
        return list(found)

    async with Engine(config, open_device=open_device) as engine:
        token_ids = await asyncio.gather(*(complete(engine, case) for case in cases))
        if faults := await engine.audit():
            raise RuntimeError(f"the engine's books do not add up: {faults}")
        return Outcome(token_ids, await engine.stats(), runtimes[-1].num_replays)


def _check(report: Report, gpu: Gpu, cases: list[Case], what: str, run_engine: Any, *, is_tight: bool = False) -> None:
    outcome: Outcome = run_engine()
    stats = outcome.stats
    preemptions = sum(stats.num_preemptions.values())
    report.detail(
        what,
        {
            "cache_hits": stats.prefix_cache_hits,
            "steps": stats.num_steps,
            "replayed_steps": outcome.num_replays,
            "preemptions": stats.num_preemptions,
            "swap_out_bytes": stats.swap_out_bytes,
            "swap_in_bytes": stats.swap_in_bytes,
        },
    )
    parted = _parted(cases, outcome.token_ids)
    note = parted or f"{len(cases)} prompts x {len(cases[0].expected)} tokens; {preemptions} preemptions"
    report.right(f"greedy tokens, {what}", not parted, value=len(cases) * len(cases[0].expected), unit="tokens", note=note)
    # What did not happen was not checked.
    happened = {"prefix hits": stats.prefix_cache_hits}
    if is_tight:
        happened |= {
            "bytes copied out": stats.swap_out_bytes,
            "bytes copied in": stats.swap_in_bytes,
            "preemptions": preemptions,
        }
    if gpu.facts.has_triton:
        happened["replayed steps"] = outcome.num_replays
    for name, count in happened.items():
        if not count:
            report.right(f"{name}, {what}", False, value=0, note="the check is to have some")


def _parted(cases: list[Case], found: list[list[int]]) -> str:
    """Where a continuation first differs from what is expected; "" if none does."""
    for number, (case, tokens) in enumerate(zip(cases, found, strict=True)):
        if tokens != case.expected:
            same = next((i for i, (a, b) in enumerate(zip(tokens, case.expected, strict=False)) if a != b), len(tokens))
            return f"prompt {number} of {len(case.prompt)} tokens parts at its token {same}"
    return ""
