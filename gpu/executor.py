"""The contract between the worker and a device.

An executor owns the model, the device's KV pool, the host's, and one slot per sequence: token
log, block table, sampling state. It is told what to do by `RunStep` (deltas, columns) and answers
with `StepDone`. All of its methods are synchronous and run on the worker's compute thread;
`run_step` calls come one after another, in the order of their step ids.

Implementations: `simulated/` (no torch, memory that remembers who wrote what), `cpu/`, later `cuda/`.
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.capacity import Capacity as Capacity
from ..protocol.messages import RunStep, StepDone


class Executor(Protocol):
    """A device that runs steps. Not thread-safe: one compute thread drives it."""

    @property
    def capacity(self) -> Capacity:
        """What the device offers. Constant while the executor lives."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences the device remembers: 0 when everything has ended and been swept."""
        ...

    def run_step(self, step: RunStep) -> StepDone:
        """Run one step to its end and return the sampled tokens.

        Order of effects: `released`, `admitted`, `table_edits`, `copies`, then the rows. A step may have no
        rows: then it only releases. A row whose logits are not finite is reported in `failed` and samples
        nothing. Any exception means that the device's state is not to be trusted: the caller ends the epoch.
        """
        ...

    def close(self) -> None:
        """Give the device's memory back. The executor is not used after this."""
        ...
