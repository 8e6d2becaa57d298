"""Weights on a device: read from safetensors, fused, cast.

Query, key and value projections become one matrix, gate and up another, so that a layer makes four
matrix products instead of seven. Each part is copied straight from the mapped file into its place:
no second copy of the model exists while it loads. A checkpoint must hold every tensor in the shape
the config implies, and nothing that would have changed the result and is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...protocol.errors import ModelLoadError
from .config import ModelConfig, read_json

Layer = TypeVar("Layer")

_FLOATS = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as `torch.nn.functional.linear` wants them.

    `qkv` is [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size] in the order query, key, value;
    `gate_up` is [2 * intermediate_size, hidden_size]. `q_norm` and `k_norm` are [head_dim].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. `lm_head` is the embedding itself where the model ties them. [vocab_size, hidden_size]."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        tensors = [self.embedding, self.final_norm, self.lm_head]
        for layer in self.layers:
            tensors += [tensor for name in LayerWeights.__slots__ if (tensor := getattr(layer, name)) is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def load_weights(directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Read the safetensors of `directory` as `config` describes them.

    Raises `ModelLoadError` naming the file or the tensor: none there, truncated or corrupt, missing,
    of another shape, of a type that is not floating point, or not known to the architecture.
    """
    weights, layers = load_converted(directory, config, convert=lambda layer: layer, dtype=dtype, device=device)
    return replace(weights, layers=layers)


def load_converted(
    directory: Path, config: ModelConfig, *, convert: Callable[[LayerWeights], Layer], dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, list[Layer]]:
    """As `load_weights`, but `convert` makes something of each layer before the next is read.

    Returns weights without layers, and what was made of those: a model that becomes smaller is never there as it was.
    """
    with _Checkpoint(directory, dtype, device) as checkpoint:
        embedding_shape = (config.vocab_size, config.hidden_size)
        embedding = checkpoint.take("model.embed_tokens.weight", embedding_shape)
        layers = [convert(_layer(checkpoint, config, f"model.layers.{index}")) for index in range(config.num_layers)]
        final_norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            lm_head = embedding
            checkpoint.ignore("lm_head.weight")
        else:
            lm_head = checkpoint.take("lm_head.weight", embedding_shape)
        checkpoint.refuse_leftovers()
    return DecoderWeights(embedding, [], final_norm, lm_head), layers


def _layer(checkpoint: _Checkpoint, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = [
        (f"{prefix}.self_attn.{part}_proj", rows) for part, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
    ]
    # Old checkpoints store the rotary frequencies, which the config determines.
    checkpoint.ignore(f"{prefix}.self_attn.rotary_emb.inv_freq")
    return LayerWeights(
        input_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=checkpoint.fuse([(f"{name}.weight", (rows, hidden)) for name, rows in projections]),
        qkv_bias=checkpoint.fuse([(f"{name}.bias", (rows,)) for name, rows in projections]) if config.qkv_bias else None,
        q_norm=checkpoint.take(f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        k_norm=checkpoint.take(f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        attention_out=checkpoint.take(f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)),
        post_attention_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=checkpoint.fuse([(f"{prefix}.mlp.{part}_proj.weight", (intermediate, hidden)) for part in ("gate", "up")]),
        down=checkpoint.take(f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)),
    )


class _Checkpoint:
    """The tensors of a directory, by name, whichever file holds them. Open while used as a context."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._holder: dict[str, Any] = {}
        self._unused: set[str] = set()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            for path in _weight_files(self._directory):
                try:
                    handle = opening.enter_context(safe_open(path, framework="pt", device="cpu"))
                except (SafetensorError, OSError) as error:
                    raise ModelLoadError(f"{path} is truncated or corrupt: {error}", key="model") from error
                self._holder.update(dict.fromkeys(handle.keys(), handle))
            self._files = opening.pop_all()
        self._unused = set(self._holder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._files.close()
        self._holder.clear()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own storage, on the device and of the dtype asked for."""
        return self.fuse([(name, shape)])

    def fuse(self, parts: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """The parts, joined along their first dimension."""
        rows = sum(shape[0] for _, shape in parts)
        fused = torch.empty((rows, *parts[0][1][1:]), dtype=self._dtype, device=self._device)
        first = 0
        for name, shape in parts:
            fused[first : first + shape[0]].copy_(self._read(name, shape))
            first += shape[0]
        return fused

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._unused.discard(name)

    def refuse_leftovers(self) -> None:
        """Raise if a tensor was neither used nor ignored: the model would not be what it says it is."""
        if self._unused:
            some = ", ".join(sorted(self._unused)[:3])
            raise ModelLoadError(
                f"{self._directory}: {len(self._unused)} tensors are unknown to this architecture: {some}", key="model"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._holder:
            raise ModelLoadError(f"{self._directory}: tensor {name} is missing", key="model")
        entry = self._holder[name].get_slice(name)
        if tuple(entry.get_shape()) != shape:
            raise ModelLoadError(
                f"{self._directory}: tensor {name} has shape {entry.get_shape()}, expected {list(shape)}", key="model"
            )
        if entry.get_dtype() not in _FLOATS:
            raise ModelLoadError(
                f"{self._directory}: tensor {name} is of type {entry.get_dtype()}; supported: {', '.join(_FLOATS)}", key="model"
            )
        self._unused.discard(name)
        tensor: Tensor = self._holder[name].get_tensor(name)
        return tensor


def _weight_files(directory: Path) -> list[Path]:
    """The files that make up the checkpoint: those of the index, else one file, else all there are."""
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{index} has no weight_map from tensors to files", key="model")
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    elif (single := directory / "model.safetensors").is_file():
        paths = [single]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(f"model directory {directory} has no safetensors weights", key="model")
    for path in paths:
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing (named by {_INDEX})", key="model")
    return paths
