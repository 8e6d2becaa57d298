"""What is computed from the times at which a request's output came. Names and formulas are those of `vllm bench serve`.

    TTFT   time to first token: from sending to the first output
    E2EL   end-to-end latency: from sending to the last output
    TPOT   time per output token after the first: (E2EL - TTFT) / (n - 1); none where n is 1
    ITL    inter-token latency: every gap between two outputs (TBT in the table of three schedulers)

A percentile lies between the two nearest values (linear, numpy's default); the deviation is the
population's. Times are in seconds of one monotonic clock unless a name ends in `_ms`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....protocol.errors import ValidationError, shorten

OBJECTIVES = ("ttft", "tpot", "e2el")
"""What `--goodput` can bound."""


class Timeline(msgspec.Struct, kw_only=True):
    """One request as its client saw it. `at_s` holds when each output came: one token, or a few that came at once."""

    sent_s: float
    num_prompt: int
    at_s: list[float] = []
    num_output: int = 0
    num_cached: int = 0
    error: str | None = None

    @property
    def completed(self) -> bool:
        """Whether it ended well and brought anything."""
        return self.error is None and bool(self.at_s)

    @property
    def ttft_s(self) -> float:
        """From sending to the first output."""
        return self.at_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From sending to the last output."""
        return self.at_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None where there are none."""
        return (self.e2el_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Every gap between two outputs."""
        return [later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)]


class Spread(NamedTuple):
    """Of many values of one latency."""

    mean: float
    median: float
    std: float
    p99: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of `values` lie below; NaN where there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> Spread:
    """Mean, median, deviation and 99th percentile of `values`; NaN where there are none."""
    if not values:
        return Spread(math.nan, math.nan, math.nan, math.nan)
    return Spread(statistics.fmean(values), statistics.median(values), statistics.pstdev(values), percentile(values, 0.99))


def latencies_ms(timelines: Iterable[Timeline]) -> dict[str, list[float]]:
    """TTFT, TPOT, ITL and E2EL of the requests that completed, in milliseconds."""
    done = [timeline for timeline in timelines if timeline.completed]
    seconds = {
        "ttft": [timeline.ttft_s for timeline in done],
        "tpot": [timeline.tpot_s for timeline in done if timeline.tpot_s is not None],
        "itl": [gap for timeline in done for gap in timeline.gaps_s],
        "e2el": [timeline.e2el_s for timeline in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def parse_objectives(words: Iterable[str], names: Sequence[str] = OBJECTIVES) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` as milliseconds by name. Raises `ValidationError` for any other form, or name."""
    objectives: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = math.nan
        if name not in names or not 0 < limit_ms < math.inf or name in objectives:
            raise ValidationError(
                f"--goodput: {shorten(word)} is not allowed; expected NAME:MILLISECONDS, once each of {', '.join(names)}",
                field="goodput",
                value=word,
            )
        objectives[name] = limit_ms
    return objectives


def num_good(timelines: Iterable[Timeline], objectives_ms: Mapping[str, float]) -> int:
    """How many requests completed within every objective. A request of one token has a TPOT of 0, and an ITL of 0.

    The ITL of a request is the 99th percentile of its gaps.
    """

    def is_good(timeline: Timeline) -> bool:
        found_s = {"ttft": timeline.ttft_s, "tpot": timeline.tpot_s or 0.0, "e2el": timeline.e2el_s}
        if "itl" in objectives_ms:
            found_s["itl"] = percentile(timeline.gaps_s or [0.0], 0.99)
        return all(1e3 * found_s[name] <= limit_ms for name, limit_ms in objectives_ms.items())

    return sum(timeline.completed and is_good(timeline) for timeline in timelines)
