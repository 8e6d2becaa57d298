"""The contract between the actors of a device and the device itself.

An executor owns the model, the device's KV pool, the host's, and one slot per sequence: token log, block
table, sampling state. It is told what to do by `RunStep` (deltas, columns) and `CopyBlocks`, and answers with
`StepDone` and `CopyDone`. Its methods are synchronous. Three threads drive it, one for each timeline:

    thread                  calls            in the order of
    compute                 `run_step`       step ids
    lane of copies out      `copy_blocks`    copy ids of direction "out"
    lane of copies in       `copy_blocks`    copy ids of direction "in"

They run side by side and meet only in their fences: an operation starts when everything that its `after`
names is complete, and is complete when it has ended, whether it worked or not. Who hands the operations over
does so in the order in which they were issued, so that whatever one waits for has been handed over before it.
Answers come in order within a timeline only: what waited for another operation may be answered a moment before it.

Implementations: `simulated/` (no torch, memory that remembers who wrote what), `cpu/`, `cuda/`.

A GPU needs no thread while it computes, and must not wait for one between two steps. Its executor is a
`LaunchingExecutor`: the compute thread calls `launch_step`, which returns while the step runs, and a fourth thread waits
for the answers, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ..protocol.capacity import Capacity as Capacity
from ..protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone

Watch = Callable[[], str | None]
"""Says what has changed about other processes on the device since the last call, in words; None: nothing has."""


class Executor(Protocol):
    """A device that runs steps and copies. Three threads drive it, as the table above says; no others."""

    @property
    def capacity(self) -> Capacity:
        """What the device offers. Constant while the executor lives."""
        ...

    @property
    def num_sequences(self) -> int:
        """Sequences the device remembers: 0 when everything has ended and been swept."""
        ...

    @property
    def watch(self) -> Watch | None:
        """Looks who else uses the device; None: nobody can tell. Called now and then, from any thread."""
        ...

    def run_step(self, step: RunStep) -> StepDone:
        """Wait for the copies in `step.after`, run the step to its end and return the sampled tokens.

        Order of effects: `released`, `admitted`, `table_edits`, `copies`, then the rows. A step may have no
        rows: then it only releases. A row whose logits are not finite is reported in `failed` and samples
        nothing. Any exception means that the device's state is not to be trusted: the caller ends the epoch.
        Raises `FencesClosedError` if `interrupt` ends the wait.
        """
        ...

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Wait for `copy.after`, copy whole blocks from one tier to the other, and say how it went.

        A copy that fails - ids out of range and lists of different lengths included - is answered with
        `ok=False` and the reason; what its targets hold then is junk, and the device goes on. Any exception means
        that the device is not to be trusted: the caller ends the epoch. Raises `FencesClosedError` if `interrupt`
        ends the wait, `ValueError` for a copy that waits for itself.
        """
        ...

    def interrupt(self) -> None:
        """End all waiting for fences, now and from here on. Callable from any thread; only `close` comes after it."""
        ...

    def close(self) -> None:
        """Give the device's memory back. No other method runs or is called after this."""
        ...


class PendingStep(Protocol):
    """A step that has been launched."""

    def result(self) -> StepDone:
        """Wait for its end and return what `run_step` would. Steps are asked in the order in which they were launched."""
        ...


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """A device that computes by itself."""

    def launch_step(self, step: RunStep) -> PendingStep:
        """Begin what `run_step` does; the next step may be launched before this one's result is asked for.

        Waits only where the step needs what an earlier one draws, or a copy that has not been launched yet.
        """
        ...
