"""A device whose streams run as late as they may, on the CPU: what is launched too early, or read too late, shows.

Work is kept when it is launched and runs when somebody waits for an event behind it, in one of the orders that the
events allow; `seed` picks it. So memory that is written again before it was read, a token that the host was expected to
know, and a copy that nobody held back have the effect that they would have on a GPU, only every time. What was launched
and waited for is in `history`.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.runtime import DeviceMemory, Event, Graph


@contextmanager
def no_host_reads() -> Iterator[None]:
    """What makes the host wait for a tensor raises."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("the host looks at a tensor in the middle of a step")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


class LazyEvent:
    """Implements `Event`."""

    def __init__(self, runtime: LazyRuntime, stream: LazyStream) -> None:
        self._runtime = runtime
        self.stream = stream
        self.time: float | None = None

    def synchronize(self) -> None:
        self._runtime.history.append(("synchronize", self.stream.name, threading.current_thread().name))
        if self.stream is not self._runtime.compute:
            self._runtime.copies_may_end.wait()
        self._runtime.run_until(self)

    def is_complete(self) -> bool:
        return self.time is not None

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, LazyEvent)
        assert self.time is not None and earlier.time is not None, "both have happened"
        return self.time - earlier.time


class LazyStream:
    """Implements `Stream`."""

    def __init__(self, runtime: LazyRuntime, name: str) -> None:
        self.name = name
        self._runtime = runtime
        self.queue: deque[Callable[[], bool]] = deque()

    def launch(self, work: Callable[[], None]) -> None:
        self._runtime.history.append(("launch", self.name, threading.current_thread().name))

        def run() -> bool:
            self._runtime.clock += 1e-3
            with torch.inference_mode(), no_host_reads() if self._runtime.forbids_host_reads else nullcontext():
                work()
            return True

        self._add(run)

    def record(self, *, timed: bool = False) -> LazyEvent:
        event = LazyEvent(self._runtime, self)

        def run() -> bool:
            event.time = self._runtime.clock
            return True

        self._add(run)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LazyEvent)
        self._runtime.history.append(("wait", self.name, event.stream.name))
        self._add(event.is_complete)

    def _add(self, run: Callable[[], bool]) -> None:
        with self._runtime.lock:
            self.queue.append(run)
            self._runtime.progress()


class LazyGraph:
    """Implements `Graph`: the work again."""

    def __init__(self, runtime: LazyRuntime, work: Callable[[], None]) -> None:
        self._runtime, self._work = runtime, work

    def replay(self) -> None:
        self._runtime.num_replays += 1
        self._work()


class LazyRuntime:
    """Implements `Runtime`."""

    def __init__(self, seed: int = 0, *, total_bytes: int = 1 << 30) -> None:
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.clock = 0.0
        self.history: list[tuple[Any, ...]] = []
        self.num_replays = 0
        self.copies_may_end = threading.Event()
        """While it is not set, nobody can make the device copy by waiting for a copy; steps that wait for one still do."""
        self.copies_may_end.set()
        self._random = random.Random(seed)
        self._total_bytes = total_bytes
        self.streams = [LazyStream(self, name) for name in ("compute", "copy_out", "copy_in")]
        self.compute, self.copy_out, self.copy_in = self.streams
        self.is_closed = False
        self.forbids_host_reads = False
        """Whether work that looks at a tensor on the host fails: on a GPU it would wait there."""

    def run_until(self, event: LazyEvent) -> None:
        """Run what must be, and by chance what may be, until `event` has happened."""
        with self.lock:
            while not event.is_complete():
                streams = self._random.sample(self.streams, len(self.streams))
                if self._random.random() < 0.5:
                    streams.sort(key=lambda stream: stream is not event.stream)
                assert any(self._advance(stream) for stream in streams), "streams wait for each other in a circle"

    def progress(self) -> None:
        """A device also works while nobody waits: by chance something of what is launched runs now."""
        while self._random.random() < 0.3:
            self._advance(self._random.choice(self.streams))

    def _advance(self, stream: LazyStream) -> bool:
        if not stream.queue or not stream.queue[0]():
            return False
        stream.queue.popleft()
        return True

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Graph:
        return LazyGraph(self, work)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._total_bytes, self._total_bytes, 0, 0)

    def synchronize(self) -> None:
        with self.lock:
            for stream in self.streams:
                self.run_until(stream.record())

    def forget_peak(self) -> None:
        self.synchronize()

    def close(self) -> None:
        self.synchronize()
        self.is_closed = True
