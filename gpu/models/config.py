"""What a decoder has to know of its model, read from `config.json`.

One rule: a feature that the decoder does not compute is refused by name. A model that loads is
computed exactly; there is no third state in which it runs and answers something else. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...protocol.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_QWEN3_HEAD_DIM = 128
"""Qwen3's published default; the other families divide the hidden size by the heads."""

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class Llama3Rope(msgspec.Struct, frozen=True):
    """Llama 3.1's stretching of the rotary wavelengths (`rope_type` "llama3")."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: Positive


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and numerics of one decoder-only transformer."""

    architecture: str
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    """Rows of the embedding."""
    rope_theta: PositiveFloat
    rope_scaling: Llama3Rope | None
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: bool
    qkv_bias: bool
    """Whether the query, key and value projections add a bias (Qwen2)."""
    qk_norm: bool
    """Whether queries and keys are normalised per head before the rotation (Qwen3)."""
    max_position_embeddings: Positive
    eos_token_ids: tuple[int, ...]
    """Ends of `config.json` and `generation_config.json` together, without repetition."""
    dtype: str
    """What the checkpoint says its weights are."""


def load_model_config(directory: Path, *, max_model_len: int | None = None) -> ModelConfig:
    """Read `directory`'s `config.json` and `generation_config.json`.

    `max_model_len` is the longest sequence that will be run (default: the model's limit); a sliding
    window is acceptable where it is at least as long. Raises `ModelLoadError` with the file, the key
    and what is wrong: unreadable, incomplete, of an unsupported architecture, or with a feature that
    is not computed here.
    """
    path = directory / "config.json"
    raw = read_json(path)
    architecture = _architecture(raw, path)
    _refuse_unsupported(raw, path, architecture, max_model_len)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    values = {
        "architecture": architecture,
        **_shape(raw, path, architecture),
        **_rope(raw, path),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "eos_token_ids": _eos_token_ids(raw, generation),
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
    }
    try:
        config = msgspec.convert(values, ModelConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path}: {error}", key="model") from None
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelLoadError(
            f"{path}: {config.num_heads} heads over {config.num_kv_heads} KV heads of {config.head_dim} do not divide evenly",
            key="model",
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelLoadError` with the path if there is none."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror or error}", key="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}", key="model") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object", key="model")
    return value


def _architecture(raw: dict[str, Any], path: Path) -> str:
    found = raw.get("architectures") or []
    for name in found:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    described = ", ".join(map(str, found)) or f"none named (model_type {raw.get('model_type')!r})"
    raise ModelLoadError(
        f"{path}: unsupported architecture: {described}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}", key="model"
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path, architecture: str, max_model_len: int | None) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported(path, "hidden_act", raw["hidden_act"])
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if raw.get(key):
            raise _unsupported(path, key, raw[key])
    if architecture == "MistralForCausalLM" or raw.get("use_sliding_window"):
        window = raw.get("sliding_window")
        longest = max_model_len or raw.get("max_position_embeddings") or 0
        if window is not None and window < longest:
            raise ModelLoadError(
                f"{path}: sliding_window {window} is not supported for sequences of up to {longest} tokens; "
                f"set max_model_len to {window} or less",
                key="model",
            )


def _shape(raw: dict[str, Any], path: Path, architecture: str) -> dict[str, Any]:
    names = {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
    }
    for key in names.values():
        # Checked here too, since the derived values below compute with them.
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise ModelLoadError(f"{path}: {key} must be a positive integer, got {raw.get(key)!r}", key="model")
    shape = {name: raw[key] for name, key in names.items()}
    shape["num_kv_heads"] = raw.get("num_key_value_heads") or raw["num_attention_heads"]
    default_head_dim = (
        _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else raw["hidden_size"] // raw["num_attention_heads"]
    )
    shape["head_dim"] = raw.get("head_dim") or default_head_dim
    return shape


def _rope(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise _unsupported(path, "rope_type", kind)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1:
        raise _unsupported(path, "partial_rotary_factor", partial)
    scaling = {key: parameters[key] for key in Llama3Rope.__struct_fields__ if key in parameters} if kind == "llama3" else None
    return {"rope_theta": parameters.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_scaling": scaling}


def _eos_token_ids(*sources: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for source in sources:
        value = source.get("eos_token_id")
        found.extend(value if isinstance(value, list) else [] if value is None else [value])
    return list(dict.fromkeys(found))


def _unsupported(path: Path, key: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"{path}: {key} {value!r} is not supported", key="model")
