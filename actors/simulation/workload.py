"""Requests as a simulation needs them: when each comes, how long it is, and what it has in common with others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import msgspec

from ...protocol.ids import RequestId
from ...protocol.messages import Admit
from ...protocol.sampling import SamplingParams

STOP = 2**31 - 1
"""The token by which an output ends before its `max_tokens`. No other token is this one."""
MOST_TOKENS = 2**30
"""Tokens of prompts are below this; those of outputs that are like nobody else's are from here on."""

Tokens = Sequence[int]


class Output(msgspec.Struct, frozen=True):
    """One sequence's output. `tokens` None: tokens like nobody else's."""

    length: int
    tokens: Tokens | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `prompt` makes its tokens, below `MOST_TOKENS`, only when it comes: traces may hold many millions."""

    arrival_s: float
    num_prompt_tokens: int
    prompt: Callable[[], Tokens]
    outputs: tuple[Output, ...]
    """One for each sequence, in the order of their index. No output is empty."""
    max_tokens: int | None = None
    """What the client allowed. An output that is shorter ends by a token that nobody foresees."""
    label: str = ""
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    """It computes all of its prompt, cached or not."""


def admits(jobs: Sequence[Job]) -> Iterator[Admit]:
    """The jobs as messages, in their order. Their ids are their places, from 1 on, and so are their seeds.

    Nobody is slow to read: outputs are `final_only`. Prompts are arrays of int32.
    """
    for number, job in enumerate(jobs, start=1):
        params = SamplingParams(
            n=len(job.outputs),
            temperature=0.0,
            seed=number,
            max_tokens=job.max_tokens,
            output_kind="final_only",
            prompt_logprobs=job.prompt_logprobs,
        )
        yield Admit(
            RequestId(number),
            job.label or str(number),
            cast("list[int]", array("i", job.prompt())),  # a sequence of integers like any other, in a tenth of the room
            params,
            job.arrival_s,
            stop_token_ids=[STOP],
            priority=job.priority,
            tenant=job.tenant,
            cache_salt=job.cache_salt,
        )


def output_tokens(job: Job, seed: int, index: int, start: int) -> Iterator[int]:
    """The tokens of the output of sequence `index` from `start` on, for the job with this seed; `STOP` ends it early."""
    output = job.outputs[index]
    ends_early = output.length != job.max_tokens
    if output.tokens is not None:
        yield from output.tokens[start : output.length - ends_early]
    else:
        first = MOST_TOKENS + (seed * 7919 + index * 104_729) % (MOST_TOKENS - output.length - 1)
        yield from range(first + start, first + output.length - ends_early)
    if ends_early:
        yield STOP


def tokens_of(runs: Iterable[tuple[int, int]]) -> array[int]:
    """Runs of (first token, length), one after the other: the tokens of each count upwards. As int32."""
    import numpy as np  # not at the top: what shows the help needs none

    tokens = array("i")
    for start, length in runs:
        tokens.frombytes(np.arange(start, start + length, dtype=np.int32).tobytes())
    return tokens
