"""The Scheduler: drain the inbox, plan, send. All decisions are `scheduling/core.py`'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from ..protocol.errors import problem_of
from ..protocol.ids import show_request_id
from ..protocol.messages import (
    Abort,
    Admit,
    Closed,
    CopyBlocks,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    DeviceShared,
    FrontendLost,
    Refused,
    Resend,
    RunStep,
    StepDone,
    TokensSampled,
)
from .accounts import Accounts, line_of, rounded
from .mailbox import Mailbox
from .observing.logs import logger
from .observing.recorder import Recorder
from .scheduling.core import SchedulerCore
from .scheduling.reports import Finished, HostHit, Paused, Preempted, Report

FromFrontend = Admit | Abort | Credit | Resend | Closed
FromDevice = StepDone | CopyDone | DeviceShared | DeviceLost | DeviceReady
SchedulerInbox = FromFrontend | FromDevice | FrontendLost

SendToDevice = Callable[[RunStep | CopyBlocks, float | None], None]
"""Takes a step or a copy and how long it should take, over one ordered link."""


class Listener(Protocol):
    """Takes the scheduler's tokens and refusals: a mailbox, or links to many."""

    async def post(self, message: TokensSampled | Refused, /) -> None:
        """Take a message, waiting for room where there is none."""
        ...


class Scheduler:
    """Receives what comes from every side; sends `RunStep` to the worker, `CopyBlocks` to the swap manager, `TokensSampled`
    and `Refused` to the detokenizer.
    """

    def __init__(
        self,
        core: SchedulerCore,
        *,
        inbox: Mailbox[SchedulerInbox],
        device: SendToDevice,
        detokenizer: Listener,
        on_culprit: Callable[[], None],
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.inbox = inbox
        self._device = device
        self._detokenizer = detokenizer
        self._on_culprit = on_culprit
        self._recorder = recorder
        self._clock = clock
        self._log = logger("scheduler")
        self.accounts = Accounts(self._write_account)
        # Taken up at the end of a turn: the account that is closed may be one of its own.
        self._closings: list[Closed | FrontendLost] = []
        self._reports: list[Report] = []

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            batch = await self.inbox.take(timeout_s=self._patience())
            now = self._clock()
            self.core.stalls.at(now)
            for message in batch:
                self._handle(message, now)
            self.send_steps()
            outputs, reports = self.core.take_outputs(now), self.core.take_reports()
            if self._recorder is not None:
                self._recorder.told(outputs, reports, now)
            self._reports += reports
            for output in outputs:
                await self._send_on(output)
            self._write_down(now)

    def close(self) -> None:
        """Write down what is known of requests whose last text was still on its way."""
        self._reports += self.core.take_reports()
        self._write_down(self._clock())
        self.accounts.close()

    def send_steps(self) -> None:
        """Plan as many steps as may be in flight and hand them to the worker."""
        while True:
            began = self._clock()
            step = self.core.plan(began)
            before, after = self.core.take_copies()
            self._send_copies(before)
            if step is not None:
                self._device(step, self.core.predicted_s(step))
            self._send_copies(after)
            plan_s = self._clock() - began
            if self._recorder is not None:
                self._recorder.planned(began, step, [*before, *after], plan_s)
            if step is None:
                return
            self.core.pacer.on_planned(plan_s)
            self._log.debug(
                "scheduler.step",
                step_id=step.step_id,
                num_rows=len(step.seq_ids),
                num_tokens=sum(step.num_tokens),
                num_running=len(self.core.queues.running),
                num_waiting=len(self.core.queues.waiting),
                num_preempted=len(self.core.queues.recovery),
                num_free_blocks=self.core.cache.pool.num_free,
            )

    def reset_cache(self) -> None:
        """Forget every cached prefix that nobody holds."""
        self.core.on_reset()
        if self._recorder is not None:
            self._recorder.was_reset()

    def drain(self) -> None:
        """Take no new requests from here on."""
        self.core.draining = True
        if self._recorder is not None:
            self._recorder.was_drained()

    def _send_copies(self, copies: Iterable[CopyBlocks]) -> None:
        for copy in copies:
            self._device(copy, self.core.predicted_copy_s(copy))

    def _patience(self) -> float:
        wakeup = self.core.next_wakeup()
        return float("inf") if wakeup is None else max(0.0, wakeup - self._clock())

    def _handle(self, message: SchedulerInbox, now: float) -> None:
        match message:
            case StepDone():
                predicted_s = self.core.predicted_s(message)
                self.core.on_step_done(message, now)
                self._log.debug("scheduler.step_done", step_id=message.step_id, predicted_s=predicted_s, step_s=message.seconds)
            case CopyDone():
                self.core.on_copy_done(message)
            case Admit():
                self._admit(message, now)
            case Abort():
                self.core.on_abort(message, now)
            case Credit():
                self.core.on_credit(message)
            case Closed():
                self.core.on_closed(message)
                self._closings.append(message)
            case Resend():
                self.core.on_resend(message, now)
            case FrontendLost():
                self.core.on_frontend_lost(message, now)
                self._closings.append(message)
            case DeviceShared():
                self.core.on_device_shared(message)
            case DeviceLost():
                if self.core.on_device_lost(message, now):
                    self._on_culprit()
            case DeviceReady():
                self.core.on_device_ready(message)
        if self._recorder is not None:
            self._recorder.received(message, now)

    def _admit(self, message: Admit, now: float) -> None:
        try:
            self.core.on_admit(message, now)
        except Exception as error:
            # One request's fault (a policy that cannot rank it) is that request's alone.
            request_id = show_request_id(message.request_id)
            self._log.error("request.failed", request_id=request_id, label=message.label, reason=repr(error), exc_info=error)
            self.core.refuse(message.request_id, problem_of(error))

    async def _send_on(self, output: TokensSampled | Refused) -> None:
        if isinstance(output, Refused) and output.problem is not None:
            self._log.info(
                "request.refused",
                request_id=show_request_id(output.request_id),
                reason=output.problem.message,
                field=output.problem.field,
            )
        await self._detokenizer.post(output)

    def _write_down(self, now: float) -> None:
        reports, self._reports = self._reports, []
        for report in reports:
            if isinstance(report, Finished):
                self.accounts.keep(report)
            else:
                self._write_report(report)
        closings, self._closings = self._closings, []
        for closing in closings:
            if isinstance(closing, Closed):
                self.accounts.on_closed(closing, now)
            else:
                self.accounts.on_frontend_lost(closing.incarnation)

    def _write_account(self, account: Finished) -> None:
        if account.problem is not None:
            request_id = show_request_id(account.request_id)
            self._log.error("request.failed", request_id=request_id, label=account.label, reason=account.problem.message)
        self._log.info("request.finished", **line_of(account))
        if self._recorder is not None:
            self._recorder.travelled(account, self._clock())

    def _write_report(self, report: Preempted | HostHit | Paused) -> None:
        fields = msgspec.structs.asdict(report)
        fields["request_id"] = show_request_id(report.request_id)
        match report:
            case Preempted():
                self._log.info("scheduler.preempted", **rounded(fields))
            case HostHit():
                self._log.info("scheduler.host_hit", **rounded(fields))
            case Paused():
                self._log.info("scheduler.paused", **fields)
