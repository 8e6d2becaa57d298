"""GPU executors on a device of the CPU whose streams run late, with torch's operations or the interpreted kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repertory.gpu.cuda.executor import GpuExecutor
from repertory.gpu.cuda.opening import DeviceFacts, open_on
from repertory.protocol.config import EngineConfig
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime

TORCH_ONLY = DeviceFacts("late", None, 4, has_triton=False)
WITH_TRITON = DeviceFacts("late", None, 4, has_triton=True)

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_device_blocks": 200,
    "num_host_blocks": 40,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "max_model_len": 256,
}


def open_late(model_dir: Path, *, seed: int = 0, triton: bool = False, **settings: Any) -> tuple[GpuExecutor, LazyRuntime]:
    """An executor, and the device below it. What was never written to its pools is NaN."""
    backend = {} if triton else {"attention_backend": "torch"}
    config = EngineConfig(model=str(model_dir), **{**SETTINGS, **backend, **settings})
    runtime = LazyRuntime(seed)
    executor = open_on(runtime, config, model_dir, facts=WITH_TRITON if triton else TORCH_ONLY)
    executor._open.pool.blocks.fill_(float("nan"))
    executor._open.host.blocks.fill_(float("nan"))
    return executor, runtime
