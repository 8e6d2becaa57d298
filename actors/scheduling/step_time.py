"""How long a step will take: a linear model, fitted while the engine runs.

    seconds = a + b * prefill tokens + c * attended tokens + d * rows

Attended tokens are the query-key pairs of all rows: a decode at position p attends p + 1 of them.
Recursive least squares: each step costs the same few dozen multiplications, and what the device did long ago
stops counting. Forgetting is directional (Kulhavy and Karny, Tracking of slowly varying parameters by directional
forgetting, 1984): a step makes room only for what it says something about. Plain exponential forgetting also
forgets what hours of equal steps say nothing of, until noise alone moves those weights: after 5,000 decode steps
a prefill token was predicted at 60 times its cost, or below zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FORGETTING = 0.985
"""Weight of a step against the one after it: the last 60 or so count."""
LEAST_STEPS = 8
"""Steps seen before the model says anything."""
SURPRISE = 2.0
"""A step that takes longer than this many times its prediction is believed when the next one does as well: one alone is
somebody else's doing, who held the processor, and would spoil the weights for as long as they remember it.
"""
ERROR_WEIGHT = 0.1
GUESS_TOKEN_S = 1e-4
"""A prefill token before any step was seen: an 8B model on a GPU takes 40 us, a 135M model on a core 260 us."""
BEST_GROWTH = 1.005
"""By which the best time per token is raised by each step that does not reach it, so that it follows a slower device."""
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
"""Bounds of a prefill token's fitted cost, in units of the best time per token of whole steps."""
LEAST_CONTEXT = 64
"""Attending this many positions never takes as long as computing a token: 2 x hidden size x 6 and more do in a model."""
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
        self._best_token_s = math.inf
        self._best_step_s = math.inf
        self._has_prefilled = False
        self._held_back: tuple[Load, float] | None = None
        self._was_surprised = False
        self.error_s = 0.0

    def predict(self, load: Load) -> float | None:
        """Seconds the step will take; None until enough has been seen."""
        if self._num_steps < LEAST_STEPS:
            return None
        # Written out: several times a step somebody asks, and a loop over four numbers takes four times as long.
        (constant, per_token, per_pair, per_row), (_, token, pair, row) = self._weights, _features(load)
        return max(0.0, constant + per_token * token + per_pair * pair + per_row * row)

    def prefill_s(self, start: int, count: int) -> float:
        """Seconds that `count` tokens from position `start` add to steps that run anyway, attention included.

        Never negative, grows with both arguments, and is positive for any token. The fitted weights are right for
        loads like those seen, but on the way there, and for others, they may be anything: of either sign, the
        cost of tokens laid on their context. So each is held within what the best time per token of whole
        steps allows. Until `LEAST_STEPS` have been seen, or while no prefill has, a token takes that best time;
        before the first step, `GUESS_TOKEN_S`.
        """
        best_s = self._best_token_s if self._num_steps else GUESS_TOKEN_S
        token_s, pair_s = best_s, 0.0
        if self._num_steps >= LEAST_STEPS:
            if self._has_prefilled:
                token_s = _within(self._weights[1] / _SCALES[1], LEAST_SHARE * best_s, MOST_SHARE * best_s)
            pair_s = _within(self._weights[2] / _SCALES[2], 0.0, token_s / LEAST_CONTEXT)
        return count * token_s + attended(start, count) * pair_s

    def prefill_share(self, load: Load, without: Load) -> float:
        """Which part of the time of a step, 0 to 1, its chunks are to blame for; `without` is its load without them."""
        if not without.num_rows:
            return 1.0
        whole, rest = self.predict(load), self.predict(without)
        if whole is None or rest is None or whole <= 0.0:
            return load.num_prefill_tokens / (load.num_prefill_tokens + without.num_rows)
        return _within(1.0 - rest / whole, 0.0, 1.0)

    @property
    def constant_s(self) -> float:
        """What a step takes beside its tokens and rows: at most what the shortest took. 0 until enough has been seen."""
        return 0.0 if self._num_steps < LEAST_STEPS else _within(self._weights[0], 0.0, self._best_step_s)

    def learn(self, load: Load, seconds: float) -> None:
        """A step of this load took `seconds`."""
        predicted = self.predict(load)
        is_surprise = (
            predicted is not None
            and seconds > SURPRISE * max(predicted, self._best_step_s)
            and (self._has_prefilled or not load.num_prefill_tokens)  # else nothing was known of such a load
        )
        was_surprised, self._was_surprised = self._was_surprised, is_surprise
        held_back, self._held_back = self._held_back, None
        if is_surprise and not was_surprised:
            self._held_back = load, seconds
            return
        if is_surprise and held_back is not None:
            self._learn(*held_back)
        self._learn(load, seconds)

    def _learn(self, load: Load, seconds: float) -> None:
        predicted = self.predict(load)
        if predicted is not None:
            self.error_s += ERROR_WEIGHT * (abs(seconds - predicted) - self.error_s)
        x = _features(load)
        spread = [sum(row[k] * x[k] for k in range(len(x))) for row in self._covariance]
        surprise = sum(a * b for a, b in zip(x, spread, strict=True))
        error = seconds - sum(a * b for a, b in zip(self._weights, x, strict=True))
        self._weights = [weight + value / (1.0 + surprise) * error for weight, value in zip(self._weights, spread, strict=True)]
        kept = FORGETTING - (1.0 - FORGETTING) / surprise
        gain = kept / (1.0 + kept * surprise)
        self._covariance = [
            [row[k] - spread[i] * spread[k] * gain for k in range(len(x))] for i, row in enumerate(self._covariance)
        ]
        self._note_best(load, seconds)
        self._num_steps += 1

    def _note_best(self, load: Load, seconds: float) -> None:
        self._best_step_s = min(self._best_step_s * BEST_GROWTH, seconds)
        token_s = max(seconds, 1e-9) / max(1, load.num_prefill_tokens + load.num_rows)
        if load.num_prefill_tokens and not self._has_prefilled:
            self._has_prefilled = True
            self._best_token_s = token_s  # what steps of decodes took says little about it
        elif load.num_prefill_tokens or not self._has_prefilled:
            self._best_token_s = min(self._best_token_s * BEST_GROWTH, token_s)


def _within(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))


def _features(load: Load) -> tuple[float, float, float, float]:
    tokens, pairs, rows = load
    return 1.0, tokens / _SCALES[1], pairs / _SCALES[2], rows / _SCALES[3]
