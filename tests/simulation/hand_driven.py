"""An engine whose every message waits to be carried by hand: the order of events is whoever's that drives it.

What links do not allow cannot be done: each is a queue, taken from at its head. Everything is looked at by the same
checker as a run of `World`.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.simulation.checker import Checker
from repertory.actors.simulation.guest import Guest
from repertory.actors.simulation.scenario import Visitor
from repertory.actors.simulation.texts import Texts
from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import Epoch, RequestId, SequenceId
from repertory.protocol.messages import (
    Abort,
    Admit,
    Closed,
    CopyBlocks,
    CopyDirection,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    Refused,
    Resend,
    RunStep,
    StepDone,
    TokensSampled,
)
from repertory.protocol.sampling import SamplingParams

STEP_S = 0.01
MOST_TURNS = 5000


class HandDriven:
    """`config` with a device of its blocks and `num_host_blocks`; nothing happens but what is called."""

    def __init__(self, config: EngineConfig, *, num_host_blocks: int, vocab_size: int = 50) -> None:
        self.config = config
        self.device = SimulatedExecutor(
            num_device_blocks=config.num_device_blocks or 0,
            num_host_blocks=num_host_blocks,
            block_size=config.block_size,
            vocab_size=vocab_size,
            fail_rows=self._rows_that_fail,
            fail_copies=lambda copy: self.fails_next_copy,
            copy_seconds=lambda copy: STEP_S / 2,
            step_seconds=lambda step: STEP_S,
        )
        self.now = 0.0
        self.core = SchedulerCore(config, self.device.capacity, epoch=Epoch(1))
        self.checker = Checker(self.core, config, dataclasses.replace(self.device, epoch=None))
        self.guests: dict[RequestId, Guest] = {}
        self.texts = Texts({})
        self.steps: deque[RunStep] = deque()
        self.copies: dict[CopyDirection, deque[CopyBlocks]] = {"out": deque(), "in": deque()}
        self.answers: deque[StepDone | CopyDone] = deque()
        self.to_texts: deque[TokensSampled | Refused] = deque()
        self.replies: deque[Abort | Closed | Resend] = deque()
        self.unread: deque[Credit] = deque()
        self.fails_next_copy = False
        self.poisoned: set[RequestId] = set()
        self.num_lives = 1

    # ---- visitors -------------------------------------------------------------------------------

    def come(self, prompt: list[int], params: SamplingParams, **admit: object) -> RequestId:
        """A request arrives."""
        request = RequestId(len(self.guests) + 1)
        message = Admit(request, f"request {request}", prompt, params, self.now, **admit)  # type: ignore[arg-type]
        visitor = Visitor(name=request, comes_s=self.now, prompt=tuple(prompt), params=params)
        self.guests[request] = Guest(visitor, message)
        self.hear(message)
        return request

    def leave(self, request: RequestId) -> None:
        """A client goes."""
        self.hear(Abort(request))

    def read(self) -> None:
        """The reader that has waited longest takes a token."""
        self.hear(self.unread.popleft())

    # ---- the scheduler --------------------------------------------------------------------------

    def hear(self, message: object) -> None:
        """The scheduler handles a message."""
        self.checker.hears(message)
        core = self.core
        match message:
            case Admit():
                core.on_admit(message, self.now)
            case Abort():
                core.on_abort(message, self.now)
            case Credit():
                core.on_credit(message)
            case StepDone():
                core.on_step_done(message, self.now)
            case CopyDone():
                core.on_copy_done(message)
            case Closed():
                core.on_closed(message)
            case Resend():
                core.on_resend(message, self.now)
            case DeviceLost():
                core.on_device_lost(message, self.now)
            case DeviceReady():
                core.on_device_ready(message)
            case _:
                raise TypeError(message)
        self._collect()
        self.checker.has_heard(message)

    def plan(self) -> bool:
        """The scheduler plans a step; whether it sent anything."""
        self.checker.before_plan(self.now)
        step = self.core.plan(self.now)
        self.checker.after_plan(step)
        before, after = self.core.take_copies()
        for operation in (*before, *([] if step is None else [step]), *after):
            self.checker.sent(operation)
            if isinstance(operation, RunStep):
                self.steps.append(operation)
            else:
                self.copies[operation.direction].append(operation)
        if step is None:
            self.checker.after_turn(self.core.next_wakeup())
        self._collect()
        return step is not None or bool(before) or bool(after)

    def _collect(self) -> None:
        for output in self.core.take_outputs(self.now):
            self.checker.said(output)
            self.to_texts.append(output)

    # ---- the device -----------------------------------------------------------------------------

    def can_run(self, operation: RunStep | CopyBlocks) -> bool:
        """Whether all that it waits for has ended."""
        return not self.device._timelines.unmet(operation.after)

    def run_step(self) -> bool:
        """The device runs the oldest step, if that need not wait."""
        if not self.steps or not self.can_run(self.steps[0]):
            return False
        self.now += STEP_S
        self.answers.append(self.device.run_step(self.steps.popleft()))
        return True

    def run_copy(self, lane: CopyDirection, *, fails: bool = False) -> bool:
        """The device carries the oldest copy of a lane out, if that need not wait."""
        if not self.copies[lane] or not self.can_run(self.copies[lane][0]):
            return False
        self.fails_next_copy = fails
        self.answers.append(self.device.copy_blocks(self.copies[lane].popleft()))
        self.fails_next_copy = False
        return True

    def die(self) -> None:
        """The device is gone; what it had answered before is heard first."""
        while self.answers:
            self.hear(self.answers.popleft())
        self.steps.clear()
        for lane in self.copies.values():
            lane.clear()
        self.hear(DeviceLost(self.core.epoch, "the test ends it"))

    def come_back(self) -> None:
        """Another device, as empty as the first."""
        self.num_lives += 1
        self.device = dataclasses.replace(self.device, epoch=None)
        self.hear(DeviceReady(Epoch(self.num_lives)))

    def _rows_that_fail(self, step: RunStep) -> list[SequenceId]:
        return [seq_id for seq_id in step.seq_ids if self.checker.request_of(seq_id) in self.poisoned]

    # ---- texts ----------------------------------------------------------------------------------

    def tell(self, *, crash: bool = False) -> None:
        """The detokenizer takes a message, or crashes at it."""
        message = self.to_texts.popleft()
        if crash:
            self.texts.crash(message)
        else:
            self.texts.on_message(message)
        deltas, replies = self.texts.take()
        self.replies.extend(replies)
        for delta in deltas:
            guest = self.guests[delta.request_id]
            self.checker.handed_over(guest, delta)
            credits = [Credit(delta.request_id, 1, delta.index) for _ in guest.take(delta, self.now)]
            self.unread.extend(credits)

    # ---- the end --------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One of everything; whether anything happened."""
        if not self.core.device_is_ready:
            self.come_back()
        happened = [self.plan(), self.run_step(), self.run_copy("out"), self.run_copy("in")]
        for queue, act in ((self.answers, self.answer), (self.to_texts, self.tell), (self.replies, self.reply)):
            happened.append(bool(queue))
            if queue:
                act()
        happened.append(bool(self.unread))
        if self.unread:
            self.read()
        return any(happened)

    def answer(self) -> None:
        """The scheduler hears the device's oldest answer."""
        self.hear(self.answers.popleft())

    def reply(self) -> None:
        """The scheduler hears the detokenizer's oldest message."""
        self.hear(self.replies.popleft())

    def run_to_the_end(self) -> None:
        """Turn until all is over, then look at what is left."""
        for _ in range(MOST_TURNS):
            if not self.turn():
                wakeup = self.core.next_wakeup()
                if wakeup is None and not self.core.num_live:
                    break
                assert wakeup is not None, f"nothing happens any more: {self.core.stats()}"
                self.now = max(self.now, wakeup)
        self.checker.at_the_end(self.guests.values(), num_open_texts=len(self.texts), num_on_device=self.device.num_sequences)
