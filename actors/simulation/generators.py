"""Workloads made up by rule and seed: the same arguments give the same requests.

Times are Poisson unless a generator says otherwise, lengths log-normal about their mean (the sigma of their logarithm is
`SPREAD`), as those of chats are. Prompts are made of segments; a segment that two prompts have in common is what a
prefix cache can share.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from .workload import MOST_TOKENS, Job, Output, tokens_of

SPREAD = 0.6
MOST_TIMES = 8
"""No length is more than this many times the mean."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What generators are told. Lengths are means, in tokens; `rate` is in requests a second."""

    count: int
    rate: float
    seed: int = 1
    input_len: int = 512
    output_len: int = 128
    prefix_len: int = 1024
    """What requests of a group, or of all chats, begin with."""
    groups: int = 8
    turns: int = 4
    burst: int = 32
    """Requests that come at once."""
    think_s: float = 10.0
    """Between the end of an answer and the next turn, on average."""


Segment = tuple[int, int]
"""First token and length: its tokens count upwards, and no two segments overlap."""


class Segments:
    """Gives out segments. Raises `OverflowError` once a workload has more tokens than there are ids."""

    def __init__(self) -> None:
        self._next = 1

    def new(self, length: int) -> Segment:
        """A segment of tokens that no other has."""
        start = self._next
        self._next += length
        if self._next >= MOST_TOKENS:
            raise OverflowError("a generated workload may have 2**30 different tokens at most")
        return start, length


def poisson(shape: Shape) -> list[Job]:
    """Requests that have nothing in common, at the times of a Poisson process."""
    draw, made = random.Random(shape.seed), Segments()
    times = _times(shape.count, shape.rate, draw)
    return [_job(at, [made.new(_length(shape.input_len, draw))], _length(shape.output_len, draw)) for at in times]


def bursts(shape: Shape) -> list[Job]:
    """The same, `burst` at once: the times of bursts are a Poisson process."""
    draw, made = random.Random(shape.seed), Segments()
    num_bursts = math.ceil(shape.count / shape.burst)
    times = [at for at in _times(num_bursts, shape.rate / shape.burst, draw) for _ in range(shape.burst)]
    return [
        _job(at, [made.new(_length(shape.input_len, draw))], _length(shape.output_len, draw)) for at in times[: shape.count]
    ]


def shared_prefix(shape: Shape) -> list[Job]:
    """Requests of `groups` groups. Each begins with the `prefix_len` tokens of its group; who comes next is drawn."""
    draw, made = random.Random(shape.seed), Segments()
    prefixes = [made.new(shape.prefix_len) for _ in range(shape.groups)]
    return [
        _job(at, [draw.choice(prefixes), made.new(_length(shape.input_len, draw))], _length(shape.output_len, draw))
        for at in _times(shape.count, shape.rate, draw)
    ]


def chats(shape: Shape) -> list[Job]:
    """Conversations of about `turns` turns behind one system prompt: each turn says again all that was said before.

    A turn comes `think_s` after the answer before it could have ended, at 50 tokens a second.
    """
    draw, made = random.Random(shape.seed), Segments()
    system = made.new(shape.prefix_len)

    def one(at: float) -> list[Job]:
        return _chat(at, [system], shape, draw, made)

    return _arrivals(shape, shape.rate / shape.turns, draw, one)


def mooncake_like(shape: Shape) -> list[Job]:
    """The shape of Mooncake's published traces: long prompts, short answers, chats and tools with long common beginnings.

    Half of the arrivals are turns of chats about a document, three in ten are tool calls behind one of `groups` prompts
    of `prefix_len` tokens, the rest have nothing in common with anybody.
    """
    draw, made = random.Random(shape.seed), Segments()
    prefixes = [made.new(shape.prefix_len) for _ in range(shape.groups)]
    # A chat is an arrival of `turns` requests: so many of the arrivals are chats, for half of the requests to be turns.
    share_of_chats = 1 / (1 + shape.turns)
    share_of_tools = share_of_chats + 0.6 * (1 - share_of_chats)

    def one(at: float) -> list[Job]:
        kind = draw.random()
        if kind < share_of_chats:
            return _chat(at, [made.new(_length(shape.input_len, draw))], shape, draw, made)
        head = [draw.choice(prefixes)] if kind < share_of_tools else []
        own = made.new(_length(max(1, shape.input_len // (2 if head else 1)), draw))
        return [_job(at, [*head, own], _length(shape.output_len, draw))]

    return _arrivals(shape, shape.rate / (1 + share_of_chats * (shape.turns - 1)), draw, one)


GENERATORS: dict[str, Callable[[Shape], list[Job]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "shared-prefix": shared_prefix,
    "chats": chats,
    "mooncake-like": mooncake_like,
}
"""By the name that `repertory simulate --generate` takes."""

ANSWER_RATE = 50.0
QUESTION_SHARE = 8
"""A chat's later questions are this many times shorter than `input_len`."""


def _arrivals(shape: Shape, rate: float, draw: random.Random, one: Callable[[float], list[Job]]) -> list[Job]:
    """The first `count` requests of what comes `rate` times a second, where each of that is a few requests over time."""
    jobs: list[Job] = []
    times: list[float] = []
    at = 0.0
    while bisect_right(times, at) < shape.count:
        for job in one(at):
            jobs.append(job)
            insort(times, job.arrival_s)
        at += draw.expovariate(rate)
    return sorted(jobs, key=lambda job: job.arrival_s)[: shape.count]


def _chat(at: float, history: list[Segment], shape: Shape, draw: random.Random, made: Segments) -> list[Job]:
    jobs = []
    for turn in range(1 + int(draw.expovariate(1.0 / max(1e-9, shape.turns - 0.5)))):
        mean = shape.input_len if turn == 0 else max(1, shape.input_len // QUESTION_SHARE)
        history = [*history, made.new(_length(mean, draw))]
        answer = made.new(_length(shape.output_len, draw))
        jobs.append(_job(at, history, answer[1], answer))
        history = [*history, answer]
        at += answer[1] / ANSWER_RATE + draw.expovariate(1.0 / shape.think_s)
    return jobs


def _job(at: float, segments: Sequence[Segment], length: int, answer: Segment | None = None) -> Job:
    return Job(
        arrival_s=at,
        num_prompt_tokens=sum(length for _, length in segments),
        prompt=partial(tokens_of, tuple(segments)),
        outputs=(Output(length, None if answer is None else tokens_of([answer])),),
        max_tokens=length,
    )


def _times(count: int, rate: float, draw: random.Random) -> list[float]:
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def _length(mean: int, draw: random.Random) -> int:
    drawn = draw.lognormvariate(math.log(mean) - SPREAD * SPREAD / 2, SPREAD)
    return max(1, min(MOST_TIMES * mean, round(drawn)))
