"""Opening a simulated device for a configuration and a model's directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError, ModelLoadError
from ..models.config import load_model_config
from ..structured import Grammars
from .executor import DEFAULT_MAX_MODEL_LEN, DEFAULT_NUM_BLOCKS, DEFAULT_VOCAB_SIZE, SimulatedExecutor


def open_simulated(config: EngineConfig, model_dir: Path | None) -> SimulatedExecutor:
    """A simulated device of the sizes in `config`, with the vocabulary and length of the model in `model_dir`.

    Reads `config.json`, and `tokenizer.json` once there are structured outputs. Without a directory the sizes are the
    defaults of `SimulatedExecutor`.
    Raises `ModelLoadError` when the file is missing or unusable, `ConfigError` for a `max_model_len`
    the model does not have.
    """
    vocab_size, model_len = DEFAULT_VOCAB_SIZE, DEFAULT_MAX_MODEL_LEN
    if model_dir is not None:
        vocab_size, model_len = _model_sizes(model_dir / "config.json")
    max_model_len = config.max_model_len or model_len
    if max_model_len > model_len:
        raise ConfigError(f"max_model_len {max_model_len} is more than the model's {model_len} positions", key="max_model_len")
    num_host_blocks = config.num_host_blocks
    if num_host_blocks is None:
        num_host_blocks = DEFAULT_NUM_BLOCKS if config.kv_offloading_size > 0 else 0
    return SimulatedExecutor(
        num_device_blocks=config.num_device_blocks or DEFAULT_NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        block_size=config.block_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        wait_for_fences=True,
        grammars=None if model_dir is None else _grammars(model_dir, vocab_size),
    )


def _grammars(model_dir: Path, vocab_size: int) -> Grammars | None:
    """None where the directory holds no more of a model than its sizes."""
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        eos_token_ids = load_model_config(model_dir).eos_token_ids
    except ModelLoadError:
        return None
    return Grammars(file, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


class _ModelSizes(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int


def _model_sizes(path: Path) -> tuple[int, int]:
    try:
        sizes = msgspec.json.decode(path.read_bytes(), type=_ModelSizes)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"model: {path}: {error}", key="model") from error
    if sizes.vocab_size < 1 or sizes.max_position_embeddings < 1:
        raise ModelLoadError(f"model: {path}: vocab_size and max_position_embeddings must be positive", key="model")
    return sizes.vocab_size, sizes.max_position_embeddings
