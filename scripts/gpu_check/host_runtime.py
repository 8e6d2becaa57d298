"""`Runtime` played by the CPU, for rehearsals: what is launched runs at once, so every event behind it has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from repertory.gpu.cuda.runtime import DeviceMemory, Event, Graph

TOTAL_BYTES = 8 << 30
"""What the device pretends to have; a rehearsal's sizes need little of it."""


class HostEvent:
    """Implements `Event`."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """See `Event.synchronize`."""

    def is_complete(self) -> bool:
        """See `Event.is_complete`."""
        return True

    def seconds_since(self, earlier: Event) -> float:
        """See `Event.seconds_since`."""
        assert isinstance(earlier, HostEvent)
        return self.at_s - earlier.at_s


class HostStream:
    """Implements `Stream`."""

    def launch(self, work: Callable[[], None]) -> None:
        """See `Stream.launch`."""
        with torch.inference_mode():
            work()

    def record(self, *, timed: bool = False) -> HostEvent:
        """See `Stream.record`."""
        return HostEvent()

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""


class HostGraph:
    """Implements `Graph`: the work again, with the same tensors."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._work()


class HostRuntime:
    """Implements `Runtime`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute, self.copy_out, self.copy_in = HostStream(), HostStream(), HostStream()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Runtime.pinned`."""
        return torch.empty(tuple(shape), dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `Runtime.capture`. Runs nothing, as on a GPU."""
        return HostGraph(work)

    def memory(self) -> DeviceMemory:
        """See `Runtime.memory`."""
        return DeviceMemory(TOTAL_BYTES, TOTAL_BYTES, 0, 0)

    def synchronize(self) -> None:
        """See `Runtime.synchronize`. Everything is done when it is launched."""

    def forget_peak(self) -> None:
        """See `Runtime.forget_peak`."""

    def close(self) -> None:
        """See `Runtime.close`."""
