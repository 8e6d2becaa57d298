"""4. What would give the same tokens other keys and values is part of the cache's identity, or ends what it made.

One model is served at a time, without adapters, so a client can name nothing that changes KV: of all that a request
carries only its tokens and its salt say where it is looked up. What can change behind the same name are the weights. A
device that is opened anew reads them anew, and with it everything that an earlier one has computed is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from repertory import Engine, SamplingParams
from repertory.protocol.messages import Admit, NewRow
from repertory.tests.engine.stage import greedy, last_of, prompt_of, until
from repertory.tests.tiny_model import make_tiny_model

PROMPT = prompt_of(13)

IDENTITY = {"token_ids", "cache_salt"}
CHANGES_NO_KV = {
    "request_id", "label", "params", "arrival_s", "stop_token_ids", "priority", "tenant", "trace_context", "holds", "follows",
    "barred",
}  # fmt: skip
READ_AFTER_THE_KV = {"params", "index", "barred", "seq_id", "num_prompt_tokens"}
"""Of what the device is told of a sequence: what only its draws depend on, or names."""


def test_whoever_adds_an_attribute_to_requests_says_whether_it_changes_kv() -> None:
    assert {field.name for field in msgspec.structs.fields(Admit)} == IDENTITY | CHANGES_NO_KV
    device = {field.name for field in msgspec.structs.fields(NewRow)}
    assert device == READ_AFTER_THE_KV | {"token_ids", "block_table", "namespace"}


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.9, seed=3, max_tokens=4), greedy(4, logit_bias={5: 9.0}), greedy(4, repetition_penalty=1.7)],
    ids=["drawn", "biased", "penalised"],
)
async def test_parameters_of_the_draw_share_what_they_cannot_change(stage, params) -> None:
    s = await stage(block_size=4)
    await s.ask(PROMPT, params)
    again = await s.ask(PROMPT)
    assert again.num_cached_tokens == 12
    assert again.outputs[0].token_ids == s.alone(PROMPT).token_ids
    await s.check_clean()


async def _alone(model: Path) -> list[int]:
    async with Engine(model=str(model), worker="inline", enable_prefix_caching=False, **SETTINGS) as engine:
        return (await last_of(engine.generate(PROMPT, greedy(8, ignore_eos=True)))).outputs[0].token_ids


SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 4,
    "num_device_blocks": 64,
    "log_level": "error",
}


@pytest.mark.parametrize("host_blocks", [0, 64])
async def test_weights_that_are_replaced_behind_the_same_name_find_nothing_of_the_old(tmp_path: Path, host_blocks: int) -> None:
    old, new = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    expected = [await _alone(model) for model in (old, new)]
    assert expected[0] != expected[1]
    served = shutil.copytree(old, tmp_path / "served")
    async with Engine(model=str(served), worker="process", num_host_blocks=host_blocks, **SETTINGS) as engine:

        async def ask() -> tuple[int, list[int]]:
            output = await last_of(engine.generate(PROMPT, greedy(8, ignore_eos=True)))
            return output.num_cached_tokens, output.outputs[0].token_ids

        assert await ask() == (0, expected[0])
        assert await ask() == (12, expected[0])
        shutil.copy(new / "model.safetensors", served / "new")
        (served / "new").replace(served / "model.safetensors")
        pid = engine._company.keeper._device.pid
        os.kill(pid, signal.SIGKILL)
        core = engine._company.scheduler.core
        await until(lambda: core.num_restarts == 1, patience_s=60)
        assert await ask() == (0, expected[1])
        assert await ask() == (12, expected[1])
        assert await engine.audit() == []
