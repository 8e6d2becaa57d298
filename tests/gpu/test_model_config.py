"""Reading `config.json`: both spellings of what changed name, and a refusal by name of what is not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.models.config import SUPPORTED_ARCHITECTURES, Llama3Rope, ModelConfig, load_model_config
from repertory.protocol.errors import ModelLoadError
from repertory.tests.tiny_model import make_tiny_model


def config_with(directory: Path, *, architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """The tiny model's config with keys changed; a value of None removes the key."""
    make_tiny_model(directory, architecture=architecture, weights=False)
    raw = json.loads((directory / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(raw))
    return load_model_config(directory, max_model_len=None)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_each_architecture_differs_where_it_should(tmp_path: Path, architecture: str) -> None:
    config = config_with(tmp_path, architecture=architecture)
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    missing: dict[str, Any] = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "torch_dtype", "hidden_act")
    )
    config = config_with(tmp_path, **missing)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert (config.tie_word_embeddings, config.dtype) == (False, "float32")
    assert config_with(tmp_path, architecture="Qwen3ForCausalLM", head_dim=None).head_dim == 128


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_spellings(tmp_path: Path, name: str) -> None:
    assert config_with(tmp_path, **{"torch_dtype": None, name: "bfloat16"}).dtype == "bfloat16"


def test_rope_has_three_spellings(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert config_with(tmp_path, rope_theta=5e5).rope_theta == 5e5
    new = config_with(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling})
    old = config_with(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = config_with(tmp_path, rope_theta=500000, rope_scaling={"type": "llama3", **scaling})
    assert new == old == older
    assert new.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert config_with(tmp_path, rope_parameters={"rope_theta": 7.0, "rope_type": "default"}).rope_theta == 7.0


def test_ends_of_both_files_are_merged_without_repetition(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, weights=False)
    for in_config, in_generation, merged in (
        (2, 2, (2,)),
        ([2, 5], 7, (2, 5, 7)),
        (None, [7, 2], (7, 2)),
        (None, None, ()),
    ):
        for name, value in (("config.json", in_config), ("generation_config.json", in_generation)):
            raw = json.loads((tmp_path / name).read_text()) | {"eos_token_id": value}
            (tmp_path / name).write_text(json.dumps(raw))
        assert load_model_config(tmp_path).eos_token_ids == merged
    (tmp_path / "generation_config.json").unlink()
    assert load_model_config(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2"),
        ({"architectures": None}, "model_type 'llama'"),
        ({"architectures": []}, "model_type 'llama'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"vocab_size": "320"}, "vocab_size must be a positive integer, got '320'"),
        ({"num_key_value_heads": 3}, "do not divide evenly"),
        ({"head_dim": 15}, "do not divide evenly"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_ids"),
    ],
)
def test_what_is_not_computed_or_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        config_with(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}),
        ("Qwen2ForCausalLM", {"sliding_window": 1024, "use_sliding_window": True}),
    ],
)
def test_a_sliding_window_is_refused_unless_every_sequence_fits_in_it(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match="sliding_window 1024") as caught:
        config_with(tmp_path, architecture=architecture, **changes)
    assert "max_model_len to 1024" in str(caught.value)
    assert load_model_config(tmp_path, max_model_len=1024).num_layers == 3
    assert config_with(tmp_path, architecture=architecture, **(changes | {"sliding_window": 4096})).num_layers == 3


def test_a_sliding_window_that_is_switched_off_does_not_matter(tmp_path: Path) -> None:
    for architecture in ("Qwen2ForCausalLM", "LlamaForCausalLM"):
        config_with(tmp_path, architecture=architecture, sliding_window=16, use_sliding_window=False)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", b'{"a": NaN}'])
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(tmp_path)
