"""What has arrived of one completion, and how far its reader has come. Slow readers find it merged."""

from __future__ import annotations

from ...protocol.messages import TextDelta, TokenLogprobs
from ...protocol.outputs import CompletionOutput, Logprob
from ...protocol.sampling import FinishReason, OutputKind


class Completion:
    """One of a request's sequences in its frontend. `has_logprobs`: whether they were asked for."""

    def __init__(self, index: int, *, has_logprobs: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.num_seen_tokens = 0
        """Tokens its reader has taken."""
        self.num_granted = 0
        """Of these, how many it has been given credit for."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._text = ""  # what its reader has taken; the copy that adding to it makes is then of a string that is read anyway
        self._new_text = ""
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self._cumulative_logprob = 0.0

    def on_delta(self, delta: TextDelta) -> None:
        """New text and tokens, and perhaps the end."""
        self._new_text += delta.text
        self.token_ids += delta.token_ids
        if self._logprobs is not None:
            for details in delta.logprobs:
                self._logprobs.append(by_token(details))
                self._cumulative_logprob += details.logprobs[0]
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, delta.stop_reason)

    def end(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        """It goes no further; a second end changes nothing."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What its reader gets now: all so far, or ("delta") what it has not had yet."""
        text, first = self._new_text, 0
        self._new_text = ""
        if kind == "delta":
            first = self.num_seen_tokens
        else:
            text = self._text = self._text + text
        self.num_seen_tokens = len(self.token_ids)
        if self._logprobs is None:
            return CompletionOutput(self.index, text, self.token_ids[first:], None, None, self.finish_reason, self.stop_reason)
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[first:],
            self._cumulative_logprob,
            self._logprobs[first:],
            self.finish_reason,
            self.stop_reason,
        )


def by_token(details: TokenLogprobs) -> dict[int, Logprob]:
    """The token itself first, then the most likely ones in falling order; each once."""
    texts: list[str] | list[None] = details.texts or [None] * len(details.token_ids)
    ranks = [details.rank, *range(1, len(details.token_ids))]
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank, text in zip(details.token_ids, details.logprobs, ranks, texts, strict=True):
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
