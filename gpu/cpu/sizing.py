"""How many KV blocks each tier gets, and whether this machine's memory holds them."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...protocol.config import FIELDS, EngineConfig
from ...protocol.errors import ConfigError
from ..machine import memory_bytes

_log = logging.getLogger(__name__)


class PoolSizes(NamedTuple):
    """Blocks of the pool that steps compute in, and of the host tier."""

    num_device_blocks: int
    num_host_blocks: int


def pool_sizes(config: EngineConfig, block_bytes: int) -> PoolSizes:
    """Sizes of both tiers for blocks of `block_bytes`. They come out of the same memory here, and must fit together.

    Raises `ConfigError` naming the key for fewer than two device blocks, and for more of either than there is memory
    for; a host tier that nobody asked for, of the default size, shrinks instead, with a warning.
    """
    num_device_blocks = _num_device_blocks(config, block_bytes)
    left_bytes = memory_bytes() - num_device_blocks * block_bytes
    wanted_bytes = _host_bytes(config, block_bytes)
    if wanted_bytes > left_bytes:
        key = "kv_offloading_size" if config.num_host_blocks is None else "num_host_blocks"
        value, default = getattr(config, key), FIELDS[key].default
        said = (
            f"{key} {value} needs {wanted_bytes / 2**30:.1f} GiB for the host's KV pool; beside the device's this machine "
            f"has {left_bytes / 2**30:.1f} GiB of memory"
        )
        if value != default:
            raise ConfigError(said, key=key)
        _log.warning(f"{said}: it gets those")
        wanted_bytes = left_bytes
    return PoolSizes(num_device_blocks, int(wanted_bytes // block_bytes))


def _host_bytes(config: EngineConfig, block_bytes: int) -> float:
    if config.num_host_blocks is not None:
        return config.num_host_blocks * block_bytes
    return config.kv_offloading_size * 2**30


def _num_device_blocks(config: EngineConfig, block_bytes: int) -> int:
    key = "num_device_blocks" if config.num_device_blocks is not None else "cpu_kv_cache_bytes"
    num_blocks = config.num_device_blocks or config.cpu_kv_cache_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"{key} {getattr(config, key)} makes {num_blocks} KV blocks of {block_bytes} bytes; at least 2 are needed", key=key
        )
    if num_blocks * block_bytes > memory_bytes():
        raise ConfigError(
            f"{key} {getattr(config, key)} needs {num_blocks * block_bytes / 2**30:.1f} GiB for the KV pool; "
            f"this machine has {memory_bytes() / 2**30:.1f} GiB of memory",
            key=key,
        )
    return num_blocks
