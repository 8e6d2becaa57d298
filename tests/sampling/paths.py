"""The ways to sample, under one name: torch, and the C kernels of each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from repertory.gpu.cpu import library as lib
from repertory.gpu.cpu.sampler import Sampler
from repertory.gpu.sampling import Sampled, SamplingRow, sample

Sample = Callable[[Tensor, Sequence[SamplingRow]], Sampled]


def names() -> list[str]:
    """Of the paths there are here."""
    try:
        library = lib.open_library()
    except lib.KernelsUnavailableError:
        return ["torch"]
    levels = [name for level, name in enumerate(lib.LEVELS) if name != "amx" and library.has_kernels(level, False)]
    return ["torch", *levels]


@contextmanager
def opened(name: str, *, num_threads: int = 1) -> Iterator[Sample]:
    """A function that samples rows of logits of any vocabulary."""
    if name == "torch":
        yield sample
        return
    library = lib.open_library()
    level = lib.LEVELS.index(name)
    team = library.team_open(num_threads)

    def in_c(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        sampler = Sampler(library, level, team, num_threads=num_threads, vocab_size=logits.shape[-1])
        return sampler.sample(logits if logits.stride(-1) == 1 and logits.stride(0) else logits.contiguous(), rows)

    try:
        yield in_c
    finally:
        library.team_close(team)


def distinct_rows(logits: Tensor, count: int) -> Tensor:
    """The same logits in `count` rows of memory."""
    return torch.clone(logits.expand(count, -1), memory_format=torch.contiguous_format)
