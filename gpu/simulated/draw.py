"""The simulated model: the next token is a hash of the tokens before it.

As pure as a model's argmax, and touchier: one token read wrongly anywhere changes every token
from there on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ...protocol.messages import TokenLogprobs
from ...protocol.sampling import MAX_LOGPROBS
from ..slots import Slot
from .contents import Int64Array


def permitted_tokens(slot: Slot, vocab_size: int) -> NDArray[np.bool_] | None:
    """Which tokens the sequence may choose next, bool `[vocab_size]`; None: all. Raises `GrammarError`."""
    edits = slot.edits()
    permitted = None if edits is None else edits.permitted(vocab_size)
    if slot.grammar is None:
        return permitted
    allowed = np.unpackbits(slot.grammar.mask().view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    return allowed if permitted is None else allowed & permitted


class HashedToken:
    """Draws tokens from [0, vocab_size) without `reserved_ids`.

    Greedy (temperature 0): a function of the tokens alone. Otherwise of the tokens and of what names
    the draw: the request's seed, the sequence's index in it, and the output position. Penalties and biases that apply
    change the hash. A token that the request bars, or its grammar, gives way to one of the others; a reserved one only
    where a grammar leaves nothing else.
    Raises `ValueError` when every id is reserved.
    """

    def __init__(self, vocab_size: int, reserved_ids: Iterable[int] = ()) -> None:
        reserved = frozenset(reserved_ids)
        self._vocab_size = vocab_size
        self._choices: Sequence[int] = [i for i in range(vocab_size) if i not in reserved] if reserved else range(vocab_size)
        if not self._choices:
            raise ValueError(f"reserved_ids leaves no token of a vocabulary of {vocab_size}")

    def draw(self, tokens: Int64Array, slot: Slot) -> int | None:
        """The token after `tokens` (int64 `[n]`), as read from memory, for the sequence of `slot`; None if all are barred.

        Raises `ValueError` for a draw at a temperature above 0 without a seed: no such draw can be repeated;
        `GrammarError` where the sequence's grammar fails.
        """
        key = b""
        if slot.params.temperature > 0:
            if slot.params.seed is None:
                raise ValueError(f"sequence {slot.seq_id}: temperature {slot.params.temperature} without a resolved seed")
            key = struct.pack("<qqq", slot.params.seed, slot.index, slot.num_output_tokens)
        edits = slot.edits()
        if edits is not None and edits.changes:
            key += blake2b(edits.changes, digest_size=16).digest()
        number = int.from_bytes(blake2b(tokens.astype("<i4").tobytes(), digest_size=8, key=key).digest(), "little")
        token = self._choices[number % len(self._choices)]
        permitted = permitted_tokens(slot, self._vocab_size)
        if permitted is None or permitted[token]:
            return token
        left = [choice for choice in self._choices if permitted[choice]]
        if not left and slot.grammar is not None:
            left = np.flatnonzero(permitted).tolist()  # reserved ones: its end
        return left[number % len(left)] if left else None

    def logprobs(self, tokens: Int64Array, slot: Slot, token: int, num_likeliest: int | None = None) -> TokenLogprobs:
        """Made-up logarithms for `token`, drawn after `tokens`: a function of these alone, falling as real ones do.

        `num_likeliest` of the likeliest stand beside it, or as many as the request asks for. A greedy token is the
        likeliest. One that is not among the `MAX_LOGPROBS` likeliest is a little less likely.
        """
        gaps = blake2b(tokens.astype("<i4").tobytes(), digest_size=32, key=b"logprobs").digest()
        first = int.from_bytes(gaps[-8:], "little")
        count = min(MAX_LOGPROBS, len(self._choices))
        likeliest = [self._choices[(first + i) % len(self._choices)] for i in range(count)]
        if slot.params.temperature == 0:
            likeliest = [token, *(other for other in likeliest if other != token)][:count]
        falling = list(accumulate((-0.05 - gap / 256 for gap in gaps[: count + 1]), initial=-1.0))
        rank = likeliest.index(token) + 1 if token in likeliest else count + 1
        wanted = (slot.params.logprobs if num_likeliest is None else num_likeliest) or 0
        return TokenLogprobs([token, *likeliest[:wanted]], [falling[rank - 1], *falling[: min(wanted, count)]], rank)
