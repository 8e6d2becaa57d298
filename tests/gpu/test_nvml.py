"""The driver's view of the device, with a driver made of dictionaries in the shape of `pynvml`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from repertory.gpu import nvml
from repertory.gpu.nvml import DeviceMemory, DeviceWatch, open_watch

GIB = 2**30
OTHERS = frozenset({4711})


class NVMLError(Exception):
    pass


class NVMLLibraryMismatchError(Exception):  # as in the package, no NVMLError
    pass


class Device:
    """A GPU (`slices` None: MIG is off) or a MIG slice, as the driver knows it."""

    def __init__(self, uuid: str, *, total: int = 80 * GIB, slices: list[Device | None] | None = None) -> None:
        self.uuid = uuid
        self.total = total
        self.used = total // 4
        self.slices = slices
        self.processes: dict[int, int | None] = {}
        self.graphics: dict[int, int | None] = {}


class FakePynvml(ModuleType):
    """The functions of `pynvml` that are used, with their names, arguments and results. `broken` ones raise."""

    def __init__(self, *devices: Device) -> None:
        super().__init__("pynvml")
        self.devices = devices
        self.broken: dict[str, type[Exception]] = {}
        self.num_open = 0
        self.NVMLError = NVMLError
        self.NVMLLibraryMismatchError = NVMLLibraryMismatchError
        for name in dir(FakePynvml):
            if name.startswith("nvml"):
                setattr(self, name, self._guarded(name, getattr(self, name)))

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if name in self.broken:
                raise self.broken[name]
            assert name == "nvmlInit" or self.num_open, f"{name} without nvmlInit"
            return function(*arguments)

        return call

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, handle: Device) -> str:
        return handle.uuid

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        if device.uuid.startswith("MIG-"):
            raise NVMLError("Invalid Argument")
        return [int(device.slices is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 0 if device.slices is None else len(device.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        found = (device.slices or [])[index]
        if found is None:
            raise NVMLError("Not Found")
        return found

    def nvmlDeviceGetMemoryInfo(self, handle: Device) -> SimpleNamespace:
        return SimpleNamespace(total=handle.total, free=handle.total - handle.used, used=handle.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Device) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Device) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.graphics.items()]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Device) -> list[SimpleNamespace]:
        raise NVMLError("Not Supported")


Install = Callable[..., FakePynvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(*devices: Device) -> FakePynvml:
        fake = FakePynvml(*devices)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def opened(ordinal: int = 0, visible: str | None = None, **more: object) -> DeviceWatch:
    watch = open_watch(ordinal, visible=visible, **more)  # type: ignore[arg-type]
    assert watch is not None
    return watch


# ---- which device ---------------------------------------------------------------------------------


def test_without_the_package_there_is_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert open_watch(0, visible=None) is None


def test_importing_the_module_does_not_import_the_package() -> None:
    assert not hasattr(nvml, "pynvml")


def test_without_the_drivers_library_there_is_no_watch(install: Install) -> None:
    install(Device("GPU-a")).broken["nvmlInit"] = NVMLError
    assert open_watch(0, visible=None) is None


@pytest.mark.parametrize(
    ("ordinal", "visible"), [(2, None), (1, "0"), (0, ""), (0, "-1"), (0, "7"), (0, "GPU-x"), (0, "none"), (1, "0,,1")]
)
def test_a_device_that_is_not_there_has_no_watch_and_the_library_is_given_back(
    install: Install, ordinal: int, visible: str | None
) -> None:
    fake = install(Device("GPU-a"), Device("GPU-b"))
    assert open_watch(ordinal, visible=visible) is None
    assert fake.num_open == 0


@pytest.mark.parametrize(
    ("ordinal", "visible", "device"),
    [(0, None, "GPU-aa"), (1, None, "GPU-ab"), (0, "1", "GPU-ab"), (1, " 1 , 0 ", "GPU-aa"), (0, "GPU-ab", "GPU-ab")],
)
def test_ordinals_count_the_visible_devices(install: Install, ordinal: int, visible: str | None, device: str) -> None:
    install(Device("GPU-aa"), Device("GPU-ab"))
    assert opened(ordinal, visible).device == device


def test_a_uuid_may_be_cut_short_but_must_not_be_ambiguous(install: Install) -> None:
    install(Device("GPU-ab12"), Device("GPU-ac34"))
    assert opened(0, "GPU-ac").device == "GPU-ac34"
    assert open_watch(0, visible="GPU-a") is None


def test_what_cuda_calls_the_device_wins_over_its_index(install: Install) -> None:
    install(Device("GPU-slow"), Device("GPU-fast"))
    assert opened(0, None, uuid="fast").device == "GPU-fast"
    assert opened(0, "0", uuid="GPU-fast").device == "GPU-fast"
    assert opened(1, None, uuid="unheard-of").device == "GPU-fast"


def test_a_device_that_this_process_may_not_see_is_not_counted(install: Install) -> None:
    fake = install(Device("GPU-a"))
    fake.broken["nvmlDeviceGetHandleByIndex"] = NVMLError
    assert open_watch(0, visible=None) is None
    assert fake.num_open == 0


# ---- slices ---------------------------------------------------------------------------------------


def sliced() -> Device:
    return Device("GPU-a", slices=[None, Device("MIG-1", total=10 * GIB), None, Device("MIG-2", total=20 * GIB)])


@pytest.mark.parametrize(
    ("ordinal", "visible", "uuid", "device"),
    [
        (0, "MIG-2", None, "MIG-2"),
        (1, "MIG-2,MIG-1", None, "MIG-1"),
        (0, None, None, "MIG-1"),
        (0, "0", None, "MIG-1"),
        (0, "GPU-a", None, "MIG-1"),
        (0, None, "2", "MIG-2"),
        (0, "MIG-2", "a", "MIG-1"),
    ],
)
def test_of_a_gpu_in_slices_a_slice_is_watched(
    install: Install, ordinal: int, visible: str | None, uuid: str | None, device: str
) -> None:
    install(sliced())
    assert opened(ordinal, visible, uuid=uuid).device == device


def test_a_slices_memory_and_processes_are_its_own(install: Install) -> None:
    gpu = sliced()
    install(gpu)
    gpu.processes = {1: GIB, 2: GIB}
    (gpu.slices or [])[3].processes = {2: GIB}  # type: ignore[union-attr]
    watch = opened(0, "MIG-2")
    assert watch.memory() == DeviceMemory(20 * GIB, 5 * GIB)
    assert watch.other_processes() == {2: GIB}


def test_a_gpu_that_is_to_be_cut_but_has_no_slice_yet_cannot_be_watched(install: Install) -> None:
    fake = install(Device("GPU-a", slices=[None, None]))
    assert open_watch(0, visible=None) is None
    assert fake.num_open == 0


# ---- memory and processes -------------------------------------------------------------------------


def test_memory_is_total_and_used(install: Install) -> None:
    install(Device("GPU-a", total=80 * GIB))
    assert opened().memory() == DeviceMemory(80 * GIB, 20 * GIB)


def test_our_own_processes_are_not_others(install: Install) -> None:
    device = Device("GPU-a")
    install(device)
    device.processes = {os.getpid(): GIB, 4711: GIB, 9: None}
    device.graphics = {12: 5, 4711: 7}
    assert opened().other_processes() == {9: None, 12: 5, 4711: 7}
    assert opened(own_pids=OTHERS).other_processes() == {9: None, 12: 5, os.getpid(): GIB}


def test_what_one_query_refuses_the_others_may_tell(install: Install) -> None:
    device = Device("GPU-a")
    fake = install(device)
    device.graphics = {12: 5}
    fake.broken["nvmlDeviceGetComputeRunningProcesses"] = NVMLLibraryMismatchError
    assert opened().other_processes() == {12: 5}
    fake.broken["nvmlDeviceGetGraphicsRunningProcesses"] = NVMLError
    assert opened().other_processes() is None


def test_a_poll_reports_each_change_once(install: Install) -> None:
    device = Device("GPU-a")
    install(device)
    device.processes = {1: GIB}
    watch = opened()
    assert watch.poll() is None
    device.processes = {1: 2 * GIB, 2: 3 * GIB, 3: None}
    assert watch.poll() == "device GPU-a is shared differently: process 2 (3072 MiB), process 3 came"
    assert watch.poll() is None
    device.processes = {4: 0, 3: None}
    assert watch.poll() == "device GPU-a is shared differently: process 4 (0 MiB) came; process 1, process 2 went"
    device.processes = {}
    assert watch.poll() == "device GPU-a is shared differently: process 3, process 4 went"
    assert watch.poll() is None


def test_our_own_coming_is_no_change(install: Install) -> None:
    device = Device("GPU-a")
    install(device)
    watch = opened()
    device.processes = {os.getpid(): 9 * GIB}
    assert watch.poll() is None


def test_a_driver_that_is_silent_for_a_while_reports_no_change(install: Install) -> None:
    device = Device("GPU-a")
    fake = install(device)
    device.processes = {1: GIB}
    watch = opened()
    fake.broken = {name: NVMLError for name in dir(FakePynvml) if name.startswith("nvmlDevice")}
    assert (watch.poll(), watch.memory()) == (None, None)
    fake.broken = {}
    assert watch.poll() is None
    device.processes = {}
    assert watch.poll() is not None


def test_a_closed_watch_answers_nothing_and_gives_the_library_back_once(install: Install) -> None:
    fake = install(Device("GPU-a"))
    watch, other = opened(), opened()
    watch.close()
    watch.close()
    assert fake.num_open == 1
    assert (watch.memory(), watch.other_processes(), watch.poll()) == (None, None, None)
    assert other.memory() is not None
