"""What a float8 KV pool divides keys and values by, found out by running the model once.

Random tokens go through the model into a pool of the model's own dtype, and what has been written there tells how large the
keys and values of each layer get. Nothing of a step's usual path knows of it. Scales that a checkpoint may bring
(`k_scale`, `v_scale`) are not read: one that has them is refused, like any tensor that is not used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...protocol.errors import ConfigError
from ...protocol.sampling import SamplingParams
from ..slots import Row
from .fp8 import LARGEST
from .lone_steps import random_slot, run_alone
from .plan import PoolShape, make_plan
from .pools import DevicePool, KvScales
from .runtime import Runtime
from .stepping import Limits, StepRunner

NUM_PROMPTS = 4
PROMPT_LEN = 128

HEADROOM = 4.0
"""How many times larger than in the trial keys and values may be before they saturate, at 448 times the scale.

Float8 is a floating-point format, so more room takes precision from the smallest elements only. On SmolLM2-135M, text has
keys of up to 1.4 and values of up to 1.5 times the trial's; with a headroom of 1 to 32 its logits are off by the same 6%
in the mean, with one of 0.5 by 25%.
"""


def prompt_len(limits: Limits, block_size: int) -> int:
    """Tokens of each prompt: fewer than `PROMPT_LEN` where a sequence may not be that long."""
    return min(PROMPT_LEN, limits.table_width * block_size)


def measure_scales(runtime: Runtime, runner: StepRunner, pool: DevicePool, *, vocab_size: int) -> list[KvScales]:
    """Scales for each layer's keys and values. `runner` runs on `pool`, of the model's dtype, with room for one prompt.

    Raises `ConfigError` if keys or values are not finite.
    """
    shape = PoolShape(len(pool.blocks), pool.block_size, vocab_size)
    num_tokens = prompt_len(runner.limits, pool.block_size)
    chunk = runner.limits.num_tokens
    largest: list[Tensor] = []
    runtime.compute.launch(lambda: _clear(pool))
    for prompt in range(NUM_PROMPTS):
        slot = random_slot(prompt, num_tokens, shape, SamplingParams())
        for start in range(0, num_tokens, chunk):
            row = Row(slot, start, min(start + chunk, num_tokens), 0)
            run_alone(runner, runtime, make_plan([row], [], shape, {}))
        runtime.compute.launch(lambda: largest.append(_largest(pool)))
        runtime.compute.record().synchronize()
    return [_scales(layer, *pair) for layer, pair in enumerate(torch.stack(largest).amax(dim=0).tolist())]


def _clear(pool: DevicePool) -> None:
    """What no token of the trial is written to counts as 0."""
    pool.blocks.zero_()


def _largest(pool: DevicePool) -> Tensor:
    """The largest key and value of each layer: float32 [num_layers, 2]."""
    return pool.blocks.abs().amax(dim=(0, 3, 4, 5)).float()


def _scales(layer: int, key: float, value: float) -> KvScales:
    for what, largest in (("keys", key), ("values", value)):
        if not math.isfinite(largest):
            raise ConfigError(f"kv_cache_dtype fp8: the {what} of layer {layer} are not finite", key="kv_cache_dtype")
    return KvScales(_scale(key), _scale(value))


def _scale(largest: float) -> float:
    return largest * HEADROOM / LARGEST or 1.0
