"""What must hold of every run, looked at after every event. Each rule raises a `Violation` that names it.

    rule             what                                                                       where
    --------------   ------------------------------------------------------------------------   ----------------
    books            blocks of both tiers are conserved, locks are holders, promises are kept   `SchedulerCore.audit`
    fences           an operation waits for all earlier users of its blocks                     `fence_ledger.py`
    (the device's)   it runs after them, and reads what it must find                            `gpu/simulated`
    failed rows      nobody builds on what a row with NaN logits computed                       `taint.py`
    rows             a row goes on where the last one ended, in blocks that are not free        `rows.py`
    in flight        no more steps than `max_steps_in_flight`                                   `rows.py`
    credit, length   nothing is planned past a reader's credit or a request's last token        `rows.py`
    budget           every decode has its row, prefills keep to the token budget                `rows.py`
    hits             cached tokens are those of the prompt that no row computed                 `rows.py`
    outputs          tokens are those of a run alone                                            `answers.py`
    one terminal     each request opens and ends once, and its visitor hears so                 `answers.py`
    reasons          each end has one that there is a reason for                                `answers.py`
    newcomers        nobody passes whom it must not                                             `order.py`
    preemptions      nobody makes way too early, nor too often                                  `order.py`, here
    waiting          who is first of all that could compute is served                           `order.py`
    suspects         who may have killed the device computes alone                              `blame.py`
    stuck            while there is work, something is in flight or a wake-up is set            here
    left over        at the end nothing is left of anybody                                      here

What a device notices is raised by the device. A checker serves one run.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...gpu.simulated import SimulatedExecutor
from ...protocol.config import EngineConfig
from ...protocol.ids import RequestId, SequenceId
from ...protocol.messages import (
    Abort,
    Admit,
    CopyBlocks,
    CopyDone,
    Credit,
    DeviceLost,
    Refused,
    Resend,
    RunStep,
    StepDone,
    TextDelta,
    TokensSampled,
)
from ..scheduling.core import SchedulerCore
from .answers import Answers
from .blame import Blame
from .fence_ledger import FenceLedger
from .guest import Guest
from .order import PREEMPTIONS, Order
from .rows import Rows
from .taint import Taint
from .violation import Violation

BOOKS, STUCK, LEFT = "books", "stuck", "left over"


class Checker:
    """Watches one core from outside: what it hears, what it sends, what it says. Reads its books, changes nothing."""

    def __init__(self, core: SchedulerCore, config: EngineConfig, device: SimulatedExecutor) -> None:
        self.core = core
        self.config = config
        self.answers = Answers(device, core.max_length)
        self.order = Order(core, config)
        self.rows = Rows(core, config, self.answers)
        self.blame = Blame(self.answers.excuses)
        self.num_steps = 0
        self._num_set_back = 0
        self._begin_life()

    def _begin_life(self) -> None:
        self._fences = FenceLedger(self.core.capacity.block_size)
        self._taint = Taint()
        self._num_copies = 0
        self.rows.begin_life()

    def request_of(self, seq_id: SequenceId) -> RequestId:
        """Whose sequence it is, or was."""
        return self.rows.request_of(seq_id)

    # ---- what the scheduler hears ---------------------------------------------------------------

    def hears(self, message: object) -> None:
        """A message is about to be handled."""
        answers = self.answers
        match message:
            case Admit():
                answers.admits.setdefault(message.request_id, message)
            case Abort(reason="stop"):
                n = answers.admits[message.request_id].params.n
                indices = range(n) if message.index is None else [message.index]
                answers.stopped.update((message.request_id, index) for index in indices)
            case Abort():
                answers.aborted.add(message.request_id)
            case Credit():
                key = (message.request_id, message.index)
                self.rows.granted[key] = self.rows.granted.get(key, 0) + message.num_tokens
            case Resend():
                answers.resent.add(message.request_id)
            case StepDone() | CopyDone() | DeviceLost() if message.epoch == self.core.epoch and self.core.device_is_ready:
                self._device_says(message)
            case _:
                pass

    def _device_says(self, message: StepDone | CopyDone | DeviceLost) -> None:
        if isinstance(message, CopyDone):
            self._fences.told(message)
            self._num_copies -= 1
        elif isinstance(message, StepDone):
            del self.rows.in_flight[message.step_id]
            self._fences.told(message)
            self._taint.told(message)
            for row in message.failed:
                self.answers.excuses[self.request_of(row.seq_id)] = "its row failed"
            if message.failed:
                self._set_back()
        else:
            present = {seq_id for step in self.rows.in_flight.values() for seq_id in step.seq_ids}
            alive = {seq_id: self.request_of(seq_id) for seq_id in present if seq_id in self.core.table.sequences}
            self.blame.death(present, alive)
            self._set_back()
            self._begin_life()

    def _set_back(self) -> None:
        """Others lose what they had, by no fault of the order."""
        self._num_set_back += len(self.core.table.sequences)
        self.order.forget()
        self.rows.set_back()

    def has_heard(self, message: object) -> None:
        """It was handled."""
        self._check_books(type(message).__name__)

    # ---- what it plans and sends ----------------------------------------------------------------

    def before_plan(self, now: float) -> None:
        """A plan is about to be made."""
        for seq in self.core.queues.paused.values():
            if now >= seq.paused_s + self.config.max_pause_s:
                self.answers.excuses.setdefault(seq.request_id, "its reader was too slow")
        self.order.before()
        self.rows.before_plan()

    def after_plan(self, step: RunStep | None) -> None:
        """It has been made; its step, if any, has not been sent yet."""
        self._check_books("a plan")
        self.rows.after_plan(step)
        self.order.after(step)

    def sent(self, operation: RunStep | CopyBlocks) -> None:
        """An operation goes to the device."""
        rows = self._fences.sent(operation)
        if isinstance(operation, CopyBlocks):
            self._num_copies += 1
            self._taint.sent_copy(operation)
            return
        self.num_steps += 1
        for new in operation.admitted:
            self.order.admitted(new.seq_id)
        self.rows.sent(operation, rows)
        self._taint.sent_step(operation, rows)
        self.blame.check_alone(self.rows.in_flight.values(), self.core.table.sequences)

    def after_turn(self, wakeup: float | None) -> None:
        """All that is to be sent has been. Nobody may be left who only waits for a turn that does not come."""
        core, queues = self.core, self.core.queues
        if not core.device_is_ready or self.rows.in_flight or self._num_copies or wakeup is not None:
            return
        idle = [*queues.running, *queues.recovery, *queues.waiting, *queues.fetching.values()]
        if any(not seq.is_held for seq in idle):
            raise Violation(STUCK, f"nothing is in flight and nobody will ask again: {core.stats()}")

    # ---- what it says ---------------------------------------------------------------------------

    def said(self, message: TokensSampled | Refused) -> None:
        """The scheduler tells the detokenizer."""
        if isinstance(message, TokensSampled):
            for opening in message.opened:
                if opening.request_id not in self.answers.opens:
                    self.rows.check_hits(opening)
            if not self.answers.is_replay(message):
                self._gained(message)
        self.answers.said(message)

    def _gained(self, message: TokensSampled) -> None:
        indices = message.indices or [0] * len(message.token_ids)
        for key in zip(message.request_ids, indices, strict=True):
            seq_id = self.rows.seq_ids[key]
            self.blame.token(seq_id)
            self.order.gained(seq_id)

    def handed_over(self, guest: Guest, delta: TextDelta) -> None:
        """A visitor is about to be told."""
        self.answers.handed_over(guest, delta)

    # ---- books and the end ----------------------------------------------------------------------

    def _check_books(self, what: str) -> None:
        problems = self.core.audit()
        if problems:
            raise Violation(BOOKS, f"after {what}: {'; '.join(problems)}")

    def at_the_end(self, guests: Iterable[Guest], *, num_open_texts: int, num_on_device: int) -> None:
        """Everybody has gone: each has had what it came for, and nothing is left of anybody."""
        for guest in guests:
            self.answers.at_the_end(guest)
        self._check_bound()
        self.core.on_reset()
        self._check_books("the end")
        stats = self.core.stats()
        left = {
            "requests": self.core.num_live,
            "steps": len(self.rows.in_flight),
            "copies": self._num_copies,
            "histories": len(self.core.telling.histories),
            "texts": num_open_texts,
            "sequences on the device": num_on_device,
            "device blocks": stats.device_blocks.total - stats.device_blocks.free,
            "host blocks": stats.host_blocks.total - stats.host_blocks.free,
            "namespaces": len(self.core.cache.tree.namespaces()),
        }
        if any(left.values()):
            raise Violation(LEFT, ", ".join(f"{count} {what}" for what, count in left.items() if count))

    def _check_bound(self) -> None:
        """Behaviour 12: at most sequences x blocks of the longest, and as many again for each time that all were set back."""
        lengths = [self.answers.longest(request) for request in self.answers.admits]
        longest = -(-max(lengths, default=0) // self.config.block_size)
        num_sequences = sum(admit.params.n for admit in self.answers.admits.values())
        most = (num_sequences + self._num_set_back) * longest
        if self.order.num_preemptions > most:
            raise Violation(PREEMPTIONS, f"{self.order.num_preemptions} preemptions, {most} are the bound")
