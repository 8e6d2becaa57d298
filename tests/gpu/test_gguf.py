"""GGUF conversion: exact on a tiny file whose origin is known, and on the demo model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.gguf import convert_gguf
from repertory.gpu.models.source import demo_file
from repertory.gpu.models.weights import load_weights
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ModelLoadError
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.gpu.tiny_gguf import tiny_tensors, write_tiny_gguf

PROMPT = "The capital of France is"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_every_tensor_comes_back_bit_for_bit(tmp_path: Path, target: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", seed=3), target)
    converted, original = load_file(target / "model.safetensors"), tiny_tensors(3)
    assert converted.keys() == original.keys()
    for name, values in original.items():
        np.testing.assert_array_equal(converted[name], values, err_msg=name)


def test_the_converted_directory_loads_as_a_tied_llama(tmp_path: Path, target: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"), target)
    config = load_model_config(target)
    assert (config.architecture, config.tie_word_embeddings, config.eos_token_ids) == ("LlamaForCausalLM", True, (2,))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 2, 8, 1e-5)
    load_weights(target, config, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer_config = json.loads((target / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}"
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab   7<|im_end|>").tokens == ["ab", "ĠĠĠ", "7", "<|im_end|>"]


def test_an_output_matrix_of_its_own_unties_the_embeddings(tmp_path: Path, target: Path) -> None:
    head = np.ones((19, 32), dtype=np.float32)
    convert_gguf(write_tiny_gguf(tmp_path / "t.gguf", change=lambda writer: writer.add_tensor("output.weight", head)), target)
    assert load_model_config(target).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": "mamba"}, "general.architecture 'mamba' is not supported; supported: llama"),
        ({"pre_tokenizer": "qwen2"}, "tokenizer.ggml.pre 'qwen2' is not supported"),
        ({"change": lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32))}, "tensor rope_freqs.weight"),
        ({"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "rope.scaling.type 'yarn'"),
    ],
)
def test_what_it_cannot_translate_is_refused_by_name(tmp_path: Path, target: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        convert_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", **settings), target)


def _cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


@pytest.mark.parametrize("damage", [_cut(0), _cut(3), _cut(40), _cut(700), _cut(-1), lambda _: b"no model at all" * 10])
def test_a_damaged_file_is_a_load_error_with_its_path(tmp_path: Path, target: Path, damage: Callable[[bytes], bytes]) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    source.write_bytes(damage(source.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        convert_gguf(source, target)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path: Path, target: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    generator = random.Random(0)
    failures = 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(4):
            content[generator.randrange(900)] = generator.randrange(256)
        (tmp_path / "tiny.gguf").write_bytes(content)
        try:
            convert_gguf(tmp_path / "tiny.gguf", target)
        except ModelLoadError:
            failures += 1
    assert failures > 10


def test_the_demo_models_tokenizer_splits_digits_before_bytes(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode("   7").tokens == ["ĠĠĠ", "7"]
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.get_vocab_size() == 49152
    text = "def f(x):\n    return x  # naïve — 你好 🙂<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_demo_model_continues_a_prompt_as_transformers_does(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.from_file(str(demo_model / "tokenizer.json")).encode(PROMPT).ids
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    config = EngineConfig(model="demo", dtype="float32", num_device_blocks=16, num_threads=1)
    stepper = Stepper(CpuExecutor(demo_model, config=config))
    stepper.add(1, ids)
    assert stepper.run(8, chunk=3)[1] == expected[0, len(ids) :].tolist()


@pytest.mark.slow
def test_the_demo_models_weights_equal_those_transformers_reads_from_the_file(demo_model: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF only beside it")
    from transformers import AutoModelForCausalLM, GgufConfig

    source = demo_file()
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = model.state_dict()
    converted = load_file(demo_model / "model.safetensors")
    assert set(expected) - set(converted) <= {"lm_head.weight"}
    for name, values in converted.items():
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)
