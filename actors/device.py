"""Which executor serves a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ..gpu.cuda.available import ordinal_of, why_no_cuda
from ..gpu.executor import Executor
from ..protocol.config import FIELDS, EngineConfig
from ..protocol.errors import ConfigError

DeviceOpener = Callable[[EngineConfig, Path], Executor]
"""What `open_executor` is: tests and other devices bring their own."""


def check_buildable(config: EngineConfig) -> None:
    """Refuse, by name and before any heavy import, settings this version does not implement."""
    if config.is_cuda and (reason := why_no_cuda(ordinal_of(config.device))) is not None:
        raise ConfigError(f"device {config.device!r} is not to be had: {reason}", key="device")
    for key in ("quantization", "kv_cache_dtype"):
        value = getattr(config, key)
        if value == FIELDS[key].default:
            continue
        if value != "fp8":
            raise ConfigError(f"{key}: {value!r} is not supported; there is fp8", key=key)
        if not config.is_cuda:
            raise ConfigError(f"{key}: {value!r} needs a GPU, and device is {config.device}", key=key)
    if config.speculative_window:
        raise ConfigError(
            f"speculative_window: {config.speculative_window} is not supported by this version", key="speculative_window"
        )


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """`config` with the device that "auto" comes to here: a GPU where there is one, else it stays, and means the CPU."""
    if config.device == "auto" and why_no_cuda() is None:
        return replace(config, device="cuda")
    return config


def open_executor(config: EngineConfig, model_dir: Path) -> Executor:
    """Open the device. Slow: loads the model's weights. Raises `ConfigError` or `ModelLoadError`."""
    if config.device == "simulated":
        from ..gpu.simulated import open_simulated

        return open_simulated(config, model_dir)
    if config.is_cuda:
        from ..gpu.cuda.opening import open_cuda

        return open_cuda(config, model_dir)
    from ..gpu.cpu.executor import CpuExecutor  # brings torch with it

    return CpuExecutor(model_dir, config=config)
