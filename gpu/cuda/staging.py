"""What the host tells the device of a step: written into pinned memory, taken over by one copy, read from fixed addresses.

Two steps are under way at most, so there are two host buffers, used in turn; by the time that one is written again, the
step that read it is over. The device needs one: the copy into it is behind the step before in the same stream. Sections
begin at fixed places, so that a captured graph finds them; each has room for the largest step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .runtime import Runtime

_ALIGNMENT = 256


class Section(NamedTuple):
    """Room for a tensor of up to `shape`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole room."""
        return math.prod(self.shape) * self.dtype.itemsize


class Staging:
    """Named sections, twice on the host and once on the device."""

    def __init__(self, runtime: Runtime, sections: Mapping[str, Section]) -> None:
        first: dict[str, int] = {}
        end = 0
        for name, section in sections.items():
            first[name] = end
            end += -(-section.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._hosts = [runtime.pinned((end,), torch.uint8).zero_() for _ in range(2)]
        self._device = torch.zeros((end,), dtype=torch.uint8, device=runtime.device)
        host_views = [_views(host, sections, first) for host in self._hosts]
        self.hosts: list[dict[str, Tensor]] = host_views
        """The host's side: that of step number `turn` is at `turn % 2`."""
        self._arrays = [{name: view.numpy() for name, view in views.items()} for views in host_views]
        self.tensors: dict[str, Tensor] = _views(self._device, sections, first)
        """The device's side, at addresses that do not change. What a step did not write is of an earlier one."""

    def arrays(self, turn: int) -> dict[str, npt.NDArray[np.generic]]:
        """The host's side for step number `turn`: to be filled before `copy_over`, and left alone until that has run."""
        return self._arrays[turn % 2]

    def copy_over(self, turn: int) -> None:
        """Launch the copy of step `turn`'s sections to the device, on the current stream."""
        self._device.copy_(self._hosts[turn % 2], non_blocking=True)


class StagedTables:
    """Block tables on their way to the device, where each row has room for the longest: only what a step has is copied."""

    def __init__(self, runtime: Runtime, *, max_rows: int, max_width: int) -> None:
        self._hosts = [runtime.pinned((max_rows * max_width,), torch.int32).zero_() for _ in range(2)]
        self._flat = torch.zeros((max_rows * max_width,), dtype=torch.int32, device=runtime.device)
        self.tensor = torch.zeros((max_rows, max_width), dtype=torch.int32, device=runtime.device)
        """int32 [max_rows, max_width]. What a step did not write are blocks of an earlier one, or 0: all exist."""

    def write(self, turn: int, tables: npt.NDArray[np.int32]) -> Callable[[], None]:
        """Put `tables` [rows, width] into the buffer of step `turn`. Returns what launches the copy."""
        host = self._hosts[turn % 2][: tables.size]
        host.numpy()[:] = tables.reshape(-1)
        rows, width = tables.shape

        def copy_over() -> None:
            flat = self._flat[: host.numel()]
            flat.copy_(host, non_blocking=True)
            self.tensor[:rows, :width].copy_(flat.view(rows, width))

        return copy_over


def _views(memory: Tensor, sections: Mapping[str, Section], first: Mapping[str, int]) -> dict[str, Tensor]:
    return {
        name: memory[first[name] : first[name] + section.num_bytes].view(section.dtype).view(section.shape)
        for name, section in sections.items()
    }
