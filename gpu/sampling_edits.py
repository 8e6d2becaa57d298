"""What a sequence changes of its logits before a draw: masks, biases and penalties, kept beside the sampler.

Kept per slot, for sequences that ask for any of it. Built from the log when the sequence comes to the device and carried
on token by token from there, so that nothing here outlives, or needs to outlive, a preemption or a restart: the log is sent
whole, and the same log gives the same edits. Sparse: a penalty costs memory and time for the tokens seen, not for the
vocabulary. No torch: the simulated device uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..protocol.messages import Barred, NewRow
from ..protocol.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NOT_FINITE = "the model's logits are not finite"
NO_TOKEN_LEFT = "no token is left to choose from: the request's own parameters bar all of them"

_NO_IDS: Int32Array = np.empty(0, np.int32)
_NOTHING_BARRED = Barred()


class LogitEdits:
    """The edits of one sequence, as they stand for its next token once `catch_up` has seen its log.

    In the order they are to be applied: `allowed` (int32 words, bit i of word j set: token 32 j + i may be chosen, none
    behind the last; None: all may), `barred` (ids that may not), `bias` added at `bias_ids`; then at each of `seen_ids` a
    positive logit is divided by `repetition`, another multiplied, and `penalties` subtracted. Ids are int32 and, but for
    `barred`, without repetition; values are float32. All arrays are for reading, until the next `catch_up`.
    """

    __slots__ = (
        "_barred_at_first",
        "_barred_later",
        "_counts",
        "_from_token",
        "_ids",
        "_num_prompt_tokens",
        "_num_taken",
        "_params",
        "_penalties",
        "_phrases",
        "_places",
        "allowed",
        "barred",
        "bias",
        "bias_ids",
        "penalties",
        "repetition",
        "seen_ids",
    )

    def __init__(self, row: NewRow) -> None:
        params = row.params
        given = row.barred or _NOTHING_BARRED
        self._params = params
        self._num_prompt_tokens = row.num_prompt_tokens
        self.allowed = packed_mask(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.repetition = params.repetition_penalty
        single = [phrase[0] for phrase in given.bad_words if len(phrase) == 1]
        self._barred_later = np.array(single, np.int32)
        self._barred_at_first = np.array([*single, *given.ends], np.int32)
        self._phrases: dict[int, list[list[int]]] = {}  # by their last token but one
        for phrase in given.bad_words:
            if len(phrase) > 1:
                self._phrases.setdefault(phrase[-2], []).append(phrase)
        self.barred = _NO_IDS
        self._places: dict[int, int] = {}
        self._counts: list[int] = []
        self._ids = self.seen_ids = _NO_IDS
        self._penalties = self.penalties = np.empty(0, np.float32)
        # Which tokens count: all for the repetition penalty, only the generated ones for the other two, or none.
        self._from_token: int | None = row.num_prompt_tokens
        if params.repetition_penalty != 1.0:
            self._from_token = 0
        elif not params.presence_penalty and not params.frequency_penalty:
            self._from_token = None
        self._num_taken = 0

    @classmethod
    def of(cls, row: NewRow) -> LogitEdits | None:
        """The edits of a sequence as it is sent; None for one that asks for none. They have seen nothing yet."""
        return cls(row) if row.barred is not None or asks_for_edits(row.params) else None

    @property
    def is_idle(self) -> bool:
        """Whether the next token's logits stay as they are: `min_tokens` have come, no bad word has begun."""
        return self.allowed is None and not (len(self.barred) or len(self.bias_ids) or len(self.seen_ids))

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in what has been appended to the log since the last call; the edits are then those for the next token."""
        if self._from_token is not None:
            if self._num_taken == 0 and self._from_token == 0:
                self._open(np.unique(np.array(token_ids[: self._num_prompt_tokens], np.int32)))
            for token in token_ids[max(self._num_taken, self._num_prompt_tokens) :]:
                self._count(token)
        self._num_taken = len(token_ids)
        num_output = len(token_ids) - self._num_prompt_tokens
        barred = self._barred_at_first if num_output < self._params.min_tokens else self._barred_later
        if self._phrases and num_output:
            completing = self._completing(token_ids, num_output)
            barred = np.concatenate((barred, np.array(completing, np.int32))) if completing else barred
        self.barred = barred

    def permitted(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Which tokens are not masked: bool [vocab_size]."""
        permitted = np.ones(vocab_size, np.bool_) if self.allowed is None else unpacked_mask(self.allowed, vocab_size)
        permitted[self.barred] = False
        return permitted

    @property
    def changes(self) -> bytes:
        """What is done to logits that are not masked, as bytes to compare."""
        if not len(self.bias_ids) and not len(self.seen_ids):
            return b""
        columns = (self.bias_ids, self.bias, self.seen_ids, self.penalties, np.array([self.repetition]))
        return b"".join(column.tobytes() for column in columns)

    def _completing(self, token_ids: Sequence[int], num_output: int) -> list[int]:
        """The last tokens of the phrases that the output ends with all but the last token of."""
        found = []
        for phrase in self._phrases.get(token_ids[-1], ()):
            begun = len(phrase) - 1
            if begun <= num_output and list(token_ids[-begun:]) == phrase[:-1]:
                found.append(phrase[-1])
        return found

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = len(self._counts)
            self._open(np.array([token], np.int32))
        self._counts[place] += 1
        self._penalties[place] = self._params.frequency_penalty * self._counts[place] + self._params.presence_penalty

    def _open(self, tokens: Int32Array) -> None:
        """Give each of `tokens`, which are new, a place; they have not been generated yet."""
        first = len(self._counts)
        end = first + len(tokens)
        if end > len(self._ids):
            room = max(2 * len(self._ids), end, 64)
            self._ids = np.resize(self._ids, room) if first else np.zeros(room, np.int32)
            self._penalties = np.resize(self._penalties, room) if first else np.zeros(room, np.float32)
        self._ids[first:end] = tokens
        self._penalties[first:end] = 0.0
        self._places.update(zip(tokens.tolist(), range(first, end), strict=True))
        self._counts += [0] * len(tokens)
        self.seen_ids, self.penalties = self._ids[:end], self._penalties[:end]


def asks_for_edits(params: SamplingParams) -> bool:
    """Whether these parameters alone change logits (`min_tokens` and `bad_words` do it through the ids they bar)."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
    )


def unpacked_mask(words: Int32Array, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether bit i of word j is set, for each token 32 j + i: bool [vocab_size]. There are no bits behind the last word."""
    mask = np.zeros(vocab_size, np.bool_)
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:vocab_size]
    mask[: len(bits)] = bits
    return mask


def packed_mask(token_ids: Sequence[int]) -> Int32Array:
    """`token_ids` as bits of int32 words, as many as the largest id needs."""
    bits = np.zeros((max(token_ids, default=-1) // 32 + 1) * 32, np.uint8)
    bits[np.array(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
