"""A run from its trace, read record by record: what is kept grows with requests and steps, not with tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ....protocol import trace
from ....protocol.ids import RequestId
from ....protocol.journey import Journey
from ....protocol.trace_reading import open_trace
from . import words
from .derived import JourneySoFar
from .run import CopySeen, Incident, Mark, MarkKind, RequestSeen, Run, StepSeen

_INCIDENTS = {
    "lost": "the device was lost",
    "ready": "a new device was ready",
    "shared": "others came to use the device",
    "reset": "the cache was emptied",
    "drain": "no new requests were taken from here on",
}


def read_run(lines: Iterable[bytes], name: str) -> Run:
    """The run of a trace. Raises `ValidationError` where it is none, or where a line other than the last is not whole."""
    began, records = open_trace(lines, name)
    reading = _Reading(began, name)
    is_torn = False
    for record in records:
        if record is None:
            is_torn = True
        else:
            reading.add(record)
    if is_torn:
        reading.run.notes.append("The last line is not whole: the run that wrote it was cut off.")
    return reading.end()


class _Live:
    """A request that has not ended."""

    def __init__(self, seen: RequestSeen, journey: JourneySoFar, seq_ids: range) -> None:
        self.seen = seen
        self.journey = journey
        self.seq_ids = seq_ids
        self.num_left = len(seq_ids)


class _Reading:
    def __init__(self, began: trace.Began, name: str) -> None:
        capacity = began.capacity
        self.run = Run(
            name=name,
            source="trace",
            engine=began.engine,
            device=capacity.device,
            wall_s=began.wall_s,
            block_size=capacity.block_size,
            num_device_blocks=capacity.num_device_blocks,
            num_host_blocks=capacity.num_host_blocks,
        )
        self._began_s = self._last_s = began.at
        self._requests: dict[int, RequestSeen] = {}
        self._live: dict[int, _Live] = {}
        self._of_sequence: dict[int, _Live] = {}
        self._planned: dict[tuple[int, int], trace.Planned] = {}
        self._free_s = {"step": 0.0, "out": 0.0, "in": 0.0}
        """When the last operation of each lane ended: clocks are read on both sides, and a picture must not overlap."""
        self._has_end = False

    def add(self, record: trace.AnyRecord) -> None:
        """The next record."""
        match record:
            case trace.Planned():
                self._plan(record)
            case trace.StepEnded():
                self._end_step(record)
            case trace.CopyEnded():
                self._end_copy(record)
            case trace.Arrived():
                self._arrive(record)
            case trace.Ended():
                self._end(record)
            case trace.Travelled():
                self._travel(record)
            case trace.DeviceEvent():
                self._device(record)
            case trace.Told():
                if record.what in _INCIDENTS:
                    self.run.incidents.append(Incident(record.at - self._began_s, _INCIDENTS[record.what]))
            case trace.Finished():
                self._has_end = True
                if record.reason != "closed":
                    self.run.notes.append(f"The trace stops before the run did: {record.reason}.")
            case _:
                self._say(record)
        self._last_s = max(self._last_s, getattr(record, "at", 0.0))

    def end(self) -> Run:
        """The run, with what had not ended as far as it went."""
        run = self.run
        for live in self._live.values():
            live.seen.journey = live.journey.until(self._last_s)
        for planned in self._planned.values():
            run.steps.append(self._step(planned, None))
        run.steps.sort(key=lambda step: step.planned_s)
        run.requests = sorted(self._requests.values(), key=lambda request: request.arrival_s)
        run.duration_s = self._last_s - self._began_s
        if not self._has_end:
            run.notes.append("The trace has no last record: the run may have gone on.")
        num_derived = sum(request.is_derived for request in run.requests)
        if num_derived:
            run.notes.append(
                f"{num_derived:,} of {len(run.requests):,} requests have no journey of their own in the trace; theirs are put "
                "together from its other records: waiting for memory counts as queue, and nobody is blamed for stalls."
            )
        return run

    # ---- requests ---------------------------------------------------------------------------------

    def _arrive(self, record: trace.Arrived) -> None:
        if record.request_id in self._requests:
            return  # said again
        seen = RequestSeen(
            request_id=RequestId(record.request_id),
            label=record.label,
            arrival_s=record.arrival_s - self._began_s,
            journey=Journey([]),  # until it is over, or all that was read
            is_derived=True,
            num_prompt_tokens=record.num_prompt_tokens,
        )
        self._requests[record.request_id] = seen
        live = _Live(seen, JourneySoFar(record.arrival_s), range(record.seq_id, record.seq_id + record.n))
        live.journey.enter("queue", record.at)
        if not record.seq_id:
            seen.reason, seen.journey = "refused", live.journey.until(record.at)
            return
        self._live[record.request_id] = live
        for seq_id in live.seq_ids:
            self._of_sequence[seq_id] = live

    def _say(self, record: trace.AnyRecord) -> None:
        """What was decided about a request, and where that leaves it."""
        live = self._live.get(getattr(record, "request_id", -1))
        if live is None:
            return
        match record:
            case trace.Preempted():
                live.seen.num_preemptions += 1
                live.journey.enter("preempted", record.at)
                said = words.preempted(
                    record.mode, record.num_tokens, record.num_freed_blocks, record.swap_s, record.recompute_s, record.reason
                )
                self._mark(live, record.at, "preempted", said)
            case trace.Fetched():
                if record.fetched and live.journey.stage == "queue":
                    live.journey.enter("fetch", record.at)
                said = words.host_hit(record.fetched, record.num_tokens, record.fetch_s, record.recompute_s)
                self._mark(live, record.at, "host hit", said)
            case trace.Paused():
                live.journey.enter("paused", record.at)
                self._mark(live, record.at, "paused", words.paused(record.num_output_tokens))
            case trace.Credited() if live.journey.stage == "paused":
                live.journey.enter("queue", record.at)
            case trace.Aborted() if record.reason == "abort":  # else it is the detokenizer's, at a stop string
                self._mark(live, record.at, "aborted", "its client left, or asked for its end")
            case _:
                pass

    def _mark(self, live: _Live, at: float, what: MarkKind, said: str) -> None:
        at_s = at - self._began_s - live.seen.arrival_s
        live.seen.marks.append(Mark(at_s, what, said))

    def _end(self, record: trace.Ended) -> None:
        live = self._live.get(record.request_id)
        if live is None:
            return
        seen = live.seen
        live.num_left -= 1
        seen.num_output_tokens += record.num_output_tokens
        seen.num_cached_tokens = record.num_cached_tokens if record.index == 0 else seen.num_cached_tokens
        if record.reason is not None:
            seen.reason = record.reason
        if not live.num_left or record.reason is None:
            seen.journey = live.journey.until(record.at)
        if not live.num_left:
            self._forget(record.request_id)

    def _forget(self, request_id: int) -> None:
        """It is over: nothing that comes is about it."""
        live = self._live.pop(request_id, None)
        if live is not None:
            for seq_id in live.seq_ids:
                del self._of_sequence[seq_id]

    def _travel(self, record: trace.Travelled) -> None:
        self._forget(record.request_id)
        seen = self._requests.get(record.request_id)
        if seen is None:  # it arrived before the trace began, or never got as far as the scheduler
            arrival_s = record.arrival_s - self._began_s
            request_id = RequestId(record.request_id)
            seen = RequestSeen(request_id=request_id, label=record.label, arrival_s=arrival_s, journey=record.journey)
            self._requests[record.request_id] = seen
        seen.journey, seen.is_derived, seen.reason = record.journey, False, record.reason
        seen.num_prompt_tokens, seen.num_cached_tokens = record.num_prompt_tokens, record.num_cached_tokens
        seen.num_output_tokens, seen.num_preemptions = record.num_output_tokens, record.num_preemptions

    # ---- the device -------------------------------------------------------------------------------

    def _plan(self, record: trace.Planned) -> None:
        if not record.step_id:
            return
        self._planned[record.epoch, record.step_id] = record
        for seq_id in record.admitted:
            live = self._of_sequence.get(seq_id)
            if live is not None and live.journey.stage != "decode":
                live.journey.enter("prefill", record.at)

    def _end_step(self, record: trace.StepEnded) -> None:
        planned = self._planned.pop((record.epoch, record.step_id), None)
        if planned is None:
            return
        self.run.steps.append(self._step(planned, record))
        failed = {seq_id for seq_id, _ in record.failed}
        for seq_id, _, _, samples in planned.chunks:
            live = self._of_sequence.get(seq_id)
            if not samples or live is None or seq_id in failed:
                continue
            if live.seen.ttft_s is None:
                live.seen.ttft_s = record.at - live.journey.arrival_s
            if live.journey.stage == "prefill":
                live.journey.enter("decode", record.at)

    def _step(self, planned: trace.Planned, ended: trace.StepEnded | None) -> StepSeen:
        start_s, end_s = None, planned.at - self._began_s
        if ended is not None:
            start_s, end_s = self._span("step", ended.at, ended.seconds)
        total = self.run.num_device_blocks
        return StepSeen(
            step_id=planned.step_id,
            epoch=planned.epoch,
            planned_s=planned.at - self._began_s,
            start_s=start_s,
            end_s=end_s,
            waited_s=0.0 if ended is None else ended.waited_s,
            predicted_s=planned.predicted_s,
            num_prefill_tokens=planned.load[0],
            num_decodes=len(planned.decodes),
            num_running=planned.num_running,
            num_waiting=planned.num_waiting,
            num_preempted=planned.num_preempted,
            num_held=max(0, total - planned.num_free - planned.num_cached),
            num_cached=planned.num_cached,
            num_host_used=planned.num_host_used,
        )

    def _span(self, lane: str, at: float, seconds: float) -> tuple[float, float]:
        """Start and end of an operation that was over at `at`: on its lane, after the one before it."""
        end_s = max(at - self._began_s, self._free_s[lane])
        start_s = max(end_s - seconds, self._free_s[lane])
        self._free_s[lane] = end_s
        return start_s, end_s

    def _end_copy(self, record: trace.CopyEnded) -> None:
        start_s, end_s = self._span(record.direction, record.at, record.seconds)
        copied = CopySeen(record.copy_id, record.direction, start_s, end_s, record.waited_s, record.num_bytes, record.ok)
        self.run.copies.append(copied)

    def _device(self, record: trace.DeviceEvent) -> None:
        self.run.incidents.append(Incident(record.at - self._began_s, _INCIDENTS[record.what]))
        if record.what != "lost":
            return
        for key in [key for key in self._planned if key[0] <= record.epoch]:
            self.run.steps.append(self._step(self._planned.pop(key), None))
        for live in self._live.values():
            if live.journey.stage in ("prefill", "decode", "fetch"):
                live.journey.enter("restart", record.at)
