"""The parts, the most valuable first: what there is and how long each may take."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A part. It is not begun with less than `least_s` seconds left, and cut off after `limit_s`.

    Parts that measure no time run side by side with the others of their kind that stand beside them in the list.
    """

    name: str
    about: str
    limit_s: float
    least_s: float
    is_timed: bool = True


PARTS = (
    Part("conformance", "greedy tokens of the whole engine in float32 against plain torch", 110, 30, is_timed=False),
    Part("attention", "every attention backend that can run against float32 SDPA", 110, 20, is_timed=False),
    Part("glue", "norms, rotation, activation and copies in Triton against torch", 110, 20, is_timed=False),
    Part("sampling", "draws in Triton against the reference", 110, 20, is_timed=False),
    Part("bfloat16", "log-probabilities in bfloat16, teacher-forced, against plain torch in float32", 110, 20, is_timed=False),
    Part("throughput", "prefill and decode of a Llama-8B shape against the device's own ceilings", 75, 30),
    Part("swap", "copies between the tiers: bits, bandwidth, what they cost the steps beside them", 60, 25),
    Part("graphs", "decode steps captured and launched one by one", 60, 25),
    Part("table", "static, continuous and chunked scheduling on the same arrivals, the whole engine", 75, 30),
    Part("fp8", "fp8 weights and KV: what they change and what they gain", 60, 25),
)

BUDGET_S = 295.0
"""Seconds for all of it: under 5 minutes, with a moment for the table."""


class UnknownPartError(Exception):
    """There is no part of that name; the message names those that there are."""


def chosen(names: str | None) -> list[Part]:
    """The parts that `names`, separated by commas, stands for, in the order of the list; None: all of them.

    Raises `UnknownPartError`.
    """
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",")]
    known = [part.name for part in PARTS]
    for name in wanted:
        if name not in known:
            raise UnknownPartError(f"there is no part {name!r}; there are {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]
