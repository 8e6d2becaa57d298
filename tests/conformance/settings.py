"""Settings that must not change a single token, and a small selection in which every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from repertory.protocol.config import EngineConfig

from .reference import NUM_THREADS

BUDGETS = (1, 7, 16, 512)
BLOCK_SIZES = (4, 16)


@dataclass(frozen=True)
class Setting:
    """One way to run. `small_pool`: so few KV blocks that running requests get into each other's way."""

    budget: int
    caching: bool
    block_size: int
    small_pool: bool
    chunked: bool
    alone: bool
    backend: str = "auto"
    """`attention_backend`: "auto" is the C kernels, where there are any for this machine."""
    worker: Literal["inline", "process"] = "inline"
    in_flight: int = 2

    def __str__(self) -> str:
        parts = [
            f"budget {self.budget}",
            "cache" if self.caching else "no cache",
            f"blocks of {self.block_size}",
            "small pool" if self.small_pool else "ample pool",
            "chunked" if self.chunked else "whole",
            "alone" if self.alone else "together",
            self.backend,
            self.worker,
            f"{self.in_flight} in flight",
        ]
        return ", ".join(parts)

    @property
    def must_preempt(self) -> bool:
        """Whether requests cannot all stay to their end."""
        return self.small_pool and not self.alone

    def num_blocks(self, lengths: Sequence[int], *, spare_tokens: int) -> int:
        """The pool for sequences that grow to `lengths` tokens.

        An ample one holds them all. A small one holds the longest, and `spare_tokens` beside it, where they run
        together: enough for a second to begin, and not for both to end.
        """
        blocks = [-(-length // self.block_size) for length in lengths]
        if not self.small_pool:
            return sum(blocks)
        return max(blocks) + (0 if self.alone else -(-spare_tokens // self.block_size))

    def config(self, model_dir: Path, *, num_blocks: int) -> EngineConfig:
        """The engine's configuration, in float32."""
        return EngineConfig(
            model=str(model_dir),
            device="cpu",
            worker=self.worker,
            max_steps_in_flight=self.in_flight,
            attention_backend=self.backend,
            dtype="float32",
            num_threads=NUM_THREADS,
            num_device_blocks=num_blocks,
            block_size=self.block_size,
            max_num_batched_tokens=self.budget,
            max_num_seqs=1 if self.alone else 64,
            enable_prefix_caching=self.caching,
            enable_chunked_prefill=self.chunked,
            log_level="warning",
        )


BACKENDS = ("auto", "torch")

EVERY = [
    Setting(*values)
    for values in itertools.product(BUDGETS, (True, False), BLOCK_SIZES, (True, False), (True, False), (True, False), BACKENDS)
]
"""The full product of what may change what is computed when, and by which code."""

HOSTS = [replace(s, worker=worker, in_flight=n) for s in EVERY for worker in ("inline", "process") for n in (1, 2)]  # type: ignore[arg-type]
"""The same, with every way to host the device and to send it steps."""

COVERING = [
    Setting(512, True, 16, small_pool=False, chunked=True, alone=False, worker="process", in_flight=1),
    Setting(512, False, 4, small_pool=True, chunked=False, alone=True, backend="torch", worker="inline", in_flight=2),
    Setting(16, True, 4, small_pool=True, chunked=True, alone=False, worker="inline", in_flight=2),
    Setting(16, False, 16, small_pool=False, chunked=False, alone=True, backend="torch", worker="process", in_flight=1),
    Setting(7, False, 16, small_pool=True, chunked=True, alone=False, backend="torch", worker="inline", in_flight=1),
    Setting(7, True, 4, small_pool=False, chunked=False, alone=True, worker="process", in_flight=2),
    Setting(1, True, 16, small_pool=True, chunked=False, alone=False, backend="torch", worker="process", in_flight=2),
    Setting(1, False, 4, small_pool=False, chunked=True, alone=True, worker="inline", in_flight=1),
    Setting(512, True, 4, small_pool=True, chunked=True, alone=False, backend="torch", worker="process", in_flight=2),
    Setting(512, False, 4, small_pool=False, chunked=False, alone=False, backend="torch", worker="process", in_flight=2),
]
"""A selection. Eight of them cover every pair of values; the other two run all prompts in torch as well."""


def pairs(settings: Sequence[Setting]) -> set[tuple[tuple[str, int | bool], tuple[str, int | bool]]]:
    """Every two values that meet in one of the settings."""
    return {pair for setting in settings for pair in itertools.combinations(sorted(vars(setting).items()), 2)}
