"""`Runtime` on torch's CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .runtime import DeviceMemory, Event, Graph

_cuda: Any = torch.cuda
"""Its classes have no types of their own."""

_OWN_ERRORS = {"capture_error_mode": "thread_local"}
"""What other threads of the process ask of CUDA meanwhile is no fault of the capture."""


class TorchEvent:
    """Implements `Event`. Waiting on it blocks the thread instead of spinning, and lets go of Python's lock."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.event.synchronize()

    def is_complete(self) -> bool:
        """See `Event.is_complete`."""
        return bool(self.event.query())

    def seconds_since(self, earlier: Event) -> float:
        """See `Event.seconds_since`."""
        assert isinstance(earlier, TorchEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class TorchStream:
    """Implements `Stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def launch(self, work: Callable[[], None]) -> None:
        """See `Stream.launch`."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            work()

    def record(self, *, timed: bool = False) -> TorchEvent:
        """See `Stream.record`."""
        event = _cuda.Event(enable_timing=timed, blocking=True)
        event.record(self.stream)
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert isinstance(event, TorchEvent)
        self.stream.wait_event(event.event)


class TorchRuntime:
    """Implements `Runtime` for one GPU.

    All of torch's work of this process goes through it: it makes its device the thread's current one where it launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.compute = TorchStream(_cuda.Stream(device, priority=-1))
            self.copy_out = TorchStream(_cuda.Stream(device))
            self.copy_in = TorchStream(_cuda.Stream(device))
        self._graph_memory: Any = None
        self._pinned: list[Tensor] = []

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Runtime.pinned`. Lives until `close`.

        Registered with CUDA rather than taken from torch's allocator of pinned memory, which rounds up to a power of two.
        """
        memory = torch.empty(tuple(shape), dtype=dtype)
        if memory.nbytes:
            status = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if status != 0:
                raise MemoryError(f"the host cannot page-lock {memory.nbytes / 2**30:.2f} GiB (CUDA error {status})")
            self._pinned.append(memory)
        return memory

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Runtime.capture`. Graphs share their memory: they never run at the same time."""
        graph: Graph = _cuda.CUDAGraph()
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), _cuda.graph(graph, pool=self._graph_memory, stream=self.compute.stream, **_OWN_ERRORS):
            work()
        return graph

    def memory(self) -> DeviceMemory:
        """See `Runtime.memory`."""
        free, total = torch.cuda.mem_get_info(self.device)
        statistics = torch.cuda.memory_stats(self.device)
        return DeviceMemory(
            total_bytes=total,
            free_bytes=free,
            reserved_bytes=statistics["reserved_bytes.all.current"],
            peak_bytes=statistics["reserved_bytes.all.peak"],
        )

    def synchronize(self) -> None:
        """See `Runtime.synchronize`."""
        torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        """See `Runtime.forget_peak`."""
        self.synchronize()
        self._graph_memory = None  # of graphs that are gone
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def close(self) -> None:
        """See `Runtime.close`."""
        self.synchronize()
        for memory in self._pinned:
            torch.cuda.check_error(int(_cuda.cudart().cudaHostUnregister(memory.data_ptr())))
        self._pinned.clear()
        self._graph_memory = None
        torch.cuda.empty_cache()
