"""A latency model from the steps and copies of a recorded run.

Least squares with weights that are not negative. There are four of them for steps and three for copies, so every subset
of weights is solved plainly and the best solution without a negative one taken: that is what Lawson and Hanson's method
(Solving Least Squares Problems, 1974, chapter 23) finds step by step, and it needs no library. The fit is made twice, the
second time without the `TRIMMED` share of steps that the first was most wrong about: a neighbour, a timer, a first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...protocol import trace
from ...protocol.errors import ValidationError
from .latency import LatencyModel

TRIMMED = 0.02
LEAST_STEPS = 8
GUESS_RATE = 10e9
"""Bytes/s of a lane that copied nothing."""

Floats: TypeAlias = NDArray[np.float64]


class Fit(NamedTuple):
    """A model, and how far it is off the steps it was made from."""

    latency: LatencyModel
    num_steps: int
    num_copies: int
    median_error: float
    """Of |predicted - measured| / measured, over all steps with rows."""
    p90_error: float
    total_error: float
    """Of the sum of all steps: what a throughput is wrong by."""


def fit(records: Iterable[trace.AnyRecord]) -> Fit:
    """The model of `records`' device. Raises `ValidationError` for fewer than `LEAST_STEPS` steps."""
    loads: dict[tuple[int, int], tuple[int, int, int]] = {}
    steps: list[tuple[float, float, float, float]] = []
    seconds: list[float] = []
    copies: list[trace.CopyEnded] = []
    for record in records:
        if isinstance(record, trace.Planned) and record.load[2]:
            loads[record.epoch, record.step_id] = record.load
        elif isinstance(record, trace.StepEnded):
            load = loads.pop((record.epoch, record.step_id), None)
            if load is not None and record.seconds > 0:
                steps.append((1.0, *load))
                seconds.append(record.seconds)
        elif isinstance(record, trace.CopyEnded) and record.ok and record.num_bytes:
            copies.append(record)
    if len(steps) < LEAST_STEPS:
        raise ValidationError(
            f"{len(steps)} steps are too few to fit a latency model; give it by flags (--step-ms ...)", field="trace"
        )
    features, measured = np.array(steps), np.array(seconds)
    weights = _trimmed_fit(features, measured)
    errors = np.abs(features @ weights - measured) / measured
    step_s, token_s, attended_s, row_s = (float(weight) for weight in weights)
    latency = LatencyModel(step_s=step_s, token_s=token_s, attended_s=attended_s, row_s=row_s, **_fit_copies(copies))
    return Fit(
        latency,
        len(steps),
        len(copies),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(abs((features @ weights).sum() - measured.sum()) / measured.sum()),
    )


def _fit_copies(copies: Sequence[trace.CopyEnded]) -> dict[str, float]:
    """What starting a copy takes, and each lane's rate."""
    if not copies:
        return {"copy_s": 0.0, "out_rate": GUESS_RATE, "in_rate": GUESS_RATE}
    features = np.array(
        [(1.0, copy.num_bytes * (copy.direction == "out"), copy.num_bytes * (copy.direction == "in")) for copy in copies]
    )
    copy_s, out_s, in_s = _trimmed_fit(features, np.array([copy.seconds for copy in copies]))
    return {"copy_s": float(copy_s), "out_rate": _rate(out_s), "in_rate": _rate(in_s)}


def _rate(seconds_per_byte: float) -> float:
    return float(1.0 / seconds_per_byte) if seconds_per_byte > 0 else GUESS_RATE


def _trimmed_fit(features: Floats, measured: Floats) -> Floats:
    weights = not_negative_fit(features, measured)
    residuals = np.abs(features @ weights - measured)
    kept = residuals <= np.quantile(residuals, 1.0 - TRIMMED)
    return not_negative_fit(features[kept], measured[kept])


def not_negative_fit(features: Floats, measured: Floats) -> Floats:
    """Weights w >= 0 (float64 `[k]`) that make |features @ w - measured| least; `features` is `[n, k]`, k small."""
    num_weights = features.shape[1]
    best, least = np.zeros(num_weights), float(np.square(measured).sum())
    scales = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled = features / scales
    for size in range(1, num_weights + 1):
        for chosen in combinations(range(num_weights), size):
            columns = list(chosen)
            found = np.linalg.lstsq(scaled[:, columns], measured, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.square(scaled[:, columns] @ found - measured).sum())
            if error < least:
                least, best = error, np.zeros(num_weights)
                best[columns] = found / scales[columns]
    return best
