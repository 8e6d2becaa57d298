"""A trace as a workload, and as its clients saw it: what to simulate, and what to hold the simulation against."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ...protocol import trace
from ...protocol.trace_reading import Trace
from .contents import BlockContents
from .whatif import Moment, Outcome, Seen
from .workload import Job, Output, Tokens


class Recorded(NamedTuple):
    """What a trace holds for a simulation. Times begin with the first arrival."""

    jobs: list[Job]
    num_left_out: int
    """Requests that were refused, or had no token when they ended."""
    measured: Outcome


def read_recorded(recorded: Trace) -> Recorded:
    """The requests of a trace, with outputs as long as they were, and when their tokens came."""
    size = recorded.began.capacity.block_size
    contents = BlockContents((record for record in recorded.records if isinstance(record, trace.Named)), size)
    times_of, tokens_of = _sampled(recorded)
    arrivals: dict[int, trace.Arrived] = {}
    ends: dict[int, dict[int, trace.Ended]] = {}
    for record in recorded.records:
        if isinstance(record, trace.Arrived):
            arrivals.setdefault(record.request_id, record)
        elif isinstance(record, trace.Ended):
            ends.setdefault(record.request_id, {})[record.index] = record
    first_s = min((record.arrival_s for record in arrivals.values()), default=0.0)
    jobs: list[Job] = []
    seen: list[Seen] = []
    for record in sorted(arrivals.values(), key=lambda record: record.arrival_s):
        ended = ends.get(record.request_id, {})
        outputs = [
            _output(record, ended[index], contents, size, tokens_of.get(record.seq_id + index)) for index in sorted(ended)
        ]
        if not record.seq_id or not any(output.length for output in outputs):
            continue
        jobs.append(_job(record, [output for output in outputs if output.length], ended, contents, first_s))
        for index in range(record.n):
            times = [at - first_s for at in times_of.get(record.seq_id + index, [])]
            if times:
                job = jobs[-1]
                seen.append(
                    Seen(job=len(jobs) - 1, arrival_s=job.arrival_s, num_prompt_tokens=job.num_prompt_tokens, at_s=times)
                )
    return Recorded(jobs, len(arrivals) - len(jobs), _measured(recorded, seen, ends, first_s, arrivals))


def _job(
    record: trace.Arrived, outputs: list[Output], ended: dict[int, trace.Ended], contents: BlockContents, first_s: float
) -> Job:
    max_tokens = record.max_tokens
    if all(end.reason == "length" for end in ended.values()):
        max_tokens = max(output.length for output in outputs)  # where memory or the model ended it, that was foreseen
    return Job(
        arrival_s=record.arrival_s - first_s,
        num_prompt_tokens=record.num_prompt_tokens,
        prompt=partial(_prompt, record, contents),
        outputs=tuple(outputs),
        max_tokens=max_tokens,
        label=record.label,
        priority=record.priority,
        tenant=record.tenant,
        prompt_logprobs=record.prompt_logprobs,
        cache_salt=str(record.namespace) if record.namespace else None,
    )


def _prompt(record: trace.Arrived, contents: BlockContents) -> Tokens:
    return array("i", contents.of(record.hash_ids)) if record.token_ids is None else record.token_ids


def _output(record: trace.Arrived, end: trace.Ended, contents: BlockContents, size: int, told: list[int] | None) -> Output:
    if told is not None:
        return Output(min(len(told), end.num_output_tokens), array("i", told))
    tail = contents.of(end.hash_ids)[record.num_prompt_tokens % size :]
    return Output(end.num_output_tokens, array("i", tail))


def _sampled(recorded: Trace) -> tuple[dict[int, list[float]], dict[int, list[int]]]:
    """When each sequence's tokens came, by its id, and with content what they were."""
    samplers: dict[tuple[int, int], list[int]] = {}
    times: dict[int, list[float]] = {}
    tokens: dict[int, list[int]] = {}
    for record in recorded.records:
        if isinstance(record, trace.Planned) and record.step_id:
            rows = [*record.decodes, *(seq_id for seq_id, _, _, samples in record.chunks if samples)]
            samplers[record.epoch, record.step_id] = rows
        elif isinstance(record, trace.StepEnded):
            gone = {seq_id for seq_id, _ in record.failed}
            rows = [seq_id for seq_id in samplers.pop((record.epoch, record.step_id), []) if seq_id not in gone]
            rows = rows if record.seq_ids is None else record.seq_ids
            for seq_id in rows:
                times.setdefault(seq_id, []).append(record.at)
            for seq_id, token in zip(rows, record.token_ids or (), strict=False):
                tokens.setdefault(seq_id, []).append(token)
    return times, tokens


def _measured(
    recorded: Trace,
    seen: list[Seen],
    ends: dict[int, dict[int, trace.Ended]],
    first_s: float,
    arrivals: dict[int, trace.Arrived],
) -> Outcome:
    steps = [record for record in recorded.records if isinstance(record, trace.Planned) and record.step_id]
    total = recorded.began.capacity.num_device_blocks
    moments = [
        Moment(
            step.at - first_s,
            (total - step.num_free - step.num_cached) / total,
            step.num_cached / total,
            step.num_running,
            step.num_waiting + step.num_preempted,
            step.load[0],
            len(step.decodes),
        )
        for step in steps
        if step.load[2]
    ]
    modes = [record.mode for record in recorded.records if isinstance(record, trace.Preempted)]
    first_ends = [found[0] for found in ends.values() if 0 in found]
    return Outcome(
        name="recorded",
        seen=seen,
        moments=moments,
        num_refused=sum(not record.seq_id for record in arrivals.values()),
        duration_s=max((one.at_s[-1] for one in seen), default=0.0),
        num_steps=len(steps),
        num_hit_tokens=sum(end.num_cached_tokens for end in first_ends),
        num_queried_tokens=sum(arrivals[end.request_id].num_prompt_tokens for end in first_ends if end.request_id in arrivals),
        num_preemptions={mode: modes.count(mode) for mode in ("recompute", "swap")},
        swap_bytes=_copied(recorded.records),
        busy_s=sum(record.seconds for record in recorded.records if isinstance(record, trace.StepEnded)),
    )


def _copied(records: Iterable[trace.AnyRecord]) -> int:
    return sum(record.num_bytes for record in records if isinstance(record, trace.CopyEnded) and record.ok)
