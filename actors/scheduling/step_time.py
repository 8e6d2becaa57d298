"""How long a step will take: a linear model, fitted while the engine runs.

    seconds = a + b * prefill tokens + c * attended tokens + d * rows

Attended tokens are the query-key pairs of all rows: a decode at position p attends p + 1 of them.
Recursive least squares with exponential forgetting (Ljung, System Identification, 11.2): each step
costs the same few dozen multiplications, and what the device did long ago stops counting.
"""

from __future__ import annotations

from typing import NamedTuple

FORGETTING = 0.985
"""Weight of a step against the one after it: the last 60 or so count."""
LEAST_STEPS = 8
"""Steps seen before the model says anything."""
ERROR_WEIGHT = 0.1
_SCALES = (1.0, 256.0, 65536.0, 32.0)


class Load(NamedTuple):
    """What a step computes."""

    num_prefill_tokens: int
    num_attended: int
    num_rows: int


def attended(start: int, count: int) -> int:
    """Query-key pairs of a row that computes `count` tokens from position `start`."""
    return count * start + count * (count + 1) // 2


class StepTimeModel:
    """Predicts steps from their load. `error_s` is the running mean of its absolute error."""

    def __init__(self) -> None:
        size = len(_SCALES)
        self._weights = [0.0] * size
        self._covariance = [[1e3 if row == column else 0.0 for column in range(size)] for row in range(size)]
        self._num_steps = 0
        self.error_s = 0.0

    def predict(self, load: Load) -> float | None:
        """Seconds the step will take; None until enough has been seen."""
        if self._num_steps < LEAST_STEPS:
            return None
        return max(0.0, sum(weight * value for weight, value in zip(self._weights, _features(load), strict=True)))

    def learn(self, load: Load, seconds: float) -> None:
        """A step of this load took `seconds`."""
        predicted = self.predict(load)
        if predicted is not None:
            self.error_s += ERROR_WEIGHT * (abs(seconds - predicted) - self.error_s)
        x = _features(load)
        spread = [sum(row[k] * x[k] for k in range(len(x))) for row in self._covariance]
        scale = FORGETTING + sum(a * b for a, b in zip(x, spread, strict=True))
        error = seconds - sum(a * b for a, b in zip(self._weights, x, strict=True))
        self._weights = [weight + value / scale * error for weight, value in zip(self._weights, spread, strict=True)]
        self._covariance = [
            [_bounded((row[k] - spread[i] * spread[k] / scale) / FORGETTING) for k in range(len(x))]
            for i, row in enumerate(self._covariance)
        ]
        self._num_steps += 1


def _bounded(value: float) -> float:
    # Directions that are never excited (no prefill for an hour) must not grow without bound.
    return min(1e6, max(-1e6, value))


def _features(load: Load) -> tuple[float, float, float, float]:
    tokens, pairs, rows = load
    return 1.0, tokens / _SCALES[1], pairs / _SCALES[2], rows / _SCALES[3]
