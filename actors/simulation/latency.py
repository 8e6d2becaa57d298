"""How long a device takes for what it is told, as a few numbers."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ...protocol.messages import CopyBlocks, RunStep
from ..scheduling.step_time import attended


class Latency(Protocol):
    """Anything that tells durations in seconds."""

    def of_step(self, step: RunStep) -> float:
        """Seconds of `step` once it has begun."""
        ...

    def of_copy(self, copy: CopyBlocks, block_bytes: int) -> float:
        """Seconds of `copy` once it has begun."""
        ...


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: `step_s + token_s x tokens of prefills + attended_s x query-key pairs + row_s x rows`.

    Seconds of a copy: `copy_s + bytes / rate of its lane`. A row of one token counts as a decode.
    """

    step_s: float
    token_s: float = 0.0
    attended_s: float = 0.0
    row_s: float = 0.0
    copy_s: float = 0.0
    out_rate: float = 10e9
    """Bytes/s from the device to the host."""
    in_rate: float = 10e9

    def of_step(self, step: RunStep) -> float:
        """Seconds of `step` once it has begun."""
        num_prefilled = sum(count for count in step.num_tokens if count > 1)
        pairs = sum(attended(start, count) for start, count in zip(step.starts, step.num_tokens, strict=True))
        return self.of_load(num_prefilled, pairs, len(step.seq_ids))

    def of_load(self, num_prefill_tokens: int, num_attended: int, num_rows: int) -> float:
        """Seconds of a step with this load."""
        return self.step_s + self.token_s * num_prefill_tokens + self.attended_s * num_attended + self.row_s * num_rows

    def of_copy(self, copy: CopyBlocks, block_bytes: int) -> float:
        """Seconds of `copy` once it has begun."""
        rate = self.out_rate if copy.direction == "out" else self.in_rate
        return self.copy_s + len(copy.sources) * block_bytes / rate
