"""Steps in bins of time: how the run was composed, coarse enough to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .run import Run, StepSeen


class Bin(msgspec.Struct, kw_only=True):
    """Steps that ran, by their middle, between `start_s` and `end_s`. Means are over its steps; None where there is none."""

    start_s: float
    end_s: float
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    """Rows that went on by one token, over all steps."""
    busy_s: float = 0.0
    """Time in which a step ran, exactly within the bin."""
    mean_step_s: float | None = None
    mean_predicted_s: float | None = None
    """Of those that had a prediction; `mean_step_s` is of all."""
    held_share: float | None = None
    """Share of the device's blocks that requests held."""
    cached_share: float | None = None
    host_share: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    """Waiting and preempted."""

    @property
    def idle_share(self) -> float:
        """Share of the bin in which no step ran."""
        span = self.end_s - self.start_s
        return max(0.0, 1.0 - self.busy_s / span) if span > 0 else 0.0


def binned(run: Run, num_bins: int) -> list[Bin]:
    """The time from the first step to the last in `num_bins` equal parts; empty where no step has a time."""
    steps = [step for step in run.steps if step.start_s is not None]
    if not steps:
        return []
    first_s = min(step.start_s for step in steps if step.start_s is not None)
    width = max(steps[-1].end_s - first_s, 1e-9) / num_bins
    bins = [Bin(start_s=first_s + width * index, end_s=first_s + width * (index + 1)) for index in range(num_bins)]
    members: list[list[StepSeen]] = [[] for _ in bins]
    for step in steps:
        middle_s = step.end_s - step.seconds / 2
        members[min(num_bins - 1, int((middle_s - first_s) / width))].append(step)
        _spread(step, first_s, width, bins)
    for one, within in zip(bins, members, strict=True):
        if within:
            _fill(one, within, run)
    return bins


def _spread(step: StepSeen, first_s: float, width: float, bins: list[Bin]) -> None:
    """Its time, laid to the bins that it reaches into."""
    start_s = step.end_s - step.seconds
    index = min(len(bins) - 1, int((start_s - first_s) / width))
    while index < len(bins) and bins[index].start_s < step.end_s:
        bins[index].busy_s += max(0.0, min(step.end_s, bins[index].end_s) - max(start_s, bins[index].start_s))
        index += 1


def _fill(one: Bin, steps: Sequence[StepSeen], run: Run) -> None:
    count = len(steps)
    one.num_steps = count
    one.num_prefill_tokens = sum(step.num_prefill_tokens for step in steps)
    one.num_decodes = sum(step.num_decodes for step in steps)
    one.mean_step_s = sum(step.seconds for step in steps) / count
    predicted = [step.predicted_s for step in steps if step.predicted_s is not None]
    one.mean_predicted_s = sum(predicted) / len(predicted) if predicted else None
    total, total_host = max(1, run.num_device_blocks) * count, max(1, run.num_host_blocks) * count
    one.held_share = sum(step.num_held for step in steps) / total
    one.cached_share = sum(step.num_cached for step in steps) / total
    one.host_share = sum(step.num_host_used for step in steps) / total_host
    one.num_running = sum(step.num_running for step in steps) / count
    one.num_waiting = sum(step.num_waiting + step.num_preempted for step in steps) / count
