"""The recorder: everything that enters the scheduler's core and everything that leaves it, as a trace (`trace_file`).

It stands beside the Scheduler and is told of each message after it was handled, of each plan, and of what came of both.
On the scheduler's thread, here, small records are made. What grows with tokens is only referred to, and made on the trace's
own thread (`trace_lines.py`), where everything is encoded and written (`trace_file.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ...protocol import trace
from ...protocol.config import SECRETS, EngineConfig, shown
from ...protocol.ids import RequestId
from ...protocol.messages import (
    ALL_SEQUENCES,
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
from ...protocol.sampling import FinishReason
from ...protocol.version import __version__
from ..scheduling.core import SchedulerCore
from ..scheduling.reports import Finished, Report
from ..scheduling.request import Request
from .block_names import POOLS, SPARE_NAMES, BlockNames
from .logs import logger
from .trace_file import TraceFile
from .trace_lines import Answered, Came, Entry, Happened, Over, TraceLines, seen

if TYPE_CHECKING:
    from ..scheduler import SchedulerInbox


class Recorder:
    """Writes the trace of `core`. Raises `ConfigError` where `trace_file` cannot be opened."""

    def __init__(self, core: SchedulerCore, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.trace_file is not None, "nobody asked for a trace"
        capacity = core.capacity
        limit = POOLS * (capacity.num_device_blocks + capacity.num_host_blocks) + SPARE_NAMES
        names = None if config.trace_content else BlockNames(capacity.block_size, limit=limit)
        lines = TraceLines(capacity.block_size, names)
        self._core = core
        self._clock = clock
        self._live: dict[RequestId, tuple[Request, set[int]]] = {}
        self._file: TraceFile[Entry] = TraceFile(
            config.trace_file,
            lines.records,
            partial(lines.last, clock),
            on_failure=partial(_say_failure, config.trace_file),
        )
        self._put = self._file.put
        self._put(
            trace.Began(
                version=trace.TRACE_VERSION,
                engine=__version__,
                config={key: value for key, value in shown(config).items() if key not in SECRETS},
                capacity=capacity,
                epoch=core.epoch,
                at=clock(),
                wall_s=time.time(),
                content=config.trace_content,
            )
        )

    # ---- what enters ----------------------------------------------------------------------------

    def received(self, message: SchedulerInbox, now: float) -> None:
        """`message` has been handled with this reading of the clock."""
        match message:
            case StepDone():
                self._put(Answered(now, message))
            case CopyDone():
                self._put(_copy_ended(message, now))
            case Admit():
                self._admitted(message, now)
            case Abort():
                self._put(trace.Aborted(at=now, request_id=message.request_id, reason=message.reason, index=message.index))
            case Credit():
                self._put(
                    trace.Credited(at=now, request_id=message.request_id, num_tokens=message.num_tokens, index=message.index)
                )
            case Closed():
                self._put(trace.Told(at=now, what="closed", request_ids=list(message.request_ids)))
            case Resend():
                self._put(trace.Told(at=now, what="resend", request_ids=[message.request_id]))
            case FrontendLost():
                self._put(trace.Told(at=now, what="left", incarnation=message.incarnation))
            case DeviceLost():
                self._put(trace.DeviceEvent(at=now, what="lost", epoch=message.epoch))
            case DeviceReady():
                self._put(trace.DeviceEvent(at=now, what="ready", epoch=message.epoch))
            case DeviceShared():
                self._put(trace.DeviceEvent(at=now, what="shared", epoch=message.epoch))

    def was_reset(self) -> None:
        """The core has forgotten its cache."""
        self._put(trace.Told(at=self._clock(), what="reset"))

    def was_drained(self) -> None:
        """The core takes no new requests from here on."""
        self._put(trace.Told(at=self._clock(), what="drain"))

    def _admitted(self, admit: Admit, now: float) -> None:
        request = self._core.table.get(admit.request_id)
        if request is not None and admit.request_id not in self._live:
            self._live[admit.request_id] = request, set(range(len(request.sequences)))
        self._put(Came(now, admit, 0 if request is None else request.sequences[0].seq_id))

    # ---- what leaves ----------------------------------------------------------------------------

    def planned(self, at: float, step: RunStep | None, copies: Iterable[CopyBlocks], plan_s: float) -> None:
        """A plan at clock `at` made this step, or none, and these copies; it was sent `plan_s` later."""
        self._put(seen(self._core, at, step, copies, plan_s))

    def told(self, outputs: Iterable[TokensSampled | Refused], reports: Iterable[Report], now: float) -> None:
        """What a turn came to."""
        for report in reports:
            self._put(Happened(now, report))
        for output in outputs:
            if isinstance(output, TokensSampled):
                for end in output.ended:
                    self._ended(end.request_id, end.index, end.finish_reason, now)

    def travelled(self, account: Finished, now: float) -> None:
        """A request's account is closed."""
        if account.journey is not None:
            self._put(
                trace.Travelled(
                    at=now,
                    request_id=account.request_id,
                    label=account.label,
                    arrival_s=account.arrival_s,
                    reason=account.finish_reason,
                    journey=account.journey,
                    num_prompt_tokens=account.num_prompt_tokens,
                    num_cached_tokens=account.num_cached_tokens,
                    num_output_tokens=account.num_output_tokens,
                    num_preemptions=account.num_preemptions,
                )
            )

    def _ended(self, request_id: RequestId, index: int, reason: FinishReason, now: float) -> None:
        found = self._live.get(request_id)
        if found is None:
            return  # said again
        request, left = found
        for one in sorted(left) if index == ALL_SEQUENCES else [index]:
            if one in left:
                left.remove(one)
                self._put(Over(now, request, one, reason))
        if not left:
            del self._live[request_id]

    def close(self) -> None:
        """Write the rest, what has not ended too, and close the file."""
        now = self._clock()
        for request, left in self._live.values():
            for index in sorted(left):
                self._put(Over(now, request, index, None))
        self._live.clear()
        self._file.close()


def _copy_ended(done: CopyDone, now: float) -> trace.CopyEnded:
    return trace.CopyEnded(
        at=now,
        copy_id=done.copy_id,
        epoch=done.epoch,
        direction=done.direction,
        num_bytes=done.num_bytes,
        seconds=done.seconds,
        waited_s=done.waited_s,
        ok=done.ok,
    )


def _say_failure(path: str, reason: str) -> None:
    logger("recorder").error("trace.stopped", path=path, reason=reason)
