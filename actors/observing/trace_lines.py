"""What the recorder hands over, and the records that are made of it, on the trace's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...protocol import trace
from ...protocol.messages import Admit, CopyBlocks, RunStep, StepDone
from ...protocol.sampling import FinishReason
from ..scheduling import reports
from ..scheduling.core import SchedulerCore
from ..scheduling.digest import DIGITS, DecisionDigest
from ..scheduling.request import Request
from ..scheduling.step_time import Load
from .block_names import BlockNames, Namespaces

_NOTHING = Load(0, 0, 0)


class Came(NamedTuple):
    """A request was handled; its first sequence is `seq_id`, 0 if it was refused."""

    at: float
    admit: Admit
    seq_id: int


class Answered(NamedTuple):
    """A step came back."""

    at: float
    done: StepDone


class Counts(NamedTuple):
    """How a scheduler stands after a plan."""

    num_running: int
    num_waiting: int
    num_preempted: int
    num_free: int
    num_cached: int
    num_evicted: int
    num_host_used: int


_NOT_COUNTED = Counts(0, 0, 0, 0, 0, 0, 0)


class Sent(NamedTuple):
    """A plan: its step with the copies before and after it; or nothing, and then nothing is counted."""

    at: float
    plan_s: float
    step: RunStep | None
    load: Load
    predicted_s: float | None
    copies: list[tuple[CopyBlocks, float]]
    counts: Counts


def seen(core: SchedulerCore, at: float, step: RunStep | None, copies: Iterable[CopyBlocks], plan_s: float) -> Sent:
    """What `core` has just planned."""
    told = [(copy, core.predicted_copy_s(copy)) for copy in copies]
    if step is None:
        return Sent(at, plan_s, None, _NOTHING, None, told, _NOT_COUNTED)
    queues, cache = core.queues, core.cache
    counts = Counts(
        len(queues.running),
        len(queues.waiting),
        len(queues.recovery),
        cache.pool.num_free,
        cache.tree.num_evictable,
        cache.tree.num_evicted,
        0 if cache.host is None else cache.host.pool.num_blocks - cache.host.pool.num_free,
    )
    return Sent(at, plan_s, step, core.load_of(step), core.predicted_s(step), told, counts)


class Over(NamedTuple):
    """A sequence ended, or (`reason` None) the trace does before it."""

    at: float
    request: Request
    which: int
    reason: FinishReason | None


class Happened(NamedTuple):
    """What the core reports."""

    at: float
    report: reports.Report


Entry = trace.Record | Came | Answered | Sent | Over | Happened


class TraceLines:
    """Makes records of entries, in order; `names` is None where token ids may be told."""

    def __init__(self, block_size: int, names: BlockNames | None) -> None:
        self.digest = DecisionDigest()
        self._block_size = block_size
        self._names = names
        self._namespaces = Namespaces()
        self._reached: dict[int, int] = {}  # by sequence: where its last row ended
        self._samplers: dict[tuple[int, int], list[int]] = {}  # by (epoch, step): the sequences that sample, in row order
        self._num_evicted = 0

    def records(self, entry: Entry) -> Iterator[trace.Record]:
        """The lines that `entry` becomes."""
        match entry:
            case Came():
                yield from self._arrival(entry)
            case Answered():
                yield self._answer(entry)
            case Sent():
                yield from self._plan(entry)
            case Over():
                yield from self._end(entry)
            case Happened():
                self.digest.report(entry.report)
                if not isinstance(entry.report, reports.Finished):
                    yield _report(entry.at, entry.report)
            case _:
                if isinstance(entry, trace.DeviceEvent) and entry.what == "lost":
                    self._samplers.clear()  # nobody answers these any more
                yield entry

    def last(self, now: Callable[[], float], reason: str) -> trace.Finished:
        """The last line."""
        return trace.Finished(at=now(), reason=reason, digest=self.digest.hexdigest())

    def _arrival(self, came: Came) -> Iterator[trace.Record]:
        admit, params = came.admit, came.admit.params
        namespace = self._namespaces.number(admit.cache_salt)
        hash_ids: list[int] = []
        if self._names is not None and came.seq_id:
            hash_ids = self._names.of_tokens(admit.token_ids, namespace)
            yield from self._names.take_new()
        has_content = self._names is None
        yield trace.Arrived(
            at=came.at,
            request_id=admit.request_id,
            label=admit.label,
            arrival_s=admit.arrival_s,
            num_prompt_tokens=len(admit.token_ids),
            seq_id=came.seq_id,
            hash_ids=hash_ids,
            token_ids=admit.token_ids if has_content else None,
            namespace=namespace,
            n=params.n,
            max_tokens=params.max_tokens,
            stop_token_ids=admit.stop_token_ids if has_content else [],
            output_kind=params.output_kind,
            priority=admit.priority,
            tenant=admit.tenant,
            holds=admit.holds,
            follows=admit.follows,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _plan(self, sent: Sent) -> Iterator[trace.Record]:
        at, step, load, counts = sent.at, sent.step, sent.load, sent.counts
        copies = [_copy(at, copy, predicted_s) for copy, predicted_s in sent.copies]
        for copy, _ in sent.copies:
            self.digest.copy(copy)
        if step is None:
            yield trace.Planned(at=at)
            yield from copies
            return
        self.digest.step(step)
        num_evicted, self._num_evicted = counts.num_evicted - self._num_evicted, counts.num_evicted
        decodes, chunks = self._rows(step)
        yield trace.Planned(
            at=at,
            step_id=step.step_id,
            epoch=step.epoch,
            plan_s=sent.plan_s,
            predicted_s=sent.predicted_s,
            decodes=decodes,
            chunks=chunks,
            load=(load.num_prefill_tokens, load.num_attended, load.num_rows),
            admitted=[row.seq_id for row in step.admitted],
            released=list(step.released),
            copies=[(copy.source, copy.target, copy.num_tokens) for copy in step.copies],
            after=(step.after.step, step.after.copy_out, step.after.copy_in),
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_preempted=counts.num_preempted,
            num_free=counts.num_free,
            num_cached=counts.num_cached,
            num_evicted=max(0, num_evicted),  # a new device begins at 0
            num_host_used=counts.num_host_used,
            digest=self.digest.hexdigest(DIGITS),
        )
        yield from copies

    def _rows(self, step: RunStep) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """The leading rows that go on by one token, and all others whole."""
        reached, decodes = self._reached, []
        for seq_id in step.released:
            reached.pop(seq_id, None)
        rows = list(zip(step.seq_ids, step.starts, step.num_tokens, step.samples, strict=True))
        for seq_id, start, count, samples in rows:
            if count != 1 or not samples or reached.get(seq_id) != start:
                break
            decodes.append(int(seq_id))
        for seq_id, start, count, _ in rows:
            reached[seq_id] = start + count
        self._samplers[step.epoch, step.step_id] = [int(row[0]) for row in rows if row[3]]
        return decodes, [(int(seq_id), start, count, samples) for seq_id, start, count, samples in rows[len(decodes) :]]

    def _answer(self, answered: Answered) -> trace.StepEnded:
        done = answered.done
        failed = [(int(row.seq_id), row.is_sound) for row in done.failed]
        gone = {seq_id for seq_id, _ in failed}
        samplers = self._samplers.pop((done.epoch, done.step_id), [])
        expected = [seq_id for seq_id in samplers if seq_id not in gone]
        return trace.StepEnded(
            at=answered.at,
            step_id=done.step_id,
            epoch=done.epoch,
            seconds=done.seconds,
            waited_s=done.waited_s,
            num_tokens=len(done.seq_ids),
            failed=failed,
            seq_ids=None if expected == done.seq_ids else [int(seq_id) for seq_id in done.seq_ids],
            token_ids=done.token_ids if self._names is None else None,
        )

    def _end(self, over: Over) -> Iterator[trace.Record]:
        seq, namespace = over.request.sequences[over.which], self._namespaces.number(over.request.admit.cache_salt)
        hash_ids: list[int] = []
        if self._names is not None:
            hash_ids = self._names.of(seq.log.buffer, namespace)[seq.num_prompt_tokens // self._block_size :]
            yield from self._names.take_new()
        last = seq.log.tolist(len(seq.log) - 1)
        yield trace.Ended(
            at=over.at,
            request_id=seq.request_id,
            index=over.which,
            reason=over.reason,
            num_output_tokens=seq.num_output_tokens,
            by_token=over.reason == "stop" and seq.num_output_tokens > 0 and last[0] in seq.stop_ids,
            num_cached_tokens=seq.num_cached_tokens,
            hash_ids=hash_ids,
        )


def _copy(at: float, copy: CopyBlocks, predicted_s: float) -> trace.CopySent:
    return trace.CopySent(
        at=at,
        copy_id=copy.copy_id,
        direction=copy.direction,
        num_blocks=len(copy.sources),
        after=(copy.after.step, copy.after.copy_out, copy.after.copy_in),
        predicted_s=predicted_s,
    )


def _report(at: float, report: reports.Report) -> trace.Record:
    match report:
        case reports.Preempted():
            return trace.Preempted(
                at=at,
                request_id=report.request_id,
                mode=report.mode,
                num_tokens=report.num_tokens,
                num_freed_blocks=report.num_freed_blocks,
                swap_s=report.swap_s,
                recompute_s=report.recompute_s,
                reason=report.reason,
            )
        case reports.HostHit():
            return trace.Fetched(
                at=at,
                request_id=report.request_id,
                fetched=report.fetched,
                num_tokens=report.num_tokens,
                fetch_s=report.fetch_s,
                recompute_s=report.recompute_s,
            )
        case reports.Paused():
            return trace.Paused(at=at, request_id=report.request_id, num_output_tokens=report.num_output_tokens)
        case _:
            raise TypeError(f"{type(report).__name__} is not reported line by line")
