"""GGUF to a model directory: weights dequantised to float32, tokenizer and chat template written out.

Two things are easy to get wrong. GGUF stores the query and key rows of the Llama family permuted for
an interleaved rotary embedding; they are put back. And its tokenizer names a pre-tokenizer by a
word: for `smollm` that is single digits before the byte-level split, without which "   7" becomes
other tokens. float32 keeps exactly the values that dequantisation gives, so that outputs can be
compared; whoever loads the directory casts to the dtype it wants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import ModelLoadError

CONVERTER_VERSION = 1
"""Part of a conversion's identity: raise it when the output changes, and old conversions are left alone."""

_CONTROL_TOKEN = 3
_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, Any] = {
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
}


class _Fields:
    """A GGUF file's metadata by key."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise KeyError(f"metadata key {key} is missing")
        return self._fields[key].contents()


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in the GGUF file `source` into the existing directory `target`.

    Raises `ModelLoadError` with the path when the file is truncated or corrupt, or holds an
    architecture, tokenizer or tensor that is not known here.
    """
    import gguf
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(source)
        fields = _Fields(reader)
        _refuse_unknown(fields, source)
        weights = _weights(reader, fields, source)
        files = _json_files(fields, tied="lm_head.weight" not in weights)
    except ModelLoadError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise ModelLoadError(f"{source} is truncated, corrupt or incomplete: {error}", key="model") from error
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (target / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


def _refuse_unknown(fields: _Fields, source: Path) -> None:
    for key, allowed in (
        ("general.architecture", ("llama",)),
        ("tokenizer.ggml.model", ("gpt2",)),
        ("tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS)),
    ):
        found = fields[key]
        if found not in allowed:
            raise ModelLoadError(f"{source}: {key} {found!r} is not supported; supported: {', '.join(allowed)}", key="model")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"{source}: llama.rope.scaling.type {scaling!r} is not supported", key="model")


def _weights(reader: Any, fields: _Fields, source: Path) -> dict[str, Any]:
    import gguf
    import numpy as np

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        name, part = _tensor_name(tensor.name)
        if name is None:
            raise ModelLoadError(f"{source}: tensor {tensor.name} is not supported", key="model")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in heads:
            values = _unpermuted(values, heads[part])
        weights[name] = np.ascontiguousarray(values)
    return weights


def _tensor_name(name: str) -> tuple[str | None, str | None]:
    """The Hugging Face name of a tensor, and the part of a layer that it is."""
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name], None
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER_TENSORS and pieces[3] == "weight":
        return f"model.layers.{pieces[1]}.{_LAYER_TENSORS[pieces[2]]}.weight", pieces[2]
    return None, None


def _unpermuted(rows: Any, num_heads: int) -> Any:
    """Undo the interleaving of a head's two halves: row 2i of a head goes to i, row 2i+1 to i + head_dim/2."""
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _json_files(fields: _Fields, *, tied: bool) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    special_ids = {
        f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    generation = {key: special_ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    special_tokens = {
        key.removesuffix("_id"): tokens[token_id] for key, token_id in special_ids.items() if token_id is not None
    }
    context_length = fields["llama.context_length"]
    return {
        "config.json": {**_config(fields, vocab_size=len(tokens), tied=tied), **generation},
        "generation_config.json": generation,
        "tokenizer.json": _tokenizer(fields, tokens),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special_tokens,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": fields.get("tokenizer.chat_template"),
        },
    }


def _config(fields: _Fields, *, vocab_size: int, tied: bool) -> dict[str, Any]:
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 1e-05 comes back as 9.99999974e-06, which is not what the model was trained with.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _tokenizer(fields: _Fields, tokens: list[str]) -> dict[str, Any]:
    """The content of `tokenizer.json`: byte-level BPE with the pre-tokenizer that the file names."""
    kinds = fields["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }
