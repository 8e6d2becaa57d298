"""What the device can do at best, measured in the same run as what is held against it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .gpu import Gpu


class Ceilings(NamedTuple):
    """Bytes a second of device memory, and floating-point operations a second of bfloat16 matrix products."""

    memory: float
    matrices: float


def measure_ceilings(gpu: Gpu) -> Ceilings:
    """Memory: the better of a copy, bytes read and written, and a sum, bytes read, far larger than the caches."""
    return Ceilings(_memory_rate(gpu), _product_rate(gpu))


def _memory_rate(gpu: Gpu) -> float:
    num_bytes = gpu.sized(4 << 30, 1 << 20)
    source = torch.randn(num_bytes // 4, device=gpu.device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / gpu.seconds(lambda: target.copy_(source))
    return max(copied, num_bytes / gpu.seconds(source.sum))


def _product_rate(gpu: Gpu) -> float:
    size = gpu.sized(8192, 64)
    left, right = (torch.randn(size, size, device=gpu.device).bfloat16() for _ in range(2))
    return 2 * size**3 / gpu.seconds(lambda: left @ right)


class CopyRates(NamedTuple):
    """Bytes a second of plain copies between pinned memory and the device: each way alone, and while the other runs too."""

    out: float
    into: float
    out_beside: float
    into_beside: float


def measure_copies(gpu: Gpu) -> CopyRates:
    """Large plain copies, each way in a stream of its own."""
    num_bytes = gpu.sized(512 << 20, 1 << 20)
    runtime = gpu.runtime()
    hosts = [runtime.pinned((num_bytes,), torch.uint8).zero_() for _ in range(2)]
    devices = [torch.zeros(num_bytes, dtype=torch.uint8, device=gpu.device) for _ in range(2)]
    ways = {"out": (runtime.copy_out, devices[0], hosts[0]), "into": (runtime.copy_in, hosts[1], devices[1])}
    gpu.synchronize()

    def together(names: tuple[str, ...]) -> list[float]:
        """Rates of one copy each way that is named, begun at once."""
        starts = [ways[name][0].record(timed=True) for name in names]
        for name in names:
            stream, source, target = ways[name]
            for _ in range(4):
                stream.launch(lambda source=source, target=target: target.copy_(source, non_blocking=True))  # type: ignore[misc]
        ends = [ways[name][0].record(timed=True) for name in names]
        for end in ends:
            end.synchronize()
        return [4 * num_bytes / max(end.seconds_since(start), 1e-9) for start, end in zip(starts, ends, strict=True)]

    together(("out", "into"))
    alone = [together((name,))[0] for name in ("out", "into")]
    return CopyRates(*alone, *together(("out", "into")))
