"""A tiny random model and a byte-level tokenizer, written in a fraction of a second, with no network.

The weights are drawn wide (`initializer_range` 0.2): with the usual 0.02 and tied embeddings a model
repeats its last token whatever the attention does, and tests on it would pass with a broken cache.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(CHAT_TOKENS)

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_COMMON_MERGES = ["t h", "th e", "Ġ the", "i n", "in g", "e r", "a n", "an d", "Ġ and", "h e", "he l", "l o", "hel lo", "Ġ Ġ"]


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    intermediate: int = 128,
    initializer_range: float = 0.2,
    architecture: str = "LlamaForCausalLM",
    max_position_embeddings: int = 4096,
    tie_word_embeddings: bool = True,
    weights: bool = True,
) -> Path:
    """Write a model directory (config, tokenizer, float32 weights) into `directory` and return it.

    Token ids: 0 to 2 `<pad>`, `<bos>`, `<eos>`; then the 256 bytes; then merges; the last two are
    `<|im_start|>` and `<|im_end|>`. A vocabulary larger than the merges reach has ids without text.
    `weights=False` writes none, for devices that compute nothing. The same arguments give the same
    bytes. Raises `ValueError` for a vocabulary smaller than the tokenizer's needs.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size} is less than the {MIN_VOCAB_SIZE} tokens every tokenizer here has")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_word_embeddings,
        "hidden_act": "silu",
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_tokenizer(directory, vocab_size, max_position_embeddings)
    if weights:
        generator = np.random.default_rng(seed)
        tensors = {
            name: _random(generator, name, shape, initializer_range) for name, shape in _shapes(config, architecture).items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(config: dict[str, Any], architecture: str) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, hidden)
            if architecture == "Qwen2ForCausalLM":
                shapes[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        if architecture == "Qwen3ForCausalLM":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for part in ("gate", "up"):
            shapes[f"{prefix}.mlp.{part}_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, intermediate)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _random(generator: np.random.Generator, name: str, shape: tuple[int, ...], spread: float) -> np.ndarray:
    values = generator.standard_normal(shape, dtype=np.float32) * np.float32(spread)
    # Norm weights differ from 1 so that a forgotten or misplaced one shows.
    return 1 + values if "norm" in name else values


def _write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    merges: list[tuple[str, str]] = []
    pairs = itertools.product(string.ascii_lowercase, repeat=2)
    for left, right in itertools.chain((tuple(merge.split()) for merge in _COMMON_MERGES), pairs):
        if len(tokens) == vocab_size - len(CHAT_TOKENS):
            break
        if left + right not in tokens:
            tokens.append(left + right)
            merges.append((left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    vocabulary |= {token: vocab_size - len(CHAT_TOKENS) + i for i, token in enumerate(CHAT_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS + CHAT_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
