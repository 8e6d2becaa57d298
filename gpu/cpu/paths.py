"""The code that computes a step, and which of it: the C kernels where they are built and fit, else torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...protocol.errors import ConfigError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.weights import DecoderWeights
from ..sampling import Sampled, SamplingRow
from ..slots import Row
from .kernel_path import KernelPath, why_not
from .library import KernelsUnavailableError, level_for, open_library
from .plan import SharedGroups
from .pool import KvPool
from .torch_path import TorchPath


class ComputePath(Protocol):
    """A way to compute steps over a pool."""

    @property
    def description(self) -> str:
        """In words, for the start line: which code runs, on how many threads, and why not a faster one."""
        ...

    def compute(
        self,
        rows: Sequence[Row],
        draws: Sequence[SamplingRow],
        shared: SharedGroups,
        *,
        before_draws: Callable[[], None] | None = None,
    ) -> Sampled:
        """Compute all rows and draw for those that sample; `draws` belongs to these, in order.

        `before_draws` is called once the logits are there, unless all draws are plain: what a draw's `allowed_mask`
        holds counts only from then on.
        Raises `ValueError` or `IndexError` for rows at odds with the pool or the vocabulary.
        """
        ...

    def close(self) -> None:
        """Let go of threads and memory. May be called twice."""
        ...


def open_path(model: ModelConfig, weights: DecoderWeights, pool: KvPool, *, backend: str, num_threads: int) -> ComputePath:
    """The path that `backend` names: "torch", a level of the kernels, or "auto". The kernels take `weights` apart.

    Raises `ConfigError` if a level was named and cannot run; "auto" falls back to torch and says why in its description.
    """
    threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
    if backend == "torch":
        return TorchPath(Decoder(model, weights), pool, description=f"torch, {threads}")
    try:
        library = open_library()
        level = level_for(library, pool.blocks.dtype, backend)
        if reason := why_not(model, level):
            raise KernelsUnavailableError(reason)
    except KernelsUnavailableError as error:
        if backend != "auto":
            raise ConfigError(f"attention_backend {backend!r} cannot run: {error}", key="attention_backend") from error
        return TorchPath(Decoder(model, weights), pool, description=f"torch since {error}, {threads}")
    return KernelPath(library, level, model, weights, pool, num_threads=num_threads)
