"""What the engine says when it starts: its configuration, its capacity, and what looks like a mistake."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from ...gpu.executor import Capacity
from ...protocol.config import EngineConfig, pitfalls, shown


def say_start(log: FilteringBoundLogger, config: EngineConfig, capacity: Capacity) -> None:
    """Write `engine.start`, and an `engine.warning` for each pitfall."""
    num_tokens = capacity.num_device_blocks * capacity.block_size
    log.info(
        "engine.start",
        config=shown(config),
        device=capacity.device,
        threads=config.compute_threads,
        block_size=capacity.block_size,
        num_device_blocks=capacity.num_device_blocks,
        num_host_blocks=capacity.num_host_blocks,
        num_tokens=num_tokens,
        max_model_len=capacity.max_model_len,
    )
    for message in pitfalls(config):
        log.warning("engine.warning", message=message)
    if num_tokens < capacity.max_model_len:
        log.warning(
            "engine.warning",
            message=f"the KV pool holds {num_tokens} tokens, less than one sequence of max_model_len {capacity.max_model_len}",
            num_tokens=num_tokens,
            max_model_len=capacity.max_model_len,
        )
    _say_host(log, config, capacity)


def _say_host(log: FilteringBoundLogger, config: EngineConfig, capacity: Capacity) -> None:
    """What the host tier cannot do for lack of room."""
    longest = -(-min(capacity.max_model_len, capacity.num_device_blocks * capacity.block_size) // capacity.block_size)
    if config.preemption_mode in ("swap", "heuristic") and not capacity.num_host_blocks:
        message = f"preemption_mode {config.preemption_mode} has no host blocks to swap to: every preemption will recompute"
    elif config.preemption_mode != "recompute" and 0 < capacity.num_host_blocks < longest:
        message = (
            f"the host tier holds {capacity.num_host_blocks} blocks, fewer than the {longest} of the longest request: "
            "such a one will be preempted by recompute"
        )
    else:
        return
    log.warning("engine.warning", message=message, num_host_blocks=capacity.num_host_blocks)


def say_ready(log: FilteringBoundLogger, seconds: float) -> None:
    """Write `engine.ready`."""
    log.info("engine.ready", seconds=round(seconds, 3))
