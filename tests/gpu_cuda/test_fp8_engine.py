"""Engines in float8: how far their logits are from the model's, how they find their scales, and what they refuse."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from repertory.gpu.cuda import calibration, opening
from repertory.gpu.cuda.calibration import HEADROOM, NUM_PROMPTS, PROMPT_LEN
from repertory.gpu.cuda.executor import GpuExecutor
from repertory.gpu.cuda.fp8 import FP8, LARGEST
from repertory.gpu.cuda.glue import TorchGlue
from repertory.gpu.cuda.opening import DeviceFacts, open_on
from repertory.gpu.cuda.pools import DevicePool, KvScales
from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.decoder import Batch, Decoder
from repertory.gpu.models.weights import load_weights
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError
from repertory.protocol.ids import BlockId
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.gpu_cuda.all_logits import all_logits
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime
from repertory.tests.gpu_cuda.opened import open_late

WEIGHTS = {"quantization": "fp8"}
KV = {"kv_cache_dtype": "fp8"}
BOTH = {**WEIGHTS, **KV}
CPU = torch.device("cpu")
TEXTS = [
    "The history of the printing press begins long before Gutenberg. In China, woodblock printing was used to copy Buddhist "
    "texts as early as the seventh century, and movable type made of clay was described by Shen Kuo around 1088. What changed "
    "in Mainz was the combination of metal type, oil-based ink and a press.",
    "def quicksort(xs):\n    if len(xs) < 2:\n        return xs\n    pivot = xs[len(xs) // 2]\n    return quicksort([x for x "
    "in xs if x < pivot]) + [x for x in xs if x == pivot] + quicksort([x for x in xs if x > pivot])\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
    "What is the capital of France, and which river runs through it?<|im_end|>\n<|im_start|>assistant\nThe capital of France "
    "is Paris. The river Seine runs through it.",
]
PROMPTS = [random.Random(n).choices(range(320), k=n) for n in (3, 90, 120, 64)]


# ---- quality ------------------------------------------------------------------------------------


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Of each token's logits, their mean aside: a draw does not see it."""
    found, expected = (logits - logits.mean(dim=1, keepdim=True) for logits in (found, expected))
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def agreement(found: Tensor, expected: Tensor) -> float:
    """The share of tokens that the same token would follow on, drawn greedily."""
    return float((found.argmax(dim=1) == expected.argmax(dim=1)).float().mean())


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tensor:
    return all_logits(tiny_model, PROMPTS)


# The tiny model's weights are wide and random, so its attention is sharp and its logits lie close together: it takes
# rounding worse than a trained model does. Measured, of 277 tokens: mean error, worst error, agreement
#     weights 0.193, 0.579, 0.675; KV 0.096, 0.323, 0.845; both 0.213, 0.564, 0.664; both in bfloat16 0.220, 0.545, 0.690;
#     bfloat16 alone 0.024, 0.073, 0.964.
@pytest.mark.parametrize(
    ("settings", "mean_error", "worst_error", "agrees"),
    [
        (WEIGHTS, 0.25, 0.75, 0.6),
        (KV, 0.13, 0.45, 0.77),
        (BOTH, 0.28, 0.75, 0.58),
        ({**BOTH, "dtype": "bfloat16"}, 0.28, 0.75, 0.58),
    ],
    ids=["weights", "KV", "both", "both in bfloat16"],
)
def test_logits_stay_close_to_those_of_the_model(
    tiny_model: Path, expected: Tensor, settings: dict[str, Any], mean_error: float, worst_error: float, agrees: float
) -> None:
    found = all_logits(tiny_model, PROMPTS, **settings)
    errors = relative_errors(found, expected)
    assert mean_error / 3 < errors.mean() < mean_error
    assert errors.max() < worst_error
    assert agreement(found, expected) > agrees


def test_the_comparison_would_notice_a_wrong_scale(tiny_model: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "measure_scales", lambda *_, **__: [KvScales(1e-4, 1e-4)] * 2)
    assert relative_errors(all_logits(tiny_model, PROMPTS, **KV), expected).mean() > 0.4


@pytest.mark.slow
def test_the_demo_models_logits_stay_close(demo_model: Path) -> None:
    prompts = [Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(text).ids for text in TEXTS]
    shape = {"block_size": 16, "num_device_blocks": 32, "num_host_blocks": 0, "max_num_batched_tokens": 128, "max_num_seqs": 3}
    expected = all_logits(demo_model, prompts, chunk=40, **shape)
    first, second = expected.topk(2).values.unbind(dim=1)
    # Measured, of 205 tokens: mean error, agreement, and the largest gap between the two best logits of a token that changed
    #     bfloat16 0.020, 0.976, 0.2; weights 0.124, 0.937, 1.0; KV 0.063, 0.937, 0.6; both 0.140, 0.917, 1.8.
    for more, mean_error, agrees in ((WEIGHTS, 0.17, 0.9), (KV, 0.09, 0.9), (BOTH, 0.19, 0.87)):
        found = all_logits(demo_model, prompts, chunk=40, **shape, **more)
        assert relative_errors(found, expected).mean() < mean_error
        assert agreement(found, expected) > agrees
        has_changed = found.argmax(dim=1) != expected.argmax(dim=1)
        assert float((first - second)[has_changed].max()) < 3


# ---- scales of the pool -------------------------------------------------------------------------


class Recording:
    """Plain causal attention over one prompt that notes the largest key and value of each layer."""

    def __init__(self) -> None:
        self.largest: dict[int, tuple[float, float]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.largest[layer] = float(key.abs().max()), float(value.abs().max())
        by_head = [heads.transpose(0, 1)[None] for heads in (query, key, value)]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


def expected_scales(model_dir: Path) -> list[KvScales]:
    """What a plain run over the same tokens finds."""
    config = load_model_config(model_dir)
    decoder = Decoder(config, load_weights(model_dir, config, dtype=torch.float32, device=torch.device("cpu")))
    runs = []
    for prompt in range(NUM_PROMPTS):
        tokens = torch.from_numpy(np.random.default_rng(prompt).integers(config.vocab_size, size=PROMPT_LEN))
        decoder.hidden(Batch(tokens, torch.arange(PROMPT_LEN), torch.tensor([0])), recording := Recording())
        runs.append(recording.largest)
    return [
        KvScales(*(max(run[layer][which] for run in runs) * HEADROOM / LARGEST for which in (0, 1)))
        for layer in range(config.num_layers)
    ]


def scales_of(executor: GpuExecutor) -> list[KvScales]:
    return [KvScales(cache.key_scale, cache.value_scale) for cache in executor._open.pool.caches]


@pytest.mark.parametrize("budget", [16, 33, 256])
@pytest.mark.parametrize("block_size", [4, 24, 256])
def test_scales_are_those_of_a_plain_run_whatever_the_chunks_and_blocks(tiny_model: Path, budget: int, block_size: int) -> None:
    executor, _ = open_late(tiny_model, max_num_batched_tokens=budget, block_size=block_size, **KV)
    assert executor._open.pool.blocks.dtype == FP8
    found, expected = torch.tensor(scales_of(executor)), torch.tensor(expected_scales(tiny_model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    executor.close()


def test_a_model_for_short_sequences_is_tried_with_short_prompts(tiny_model: Path) -> None:
    executor, _ = open_late(tiny_model, max_model_len=10, max_num_batched_tokens=3, **KV)
    assert all(scale > 0 for pair in scales_of(executor) for scale in pair)
    executor.close()


def test_a_pool_of_the_models_dtype_has_no_scales(tiny_model: Path) -> None:
    executor, _ = open_late(tiny_model)
    assert scales_of(executor) == [(1.0, 1.0)] * 2
    executor.close()


def changed_model(directory: Path, source: Path, name: str, value: float) -> Path:
    """The model with all of one of layer 1's weights at `value`."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[f"model.layers.1.self_attn.{name}.weight"].fill_(value)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_layer_without_values_has_a_scale_all_the_same(tiny_model: Path, tmp_path: Path) -> None:
    executor, _ = open_late(changed_model(tmp_path / "model", tiny_model, "v_proj", 0.0), **KV)
    assert scales_of(executor)[1].value == 1.0
    stepper = Stepper(executor)
    stepper.add(1, PROMPTS[1])
    assert len(stepper.run(3)[1]) == 3
    executor.close()


@pytest.mark.parametrize(("name", "what"), [("k_proj", "keys"), ("v_proj", "values")])
def test_keys_and_values_that_are_not_finite_are_refused(tiny_model: Path, tmp_path: Path, name: str, what: str) -> None:
    model = changed_model(tmp_path / "model", tiny_model, name, float("inf"))
    with pytest.raises(ConfigError, match=f"kv_cache_dtype fp8: the {what} of layer 1 are not finite") as error:
        open_late(model, **KV)
    assert error.value.key == "kv_cache_dtype"


def test_keys_and_values_beyond_their_scale_saturate(tiny_model: Path) -> None:
    config = load_model_config(tiny_model)
    pool = DevicePool(config, num_blocks=2, block_size=4, dtype=FP8, device=CPU, scales=[KvScales(0.5, 0.01)] * 2)
    cache = pool.caches[0]
    angles = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), dim=1)
    key, value = torch.full((1, 2, 16), 1e6), torch.full((1, 2, 16), -5.0)
    value[0, 0, 0] = float("nan")
    TorchGlue().rope_and_write(
        torch.zeros(1, 4, 16), key, value, positions=torch.tensor([0]), cos_sin=angles, slots=torch.tensor([5]),
        cache=cache,
    )  # fmt: skip
    assert bool((cache.keys[1, 1].float() == LARGEST).all())
    assert bool(cache.values[1, 1, 0, 0].float().isnan())
    assert bool((cache.values[1, 1, 1].float() == -LARGEST).all())


# ---- engines ------------------------------------------------------------------------------------


def test_the_capacity_tells_what_is_in_float8(tiny_model: Path) -> None:
    found = {}
    for name, settings in (("plain", {}), ("weights", WEIGHTS), ("kv", KV), ("both", BOTH)):
        executor, _ = open_late(tiny_model, **settings)
        found[name] = executor.capacity
        executor.close()
    assert [capacity.device.partition(", attention")[0] for capacity in found.values()] == [
        "late (float32", "late (float32, fp8 weights", "late (float32, fp8 KV", "late (float32, fp8 weights, fp8 KV",
    ]  # fmt: skip
    assert (
        found["plain"].block_bytes
        == found["weights"].block_bytes
        == 4 * found["kv"].block_bytes
        == 4 * found["both"].block_bytes
    )
    assert found["plain"].weights_bytes == found["kv"].weights_bytes
    # Four matrices a layer, of 2 * (128 x 64, 64 x 64, 256 x 64, 64 x 128) elements in all, and two scales each.
    elements = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)
    assert found["plain"].weights_bytes - found["both"].weights_bytes == 3 * elements - 2 * 4 * 2 * 4
    assert found["weights"].weights_bytes == found["both"].weights_bytes


@pytest.mark.parametrize("settings", [WEIGHTS, KV, BOTH], ids=["weights", "KV", "both"])
def test_chunks_and_neighbours_do_not_change_what_is_drawn(tiny_model: Path, settings: dict[str, Any]) -> None:
    prompts = {n: PROMPTS[n][:60] for n in range(4)}
    alone = {}
    for n, prompt in prompts.items():
        executor, _ = open_late(tiny_model, seed=n, **settings)
        stepper = Stepper(executor)
        stepper.add(n, prompt)
        alone |= stepper.run(8)
        executor.close()
    executor, _ = open_late(tiny_model, seed=9, **settings)
    stepper = Stepper(executor)
    for n, prompt in prompts.items():
        stepper.add(n, prompt)
    assert stepper.run(8, chunk=7) == alone
    executor.close()


@pytest.mark.usefixtures("quick_interpreter")
def test_the_kernels_and_captured_steps_draw_what_torch_draws(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NUM_PROMPTS", 1)  # the interpreter is slow
    monkeypatch.setattr(calibration, "PROMPT_LEN", 8)
    found = []
    for triton in (True, False):
        executor, runtime = open_late(tiny_model, triton=triton, max_num_batched_tokens=12, max_num_seqs=2, **BOTH)
        before = runtime.num_replays
        stepper = Stepper(executor)
        for n in (0, 1):
            stepper.add(n, PROMPTS[n][:9])
        found.append((stepper.run(4, chunk=6), scales_of(executor)))
        assert (runtime.num_replays > before) == triton
        executor.close()
    (tokens, scales), (expected_tokens, expected) = found
    torch.testing.assert_close(torch.tensor(scales), torch.tensor(expected), rtol=1e-5, atol=0)
    assert tokens == expected_tokens


def test_float8_blocks_come_back_from_the_host_as_they_were(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model, **BOTH)
    parts = executor._open
    device, host = parts.pool.blocks, parts.host
    device.view(torch.uint8).random_(0, 256)
    before = device.view(torch.uint8)[[3, 8]].clone()
    runtime.compute.launch(lambda: host.copy_out([BlockId(3), BlockId(8)], [BlockId(1), BlockId(0)]))
    runtime.compute.launch(lambda: host.copy_in([BlockId(1), BlockId(0)], [BlockId(20), BlockId(21)]))
    runtime.compute.record().synchronize()
    assert torch.equal(device.view(torch.uint8)[[20, 21]], before)
    executor.close()


@pytest.mark.parametrize("setting", [WEIGHTS, KV])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_a_gpu_without_float8_is_refused_by_the_settings_name(
    tiny_model: Path, setting: dict[str, str], capability: tuple[int, int]
) -> None:
    config = EngineConfig(model=str(tiny_model), attention_backend="torch", **setting)  # type: ignore[arg-type]
    (key,) = setting
    with pytest.raises(ConfigError, match=rf"^{key}: fp8 needs a GPU of compute capability 8\.9 or later") as error:
        open_on(LazyRuntime(), config, tiny_model, facts=DeviceFacts("old", capability, 4, has_triton=False))
    assert error.value.key == key
