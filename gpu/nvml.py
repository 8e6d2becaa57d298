"""What the driver says of our CUDA device: how much memory it has, and who else uses it.

NVML is asked through `nvidia-ml-py` (module `pynvml`, extra `cuda`), which is imported when a watch is opened. Without
the package, the driver's library, or a device that is found there, there is no watch: nothing depends on it.

Which device. CUDA counts the devices that CUDA_VISIBLE_DEVICES names, NVML those of the machine, in order of their
PCI bus, so an ordinal is translated by name where there is one: the UUID that CUDA gives (`uuid`), an entry of the
variable that is a UUID or the beginning of one, else an entry that is an index. A GPU that is cut into MIG slices
computes only in them: the device is then a slice, and memory and processes are the slice's. CUDA takes the first
slice of a GPU unless it is told which.

Who else. Rates that were measured alone are wrong once another process copies and computes on the same device. So
the set of the others is polled, and a change is a reason to measure again. Processes of other slices of the same GPU
are not seen, although they share its link to the host. In a container whose process ids NVML does not know, our own
process may look like another; it comes once and then stays, and only changes are reported.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

PACKAGE = "pynvml"
GPU_PREFIX, MIG_PREFIX = "GPU-", "MIG-"
_PROCESS_QUERIES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


class DeviceMemory(NamedTuple):
    """Bytes of a device or of a MIG slice; `used_bytes` by whomever."""

    total_bytes: int
    used_bytes: int


class DeviceWatch:
    """Looks at one device or MIG slice. `device` is its UUID. Every answer is None when the driver gives none."""

    def __init__(self, driver: Driver, handle: Any, *, own_pids: frozenset[int]) -> None:
        self.device = driver.uuid(handle) or "unknown"
        self._driver = driver
        self._handle = handle
        self._own_pids = own_pids
        self._known = frozenset(self.other_processes() or ())

    def memory(self) -> DeviceMemory | None:
        """Total and used memory now."""
        info = self._driver.ask("nvmlDeviceGetMemoryInfo", self._handle)
        return None if info is None else DeviceMemory(int(info.total), int(info.used))

    def other_processes(self) -> dict[int, int | None] | None:
        """Processes with a context on the device that are not ours, and the bytes each uses (None: not told)."""
        answers = [self._driver.ask(query, self._handle) for query in _PROCESS_QUERIES]
        if all(answer is None for answer in answers):
            return None
        found = {int(process.pid): process.usedGpuMemory for answer in answers for process in answer or ()}
        return {pid: used for pid, used in sorted(found.items()) if pid not in self._own_pids}

    def poll(self) -> str | None:
        """Why measured rates may be wrong since the last call (or the opening), in words; None: nothing changed.

        A driver that does not answer this time is no change.
        """
        others = self.other_processes()
        if others is None or others.keys() == self._known:
            return None
        came = [_named(pid, used) for pid, used in others.items() if pid not in self._known]
        went = [f"process {pid}" for pid in sorted(self._known - others.keys())]
        self._known = frozenset(others)
        changes = [f"{', '.join(names)} {verb}" for names, verb in ((came, "came"), (went, "went")) if names]
        return f"device {self.device} is shared differently: {'; '.join(changes)}"

    def close(self) -> None:
        """Let go of the driver. A closed watch answers None."""
        self._driver.close()


def open_watch(
    ordinal: int, *, visible: str | None, uuid: str | None = None, own_pids: frozenset[int] | None = None
) -> DeviceWatch | None:
    """A watch of the device that CUDA calls `ordinal`; None, silently, where NVML or the device is not to be had.

    `visible` is the value of CUDA_VISIBLE_DEVICES (None: not set). `uuid` is what CUDA says of the device, with or
    without its prefix: it wins, and is needed where GPUs of different kinds are in one machine, since CUDA puts the
    fastest first. `own_pids` are the processes that are not others; by default this one.
    """
    driver = _open_driver()
    if driver is None:
        return None
    handle = _find(driver, ordinal, visible=visible, uuid=uuid)
    if handle is None:
        driver.close()
        return None
    return DeviceWatch(driver, handle, own_pids=frozenset({os.getpid()}) if own_pids is None else own_pids)


class Driver:
    """NVML, opened. Refusals become None: what a driver, a device or a container does not tell is not an error here."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_open = True
        mismatch = getattr(module, "NVMLLibraryMismatchError", module.NVMLError)  # not one of its NVMLErrors
        self._refusals: tuple[type[Exception], ...] = (module.NVMLError, mismatch)

    def ask(self, function: str, *arguments: Any) -> Any:
        """What `function` returns, or None."""
        if not self._is_open:
            return None
        try:
            return getattr(self._module, function)(*arguments)
        except self._refusals:
            return None

    def uuid(self, handle: Any) -> str | None:
        """The name of a device or slice."""
        name: str | None = self.ask("nvmlDeviceGetUUID", handle)
        return name

    def devices(self) -> Iterator[Any]:
        """GPUs in order of their PCI bus, as far as this process may see them."""
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            handle = self.ask("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                yield handle

    def is_sliced(self, device: Any) -> bool:
        """Whether MIG is on for this GPU."""
        current, _ = self.ask("nvmlDeviceGetMigMode", device) or (0, 0)
        return bool(current)

    def slices(self, device: Any) -> Iterator[Any]:
        """The MIG slices of a GPU; their numbers have gaps."""
        for index in range((self.ask("nvmlDeviceGetMaxMigDeviceCount", device) or 0) if self.is_sliced(device) else 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
            if handle is not None:
                yield handle

    def close(self) -> None:
        """Give the library back. More than once is harmless."""
        self.ask("nvmlShutdown")
        self._is_open = False


def _open_driver() -> Driver | None:
    try:
        module: Any = importlib.import_module(PACKAGE)
    except ImportError:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:
        return None
    return Driver(module)


def _find(driver: Driver, ordinal: int, *, visible: str | None, uuid: str | None) -> Any:
    handle = None if uuid is None else _by_name(driver, uuid)
    if handle is None:
        entry = _entry(ordinal, visible)
        handle = None if entry is None else _by_index(driver, int(entry)) if entry.isdecimal() else _by_name(driver, entry)
    if handle is None or not driver.is_sliced(handle):
        return handle
    return next(driver.slices(handle), None)


def _entry(ordinal: int, visible: str | None) -> str | None:
    if visible is None:
        return str(ordinal)
    entries = [entry.strip() for entry in visible.split(",")]
    return entries[ordinal] if ordinal < len(entries) and entries[ordinal] else None


def _by_index(driver: Driver, index: int) -> Any:
    return next((handle for number, handle in enumerate(driver.devices()) if number == index), None)


def _by_name(driver: Driver, name: str) -> Any:
    """The one device or slice whose UUID begins so. Without a prefix of its own, `name` may be of either kind."""
    prefixes = ("",) if name.startswith((GPU_PREFIX, MIG_PREFIX)) else (MIG_PREFIX, GPU_PREFIX)
    for prefix in prefixes:
        found = [handle for handle in _all(driver) if (driver.uuid(handle) or "").startswith(prefix + name)]
        if len(found) == 1:
            return found[0]
    return None


def _all(driver: Driver) -> Iterator[Any]:
    for device in driver.devices():
        yield device
        yield from driver.slices(device)


def _named(pid: int, used_bytes: int | None) -> str:
    return f"process {pid}" if used_bytes is None else f"process {pid} ({used_bytes / 2**20:.0f} MiB)"
