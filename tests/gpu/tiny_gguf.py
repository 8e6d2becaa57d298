"""A tiny Llama in GGUF, written the way llama.cpp's converter does, so that its conversion can be checked exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "ĠĠ", "ĠĠĠ", "a", "b", "ab", *"0123456789"]
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "a b"]


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The model's tensors, float32, by Hugging Face name."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write `tiny_tensors(seed)` with a tokenizer to `path`; `change` may add keys or tensors before it is closed."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in tiny_tensors(seed).items():
        writer.add_tensor(_gguf_name(name), _permuted(name, values))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    return str(names.get_name(name, try_suffixes=(".weight",)))


def _permuted(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp interleaves the two halves of each query and key head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    return values.reshape(-1, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
