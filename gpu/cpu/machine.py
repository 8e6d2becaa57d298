"""What this machine's CPU and memory can do."""

from __future__ import annotations

import os
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


def memory_bytes() -> int:
    """Main memory this process may use: the machine's, or its control group's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def _cpu_flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return frozenset()
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
