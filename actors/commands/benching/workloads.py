"""The five workloads that the engine is judged by, and compared with others on. Standard library only.

    A  offline   64 requests, 256 tokens in, 64 out, all at once
    B  latency   one stream, 128 in, 128 out
    C  prefix    32 requests that share 1,024 tokens and own 32 each, 32 out
    D  ttft      time to the first token of 2,048
    E  itl       8 streams decode when a 4,096-token prompt arrives

Prompts are random token ids (no special tokens) from fixed seeds, another one per repetition, so
that a prefix cache does not carry over; answers are greedy and ignore the model's end. This file
imports nothing of the package: other engines' drivers read it as it is.
"""

from __future__ import annotations

import random
from typing import NamedTuple

FIRST_PLAIN_ID = 17
VOCAB_SIZE = 49_152

STREAMS_E = 8
LONG_PROMPT_E = 4096


class Workload(NamedTuple):
    """Prompts that arrive together, and how many tokens each is to get."""

    name: str
    title: str
    prompts: list[list[int]]
    max_tokens: int


def token_ids(count: int, seed: int, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`count` random ids of ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(count)]


def offline(repetition: int) -> Workload:
    """Workload A."""
    return Workload("A", "offline", [token_ids(256, 1000 * repetition + i) for i in range(64)], 64)


def latency(repetition: int) -> Workload:
    """Workload B."""
    return Workload("B", "latency", [token_ids(128, 50_000 + repetition)], 128)


def prefix(repetition: int) -> Workload:
    """Workload C."""
    shared = token_ids(1024, 90_000 + repetition)
    return Workload("C", "prefix", [shared + token_ids(32, 91_000 + 100 * repetition + i) for i in range(32)], 32)


def ttft(repetition: int) -> Workload:
    """Workload D."""
    return Workload("D", "ttft", [token_ids(2048, 70_000 + repetition)], 1)


def itl_streams(repetition: int) -> Workload:
    """The eight streams of workload E. They decode until the long prompt has had its first token."""
    prompts = [token_ids(64, 60_000 + 10 * repetition + i) for i in range(STREAMS_E)]
    return Workload("E", "itl", prompts, 400)


def itl_long_prompt(repetition: int) -> list[int]:
    """The prompt that arrives in the middle of workload E."""
    return token_ids(LONG_PROMPT_E, 65_000 + repetition)
