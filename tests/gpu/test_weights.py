"""Loading weights: fused, cast, from any number of files, and never silently from the wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from repertory.gpu.models.config import load_model_config
from repertory.gpu.models.weights import DecoderWeights, load_weights
from repertory.protocol.errors import ModelLoadError
from repertory.tests.tiny_model import make_tiny_model

Tensors = dict[str, np.ndarray]
ATTENTION = "model.layers.1.self_attn"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, load_model_config(directory), dtype=dtype, device=torch.device("cpu"))


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, architecture="Qwen2ForCausalLM", tie_word_embeddings=False)


def test_projections_are_fused_in_order(qwen2: Path) -> None:
    weights, original = load(qwen2), load_file(qwen2 / "model.safetensors")
    layer = weights.layers[1]
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        parts = [original[f"{ATTENTION}.{part}_proj.{kind}"] for part in "qkv"]
        assert fused is not None
        np.testing.assert_array_equal(fused.numpy(), np.concatenate(parts))
    gate_up = [original[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(layer.gate_up.numpy(), np.concatenate(gate_up))
    np.testing.assert_array_equal(weights.lm_head.numpy(), original["lm_head.weight"])
    assert weights.num_bytes == sum(values.nbytes for values in original.values())


def test_tied_embeddings_are_one_tensor_counted_once(tiny_llama: Path) -> None:
    weights = load(tiny_llama, torch.bfloat16)
    assert weights.lm_head is weights.embedding
    assert weights.embedding.dtype == torch.bfloat16
    assert weights.num_bytes * 2 == sum(values.nbytes for values in load_file(tiny_llama / "model.safetensors").values())


def test_weights_outlive_and_do_not_follow_their_file(qwen2: Path) -> None:
    weights = load(qwen2)
    before = weights.embedding.clone()
    (qwen2 / "model.safetensors").write_bytes(b"")
    assert torch.equal(weights.embedding, before)


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_checkpoints_load_like_whole_ones(qwen2: Path, with_index: bool) -> None:
    whole = load(qwen2)
    tensors = load_file(qwen2 / "model.safetensors")
    (qwen2 / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, qwen2 / file)
    if with_index:
        index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
        (qwen2 / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"stray": np.zeros(1)}, qwen2 / "consolidated.safetensors")  # not named by the index
    sharded = load(qwen2)
    assert torch.equal(sharded.layers[2].qkv, whole.layers[2].qkv)
    assert torch.equal(sharded.lm_head, whole.lm_head)
    if with_index:
        (qwen2 / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors is missing"):
            load(qwen2)
        (qwen2 / "model.safetensors.index.json").write_text('{"metadata": {}}')
        with pytest.raises(ModelLoadError, match="weight_map"):
            load(qwen2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{ATTENTION}.k_proj.weight"), f"tensor {ATTENTION}.k_proj.weight is missing"),
        (lambda t: t.pop(f"{ATTENTION}.q_proj.bias"), f"tensor {ATTENTION}.q_proj.bias is missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({f"{ATTENTION}.o_proj.weight": np.zeros((64, 63), np.float32)}),
            r"shape \[64, 63\], expected \[64, 64\]",
        ),
        (lambda t: t.update({"model.norm.weight": np.zeros(64, np.int8)}), "model.norm.weight is of type I8"),
        (lambda t: t.update({f"{ATTENTION}.q_norm.weight": np.zeros(16, np.float32)}), "unknown to this architecture"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.zeros(1, np.float32)}), "model.layers.3"),
    ],
)
def test_a_checkpoint_that_is_not_the_configs_is_refused_by_tensor(
    qwen2: Path, change: Callable[[Tensors], object], said: str
) -> None:
    rewrite(qwen2, change)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load(qwen2)
    assert str(qwen2) in str(caught.value)


def test_tensors_that_cannot_matter_are_passed_over(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    extra = {"lm_head.weight": np.ones((320, 64)), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8)}
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    assert load(tmp_path).num_bytes > 0


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    path = make_tiny_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt"):
        load(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, weights=False)
    with pytest.raises(ModelLoadError, match=f"{tmp_path} has no safetensors weights"):
        load(tmp_path)
