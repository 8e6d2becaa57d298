"""One request's text: ids in, text out, cut at stop strings. The same for streaming and not."""

from __future__ import annotations

import msgspec

from ...protocol.messages import Open
from .decode import TextDecoder, Vocabulary
from .stops import StopStrings


class Piece(msgspec.Struct, gc=False):
    """What came of some ids: the text to give out now, and where a stop string ended the request.

    `num_tokens` of the given ids belong to the output; those after the one that completed `stop` do not.
    """

    text: str
    num_tokens: int
    stop: str | None


class TextMachine:
    """Turns the ids of one request into text, holding back what is not certain yet.

    `push` ids as they come; `finish` once, unless a stop string was found before. Raises what the
    tokenizer raises.
    """

    def __init__(self, vocabulary: Vocabulary, opening: Open) -> None:
        params = opening.params
        self._decoder = TextDecoder(vocabulary, opening.prompt_tail, skip_special_tokens=params.skip_special_tokens)
        self._include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, include=self._include)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: list[int], *, ends_with_stop_token: bool = False) -> Piece:
        """Take the next ids. A stop token at their end counts, but its text stays out unless stops are included."""
        with_text = token_ids[:-1] if ends_with_stop_token and not self._include else token_ids
        released = ""
        for position, token_id in enumerate(with_text):
            self._num_tokens += 1
            # The text of the first `min_tokens` ids can be no part of a stop.
            armed = self._num_tokens > self._min_tokens
            released += self._stops.feed(self._decoder.step(token_id), armed=armed)
            if self._stops.matched is not None:
                return Piece(released, position + 1, self._stops.matched)
        return Piece(released, len(token_ids), None)

    def finish(self) -> Piece:
        """End the output: incomplete bytes become text, and a held tail that is no stop string is released."""
        armed = self._num_tokens > self._min_tokens
        text = self._stops.feed(self._decoder.flush(), armed=armed)
        return Piece(text + self._stops.flush(), 0, self._stops.matched)
