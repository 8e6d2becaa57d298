"""A recorded run again: the same inputs at the same clock readings, and whether the decisions are the same.

A core's decisions are a function of the messages it is given, of the clock it is given with them, and of when it is asked
to plan. All of that is in the trace, measured durations included: of steps, of copies, of planning itself. So a fresh
core with the trace's configuration plans the same steps, block by block, or something has changed.

Tokens count only in so far as they are alike. Where the trace has none, stand-ins are made from the names of blocks
(`contents.py`), and an end by a stop token is taken from the trace, as a fact. An output that was cut off by a crash left no
names behind, and gets tokens like nobody else's: near such an end a replay may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ...protocol import trace
from ...protocol.config import EngineConfig
from ...protocol.errors import ValidationError, problem_of
from ...protocol.ids import CopyId, Epoch, RequestId, SequenceId, StepId
from ...protocol.messages import (
    Abort,
    Admit,
    Closed,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    DeviceShared,
    FailedRow,
    FrontendLost,
    PromptPart,
    Resend,
    StepDone,
)
from ...protocol.sampling import SamplingParams
from ...protocol.trace_reading import Trace
from ..observing.trace_lines import Happened, TraceLines, seen
from ..scheduling.core import SchedulerCore
from .contents import BlockContents
from .prompt_parts import prompt_parts

_FIRST_STRANGER = 1 << 24
"""Stand-ins made from names are below this."""
_NOT_DECIDED = frozenset({"at", "plan_s"})


class Difference(NamedTuple):
    """Where a replay first decided otherwise. `fields` are (name, recorded, replayed)."""

    at: float
    step_id: int
    fields: list[tuple[str, Any, Any]]


class Replayed(NamedTuple):
    """How a replay went, as far as it did."""

    num_steps: int
    num_requests: int
    digest: str
    recorded_digest: str | None
    """None: the run that was recorded did not come to its end."""
    difference: Difference | None

    @property
    def is_same(self) -> bool:
        """Whether every decision was the recorded one."""
        return self.difference is None and self.recorded_digest in (None, self.digest)


def config_of(began: trace.Began) -> EngineConfig:
    """The configuration that a trace was recorded under. Raises `ValidationError` for one this version does not know."""
    try:
        return EngineConfig(**{"model": "recorded", **began.config, "trace_file": None, "trace_content": False})
    except TypeError as error:
        raise ValidationError(f"the trace's configuration: {error}", field="config") from None


class Replay:
    """Feeds a trace to a fresh core. `run` goes through it once."""

    def __init__(self, recorded: Trace) -> None:
        began = recorded.began
        self.core = SchedulerCore(config_of(began), began.capacity, epoch=Epoch(began.epoch))
        self._records = recorded.records
        self._lines = TraceLines(began.capacity.block_size, None)
        self._size = began.capacity.block_size
        named = (record for record in self._records if isinstance(record, trace.Named))
        self._contents = BlockContents(named, self._size)
        self._ends = {(record.request_id, record.index): record for record in self._records if isinstance(record, trace.Ended)}
        self._arrived: dict[int, trace.Arrived] = {}
        self._tails: dict[tuple[int, int], list[int]] = {}
        self._samplers: dict[tuple[int, int], list[SequenceId]] = {}
        self._prompts: dict[tuple[int, int], list[PromptPart]] = {}
        self._strangers = itertools.count(_FIRST_STRANGER)
        self._num_steps = 0

    def run(self, on_record: Callable[[], None] = lambda: None) -> Replayed:
        """Go through the trace up to its end or the first decision that differs. Calls `on_record` for each record."""
        recorded_digest: str | None = None
        for record in self._records:
            on_record()
            if isinstance(record, trace.Planned):
                difference = self._plan(record)
                if difference is not None:
                    return self._result(None, difference)
            elif isinstance(record, trace.Finished):
                recorded_digest = record.digest
            else:
                self._feed(record)
        return self._result(recorded_digest, None)

    def _result(self, recorded_digest: str | None, difference: Difference | None) -> Replayed:
        return Replayed(self._num_steps, len(self._arrived), self._lines.digest.hexdigest(), recorded_digest, difference)

    # ---- what leaves the core ---------------------------------------------------------------------

    def _plan(self, recorded: trace.Planned) -> Difference | None:
        core = self.core
        step = core.plan(recorded.at)
        before, after = core.take_copies()
        sent = seen(core, recorded.at, step, [*before, *after], recorded.plan_s)
        replayed, *_ = self._lines.records(sent)
        assert isinstance(replayed, trace.Planned)
        if step is None:
            for report in core.take_reports():
                list(self._lines.records(Happened(recorded.at, report)))
            core.take_outputs(recorded.at)
        else:
            self._num_steps += 1
            self._samplers[step.epoch, step.step_id] = [
                seq_id for seq_id, samples in zip(step.seq_ids, step.samples, strict=True) if samples
            ]
            self._prompts[step.epoch, step.step_id] = list(prompt_parts(step, self._num_asked))
            core.pacer.on_planned(recorded.plan_s)
        fields = [
            (name, getattr(recorded, name), getattr(replayed, name))
            for name in recorded.__struct_fields__
            if name not in _NOT_DECIDED and getattr(recorded, name) != getattr(replayed, name)
        ]
        return Difference(recorded.at, recorded.step_id, fields) if fields else None

    # ---- what enters it ---------------------------------------------------------------------------

    def _feed(self, record: trace.AnyRecord) -> None:
        core = self.core
        match record:
            case trace.Arrived():
                self._admit(record)
            case trace.StepEnded():
                self._end_step(record)
            case trace.CopyEnded():
                core.on_copy_done(_copy_done(record))
            case trace.Aborted():
                core.on_abort(Abort(RequestId(record.request_id), record.reason, record.index), record.at)
            case trace.Credited():
                core.on_credit(Credit(RequestId(record.request_id), record.num_tokens, record.index))
            case trace.DeviceEvent():
                self._device(record)
            case trace.Told():
                self._tell(record)
            case _:
                pass  # what was decided, and is decided again

    def _tell(self, record: trace.Told) -> None:
        request_ids = [RequestId(request_id) for request_id in record.request_ids]
        match record.what:
            case "reset":
                self.core.on_reset()
            case "drain":
                self.core.draining = True
            case "closed":
                self.core.on_closed(Closed(request_ids))
            case "left":
                self.core.on_frontend_lost(FrontendLost(record.incarnation), record.at)
            case "resend":
                for request_id in request_ids:
                    self.core.on_resend(Resend(request_id), record.at)

    def _device(self, record: trace.DeviceEvent) -> None:
        epoch = Epoch(record.epoch)
        match record.what:
            case "lost":
                self.core.on_device_lost(DeviceLost(epoch, ""), record.at)
            case "ready":
                self.core.on_device_ready(DeviceReady(epoch))
            case "shared":
                self.core.on_device_shared(DeviceShared(epoch, ""))

    def _admit(self, record: trace.Arrived) -> None:
        self._arrived.setdefault(record.request_id, record)
        message = admit_of(record, self._prompt(record))
        try:
            self.core.on_admit(message, record.at)
        except Exception as error:  # as in the Scheduler: a policy that cannot rank a request
            self.core.refuse(message.request_id, problem_of(error))

    def _end_step(self, record: trace.StepEnded) -> None:
        failed = [FailedRow(SequenceId(seq_id), "", is_sound) for seq_id, is_sound in record.failed]
        gone = {row.seq_id for row in failed}
        samplers = self._samplers.pop((record.epoch, record.step_id), [])
        seq_ids = [seq_id for seq_id in samplers if seq_id not in gone]
        if record.seq_ids is not None:
            seq_ids = [SequenceId(seq_id) for seq_id in record.seq_ids]
        tokens = record.token_ids if record.token_ids is not None else [self._next_token(seq_id) for seq_id in seq_ids]
        prompts = self._prompts.pop((record.epoch, record.step_id), [])
        done = StepDone(
            Epoch(record.epoch),
            StepId(record.step_id),
            seq_ids,
            tokens,
            record.seconds,
            failed,
            waited_s=record.waited_s,
            prompts=prompts,
        )
        self.core.on_step_done(done, record.at)

    def _num_asked(self, seq_id: SequenceId) -> int:
        seq = self.core.table.sequences[seq_id]
        return 0 if seq.prompt_logprobs is None else seq.num_prompt_tokens

    # ---- tokens -----------------------------------------------------------------------------------

    def _prompt(self, record: trace.Arrived) -> list[int]:
        if record.token_ids is not None:
            return record.token_ids
        if not record.seq_id:
            return [0] * record.num_prompt_tokens  # it was refused, and will be
        return self._contents.of(record.hash_ids)

    def _tail(self, request_id: int, index: int) -> list[int]:
        """The tokens of a sequence from its prompt's last whole block on; none if it never ended."""
        tail = self._tails.get((request_id, index))
        if tail is None:
            ended = self._ends.get((request_id, index))
            tail = self._tails[request_id, index] = [] if ended is None else self._contents.of(ended.hash_ids)
        return tail

    def _next_token(self, seq_id: SequenceId) -> int:
        """What a sequence is given next; an end by a stop token is made to come true."""
        seq = self.core.table.sequences.get(seq_id)
        if seq is None:
            return 0  # it has ended: nobody looks at it
        tail = self._tail(seq.request_id, seq.index)
        place = len(seq.log) - seq.num_prompt_tokens // self._size * self._size
        token = tail[place] if place < len(tail) else next(self._strangers)
        ended = self._ends.get((seq.request_id, seq.index))
        if ended is not None and ended.by_token and ended.num_output_tokens == seq.num_output_tokens + 1:
            seq.stop_ids = frozenset({token})
        return token


def admit_of(record: trace.Arrived, token_ids: Iterable[int]) -> Admit:
    """The request of `record` with these tokens."""
    return Admit(
        RequestId(record.request_id),
        record.label,
        list(token_ids),
        SamplingParams(
            n=record.n,
            temperature=0.0,
            max_tokens=record.max_tokens,
            output_kind=record.output_kind,
            prompt_logprobs=record.prompt_logprobs,
        ),
        record.arrival_s,
        stop_token_ids=record.stop_token_ids,
        priority=record.priority,
        tenant=record.tenant,
        cache_salt=str(record.namespace) if record.namespace else None,
        holds=record.holds,
        follows=None if record.follows is None else RequestId(record.follows),
    )


def _copy_done(record: trace.CopyEnded) -> CopyDone:
    return CopyDone(
        Epoch(record.epoch),
        CopyId(record.copy_id),
        record.direction,
        record.num_bytes,
        record.seconds,
        record.waited_s,
        record.ok,
    )
