"""Main memory for what every step reads: on huge pages, and not given back to the system in between."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names for `mallopt`."""


def huge_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on 2 MiB pages, where the system has them and it fills one. Aligned to 64 bytes or more.

    Reading weights and KV through 4 KiB pages costs a fifth of the bandwidth. Memory is taken when it is first
    written, as everywhere; until then it reads as zeros.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    # Private: shared anonymous memory is a file to Linux, and has no huge pages by default.
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = -everything.data_ptr() % _HUGE_PAGE
    return everything[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next allocation, for the whole process.

    By default glibc maps each large tensor anew and unmaps it when it is freed, so that every step pays for page
    faults over all of its activations. No effect with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
