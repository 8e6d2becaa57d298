"""Decode steps recorded once for some numbers of rows, and run again by one call instead of hundreds.

A step of n decode rows runs in the smallest captured one that has room; rows left over compute something that nobody
reads and write nothing. Captured steps know no shared prefixes: where sharing saves more than launching one by one costs,
a step is not taken from here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from .runtime import Graph, Runtime

LARGEST = 512

EAGER_COSTS_BYTES = 1 << 30
"""What launching a layer one by one takes longer than replaying it, some 200 us, in bytes that a GPU's cache delivers in
that time. Reasoned, not measured."""


def is_better_shared(runs: Sequence[tuple[Sequence[int], int]], key_bytes: int) -> bool:
    """Whether decode rows with common prefixes, (rows, keys) each, are better launched one by one with those attended once.

    `key_bytes` are those of a key and its value in all KV heads of a layer: what each row but the first would not read.
    """
    return sum((len(members) - 1) * num_keys for members, num_keys in runs) * key_bytes > EAGER_COSTS_BYTES


def captured_sizes(max_rows: int) -> list[int]:
    """Numbers of rows worth capturing: dense where a row more costs most, and the largest step that there is.

    A step is padded by at most 3 rows up to 8, 7 up to 64, 15 up to 256 and 31 beyond.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST + 1, 32)]
    return sorted({size for size in sizes if size < max_rows} | {min(max_rows, LARGEST)})


class DecodeGraphs:
    """Captured decode steps. `launch(rows)` is what is captured; it must have everything it needs in fixed places."""

    def __init__(self, runtime: Runtime, sizes: Sequence[int], launch: Callable[[int], None]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, Graph] = {}
        # The largest first: the others fit into its memory.
        for size in reversed(self._sizes):
            work = partial(launch, size)
            runtime.compute.launch(work)  # loads kernels, which cannot be captured
            runtime.compute.record().synchronize()
            self._graphs[size] = runtime.capture(work)

    def size_for(self, num_rows: int) -> int | None:
        """The captured size that a step of `num_rows` decode rows runs in; None: it is larger than all."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if num_rows and index < len(self._sizes) else None

    def launch(self, size: int) -> None:
        """Run the captured step of `size` rows, in a stream's `launch`."""
        self._graphs[size].replay()
