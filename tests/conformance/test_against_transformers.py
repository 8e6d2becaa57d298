"""In float32 the engine gives the tokens that transformers gives, whatever the settings.

The settings decide what is computed when, with whom, in which block and by which code: batches, chunks, prefix
hits, copied partial blocks, preemption and resumption. None of it may change a token. Each test also checks that its
setting did what it is there for: a pool that is said to be small must have preempted somebody.

    demo model, real prompts      a selection of settings that covers every pair of values; all of them when slow
    tiny random model             all settings, with prompts that share prefixes of many lengths; in torch a selection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from repertory.gpu.cpu.library import LEVELS, KernelsUnavailableError, level_for, open_library
from repertory.protocol.outputs import EngineStats

from .conftest import NUM_TINY_TOKENS, NUM_TOKENS
from .reference import generated
from .running import Case, differences, run_waves
from .settings import COVERING, EVERY, HOSTS, Setting, pairs

CLEAR_GAP = 1e-3
"""A float32 logit differs by less than a tenth of this between two ways to compute it."""


@dataclass(frozen=True)
class Load:
    """Which of the real prompts run, for how many tokens, and what a small pool holds beside the longest of them.

    Two of the prompts at least begin with the same `shared_tokens`.
    """

    prompts: slice
    max_tokens: int
    spare_tokens: int
    shared_tokens: int


ALL = Load(slice(None), max_tokens=NUM_TOKENS, spare_tokens=0, shared_tokens=200)
SHORT = Load(slice(12), max_tokens=32, spare_tokens=60, shared_tokens=4)
FEW = Load(slice(4), max_tokens=12, spare_tokens=16, shared_tokens=4)
READERS = Load(slice(18, 22), max_tokens=32, spare_tokens=64, shared_tokens=200)
"""Those that share the librarian's instructions."""


def load_of(setting: Setting) -> Load:
    """As much as a setting can take in seconds: little where a step takes one request or few tokens."""
    if setting.alone or setting.budget < 16:
        return FEW
    return SHORT if setting.small_pool else ALL


async def assert_real_prompts_equal(model_dir: Path, cases: Sequence[Case], setting: Setting, load: Load) -> EngineStats:
    cases = cases[load.prompts]
    lengths = [case.length(load.max_tokens) for case in cases]
    config = setting.config(model_dir, num_blocks=setting.num_blocks(lengths, spare_tokens=load.spare_tokens))
    [outputs], stats = await run_waves(config, [cases], load.max_tokens)
    assert differences(cases, outputs, load.max_tokens) == []
    assert_setting_took_effect(setting, stats, shared_tokens=load.shared_tokens)
    return stats


def assert_setting_took_effect(setting: Setting, stats: EngineStats, *, shared_tokens: int) -> None:
    assert (sum(stats.num_preemptions.values()) > 0) == setting.must_preempt, f"preemptions: {stats.num_preemptions}"
    if not setting.caching:
        assert stats.prefix_cache_hits == 0
    elif shared_tokens >= setting.block_size and not setting.small_pool:
        assert stats.prefix_cache_hits > 0


def test_the_selection_of_settings_covers_every_pair_of_values() -> None:
    assert pairs(COVERING) == pairs(HOSTS)


def test_the_reference_decides_every_token_clearly(real_cases: list[Case], tiny_cases: list[Case]) -> None:
    for case in real_cases + tiny_cases:
        assert min(case.reference.gaps) > CLEAR_GAP, f"{case.name}: a tie would make its comparison a matter of rounding"
    assert all(len(set(case.reference.token_ids)) > 8 for case in real_cases + tiny_cases), "a repeated token tests little"
    assert any(len(case.expected(NUM_TOKENS)) < NUM_TOKENS for case in real_cases)


def test_the_reference_is_what_generate_gives_for_each_prompt_alone(reference_model: Any, real_cases: list[Case]) -> None:
    for case in real_cases[:2]:
        assert generated(reference_model, [case.reference.prompt_ids], NUM_TOKENS) == [case.reference.token_ids]


@pytest.mark.parametrize("setting", COVERING, ids=str)
async def test_tokens_of_real_prompts_equal_those_of_transformers(
    demo_model: Path, real_cases: list[Case], setting: Setting
) -> None:
    await assert_real_prompts_equal(demo_model, real_cases, setting, load_of(setting))


async def test_long_prompts_that_share_a_prefix_are_preempted_and_go_on_as_before(
    demo_model: Path, real_cases: list[Case]
) -> None:
    setting = Setting(512, True, 16, small_pool=True, chunked=True, alone=False)
    stats = await assert_real_prompts_equal(demo_model, real_cases, setting, READERS)
    assert stats.prefix_cache_hits > 3 * 200, "three of the four find the instructions"


@pytest.mark.parametrize("backend", ["torch", *LEVELS])
async def test_every_backend_gives_the_tokens_of_transformers(demo_model: Path, real_cases: list[Case], backend: str) -> None:
    if backend in LEVELS and not has_kernels(backend):
        pytest.skip(f"no {backend} kernels for float32 here")
    setting = Setting(16, True, 4, small_pool=False, chunked=True, alone=False, backend=backend)
    await assert_real_prompts_equal(demo_model, real_cases, setting, FEW)


def has_kernels(level: str) -> bool:
    """Whether this machine runs the C kernels of `level` in float32."""
    try:
        level_for(open_library(), torch.float32, level)
    except KernelsUnavailableError:
        return False
    return True


TORCH_TOO = {replace(setting, worker="inline", in_flight=2) for setting in COVERING}


def slow_unless_selected(setting: Setting) -> Any:
    """All settings run on what this machine computes with; on torch, where that is not it, a selection does."""
    return pytest.param(setting, marks=[] if setting.backend == "auto" or setting in TORCH_TOO else pytest.mark.slow)


@pytest.mark.parametrize("setting", [slow_unless_selected(setting) for setting in EVERY], ids=str)
async def test_tokens_of_a_tiny_model_equal_those_of_transformers_under_every_setting(
    tiny_model: Path, tiny_cases: list[Case], setting: Setting
) -> None:
    lengths = [case.length(NUM_TINY_TOKENS) for case in tiny_cases]
    config = setting.config(tiny_model, num_blocks=setting.num_blocks(lengths, spare_tokens=32))
    waves = [tiny_cases, tiny_cases[:4]]  # the second finds what the first left in the cache
    outputs, stats = await run_waves(config, waves, NUM_TINY_TOKENS)
    for cases, found in zip(waves, outputs, strict=True):
        assert differences(cases, found, NUM_TINY_TOKENS) == []
    assert_setting_took_effect(setting, stats, shared_tokens=48)


async def test_a_wrong_token_is_noticed_and_said(tiny_model: Path, tiny_cases: list[Case]) -> None:
    config = EVERY[0].config(tiny_model, num_blocks=64)
    [[output]], _ = await run_waves(config, [tiny_cases[:1]], NUM_TINY_TOKENS)
    output.outputs[0].token_ids[5] += 1
    [found] = differences(tiny_cases[:1], [output], NUM_TINY_TOKENS)
    assert "tiny 0: from token 5 on" in found
    assert f"{tiny_cases[0].reference.gaps[5]:.2e}" in found


@pytest.mark.slow
@pytest.mark.parametrize("setting", [setting for setting in EVERY if setting.backend == "auto"], ids=str)
async def test_tokens_of_real_prompts_equal_those_of_transformers_under_every_setting(
    demo_model: Path, real_cases: list[Case], setting: Setting
) -> None:
    await assert_real_prompts_equal(demo_model, real_cases, setting, load_of(setting))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generate_gives_the_reference_for_every_prompt_alone(reference_model: Any, real_cases: list[Case]) -> None:
    for case in real_cases:
        assert generated(reference_model, [case.reference.prompt_ids], NUM_TOKENS) == [case.reference.token_ids], case.name
