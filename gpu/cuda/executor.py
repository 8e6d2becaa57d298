"""The executor for GPUs: steps are launched one behind the other, and answered when their event has come.

A step may be launched while the one before it runs, although nobody on the host knows yet what that one draws: its
tokens stay on the device, where the next step finds them, and hold their places in the logs as `UNKNOWN`. The host
learns of them by a copy at the end of the step and waits for one event.

What cannot be left to the device waits: a step with a grammar, a penalty, a bias, or a request for logprobs is launched
when all before it are answered, and drawn with `sample` of `gpu/sampling.py`.

    called by              what                                            touches
    compute thread         `launch_step`                                   logs, tables, staging; launches
    answering thread       `PendingStep.result`                            waits for the event; fills in the logs
    lanes                  `copy_blocks`                                   their own streams

Logs are filled in at places that the compute thread does not read before it has settled the step itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from ...protocol.capacity import Capacity
from ...protocol.ids import SequenceId
from ...protocol.messages import CopyBlocks, CopyDone, RunStep, StepDone
from ..answers import Answers, draws_of
from ..copying import checked_copy, copy_answer, lane_of
from ..executor import Watch
from ..logprobs import prompt_parts
from ..prompts import prompt_rows
from ..sampling import Sampled, SamplingRow, sample
from ..slots import Row, SlotTable
from ..structured import Grammars
from .fences import EventFences
from .graphs import DecodeGraphs, is_better_shared
from .plan import UNKNOWN, GpuPlan, PoolShape, make_plan
from .pools import DevicePool, PinnedPool
from .runtime import Event, Runtime
from .stepping import Staged, StepRunner


class Parts(NamedTuple):
    """What an executor is put together from; see `opening.py`. `graphs` is None where steps are never captured."""

    runtime: Runtime
    pool: DevicePool
    host: PinnedPool
    runner: StepRunner
    graphs: DecodeGraphs | None
    grammars: Grammars
    capacity: Capacity
    watch: Watch | None
    close_watch: Callable[[], None]


class GpuExecutor:
    """Runs a model on a GPU. Implements `LaunchingExecutor`. Owns all of `parts`."""

    def __init__(self, parts: Parts) -> None:
        self._parts: Parts | None = parts
        self._capacity = parts.capacity
        self._shape = PoolShape(parts.capacity.num_device_blocks, parts.capacity.block_size, parts.capacity.vocab_size)
        self._fences = EventFences()
        self._slots = SlotTable(parts.grammars)
        self._answers = Answers()
        self._pending: deque[PendingStep] = deque()
        self._settling = threading.Lock()
        self._turn = 0

    @property
    def capacity(self) -> Capacity:
        """What the device offers."""
        return self._capacity

    @property
    def watch(self) -> Watch | None:
        """Looks who else uses the device, where its driver tells."""
        return self._open.watch

    @property
    def num_sequences(self) -> int:
        """Sequences admitted and not released."""
        return len(self._slots)

    @property
    def _open(self) -> Parts:
        assert self._parts is not None, "the device is closed"
        return self._parts

    # ---- steps ----------------------------------------------------------------------------------

    def run_step(self, step: RunStep) -> StepDone:
        """Run one step to its end; see `Executor.run_step`."""
        return self.launch_step(step).result()

    def launch_step(self, step: RunStep) -> PendingStep:
        """Launch a step; see `LaunchingExecutor.launch_step`.

        Raises `KeyError`, `ValueError` or `IndexError` for a step that does not fit what came before it.
        """
        end: Event | None = None
        try:
            pending = self._launch(step)
            end = pending.end
        finally:
            self._fences.launched("step", step.step_id, end)
        return pending

    def _launch(self, step: RunStep) -> PendingStep:
        rows = self._slots.apply(step)
        waits = any(_needs_host(row) for row in rows)
        self._settle(leaving=0 if waits else 1)
        if waits:
            self._answers.forget(step)
        plan = make_plan(rows, step.shared_groups, self._shape, self._places_of_unknown())
        draws = draws_of(plan.sampling)
        self._turn += 1
        launched = self._launch_waiting(step, plan, draws) if waits else self._launch_ahead(step, plan, draws)
        pending = PendingStep(self, step, plan.sampling, launched)
        if launched.found is None:
            for row in plan.sampling:
                row.slot.token_ids.append(UNKNOWN)
        self._pending.append(pending)
        if waits:
            self._settle(leaving=0)
        return pending

    def _launch_ahead(self, step: RunStep, plan: GpuPlan, draws: list[SamplingRow]) -> Launched:
        """Launch a step of which the host needs nothing but the tokens it draws."""
        parts, runner = self._open, self._open.runner
        size = self._captured_size(plan)
        staged = runner.stage(self._turn, plan, draws, step.copies, padded_to=size or 0)
        inputs = runner.inputs(plan)

        def work() -> None:
            runner.launch_inputs(staged)
            if size is not None and parts.graphs is not None:
                parts.graphs.launch(size)
            elif staged.num_rows:
                hidden = runner.launch_hidden(staged.num_tokens, inputs)
                if staged.num_samples:
                    runner.launch_draws(runner.launch_logits(hidden, staged.num_samples))
            runner.launch_outcome(staged)

        waited, start = self._begin(step)
        parts.runtime.compute.launch(work)
        return Launched(waited, start, parts.runtime.compute.record(timed=True), staged, None)

    def _captured_size(self, plan: GpuPlan) -> int | None:
        """The captured step that `plan` runs in; None: it is launched one by one."""
        graphs, pool = self._open.graphs, self._open.pool
        if graphs is None or not plan.is_pure_decode:
            return None
        if self._open.runner.attention.attends_shared and is_better_shared(plan.runs, pool.key_bytes):
            return None
        return graphs.size_for(len(plan.rows))

    def _launch_waiting(self, step: RunStep, plan: GpuPlan, draws: list[SamplingRow]) -> Launched:
        """Run a step of which the host needs the logits, or has a say in them."""
        parts, runner = self._open, self._open.runner
        staged = runner.stage(self._turn, plan, [], step.copies)
        inputs = runner.inputs(plan)
        kept: list[Tensor] = []

        def compute() -> None:
            runner.launch_inputs(staged)
            hidden = runner.launch_hidden(staged.num_tokens, inputs)
            kept.append(hidden)
            kept.append(runner.launch_logits(hidden, staged.num_samples).float())

        waited, start = self._begin(step)
        parts.runtime.compute.launch(compute)
        self._answers.wait_for_masks([row.slot for row in plan.sampling if row.slot.grammar is not None])
        found: list[Sampled] = []
        parts.runtime.compute.launch(lambda: found.append(self._draw(kept, plan, draws)))
        end = parts.runtime.compute.record(timed=True)
        end.synchronize()
        return Launched(waited, start, end, staged, found[0])

    def _begin(self, step: RunStep) -> tuple[Event | None, Event]:
        """Hold the compute stream back for the copies that `step` needs. Its ends: before (if it must be) and behind."""
        stream = self._open.runtime.compute
        asked = stream.record(timed=True)
        is_held = self._fences.hold_back(stream, replace(step.after, step=0))  # steps are in their own stream's order
        return asked if is_held else None, stream.record(timed=True)

    def _draw(self, kept: list[Tensor], plan: GpuPlan, draws: list[SamplingRow]) -> Sampled:
        hidden, logits = kept
        runner = self._open.runner
        prompts, failed = prompt_parts(
            prompt_rows(plan.rows), lambda first, last: runner.launch_head(hidden[first:last]).float()
        )
        found = sample(logits, draws) if draws else Sampled([], [])
        return found._replace(prompts=prompts, failed_prompts=failed)

    def _places_of_unknown(self) -> dict[SequenceId, int]:
        """Where the device has the tokens of the step that runs, by sequence."""
        with self._settling:
            last = self._pending[-1].sampling if self._pending else []
        return {row.slot.seq_id: place for place, row in enumerate(last)}

    def _settle(self, *, leaving: int) -> None:
        """Wait for all launched steps but the last `leaving`, and take in what they drew."""
        while (first := self._first_of_more_than(leaving)) is not None:
            first.result()

    def _first_of_more_than(self, count: int) -> PendingStep | None:
        with self._settling:
            return self._pending[0] if len(self._pending) > count else None

    def settle(self, pending: PendingStep) -> None:
        """Take in what steps drew up to `pending`, whose event has come. From any thread."""
        with self._settling:
            while pending.done is None:
                first = self._pending[0]
                first.done = self._answer(first)
                self._fences.over("step", first.step.step_id)
                self._pending.popleft()

    def _answer(self, pending: PendingStep) -> StepDone:
        launched = pending.launched
        found = launched.found
        if found is None:
            self._answers.forget(pending.step)  # not before: those that it releases may fail in the step before it
            tokens, statuses = self._open.runner.outcome(launched.staged)
            found = Sampled(tokens, [i for i, status in enumerate(statuses) if status])
        done = self._answers.answer(pending.step, pending.sampling, found, seconds=launched.end.seconds_since(launched.start))
        return done if launched.asked is None else replace(done, waited_s=launched.start.seconds_since(launched.asked))

    # ---- copies ---------------------------------------------------------------------------------

    def copy_blocks(self, copy: CopyBlocks) -> CopyDone:
        """Copy blocks between the tiers; see `Executor.copy_blocks`. The lane's thread waits, the compute thread does not."""
        parts, lane = self._open, lane_of(copy)
        stream = parts.runtime.copy_out if copy.direction == "out" else parts.runtime.copy_in
        move = parts.host.copy_out if copy.direction == "out" else parts.host.copy_in
        asked = time.perf_counter()
        start = end = None
        try:
            self._fences.hold_back(stream, copy.after)
            start = stream.record(timed=True)
            problem = checked_copy(copy, self._capacity)
            if problem is None:
                stream.launch(lambda: move(copy.sources, copy.targets))
            end = stream.record(timed=True)
        finally:
            self._fences.launched(lane, copy.copy_id, end)
        start.synchronize()
        waited_s = time.perf_counter() - asked
        end.synchronize()
        self._fences.over(lane, copy.copy_id)
        return copy_answer(copy, self._capacity, seconds=end.seconds_since(start), waited_s=waited_s, problem=problem)

    # ---- the end --------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End all waiting for launches; see `Executor.interrupt`. What is launched ends by itself."""
        self._fences.close()

    def close(self) -> None:
        """Wait for the device and let go of its memory. May be called twice."""
        self.interrupt()
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        parts.runtime.synchronize()
        self._pending.clear()
        parts.grammars.close()
        parts.close_watch()
        runtime = parts.runtime
        del parts
        runtime.close()
        self._slots = SlotTable()


class Launched(NamedTuple):
    """A step in the compute stream: its ends, its buffers, and what it drew where the host drew it.

    `asked` is before it waited for copies; None if it did not.
    """

    asked: Event | None
    start: Event
    end: Event
    staged: Staged
    found: Sampled | None


class PendingStep:
    """A launched step. Implements `PendingStep` of the contract; made by `GpuExecutor` alone."""

    def __init__(self, executor: GpuExecutor, step: RunStep, sampling: list[Row], launched: Launched) -> None:
        self.step = step
        self.sampling = sampling
        self.launched = launched
        self.done: StepDone | None = None
        self._executor = executor

    @property
    def end(self) -> Event:
        """The event behind it."""
        return self.launched.end

    def result(self) -> StepDone:
        """Wait for the step's end; what it says. From any thread, as often as wanted."""
        self.end.synchronize()
        self._executor.settle(self)
        assert self.done is not None
        return self.done


def _needs_host(row: Row) -> bool:
    """Whether the host has a say in what follows on `row`, or is asked how likely it was."""
    slot = row.slot
    if slot.params.prompt_logprobs is not None and row.start < slot.num_prompt_tokens:
        return True
    return bool(row.samples) and (slot.grammar is not None or slot.params.logprobs is not None or slot.has_edits)
