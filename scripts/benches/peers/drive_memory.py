"""The floor under every engine: how fast one core reads memory that no cache holds. Whatever is asked, it measures that."""

from __future__ import annotations

import statistics
import time

import torch
from driving import Channel

NUM_BYTES = 1 << 30
PASSES = 5


def main() -> None:
    """Answer each request with a median of GB/s, single-threaded."""
    torch.set_num_threads(1)
    memory = torch.ones(NUM_BYTES // 4, dtype=torch.float32)
    channel = Channel()
    channel.say(ready=f"torch {torch.__version__}")
    while channel.next_request() is not None:
        speeds = []
        for _ in range(PASSES):
            began = time.perf_counter()
            memory.sum()
            speeds.append(NUM_BYTES / (time.perf_counter() - began) / 1e9)
        channel.say(gb_per_s=statistics.median(speeds))


if __name__ == "__main__":
    main()
