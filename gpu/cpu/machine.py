"""What this machine's CPU can do."""

from __future__ import annotations

from pathlib import Path

import torch

from ...protocol.errors import ModelLoadError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86's two and ARM's one: without any of them bfloat16 arithmetic is emulated and slower than float32."""


def compute_dtype(name: str) -> torch.dtype:
    """The dtype that `EngineConfig.dtype` stands for on this CPU; auto: bfloat16 where it has instructions for it.

    float16 runs everywhere, some three times slower than float32. Raises `ModelLoadError` for other names.
    """
    if name == "auto":
        name = "bfloat16" if _BF16_FLAGS & _cpu_flags() else "float32"
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not supported on CPU; supported: auto, {', '.join(_DTYPES)}", key="dtype")
    return _DTYPES[name]


def _cpu_flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
