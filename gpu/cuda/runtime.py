"""The few calls that the executor makes to the device's streams, behind a contract.

    compute stream      steps, one behind the other
    copy streams        one each way; copies between the tiers

Work goes to a stream as a function that launches it. On a GPU it is called at once, with the stream as torch's current
one, and what it launched runs later; a test's runtime keeps it and runs it as late as the events allow. So such a
function must not read what the host may change afterwards, and its results are there when an event behind it is complete.
Only `Event.synchronize` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait on the host until all work before it is done. Lets go of Python's lock."""
        ...

    def is_complete(self) -> bool:
        """Whether all work before it is done."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time from `earlier` to this one; both are complete and were recorded with `timed`."""
        ...


class Stream(Protocol):
    """Work that runs in its order."""

    def launch(self, work: Callable[[], None]) -> None:
        """Add what `work` launches."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """A point behind everything added so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is added from here on starts after `event`. The host does not wait."""
        ...


class Graph(Protocol):
    """Work that was recorded once and runs again with the same tensors."""

    def replay(self) -> None:
        """Launch it on the current stream: to be called in a stream's `launch`."""
        ...


class DeviceMemory(NamedTuple):
    """Bytes of the device: all, free for anyone, held by this process's allocator, and the most that its tensors took."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    peak_bytes: int


class Runtime(Protocol):
    """A device with three streams."""

    @property
    def device(self) -> torch.device:
        """Where tensors are made."""
        ...

    @property
    def compute(self) -> Stream:
        """The stream of steps."""
        ...

    @property
    def copy_out(self) -> Stream:
        """The stream of copies to the host."""
        ...

    @property
    def copy_in(self) -> Stream:
        """The stream of copies to the device."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor that copies to and from the device need not stage. Raises `MemoryError`."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches, on the compute stream; it has run before, so that nothing is set up in it."""
        ...

    def memory(self) -> DeviceMemory:
        """Memory now; the peak is that since `forget_peak`."""
        ...

    def synchronize(self) -> None:
        """Wait for all of this process's work on the device, whatever stream it is in."""
        ...

    def forget_peak(self) -> None:
        """Begin a new peak, and give cached memory that no tensor uses back to the device."""
        ...

    def close(self) -> None:
        """Wait for all work and let go of the device's cached memory."""
        ...
