"""Beam search: the most likely continuations of a prompt, found by keeping the best few of each length.

Built from ordinary requests. In each round every beam is a request for one token and its most likely alternatives,
whose prompt goes on from its parent's of the round before. The parents hold their KV until their children have
answered, so a round computes one token a beam: whole blocks are shared, the last one is copied (`Admit.follows`).

The rules are those of `transformers` with `early_stopping=False`. Of all continuations of all beams, the
(1 + number of end tokens) * `beam_width` most likely are looked at, in order: those that end the text are kept as finished if
they are among the first `beam_width`, and the first `beam_width` of the others are the next beams. A finished sequence's
score is its summed log-probability over its length to the power of `length_penalty`. The search ends at `max_tokens`,
or when `beam_width` are finished and the best beam, at its present length, scores no better than the worst of them.
vLLM's differs in this: it counts the prompt in the length, and always searches up to `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, aclosing

import msgspec
from tokenizers import Tokenizer

from ...protocol.errors import RequestFailedError
from ...protocol.ids import RequestId
from ...protocol.outputs import BeamSearchSequence, CompletionOutput, Logprob
from ...protocol.sampling import BeamSearchParams, SamplingParams
from .stream import RequestStream


class Beam(msgspec.Struct, frozen=True):
    """A continuation: its tokens, what each was chosen from, and the sum of their log-probabilities.

    `parent` is the request that its last token came from.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    parent: RequestId | None = None

    def score(self, length_penalty: float) -> float:
        """What it is compared by when it has ended."""
        return self.cum_logprob / float(len(self.token_ids) ** length_penalty)


class Search:
    """The beams of one prompt, round by round; no I/O here."""

    def __init__(self, params: BeamSearchParams, *, eos_token_ids: Collection[int], max_tokens: int) -> None:
        self.params = params
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.max_tokens = max_tokens
        self.beams = [Beam([], [], 0.0)]
        self.finished: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at in a round; no more than as many of one beam can be among them."""
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam_width

    @property
    def is_over(self) -> bool:
        """Whether nothing better can come."""
        if not self.beams or len(self.beams[0].token_ids) >= self.max_tokens:
            return True
        if len(self.finished) < self.params.beam_width:
            return False
        penalty = self.params.length_penalty
        return self.beams[0].score(penalty) <= self.finished[-1].score(penalty)

    def take(self, answers: list[tuple[RequestId, dict[int, Logprob]]]) -> None:
        """What each beam's request found, in the order of the beams."""
        reached = [
            (beam.cum_logprob + logprob.logprob, number, token_id)
            for number, (beam, (_, found)) in enumerate(zip(self.beams, answers, strict=True))
            for token_id, logprob in found.items()
        ]
        reached.sort(key=lambda continuation: -continuation[0])
        candidates = [
            self._grown(self.beams[number], token_id, cum_logprob, *answers[number])
            for cum_logprob, number, token_id in reached[: self.num_candidates]
        ]
        width = self.params.beam_width
        is_last = len(candidates[0].token_ids) == self.max_tokens
        ended = [is_last or beam.token_ids[-1] in self.eos_token_ids for beam in candidates]
        self.finished += [beam for beam, has_ended in zip(candidates[:width], ended[:width], strict=True) if has_ended]
        self.finished.sort(key=lambda beam: -beam.score(self.params.length_penalty))
        del self.finished[width:]
        self.beams = [beam for beam, has_ended in zip(candidates, ended, strict=True) if not has_ended][:width]

    @staticmethod
    def _grown(beam: Beam, token_id: int, cum_logprob: float, parent: RequestId, found: dict[int, Logprob]) -> Beam:
        return Beam([*beam.token_ids, token_id], [*beam.logprobs, found], cum_logprob, parent)


Ask = Callable[[list[int], RequestId | None, SamplingParams], RequestStream]
"""Starts the request for a beam's next token: its tokens, the request it follows, its parameters."""


async def run_search(search: Search, ask: Ask) -> list[Beam]:
    """Search to the end and return what was found, the best first. Raises what ends a request, and `RequestFailedError`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=search.num_candidates, ignore_eos=True, output_kind="delta")
    async with AsyncExitStack() as before:  # the round that the next one follows
        while True:
            async with AsyncExitStack() as now:
                streams = [
                    await now.enter_async_context(aclosing(ask(beam.token_ids, beam.parent, params))) for beam in search.beams
                ]
                search.take([(stream.id, await _answer(stream)) for stream in streams])
                await before.aclose()
                if search.is_over:
                    return search.finished or search.beams
                before.push_async_exit(now.pop_all())


async def _answer(stream: RequestStream) -> dict[int, Logprob]:
    output = await anext(stream)
    completion: CompletionOutput = output.outputs[0]
    if not completion.logprobs:
        raise RequestFailedError(str(completion.stop_reason or "a beam ended without an answer"))
    return completion.logprobs[0]


def sequences_of(
    found: list[Beam], prompt_ids: list[int], eos_token_ids: Collection[int], tokenizer: Tokenizer
) -> list[BeamSearchSequence]:
    """What a search found, as its caller gets it."""
    return [
        BeamSearchSequence(
            tokens=prompt_ids + beam.token_ids,
            text=tokenizer.decode(prompt_ids + beam.token_ids, skip_special_tokens=True),
            cum_logprob=beam.cum_logprob,
            logprobs=beam.logprobs,
            finish_reason="stop" if beam.token_ids[-1] in eos_token_ids else "length",
        )
        for beam in found
    ]
