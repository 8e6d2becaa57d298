"""How much of a GPU's memory the KV pool gets: what is left of `gpu_memory_utilization` beside all that is measured.

Measured, not estimated: the model runs the largest step it may be given, on a small pool, and the allocator says how much
that took at most. What captured steps take is measured the same way.
"""

from __future__ import annotations

import logging

from ...protocol.config import FIELDS, EngineConfig
from ...protocol.errors import ConfigError
from ..machine import memory_bytes
from .runtime import DeviceMemory

GIB = 2**30
_HOST_SHARE = 0.5
"""Of main memory that is page-locked without having been asked for: the system can not use what is."""

_log = logging.getLogger(__name__)


def num_device_blocks(config: EngineConfig, memory: DeviceMemory, block_bytes: int) -> int:
    """Blocks of the device's pool, by the device's memory after the largest step: its peak is what this process needs beside.

    Raises `ConfigError` naming the key if fewer than two fit, or fewer than asked for.
    """
    # What is neither free nor the allocator's belongs to other processes, or to CUDA itself on our behalf.
    others_bytes = max(0, memory.total_bytes - memory.free_bytes - memory.reserved_bytes)
    taken = memory.peak_bytes + others_bytes
    usable = config.gpu_memory_utilization * memory.total_bytes
    fitting = max(0, int((usable - taken) // block_bytes))
    said = (
        f"of the device's {memory.total_bytes / GIB:.1f} GiB this engine may use {usable / GIB:.1f} "
        f"(gpu_memory_utilization {config.gpu_memory_utilization:g}); weights and the largest step take "
        f"{memory.peak_bytes / GIB:.1f} GiB, CUDA and other processes {others_bytes / GIB:.1f}"
    )
    if config.num_device_blocks is not None:
        if config.num_device_blocks > (memory.total_bytes - taken) // block_bytes:
            wanted = config.num_device_blocks * block_bytes / GIB
            raise ConfigError(
                f"num_device_blocks {config.num_device_blocks} needs {wanted:.1f} GiB; {said}", key="num_device_blocks"
            )
        return config.num_device_blocks
    if fitting < 2:
        raise ConfigError(f"{said}: no room for two KV blocks of {block_bytes} bytes", key="gpu_memory_utilization")
    return fitting


def num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of the host tier, in page-locked memory.

    Raises `ConfigError` naming the key for more than the machine has; a size that nobody asked for shrinks instead, with a
    warning.
    """
    wanted = config.kv_offloading_size * GIB if config.num_host_blocks is None else config.num_host_blocks * block_bytes
    key = "kv_offloading_size" if config.num_host_blocks is None else "num_host_blocks"
    is_default = getattr(config, key) == FIELDS[key].default
    limit = memory_bytes() * (_HOST_SHARE if is_default else 1.0)
    if wanted > limit:
        said = (
            f"{key} {getattr(config, key)} needs {wanted / GIB:.1f} GiB of page-locked memory; this machine has "
            f"{memory_bytes() / GIB:.1f} GiB"
        )
        if not is_default:
            raise ConfigError(said, key=key)
        _log.warning(f"{said}: it gets {limit / GIB:.1f}")
        wanted = limit
    return int(wanted // block_bytes)
