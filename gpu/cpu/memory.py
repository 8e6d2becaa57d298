"""Main memory in large pieces: on huge pages, found before it is written, and not given back in between."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20

_CHUNK = 32 << 20
_PIECE = 4 << 20
"""What is asked for in one call: the system holds its lock on all of the process's memory for as long."""

_MADV_POPULATE_WRITE = 23
"""Linux's number for "fault these pages in as a write would, and change nothing"; 5.14 and later."""

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


class PagesAhead:
    """Has the system find a tensor's pages before they are written, near what is being written.

    A copy into pages that are not there yet runs at the speed at which the system finds and clears them: a third of
    its own, and less than a tenth where a virtual machine gets the page for the first time. Finding all of them at the
    start would cost seconds and memory that may never be wanted. So the chunks around the first writes, and around
    later ones, are asked for on a thread that lives for as long as it takes. No effect where the system cannot do it.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._unasked = set(range(-(-memory.nbytes // _CHUNK))) if memory.nbytes >= _HUGE_PAGE else set()
        self._wanted: deque[int] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def reach(self, offsets: Iterable[int]) -> None:
        """Bytes at these offsets are about to be written: their chunks and the ones beside them are wanted. Never waits."""
        if not self._unasked:
            return
        near = {offset // _CHUNK + side for offset in offsets for side in (0, 1, -1)}
        wanted = sorted(near & self._unasked)
        if not wanted:
            return
        self._unasked.difference_update(wanted)
        with self._lock:
            self._wanted.extend(wanted)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._populate, name="repertory-pages", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._unasked = set()
        with self._lock:
            self._wanted.clear()

    def _populate(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        first, num_bytes = self._memory.data_ptr(), self._memory.nbytes
        while True:
            with self._lock:
                if not self._wanted:
                    self._is_running = False
                    return
                chunk = self._wanted.popleft()
            for start in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, num_bytes), _PIECE):
                if madvise(first + start, min(_PIECE, num_bytes - start), _MADV_POPULATE_WRITE):
                    self.close()
                    break
