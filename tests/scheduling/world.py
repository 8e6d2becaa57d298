"""A scheduler core and a simulated device, driven by hand: no loop, no clock, no randomness of their own.

Every operation is followed by the core's audit and by a look at what it sent on. Each planned step is
held against what every step promises; the device checks that its deltas suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.scheduling.pacing import Pacer
from repertory.actors.scheduling.reports import Report
from repertory.actors.scheduling.reserve import Reserve
from repertory.actors.scheduling.sequence import Sequence
from repertory.gpu.simulated import SimulatedExecutor
from repertory.gpu.slots import Slot
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import Problem
from repertory.protocol.ids import Epoch, RequestId, SequenceId
from repertory.protocol.messages import (
    ALL_SEQUENCES,
    Abort,
    Admit,
    CopyBlocks,
    CopyDirection,
    NewRow,
    Open,
    Refused,
    RunStep,
    SequenceEnd,
    TokenLogprobs,
    TokensSampled,
)
from repertory.protocol.sampling import SamplingParams

MOST_STEPS = 20_000
STEP_S = 0.01


class World:
    """`blocks`, `block_size`, `vocab_size`, `max_model_len` and `step_s` shape the device; all else is configuration.

    Steps are planned as far ahead as is allowed, so that two are in flight whenever they may be; only a
    `paced` world leaves the moment to the core.
    """

    def __init__(
        self,
        *,
        blocks: int = 256,
        block_size: int = 4,
        vocab_size: int = 1000,
        max_model_len: int = 100_000,
        step_s: float = STEP_S,
        host_blocks: int = 0,
        copy_s: float = STEP_S / 2,
        paced: bool = False,
        **config: Any,
    ) -> None:
        config.setdefault("max_steps_in_flight", 1)
        config.setdefault("credit_window", 1_000_000)  # readers here take all there is
        self.config = EngineConfig(model="simulated", block_size=block_size, num_device_blocks=blocks, **config)
        self.device = SimulatedExecutor(
            num_device_blocks=blocks,
            num_host_blocks=host_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            fail_rows=self._rows_that_fail,
            fail_copies=lambda copy: self.failing_copies(copy),
            copy_seconds=lambda copy: copy_s,
            step_seconds=lambda step: step_s,
        )
        self.core = SchedulerCore(self.config, self.device.capacity, epoch=Epoch(1))
        if not paced:
            self.core.pacer = _Eager()
        self.step_s = step_s
        self.now = 0.0
        self.admits: dict[RequestId, Admit] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        """What the first sequence of each request gave."""
        self.given: dict[tuple[RequestId, int], list[int]] = {}
        """What each sequence gave."""
        self.sequence_ends: dict[tuple[RequestId, int], SequenceEnd] = {}
        self.stopped: set[tuple[RequestId, int]] = set()
        """Sequences that a stop string ended, wherever that was."""
        self.opens: dict[RequestId, Open] = {}
        self.prompts: dict[RequestId, list[TokenLogprobs]] = {}
        """How likely the prompts were of those that asked."""
        self.ends: dict[RequestId, SequenceEnd] = {}
        self.refusals: dict[RequestId, Problem | None] = {}
        self.reports: list[Report] = []
        self.steps: list[RunStep] = []
        self.in_flight: list[RunStep] = []
        self.copies: dict[CopyDirection, deque[CopyBlocks]] = {"out": deque(), "in": deque()}
        """Copies sent and not carried out, by lane."""
        self.copied: list[CopyBlocks] = []
        self.failing_copies: Callable[[CopyBlocks], bool] = lambda copy: False
        self.poisoned: set[RequestId] = set()
        """Requests whose logits are not finite from the next step on."""

    # ---- operations -----------------------------------------------------------------------------

    def submit(
        self,
        prompt: Items[int],
        *,
        max_tokens: int | None = 4,
        seed: int | None = None,
        n: int = 1,
        prompt_logprobs: int | None = None,
        **admit: Any,
    ) -> RequestId:
        """A request arrives; greedy unless `seed` is given."""
        request = RequestId(len(self.admits) + 1)
        temperature = 0.0 if seed is None else 1.0
        params = SamplingParams(n=n, temperature=temperature, seed=seed, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        message = Admit(request, f"request {request}", list(prompt), params, self.now, **admit)
        self.admits[request] = message
        self.core.on_admit(message, self.now)
        self._look()
        return request

    def abort(self, request: RequestId) -> None:
        """A client goes."""
        self.core.on_abort(Abort(request), self.now)
        self._look()

    def stop(self, request: RequestId, index: int) -> None:
        """One sequence has given a stop string."""
        self.stopped.add((request, index))
        self.core.on_abort(Abort(request, "stop", index), self.now)
        self._look()

    def reset(self) -> None:
        """The cache is to be forgotten."""
        self.core.on_reset()
        self._look()

    def without_reserve(self) -> None:
        """Admission leaves nothing free for growth, so memory runs out often."""
        self.core.planner.reserve = _NoReserve(self.config.block_size)

    def plan(self) -> RunStep | None:
        """Plan one step and hold it against what steps promise; it is in flight then."""
        before = _Before(self.core)
        step = self.core.plan(self.now)
        if step is not None:
            before.check(step, self.core)
            assert step.step_id == len(self.steps) + 1, "step ids are consecutive"
            self.steps.append(step)
            self.in_flight.append(step)
        self._take_copies(step)
        if step is None and not self.in_flight and not any(self.copies.values()) and self.core.num_live:
            assert self.core.next_wakeup() is not None, f"nothing runs and nobody will ask again: {self.core.stats()}"
        self._look()
        return step

    def finish(self) -> None:
        """The device runs the oldest step in flight, after the copies it waits for, and answers."""
        while self._unmet(self.in_flight[0]):
            assert self.copy(), "a step waits for a copy that cannot run"
        done = self.device.run_step(self.in_flight.pop(0))
        self.now += self.step_s
        self.core.on_step_done(done, self.now)
        self._look()

    def step(self) -> RunStep | None:
        """Plan as far ahead as is allowed, then let the device run one step; return the last one planned."""
        planned = None
        while (step := self.plan()) is not None:
            planned = step
        if self.in_flight:
            self.finish()
        while self.copy():
            pass
        return planned

    def copy(self, direction: CopyDirection | None = None) -> bool:
        """The first copy of a lane (or of any) that need not wait for anything is carried out; False: none could be."""
        for lane in ("out", "in") if direction is None else (direction,):
            if self.copies[lane] and not self._unmet(self.copies[lane][0]):
                copy = self.copies[lane].popleft()
                self.copied.append(copy)
                self.core.on_copy_done(self.device.copy_blocks(copy))
                self._look()
                return True
        return False

    def _take_copies(self, step: RunStep | None) -> None:
        sent = 0 if not self.steps else self.steps[-1].step_id
        before, after = self.core.take_copies()
        assert all(copy.after.step <= sent - (step is not None) for copy in before), "a copy waits for a later step"
        assert all(copy.after.step <= sent for copy in after), "a copy waits for a step that was not sent"
        for copy in (*before, *after):
            assert len(copy.sources) == len(copy.targets) > 0
            self.copies[copy.direction].append(copy)

    def _unmet(self, operation: RunStep | CopyBlocks) -> tuple[str, ...]:
        return tuple(self.device._timelines.unmet(operation.after))

    def run(self, *requests: RequestId) -> int:
        """Step until `requests` (all, if none is named) have ended; return the number of steps planned."""
        first = len(self.steps)
        while any(request not in self.ends and request not in self.refusals for request in requests or self.admits):
            assert len(self.steps) < MOST_STEPS, f"no end in sight: {self.core.stats()}"
            if self.step() is None and not self.in_flight and not any(self.copies.values()):
                wakeup = self.core.next_wakeup()
                self.now = self.now if wakeup is None else max(self.now, wakeup)
        return len(self.steps) - first

    # ---- facts ----------------------------------------------------------------------------------

    def sequence(self, request: RequestId, index: int = 0) -> Sequence | None:
        """A sequence of the request while it lives."""
        queues = self.core.queues
        alive = (seq for queue in (queues.running, queues.recovery, queues.waiting, queues.fetching.values()) for seq in queue)
        return next((seq for seq in alive if seq.request_id == request and seq.index == index), None)

    def running(self) -> list[RequestId]:
        """Running requests in order."""
        return [seq.request_id for seq in self.core.queues.running]

    def preempted(self) -> list[RequestId]:
        """Preempted requests in order."""
        return [seq.request_id for seq in self.core.queues.recovery]

    def waiting(self) -> list[RequestId]:
        """Waiting requests in order."""
        return [seq.request_id for seq in self.core.queues.waiting]

    def rows(self, step: RunStep) -> dict[RequestId, tuple[int, int]]:
        """The step's rows, (start, number of tokens) by request: sequences are numbered like requests while none is refused."""
        assert not self.refusals, "sequence ids are not request ids here"
        columns = zip(step.seq_ids, step.starts, step.num_tokens, strict=True)
        return {RequestId(seq_id): (start, count) for seq_id, start, count in columns}

    def reason(self, request: RequestId) -> str:
        """How the request ended: of several sequences, the last to end."""
        return "refused" if request in self.refusals else self.ends[request].finish_reason

    def reference(self, request: RequestId, index: int = 0) -> list[int]:
        """What a sequence of the request gives alone, up to its own length and its stop ids."""
        admit = self.admits[request]
        room = self.core.max_length - len(admit.token_ids)
        wanted = admit.params.max_tokens
        length = room if wanted is None else min(room, wanted)
        tokens = self.device.reference(admit.token_ids, admit.params, length, index=index)
        stops = [place for place, token in enumerate(tokens) if token in admit.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def check_outputs(self) -> None:
        """Every request has ended once, and whatever it gave is what it gives alone."""
        for request in self.admits:
            indices = range(self.admits[request].params.n)
            if self.reason(request) == "refused":
                assert not any(self.given.get((request, index)) for index in indices)
                continue
            for index in indices:
                self._check_output(request, index)
            opening = self.opens.get(request)
            assert (opening is not None) == any(self.given.get((request, index)) for index in indices), (
                "a request opens with its first token"
            )
            if opening is not None:
                assert opening.num_cached_tokens < opening.num_prompt_tokens, "the last prompt token is always computed"
            self._check_prompt(request)

    def _check_prompt(self, request: RequestId) -> None:
        admit = self.admits[request]
        asks = admit.params.prompt_logprobs is not None and bool(self.given.get((request, 0)))
        assert (request in self.prompts) == asks, "told with the first token of the first sequence"
        if asks:
            slot = Slot(NewRow(SequenceId(0), admit.token_ids, len(admit.token_ids), admit.params, []))
            tokens = np.array(admit.token_ids)
            assert self.prompts[request] == [
                self.device.prompt_logprobs(tokens[:at], slot, admit.token_ids[at]) for at in range(1, len(tokens))
            ]

    def _check_output(self, request: RequestId, index: int) -> None:
        got, end = self.given.get((request, index), []), self.sequence_ends.get((request, index), self.ends[request])
        reference, is_natural = self.reference(request, index), end.finish_reason in ("stop", "length")
        if is_natural and (request, index) not in self.stopped:
            assert got == reference, f"request {request}, {index} ({end.finish_reason}) differs from a run alone"
        else:
            assert got == reference[: len(got)], f"request {request}, {index} is no beginning of a run alone"

    def check_nothing_is_left(self) -> None:
        """All have ended: with the cache dropped every block is free, and nobody is remembered."""
        while self.in_flight or self.plan() is not None:
            self.finish()
        while self.copy():
            pass
        assert not any(self.copies.values())
        assert self.core.num_live == self.core.num_in_flight == 0
        self.reset()
        stats = self.core.stats()
        assert stats.device_blocks.free == stats.device_blocks.total
        assert stats.host_blocks.free == stats.host_blocks.total
        assert not self.core.cache.tree.namespaces()
        assert self.device.num_sequences == 0

    # ---- watching -------------------------------------------------------------------------------

    def _rows_that_fail(self, step: RunStep) -> Collection[int]:
        alive = [self.sequence(request, index) for request in self.poisoned for index in range(self.admits[request].params.n)]
        return [seq.seq_id for seq in alive if seq is not None]

    def _look(self) -> None:
        problems = self.core.audit()
        assert not problems, problems
        self.reports += self.core.take_reports()
        for message in self.core.take_outputs(self.now):
            if isinstance(message, Refused):
                self._is_over(message.request_id)
                self.refusals[message.request_id] = message.problem
            else:
                assert isinstance(message, TokensSampled)
                self._take(message)

    def _take(self, message: TokensSampled) -> None:
        for opening in message.opened:
            assert opening.request_id not in self.opens, "opened twice"
            self.opens[opening.request_id] = opening
        for part in message.prompts:
            assert part.request_id not in self.prompts, "told twice"
            self.prompts[part.request_id] = list(part.entries)
        assert any(message.indices) or not message.indices, "a column of zeros"
        indices = message.indices or [0] * len(message.token_ids)
        for request, index, token in zip(message.request_ids, indices, message.token_ids, strict=True):
            self._is_over(request)
            assert (request, index) not in self.sequence_ends, f"request {request}, {index} goes on after its end"
            assert request in self.opens, "a token before its request opened"
            self.given.setdefault((request, index), []).append(token)
            if index == 0:
                self.tokens.setdefault(request, []).append(token)
        for end in message.ended:
            self._end(end)

    def _end(self, end: SequenceEnd) -> None:
        request = end.request_id
        self._is_over(request)
        indices = range(self.admits[request].params.n)
        if end.index == ALL_SEQUENCES:
            self.ends[request] = end
            return
        assert (request, end.index) not in self.sequence_ends, "ended twice"
        self.sequence_ends[request, end.index] = end
        if all((request, index) in self.sequence_ends for index in indices):
            self.ends[request] = end

    def _is_over(self, request: RequestId) -> None:
        assert request not in self.ends and request not in self.refusals, f"request {request} goes on after its end"


class _Eager(Pacer):
    def plan_at(self) -> float | None:
        return None


class _NoReserve(Reserve):
    def blocks(self, growth: int) -> int:
        return 0


class _Before:
    """What a plan started from, as far as its promises depend on it."""

    def __init__(self, core: SchedulerCore) -> None:
        self.running = list(core.queues.running)
        self.decodes = [seq for seq in self.running if not seq.is_ending and not seq.is_prefilling]

    def check(self, step: RunStep, core: SchedulerCore) -> None:
        """Rows are real, decodes all there, prefills within their budget."""
        counts = dict(zip(step.seq_ids, step.num_tokens, strict=True))
        assert len(counts) == len(step.seq_ids), "two rows of one sequence"
        assert all(count >= 1 for count in step.num_tokens), "an empty row"
        assert counts or not core.num_live, "a step without rows while somebody is alive"
        config, decodes = core.config, {seq.seq_id for seq in self.decodes}
        prefills = [count for seq_id, count in counts.items() if seq_id not in decodes]
        if config.max_prefill_batch_size is not None:
            assert len(prefills) <= config.max_prefill_batch_size
        budget = max(1, config.token_budget - (len(counts) - len(prefills)))
        is_alone = len(prefills) == 1 and not config.enable_chunked_prefill
        assert is_alone or sum(prefills) <= budget, "prefills over their budget"
        self._check_who_gave_way(counts, core)

    def _check_who_gave_way(self, counts: dict[int, int], core: SchedulerCore) -> None:
        gone = [seq for seq in self.running if seq in core.queues.recovery]
        for seq in gone:
            assert seq.seq_id not in counts, "preempted and run in one step"
            assert seq.num_preemptions == 1 or seq.length > seq.prefill_end, "preempted again without a token of its return"
        for seq in self.decodes:
            if seq.seq_id not in counts and seq not in gone:
                is_last = seq is core.queues.running[-1] and not core.queues.fetching
                is_ample = core.cache.num_available > core.cache.num_blocks // 2
                assert gone or not (is_last or is_ample), "it sits out and need not"
