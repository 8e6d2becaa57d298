"""The executor for CPUs: one step at a time, in the order of its arrival, in the C kernels or in torch."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import torch

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.ids import SequenceId
from ...protocol.messages import FailedRow, RunStep, StepDone
from ..executor import Capacity
from ..models.config import ModelConfig, load_model_config
from ..models.weights import load_weights
from ..sampling import SamplingRow
from ..slots import Row, SlotTable
from .cores import CoreWatch, too_many_threads, usable_cores
from .library import LEVELS
from .machine import compute_dtype, memory_bytes
from .memory import keep_freed_memory
from .paths import open_path
from .plan import SharedGroups
from .pool import KvPool, block_bytes

_ATTENTION_BACKENDS = ("auto", "torch", *LEVELS)

_log = logging.getLogger(__name__)

_STAND_IN = 0
"""Token that a failed row leaves in its log: the step behind it may already count on there being one."""


class CpuExecutor:
    """Runs the model in `model_dir` on the CPU. Implements `Executor`.

    It owns the weights and the KV pool, and has no host tier: there is no slower memory to move blocks to.
    `attention_backend` chooses the code: "torch", the C kernels of one instruction set, or "auto": the best
    there is. Raises `ModelLoadError` if the model cannot be loaded, `ConfigError` naming the key for a setting
    that this device cannot satisfy.
    """

    def __init__(self, model_dir: Path, *, config: EngineConfig) -> None:
        _refuse_unsupported(config)
        model = load_model_config(model_dir, max_model_len=config.max_model_len)
        if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is more than the model's {model.max_position_embeddings}",
                key="max_model_len",
            )
        dtype = compute_dtype(config.dtype)
        num_blocks = _num_blocks(config, block_bytes(model, config.block_size, dtype))
        keep_freed_memory()
        if warning := too_many_threads(config.compute_threads, usable_cores()):
            _log.warning(warning)
        weights = load_weights(model_dir, model, dtype=dtype, device=torch.device("cpu"))
        weights_bytes = weights.num_bytes
        self._pool = KvPool(model, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype)
        self._path = open_path(model, weights, self._pool, backend=config.attention_backend, num_threads=config.compute_threads)
        self._slots = SlotTable()
        self._not_finite: set[SequenceId] = set()
        self._cores = CoreWatch()
        self._num_threads = config.compute_threads
        self._thread_id: int | None = None
        self._capacity = _capacity(config, model, self._pool, path=self._path.description, weights_bytes=weights_bytes)

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        return self._capacity

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not released."""
        return len(self._slots)

    def run_step(self, step: RunStep) -> StepDone:
        """Run one step; see `Executor.run_step`. Sampled tokens are appended to their sequences' logs here.

        Raises `KeyError`, `ValueError` or `IndexError` for a step that does not fit what came before it.
        """
        started, running = time.perf_counter(), time.thread_time()
        self._claim_thread()
        rows = self._slots.apply(step)
        self._not_finite.difference_update(step.released, (new.seq_id for new in step.admitted))
        self._pool.copy(step.copies)
        sampled = self._compute(rows, step.shared_groups) if rows else []
        seq_ids: list[SequenceId] = []
        token_ids: list[int] = []
        failed: list[FailedRow] = []
        for row, token in sampled:
            seq_id = row.slot.seq_id
            row.slot.token_ids.append(token)
            if seq_id in self._not_finite:
                failed.append(FailedRow(seq_id, "the model's logits are not finite"))
            else:
                seq_ids.append(seq_id)
                token_ids.append(token)
        seconds = time.perf_counter() - started
        if warning := self._cores.after_step(seconds, time.thread_time() - running):
            _log.warning(warning)
        return StepDone(step.epoch, step.step_id, seq_ids, token_ids, seconds, failed)

    def close(self) -> None:
        """Let go of the weights, the pool and the threads. May be called twice."""
        if "_path" in vars(self):
            self._path.close()
        for name in ("_path", "_pool"):
            vars(self).pop(name, None)
        self._slots = SlotTable()

    def _compute(self, rows: list[Row], shared: SharedGroups) -> list[tuple[Row, int]]:
        """Compute all rows. Returns those that sample with their tokens, a stand-in for those that fail.

        A sequence that failed once stays failed while it is known: its KV is not to be trusted.
        """
        sampling = [row for row in rows if row.samples]
        for row in sampling:
            if row.end != len(row.slot.token_ids):
                raise ValueError(
                    f"sequence {row.slot.seq_id} samples after token {row.end} of a log of {len(row.slot.token_ids)}"
                )
        draws = [SamplingRow(row.slot.params, row.slot.index, row.slot.num_output_tokens) for row in sampling]
        token_ids, failed = self._path.compute(rows, draws, shared)
        self._not_finite.update(sampling[i].slot.seq_id for i in failed)
        return [
            (row, _STAND_IN if row.slot.seq_id in self._not_finite else token)
            for row, token in zip(sampling, token_ids, strict=True)
        ]

    def _claim_thread(self) -> None:
        # OpenMP keeps the number of threads per calling thread: setting it where the executor is built would be lost.
        if self._thread_id != threading.get_ident():
            self._thread_id = threading.get_ident()
            torch.set_num_threads(self._num_threads)


def _refuse_unsupported(config: EngineConfig) -> None:
    for key, allowed in (("attention_backend", _ATTENTION_BACKENDS), ("kv_cache_dtype", ("auto",)), ("quantization", (None,))):
        value = getattr(config, key)
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ConfigError(f"{key} {value!r} is not supported on CPU; supported: {names}", key=key)


def _num_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """Blocks in the pool. Raises `ConfigError` for fewer than two, or more than there is memory for."""
    key = "num_device_blocks" if config.num_device_blocks is not None else "cpu_kv_cache_bytes"
    num_blocks = config.num_device_blocks or config.cpu_kv_cache_bytes // bytes_per_block
    if num_blocks < 2:
        raise ConfigError(
            f"{key} {getattr(config, key)} makes {num_blocks} KV blocks of {bytes_per_block} bytes; at least 2 are needed",
            key=key,
        )
    if num_blocks * bytes_per_block > memory_bytes():
        raise ConfigError(
            f"{key} {getattr(config, key)} needs {num_blocks * bytes_per_block / 2**30:.1f} GiB for the KV pool; "
            f"this machine has {memory_bytes() / 2**30:.1f} GiB of memory",
            key=key,
        )
    return num_blocks


def _capacity(config: EngineConfig, model: ModelConfig, pool: KvPool, *, path: str, weights_bytes: int) -> Capacity:
    dtype = str(pool.blocks.dtype).removeprefix("torch.")
    return Capacity(
        device=f"cpu ({dtype}, {path})",
        num_device_blocks=pool.blocks.shape[0],
        num_host_blocks=0,
        block_size=config.block_size,
        block_bytes=pool.blocks[0].nbytes,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        weights_bytes=weights_bytes,
    )
