"""Whether this machine has a GPU that could be used, found out without torch: that takes seconds to import.

Asked of the driver's library, which every program with CUDA loads, and of the text of torch's own version file. Asking
starts the driver, as using a GPU does: a process that has asked, and then forks, has no GPU in the child.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from pathlib import Path

_DRIVER_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_NO_DEVICE = 100
"""CUDA's CUDA_ERROR_NO_DEVICE."""


def why_no_cuda(ordinal: int = 0) -> str | None:
    """Why device number `ordinal` cannot be used, in words; None: nothing speaks against it."""
    count = _num_devices()
    if isinstance(count, str):
        return count
    if ordinal >= count:
        return f"this machine has {count} CUDA device{'s' * (count != 1)}, numbered from 0; there is no number {ordinal}"
    return _why_not_torch()


def ordinal_of(device: str) -> int:
    """The number in "cuda:N"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def _num_devices() -> int | str:
    driver = _driver()
    if driver is None:
        return "this machine has no NVIDIA driver (libcuda was not found)"
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status == _NO_DEVICE or (status == 0 and count.value == 0):
        return "the NVIDIA driver sees no device (is CUDA_VISIBLE_DEVICES set to nothing?)"
    if status != 0:
        return f"the NVIDIA driver does not start (CUDA error {status})"
    return count.value


def _driver() -> ctypes.CDLL | None:
    for name in _DRIVER_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _why_not_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version_file = Path(spec.origin).with_name("version.py")
    text = version_file.read_text() if version_file.is_file() else ""
    if re.search(r"^cuda\b[^=\n]*= *None", text, re.MULTILINE):
        return "the installed torch is a build without CUDA"
    return None
