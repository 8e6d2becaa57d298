"""Which executor serves a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..gpu.executor import Executor
from ..protocol.config import EngineConfig
from ..protocol.errors import ConfigError

DeviceOpener = Callable[[EngineConfig, Path], Executor]
"""What `open_executor` is: tests and other devices bring their own."""


def check_buildable(config: EngineConfig) -> None:
    """Refuse, by name and before any heavy import, settings this version does not implement."""
    if config.is_cuda:
        raise ConfigError("device: cuda is not supported by this version (auto, cpu and simulated are)", key="device")
    for key, default in (
        ("target_itl_ms", None),
        ("quantization", None),
        ("kv_cache_dtype", "auto"),
        ("speculative_window", 0),
    ):
        if getattr(config, key) != default:
            raise ConfigError(f"{key}: {getattr(config, key)!r} is not supported by this version", key=key)


def open_executor(config: EngineConfig, model_dir: Path) -> Executor:
    """Open the device. Slow: loads the model's weights. Raises `ConfigError` or `ModelLoadError`."""
    if config.device == "simulated":
        from ..gpu.simulated import open_simulated

        return open_simulated(config, model_dir)
    from ..gpu.cpu.executor import CpuExecutor  # brings torch with it

    return CpuExecutor(model_dir, config=config)
