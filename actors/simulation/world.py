"""The whole engine but its text and its transport, under the virtual clock: everybody, every message, every fault.

    visitors --Admit, Abort--> scheduler --RunStep, CopyBlocks--> keeper, device
    visitors --Credit--------> scheduler <--StepDone, CopyDone, DeviceLost, DeviceReady-- keeper
    visitors <--TextDelta----- texts <--TokensSampled, Refused-- scheduler
                               texts --Abort(stop), Closed, Resend--> scheduler

The scheduler's core, the tree, the pools, the copies' bookkeeping and the keeper's rules are the real ones. Each arrow
is a link with an order of its own and a delay drawn for each message; the scheduler takes in what has arrived when it
is not busy, plans, and sends, as its actor does. All of it follows from the scenario: a run repeats.
"""

from __future__ import annotations

import random
from functools import partial

from ...gpu.simulated import SimulatedExecutor
from ...protocol.ids import RequestId, SequenceId
from ...protocol.messages import (
    Abort,
    Admit,
    Closed,
    CopyBlocks,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    DeviceShared,
    Refused,
    Resend,
    RunStep,
    StepDone,
    TextDelta,
    TokensSampled,
)
from ..scheduling.pacing import Pacer
from ..scheduling.reserve import Reserve
from .checker import Checker
from .guest import Guest
from .keeping import VirtualKeeper
from .latency import LatencyModel
from .link import Link
from .run import Operation, VirtualRun
from .scenario import Fault, Scenario, Visitor
from .texts import Texts

ToScheduler = Admit | Abort | Credit | Resend | Closed | StepDone | CopyDone | DeviceShared | DeviceLost | DeviceReady

LINKS = ("admit", "credit", "texts", "replies", "device", "answers", "frontend")
MOST_TURNS = 50_000


class World(VirtualRun):
    """One run of `scenario`, every event of it looked at by `checker`. `record`: keep `story`, a line an event."""

    def __init__(self, scenario: Scenario, *, record: bool = False) -> None:
        self.scenario = scenario
        self.story: list[str] | None = [] if record else None
        self._draw = random.Random(scenario.seed)
        super().__init__(scenario.config, self._device(), _latency(scenario))
        if not scenario.has_reserve:
            self.core.planner.reserve = _NoReserve(scenario.config.block_size)
        if not scenario.is_paced:
            self.core.pacer = _Eager(self.core.pacer)
        self.checker = Checker(self.core, scenario.config, self._device())
        self.guests: dict[RequestId, Guest] = {}
        self._waiting_for: dict[int, list[Visitor]] = {}
        self._visitors = {visitor.name: visitor for visitor in scenario.visitors}
        self.texts = Texts({_id(v): v.text_stop for v in scenario.visitors if v.text_stop is not None})
        self._crashes = False
        self._poisoned: dict[RequestId, str] = {}
        self._inbox: list[ToScheduler] = []
        self._outputs: list[TokensSampled | Refused] = []
        self._busy_until = 0.0
        self._num_turns = 0
        self._links = {
            name: Link(self.at, random.Random(f"{scenario.seed} {name}"), scenario.weather.delay_s) for name in LINKS
        }
        self.keeper = VirtualKeeper(
            self.device,
            scenario.config,
            at=self.at,
            clock=lambda: self.now,
            tell=lambda message: self._send("answers", message),
            kills=self._kills,
            draw=random.Random(scenario.seed + 2),
        )

    def _device(self) -> SimulatedExecutor:
        scenario = self.scenario
        return SimulatedExecutor(
            num_device_blocks=scenario.num_device_blocks,
            num_host_blocks=scenario.num_host_blocks,
            block_size=scenario.config.block_size,
            vocab_size=scenario.vocab_size,
            max_model_len=scenario.max_model_len,
            fail_rows=self._rows_that_fail,
            fail_copies=lambda copy: self._draw.random() < scenario.weather.copy_failures,
            copy_seconds=lambda copy: 0.0,
            step_seconds=lambda step: 0.0,
        )

    # ---- the run --------------------------------------------------------------------------------

    def live(self) -> None:
        """Run to the end of the last visitor, and look at what is left. Raises `Violation`, or what a device raised."""
        for visitor in self.scenario.visitors:
            if visitor.follows in self._visitors:
                self._waiting_for.setdefault(visitor.follows or 0, []).append(visitor)
            else:
                self.at(visitor.comes_s, partial(self._come, visitor))
        for fault in self.scenario.faults:
            self.at(fault.at_s, partial(self._go_wrong, fault))
        self.go([])
        if self.keeper.is_spent:
            return
        num_on_device = self.keeper.executor.num_sequences
        self.checker.at_the_end(self.guests.values(), num_open_texts=len(self.texts), num_on_device=num_on_device)

    def _is_going(self) -> bool:
        return not self.keeper.is_spent and (bool(self._events) or bool(self._inbox) or self.core.num_live > 0)

    def _wakeup(self) -> float | None:
        """When the scheduler has its next turn; None: at the next message."""
        wakeup = self.now if self._inbox else self.core.next_wakeup()
        return None if wakeup is None else max(wakeup, self._busy_until)

    def _plan(self) -> None:
        """A turn of the scheduler, if one is due: take in what has arrived, plan, send."""
        wakeup = self._wakeup()
        if wakeup is None or wakeup > self.now:
            return
        self._num_turns += 1
        if self._num_turns > MOST_TURNS:
            raise AssertionError(f"no end in sight: {self.core.stats()}")
        batch, self._inbox = self._inbox, []
        for message in batch:
            self._handle(message)
        super()._plan()
        self.checker.after_turn(self.core.next_wakeup())
        self._collect()
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            self._links["texts"].send(self.now, partial(self._to_texts, output))
        self.reports += self.core.take_reports()

    def _collect(self) -> None:
        for output in self.core.take_outputs(self.now):
            self._note("says", output)
            self.checker.said(output)
            self._outputs.append(output)

    def _handle(self, message: ToScheduler) -> None:
        self._note("hears", message)
        self.checker.hears(message)
        match message:
            case StepDone():
                self.core.on_step_done(message, self.now)
            case CopyDone():
                self.core.on_copy_done(message)
            case Admit():
                self.core.on_admit(message, self.now)
            case Abort():
                self.core.on_abort(message, self.now)
            case Credit():
                self.core.on_credit(message)
            case Closed():
                self.core.on_closed(message)
            case Resend():
                self.core.on_resend(message, self.now)
            case DeviceShared():
                self.core.on_device_shared(message)
            case DeviceLost():
                if self.core.on_device_lost(message, self.now):
                    self.keeper.budget.on_progress()
            case DeviceReady():
                self.core.on_device_ready(message)
        if not isinstance(message, Abort):  # its ends may go with the tokens of a step that is heard next
            self._collect()
        self.checker.has_heard(message)

    def _decide(self) -> RunStep | None:
        self.checker.before_plan(self.now)
        step = super()._decide()
        self.checker.after_plan(step)
        return step

    def _issue(self, operation: Operation) -> None:
        self._note("sends", operation)
        self.checker.sent(operation)
        if isinstance(operation, CopyBlocks):
            predicted_s: float | None = self.core.predicted_copy_s(operation)
        else:
            predicted_s = self.core.predicted_s(operation)
        self._links["device"].send(self.now, partial(self.keeper.take, operation, predicted_s))

    def _listen(self) -> None:
        """Everything is said in the scheduler's turns."""

    def _send(self, link: str, message: ToScheduler) -> None:
        self._links[link].send(self.now, partial(self._arrive, message))

    def _arrive(self, message: ToScheduler) -> None:
        self._inbox.append(message)

    # ---- texts and visitors ---------------------------------------------------------------------

    def _to_texts(self, message: TokensSampled | Refused) -> None:
        if self._crashes:
            self._crashes = False
            self._note("texts crash at", message)
            self.texts.crash(message)
        else:
            self.texts.on_message(message)
        deltas, replies = self.texts.take()
        for delta in deltas:
            self._links["frontend"].send(self.now, partial(self._to_guest, delta))
        for reply in replies:
            self._send("replies", reply)

    def _to_guest(self, delta: TextDelta) -> None:
        guest = self.guests[delta.request_id]
        self.checker.handed_over(guest, delta)
        for moment in list(guest.take(delta, self.now)):
            self.at(moment, partial(self._send, "credit", Credit(delta.request_id, 1, delta.index)))
        if guest.wants_to_go():
            self._leave(guest)
        if guest.num_terminals:
            for visitor in self._waiting_for.pop(guest.visitor.name, []):
                self.at(max(self.now, visitor.comes_s), partial(self._come, visitor))

    def _come(self, visitor: Visitor) -> None:
        before = self.guests.get(RequestId(visitor.follows or 0))
        history = [] if before is None else [*before.admit.token_ids, *before.given[0]]
        admit = Admit(
            _id(visitor),
            f"visitor {visitor.name}",
            [*history, *visitor.prompt],
            visitor.params,
            self.now,
            list(visitor.stop_token_ids),
            priority=visitor.priority,
            tenant=visitor.tenant,
            cache_salt=visitor.cache_salt,
        )
        guest = self.guests[admit.request_id] = Guest(visitor, admit)
        self._send("admit", admit)
        if visitor.leaves_s is not None:
            self.at(self.now + visitor.leaves_s, partial(self._leave, guest))

    def _leave(self, guest: Guest) -> None:
        guest.has_left = True
        self._send("admit", Abort(guest.request_id))

    # ---- faults ---------------------------------------------------------------------------------

    def _go_wrong(self, fault: Fault) -> None:
        self._note("goes wrong", fault)
        match fault.kind:
            case "die":
                self.keeper.die("the scenario says so")
            case "hang":
                self.keeper.hang(fault.what)
            case "jump":
                self.now += fault.seconds
            case "stall":
                self._busy_until = max(self._busy_until, self.now + fault.seconds)
            case "crash":
                self._crashes = True
            case "poison":
                self._poisoned[RequestId(fault.whom)] = fault.what
            case "reset":
                self.core.on_reset()
            case "shared":
                self.keeper.share()

    def _rows_that_fail(self, step: RunStep) -> list[SequenceId]:
        """Rows of poisoned visitors; where it is to happen once, only in this step."""
        found = []
        for seq_id, samples in zip(step.seq_ids, step.samples, strict=True):
            request = self.checker.request_of(seq_id)
            if request in self._poisoned:
                found.append(seq_id)
                if samples and self._poisoned[request] != "always":
                    del self._poisoned[request]
        return found

    def _kills(self, step: RunStep) -> bool:
        names = (int(self.checker.request_of(seq_id)) for seq_id in step.seq_ids)
        return any(name in self._visitors and self._visitors[name].kills for name in names)

    def _note(self, what: str, message: object) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:9.4f} {what} {message}")


class _Unsteady(LatencyModel, frozen=True, kw_only=True):
    """Times that vary by up to `spread` of them either way; a share `stalls` of copies takes a hundred times as long."""

    draw: random.Random
    spread: float = 0.0
    stalls: float = 0.0

    def of_step(self, step: RunStep) -> float:
        return super().of_step(step) * self._factor()

    def of_copy(self, copy: CopyBlocks, block_bytes: int) -> float:
        seconds = super().of_copy(copy, block_bytes) * self._factor()
        return seconds * 100 if self.draw.random() < self.stalls else seconds

    def _factor(self) -> float:
        return 1.0 + self.spread * self.draw.uniform(-1.0, 1.0)


def _latency(scenario: Scenario) -> _Unsteady:
    weather = scenario.weather
    return _Unsteady(
        step_s=weather.step_s,
        token_s=weather.token_s,
        row_s=weather.row_s,
        copy_s=weather.copy_s,
        out_rate=weather.copy_rate,
        in_rate=weather.copy_rate,
        spread=weather.spread,
        stalls=weather.copy_stalls,
        draw=random.Random(scenario.seed + 1),
    )


class _Eager(Pacer):
    """Plans as early as is allowed."""

    def __init__(self, pacer: Pacer) -> None:
        super().__init__()
        self.model = pacer.model  # the cost model predicts by this one

    def plan_at(self) -> float | None:
        return None


class _NoReserve(Reserve):
    """Keeps nothing free."""

    def blocks(self, growth: int) -> int:
        return 0


def _id(visitor: Visitor) -> RequestId:
    return RequestId(visitor.name)
