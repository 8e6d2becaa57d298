"""The device that a part works on: the first GPU, or the CPU in its place where the part is only rehearsed."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from repertory.gpu.cuda.executor import GpuExecutor
from repertory.gpu.cuda.opening import DeviceFacts, LoadModel, facts_of, open_on
from repertory.gpu.cuda.runtime import DeviceMemory, Graph, Runtime, Stream
from repertory.gpu.cuda.torch_runtime import TorchRuntime
from repertory.gpu.models.weights import load_converted
from repertory.protocol.config import EngineConfig

from .host_runtime import HostRuntime

T = TypeVar("T")


class Gpu:
    """The device. `sized` picks what is large on a GPU and tiny in a rehearsal."""

    def __init__(self, *, is_rehearsal: bool) -> None:
        self.is_rehearsal = is_rehearsal
        if is_rehearsal:
            torch.set_num_threads(1)  # with as many threads as cores, a busy neighbour makes each tiny operation wait
            has_triton = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
            self.device = torch.device("cpu")
            self.facts = DeviceFacts("the CPU", None, 4, has_triton=has_triton)
        else:
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("highest")  # an image may be set to less
            self.facts = facts_of(self.device)

    @property
    def machine(self) -> dict[str, Any]:
        """What everything is found on."""
        return {
            "device": self.facts.name,
            "multiprocessors": self.facts.num_multiprocessors,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "interpreted": self.is_interpreted,
        }

    def sized(self, real: T, tiny: T) -> T:
        """`real` on a GPU, `tiny` in a rehearsal."""
        return tiny if self.is_rehearsal else real

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, thousands of times slower than compiled."""
        return self.is_rehearsal and self.facts.has_triton

    def runtime(self) -> WatchedRuntime:
        """New streams."""
        return WatchedRuntime(HostRuntime() if self.is_rehearsal else TorchRuntime(self.device))

    def config(self, model: Path, **settings: Any) -> EngineConfig:
        """Settings for an engine on this device."""
        return EngineConfig(
            model=str(model), device="cpu" if self.is_rehearsal else "cuda", worker="inline", log_level="error", **settings
        )

    def open(self, config: EngineConfig, *, load: LoadModel = load_converted) -> tuple[GpuExecutor, WatchedRuntime]:
        """An executor and the streams below it. Raises what opening raises."""
        runtime = self.runtime()
        return open_on(runtime, config, Path(config.model), facts=self.facts, load=load), runtime

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, times: int = 10, warm_ups: int = 2) -> float:
        """Median of the device's time for `work`, each run waited for; in a rehearsal it runs once."""
        for _ in range(self.sized(warm_ups, 0)):
            work()
        return statistics.median(self._once(work) for _ in range(self.sized(times, 1)))

    def _once(self, work: Callable[[], object]) -> float:
        if self.is_rehearsal:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        cuda: Any = torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class WatchedRuntime:
    """Implements `Runtime` over another one. Counts replays, and remembers what was allocated in pinned memory."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.num_replays = 0
        self.pinned_tensors: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """See `Runtime.device`."""
        return self._inner.device

    @property
    def compute(self) -> Stream:
        """See `Runtime.compute`."""
        return self._inner.compute

    @property
    def copy_out(self) -> Stream:
        """See `Runtime.copy_out`."""
        return self._inner.copy_out

    @property
    def copy_in(self) -> Stream:
        """See `Runtime.copy_in`."""
        return self._inner.copy_in

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Runtime.pinned`."""
        tensor = self._inner.pinned(shape, dtype)
        self.pinned_tensors.append(tensor)
        return tensor

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Runtime.capture`."""
        return _CountedGraph(self._inner.capture(work), self)

    def memory(self) -> DeviceMemory:
        """See `Runtime.memory`."""
        return self._inner.memory()

    def synchronize(self) -> None:
        """See `Runtime.synchronize`."""
        self._inner.synchronize()

    def forget_peak(self) -> None:
        """See `Runtime.forget_peak`."""
        self._inner.forget_peak()

    def close(self) -> None:
        """See `Runtime.close`."""
        self.pinned_tensors.clear()
        self._inner.close()


class _CountedGraph:
    """Implements `Graph`."""

    def __init__(self, inner: Graph, runtime: WatchedRuntime) -> None:
        self._inner, self._runtime = inner, runtime

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._runtime.num_replays += 1
        self._inner.replay()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
