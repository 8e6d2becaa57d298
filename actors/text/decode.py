"""Token ids to text, one id at a time.

The promise: the pieces of one request join to what decoding the prompt's end and all output ids at
once gives, less the prompt's own text. No piece is ever taken back. An id whose bytes end inside a
character is held until the character is whole; what is still incomplete at the end of the output
becomes one U+FFFD.

How. `tokenizers.decoders.DecodeStream` does this in under a microsecond an id: it keeps the ids of its
last piece, the *context*, decodes context + held ids, and gives what follows the context's text
as soon as the whole does not end in U+FFFD. The context is why spaces survive: sentence-piece style
decoders strip the first space of whatever they decode, so a piece decoded alone would lose its own.
The prompt's last ids are the first context. Four things that stream does not do are done here:

| case | the stream alone | here |
| --- | --- | --- |
| ids without text: skipped special tokens, ids beyond the tokenizer | decodes the whole run at each step | it never sees them |
| the prompt ends inside a character | the prompt's text leads the first piece | no stream before a clean end |
| a long run of bytes that are no UTF-8, or of U+FFFD itself | holds and decodes it all at each step | see `HELD_LIMIT` |
| a byte-fallback run turns invalid after it gave a character | raises "Invalid prefix" | its held ids are decoded apart |

In these cases the *window* takes over: the same algorithm in Python on the same two id lists, which
goes back to a stream as soon as the text ends cleanly. It never holds more than `HELD_LIMIT` ids: then all but
the last three are final. Why three: a character has at most four bytes and
an id at least one byte, so three more ids settle where every character before them ends.

One choice where two promises conflict. A byte-fallback decoder is all or nothing: one bad byte turns
every byte of its run into U+FFFD, characters given long ago included. Holding whole runs would
stop the stream for scripts written in nothing else, so characters are given as they complete, and
only what came after them becomes U+FFFD; an incomplete end is one U+FFFD here as well, not one a byte.
"""

from __future__ import annotations

import codecs
import re

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ...protocol.messages import PROMPT_TAIL

HELD_LIMIT = 16
"""Held ids from which on they are not one incomplete character."""

_REST_OF_CHARACTER = 3
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """What decoding needs to know of a tokenizer, gathered once (about 20 ms for 50,000 ids). What it says never changes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        by_text = tokenizer.get_vocab(with_added_tokens=True)
        known = set(by_text.values())
        self.size = max(known, default=-1) + 1
        """Ids from here on have no text."""
        specials = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        holes = {token_id for token_id in range(self.size) if token_id not in known}
        self._silent = frozenset(token_id for token_id in holes if tokenizer.id_to_token(token_id) is None)
        self._silent_or_special = self._silent | specials
        self._texts: dict[int, str] = {}

    def text_of(self, token_id: int) -> str:
        """What a token is alone, special ones too; U+FFFD where its bytes are no whole character."""
        if token_id >= self.size:
            return ""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def silent(self, *, skip_special_tokens: bool) -> frozenset[int]:
        """Ids below `size` that have no text in the output."""
        return self._silent_or_special if skip_special_tokens else self._silent

    def byte_of(self, token_id: int) -> int | None:
        """The byte a byte-fallback token stands for; None for any other token."""
        match = _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def incomplete_bytes(self, token_ids: list[int]) -> int:
        """How many byte-fallback tokens at the end are the beginning of a character. 0 in other tokenizers."""
        run = bytearray()
        for token_id in reversed(token_ids):
            byte = self.byte_of(token_id)
            if byte is None:
                break
            run.append(byte)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(reversed(run)))
        return len(decoder.getstate()[0])

    def from_whole_character(self, token_ids: list[int]) -> list[int]:
        """`token_ids` without byte-fallback tokens at the start that go on with an earlier character."""
        first = 0
        while first < min(_REST_OF_CHARACTER, len(token_ids) - 1) and 0x80 <= (self.byte_of(token_ids[first]) or 0) < 0xC0:
            first += 1
        return token_ids[first:]


class TextDecoder:
    """One request's ids to text. `prompt_tail`: the prompt's last ids, of which `PROMPT_TAIL` are used.

    `step` each output id in order, then `flush` once.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_tail: list[int], *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._size = vocabulary.size
        self._skip_special_tokens = skip_special_tokens
        self._silent = vocabulary.silent(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []
        self._context: list[int] = []
        self._stream: DecodeStream | None = None
        self._start_after([i for i in prompt_tail[-PROMPT_TAIL:] if i < self._size and i not in self._silent])

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        if token_id >= self._size or token_id in self._silent:
            return ""
        self._held.append(token_id)
        if self._stream is None:
            return self._step_window()
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The library raises a bare Exception; the stream is of no use after it.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = None
            return self._step_window()
        if piece is not None:
            self._context, self._held = self._held, []
            return piece
        if len(self._held) >= HELD_LIMIT:
            self._stream = None
            return self._step_window()
        return ""

    def flush(self) -> str:
        """The text of what is still held, its incomplete end as one U+FFFD."""
        if not self._held:
            return ""
        text, given = self._window()
        piece = text[given:]
        # A byte-fallback decoder gives an incomplete character one U+FFFD for each of its bytes.
        incomplete = self._vocabulary.incomplete_bytes(self._held)
        if incomplete > 1 and piece.endswith(_REPLACEMENT * incomplete):
            piece = piece[: 1 - incomplete]
        self._held = []
        return piece

    def _step_window(self) -> str:
        text, given = self._window()
        ids = self._context + self._held
        if not text.endswith(_REPLACEMENT):
            self._held = []
            self._start_after(ids[-PROMPT_TAIL:])
            return text[given:]
        if len(self._held) < HELD_LIMIT:
            return ""
        final = ids[:-_REST_OF_CHARACTER]
        final = final[: len(final) - self._vocabulary.incomplete_bytes(final)]
        settled = _common(self._decode(final), text)
        self._held = ids[len(final) :]
        self._start_after(final[-PROMPT_TAIL:])
        return settled[given:]

    def _window(self) -> tuple[str, int]:
        """The text of context and held ids, and how many of its characters were given before.

        A context that ends inside a character has given what it has in common with the completed text, and
        surely what stands before that character.
        """
        before, text = self._decode(self._context), self._decode(self._context + self._held)
        if not text.startswith(before) and not before.endswith(_REPLACEMENT):
            # A byte-fallback run turned invalid: its given characters stand, the held ids are decoded apart.
            self._context = []
            before, text = self._decode(self._context), self._decode(self._context + self._held)
        given = len(_common(before, text))
        if self._stream is None and before.endswith(_REPLACEMENT):
            given = max(given, len(_common(self._before_open_character(), text)))
        return text, given

    def _before_open_character(self) -> str:
        """The context's text without the incomplete character at its end, which may spoil the byte run it is in."""
        heads = (self._decode(self._context[:-cut]) for cut in range(1, _REST_OF_CHARACTER + 1))
        return next((head for head in heads if not head.endswith(_REPLACEMENT)), "")

    def _start_after(self, context: list[int]) -> None:
        """Make `context` the delivered ids; with a stream if nothing is held and their text ends cleanly."""
        # A context that starts inside a character would spoil a byte-fallback run that follows.
        context = self._vocabulary.from_whole_character(context)
        self._context, self._stream = context, None
        if not self._held and not self._decode(context).endswith(_REPLACEMENT):
            self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _common(first: str, second: str) -> str:
    """The longest text that both begin with."""
    if second.startswith(first):
        return first
    length = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[:length]
