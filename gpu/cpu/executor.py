"""The executor for CPUs: steps in the C kernels or in torch, and copies between two pools of the same memory."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.messages import CopyBlocks, CopyDone, Fences, RunStep, StepDone
from ..answers import Answers, draws_of
from ..copying import carry_out
from ..executor import Capacity
from ..models.config import ModelConfig, load_model_config
from ..models.weights import load_weights
from ..sampling import Sampled
from ..slots import Row, SlotTable
from ..structured import Grammars
from ..timelines import Timelines
from .cores import CoreWatch, too_many_threads, usable_cores
from .library import LEVELS
from .machine import compute_dtype
from .memory import keep_freed_memory
from .paths import open_path
from .plan import SharedGroups
from .pool import HostPool, KvPool, block_bytes
from .sizing import pool_sizes

_ATTENTION_BACKENDS = ("auto", "torch", *LEVELS)

_log = logging.getLogger(__name__)


class CpuExecutor:
    """Runs the model in `model_dir` on the CPU. Implements `Executor`.

    It owns the weights and both KV pools. The host tier lies in the same memory as the device's: it holds what the
    pool that is computed in, of a size of its own, has no room for. `attention_backend` chooses the code: "torch",
    the C kernels of one instruction set, or "auto": the best there is. Raises `ModelLoadError` if the model cannot be
    loaded, `ConfigError` naming the key for a setting that this device cannot satisfy.
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
        sizes = pool_sizes(config, block_bytes(model, config.block_size, dtype))
        keep_freed_memory()
        if warning := too_many_threads(config.compute_threads, usable_cores()):
            _log.warning(warning)
        weights = load_weights(model_dir, model, dtype=dtype, device=torch.device("cpu"))
        weights_bytes = weights.num_bytes
        self._pool = KvPool(model, num_blocks=sizes.num_device_blocks, block_size=config.block_size, dtype=dtype)
        self._host = HostPool(self._pool, num_blocks=sizes.num_host_blocks)
        self._path = open_path(model, weights, self._pool, backend=config.attention_backend, num_threads=config.compute_threads)
        self._timelines = Timelines()
        self._grammars = Grammars(model_dir / "tokenizer.json", vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
        self._slots = SlotTable(self._grammars)
        self._answers = Answers()
        self._cores = CoreWatch()
        self._num_threads = config.compute_threads
        self._thread_id: int | None = None
        self._capacity = _capacity(config, model, self._pool, self._host, path=self._path.description, weights=weights_bytes)

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        return self._capacity

    @property
    def watch(self) -> None:
        """Who shares the cores shows in every step (`CoreWatch`)."""
        return None

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not released."""
        return len(self._slots)

    def run_step(self, step: RunStep) -> StepDone:
        """Run one step; see `Executor.run_step`. Sampled tokens are appended to their sequences' logs here.

        Raises `KeyError`, `ValueError` or `IndexError` for a step that does not fit what came before it.
        """
        # Not for the steps that it names: this thread has run them.
        copies = Fences(copy_out=step.after.copy_out, copy_in=step.after.copy_in)
        with self._timelines.operation("step", step.step_id, copies) as waited_s:
            return replace(self._run_step(step), waited_s=waited_s)

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Copy blocks between the tiers; see `Executor.copy_blocks`."""
        host = self._host
        move = host.copy_out if copy.direction == "out" else host.copy_in
        return carry_out(copy, self._timelines, self._capacity, lambda copy: move(copy.sources, copy.targets))

    def interrupt(self) -> None:
        """End all waiting; see `Executor.interrupt`."""
        self._timelines.close()

    def close(self) -> None:
        """Let go of the weights, the pools and the threads. May be called twice."""
        self.interrupt()
        if "_path" in vars(self):
            self._path.close()
            self._host.close()
            self._grammars.close()
        for name in ("_path", "_pool", "_host"):
            vars(self).pop(name, None)
        self._slots = SlotTable()

    def _run_step(self, step: RunStep) -> StepDone:
        started, running = time.perf_counter(), time.thread_time()
        self._claim_thread()
        rows = self._slots.apply(step)
        self._answers.forget(step)
        self._pool.copy(step.copies)
        sampling = [row for row in rows if row.samples]
        found = self._compute(rows, sampling, step.shared_groups) if rows else Sampled([], [])
        seconds = time.perf_counter() - started
        if warning := self._cores.after_step(seconds, time.thread_time() - running):
            _log.warning(warning)
        return self._answers.answer(step, sampling, found, seconds=seconds)

    def _compute(self, rows: list[Row], sampling: list[Row], shared: SharedGroups) -> Sampled:
        """Compute all rows, and draw for those that sample."""
        constrained = [row.slot for row in sampling if row.slot.grammar is not None]
        return self._path.compute(
            rows, draws_of(sampling), shared, before_draws=lambda: self._answers.wait_for_masks(constrained)
        )

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


def _capacity(config: EngineConfig, model: ModelConfig, pool: KvPool, host: HostPool, *, path: str, weights: int) -> Capacity:
    dtype = str(pool.blocks.dtype).removeprefix("torch.")
    out_rate, in_rate = host.measure()
    return Capacity(
        device=f"cpu ({dtype}, {path})",
        num_device_blocks=pool.blocks.shape[0],
        num_host_blocks=host.blocks.shape[0],
        block_size=config.block_size,
        block_bytes=pool.blocks[0].nbytes,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        weights_bytes=weights,
        copy_out_rate=out_rate,
        copy_in_rate=in_rate,
    )
