"""Requests that come at random times: when, how long, and with what in common. The same seed gives the same ones."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from .workloads import FIRST_PLAIN_ID


class Request(NamedTuple):
    """A request, and how many seconds after the start it comes."""

    at_s: float
    prompt: list[int]
    max_tokens: int


class Lengths(NamedTuple):
    """Sizes of a mixed workload in tokens: pairs are the shortest and the longest."""

    chat: tuple[int, int] = (16, 64)
    document: tuple[int, int] = (1000, 1500)
    book: int = 4000
    short_answer: tuple[int, int] = (8, 16)
    long_answer: tuple[int, int] = (112, 128)


DOCUMENT_EVERY = 20
"""One prompt in so many is a document. One in all of them, in the middle, is a book."""

LONG_ANSWER_SHARE = 0.15


def poisson_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """Times of `count` arrivals, `rate` a second on average; all 0 where the rate is infinite."""
    now, times = 0.0, []
    for _ in range(count):
        now += 0.0 if math.isinf(rate) else rng.expovariate(rate)
        times.append(now)
    return times


def mixed(count: int, rate: float, *, seed: int, vocab_size: int, lengths: Lengths | None = None) -> list[Request]:
    """Chats, a few documents and one book, with mostly short answers, as a Poisson process of `rate` a second.

    One book among 101 requests or more is beyond the 99th percentile of TTFT: what that shows is how long
    the others wait behind it.
    """
    lengths = lengths or Lengths()
    rng = random.Random(seed)
    times = poisson_times(count, rate, rng)
    requests = []
    for index, at_s in enumerate(times):
        size = rng.randint(*lengths.document) if index % DOCUMENT_EVERY == DOCUMENT_EVERY // 2 else rng.randint(*lengths.chat)
        size = lengths.book if index == count // 2 else size
        answer = lengths.long_answer if rng.random() < LONG_ANSWER_SHARE else lengths.short_answer
        requests.append(Request(at_s, random_ids(size, rng, vocab_size), rng.randint(*answer)))
    return requests


def random_prompts(count: int, input_len: int, *, seed: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `input_len` random tokens that have nothing in common."""
    rng = random.Random(seed)
    return [random_ids(input_len, rng, vocab_size) for _ in range(count)]


def shared_prefix_prompts(
    count: int, input_len: int, *, num_groups: int, shared_len: int, seed: int, vocab_size: int
) -> list[list[int]]:
    """`count` prompts in `num_groups` groups: `shared_len` tokens of the group, then `input_len` of its own.

    Groups are equally large, give or take one, and come in random order.
    """
    rng = random.Random(seed)
    prefixes = [random_ids(shared_len, rng, vocab_size) for _ in range(num_groups)]
    prompts = [prefixes[index % num_groups] + random_ids(input_len, rng, vocab_size) for index in range(count)]
    rng.shuffle(prompts)
    return prompts


def random_ids(count: int, rng: random.Random, vocab_size: int) -> list[int]:
    """`count` ids of ordinary tokens."""
    first = min(FIRST_PLAIN_ID, vocab_size - 1)
    return rng.choices(range(first, vocab_size), k=count)
