"""A request between its `Open` and its terminal: a text machine for each of its sequences, and when things happened."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ...protocol.errors import Problem, problem_of
from ...protocol.journey import Journey
from ...protocol.messages import Metrics, Open, SequenceEnd, TextDelta, TokenLogprobs
from ...protocol.sampling import FinishReason
from .decode import Vocabulary
from .machine import TextMachine


class LiveRequest:
    """`machines` are of its sequences that have not ended, by index; those in `ended` ended before, elsewhere. Raises what
    the tokenizer raises.

    The first delta of all carries the metrics, and so does each end; when the request finished is in the last.
    """

    __slots__ = (
        "_first_token_s",
        "_last_token_s",
        "_vocabulary",
        "machines",
        "num_preemptions",
        "num_sequences",
        "opening",
        "prompt_logprobs",
    )

    def __init__(self, vocabulary: Vocabulary, opening: Open, *, ended: Collection[int] = ()) -> None:
        self.opening = opening
        self.num_preemptions = 0
        self.num_sequences = opening.params.n
        self._vocabulary = vocabulary
        self.machines = {index: TextMachine(vocabulary, opening) for index in range(self.num_sequences) if index not in ended}
        self.prompt_logprobs: list[TokenLogprobs] | None = None  # until they are handed over
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def learn(self, entries: list[TokenLogprobs]) -> None:
        """How likely the prompt was; the next delta carries it."""
        self.prompt_logprobs = [self._with_texts(details) for details in entries]

    def advance(
        self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs], end: SequenceEnd | None, sampled_s: float
    ) -> TextDelta:
        """Take ids and perhaps the scheduler's end; a stop string complete by then wins over the end."""
        machine, is_first = self.machines[index], self._first_token_s is None
        piece = machine.push(token_ids, ends_with_stop_token=end is not None and end.finish_reason == "stop")
        text, num_tokens, stop = piece.text, piece.num_tokens, piece.stop
        if num_tokens:
            self._saw_tokens(sampled_s)
        if stop is None and end is not None:
            rest = machine.finish()
            text, stop = text + rest.text, rest.stop
        if num_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        if logprobs:
            logprobs = [self._with_texts(details) for details in logprobs]
        if end is not None:
            self.num_preemptions = end.num_preemptions
        if stop is not None:
            return self._end(index, text, token_ids, "stop", stop_reason=stop, sampled_s=sampled_s, logprobs=logprobs)
        if end is not None:
            return self._end(
                index,
                text,
                token_ids,
                end.finish_reason,
                stop_reason=end.problem.message if end.problem is not None else end.stop_token_id,
                problem=end.problem,
                sampled_s=sampled_s,
                logprobs=logprobs,
                journey=end.journey,
            )
        opening, metrics = self.opening, self._metrics(None) if is_first else None
        if not index and not logprobs and self.prompt_logprobs is None:  # most are like this, and shorter calls are quicker
            return TextDelta(opening.request_id, text, token_ids, None, None, None, opening.num_cached_tokens, metrics)
        return TextDelta(
            opening.request_id,
            text,
            token_ids,
            num_cached_tokens=opening.num_cached_tokens,
            metrics=metrics,
            index=index,
            logprobs=logprobs,
            prompt_logprobs=self._take_prompt_logprobs(),
        )

    def failed(self, index: int, token_ids: list[int], problem: Problem, sampled_s: float) -> TextDelta:
        """The end of a sequence whose text raised: its ids count, what was held is lost."""
        if token_ids:
            self._saw_tokens(sampled_s)
        return self._end(
            index, "", token_ids, "error", stop_reason=problem.message, problem=problem, sampled_s=sampled_s, logprobs=[]
        )

    def refused(self, problem: Problem | None) -> list[TextDelta]:
        """The ends of all its sequences, from outside, with the text held so far."""
        return [self._refused(index, problem) for index in list(self.machines)]

    def _refused(self, index: int, problem: Problem | None) -> TextDelta:
        try:
            text = self.machines[index].finish().text
        except Exception as error:
            text, problem = "", problem or problem_of(error)
        reason: FinishReason = "abort" if problem is None else "error"
        stop_reason = problem.message if problem is not None else None
        return self._end(index, text, [], reason, stop_reason=stop_reason, problem=problem, sampled_s=None, logprobs=[])

    def _end(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        reason: FinishReason,
        *,
        stop_reason: str | int | None,
        sampled_s: float | None,
        logprobs: list[TokenLogprobs],
        problem: Problem | None = None,
        journey: Journey | None = None,
    ) -> TextDelta:
        del self.machines[index]
        opening = self.opening
        return TextDelta(
            opening.request_id,
            text,
            token_ids,
            reason,
            stop_reason,
            problem,
            opening.num_cached_tokens,
            metrics=self._metrics(None if self.machines else sampled_s),
            index=index,
            num_left=len(self.machines),
            logprobs=logprobs,
            prompt_logprobs=self._take_prompt_logprobs(),
            journey=None if self.machines else journey,
        )

    def _take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def _with_texts(self, details: TokenLogprobs) -> TokenLogprobs:
        return msgspec.structs.replace(details, texts=[self._vocabulary.text_of(token_id) for token_id in details.token_ids])

    def _saw_tokens(self, sampled_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = sampled_s
        self._last_token_s = sampled_s

    def _metrics(self, finished_s: float | None) -> Metrics:
        """`arrival` is when the request was queued: the frontend, which knows better, replaces it."""
        queued_s = self.opening.queued_s
        return Metrics(
            arrival=queued_s,
            queued=queued_s,
            first_scheduled=self.opening.first_scheduled_s,
            first_token=self._first_token_s,
            last_token=self._last_token_s,
            finished=finished_s,
            num_preemptions=self.num_preemptions,
        )
