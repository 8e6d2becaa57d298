"""What the KV of a sequence must hold, position by position.

The KV of a token depends on the token, on its position, on what changes the model (the namespace)
and, through attention, on every token before it. So a slot's content is a row of four integers:

    column     meaning
    TOKEN      the token id; UNWRITTEN or JUNK in memory that holds no KV
    POSITION   the token's position in its sequence
    NAMESPACE  the root of the prefix tree it belongs to
    HISTORY    a 64-bit fingerprint of all tokens up to and including this one

Two sequences with a common prefix have equal rows over it, which is what makes sharing a block
right; a block that holds the right tokens after another prefix has another HISTORY, as its KV
would have other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64Array: TypeAlias = NDArray[np.int64]

TOKEN, POSITION, NAMESPACE, HISTORY = range(4)
NUM_COLUMNS = 4
UNWRITTEN = -1
JUNK = -2

_FIRST_CAPACITY = 64
_MULTIPLIER = 6364136223846793005
"""Multiplier of Knuth's MMIX generator (TAOCP vol. 2, 3.3.4, table 1, line 26)."""


class Contents:
    """The rows a sequence's KV must have: int64 `[len(log), 4]`, grown with its log, never rewritten.

    HISTORY at position p is the sum over i <= p of (token_i + 1) * m**i modulo 2**64: a prefix sum,
    so appending costs what is appended.
    """

    def __init__(self, namespace: int, tokens: Sequence[int]) -> None:
        self._namespace = namespace
        self._length = 0
        self._rows: Int64Array = np.empty((_FIRST_CAPACITY, NUM_COLUMNS), np.int64)
        # One-element arrays: numpy warns when a scalar wraps, and wrapping is what is wanted here.
        self._history: Int64Array = np.zeros(1, np.int64)
        self._weight: Int64Array = np.ones(1, np.int64)
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    def rows(self, start: int, end: int) -> Int64Array:
        """Rows of positions [start, end): a view, int64 `[end - start, 4]`. Not to be written to."""
        return self._rows[start:end]

    def tokens(self) -> Int64Array:
        """All tokens so far: a view, int64 `[len(self)]`. Not to be written to."""
        return self._rows[: self._length, TOKEN]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the rows of `tokens`, which follow on what is there."""
        if not len(tokens):
            return
        start, end = self._length, self._length + len(tokens)
        self._make_room(end)
        rows = self._rows[start:end]
        rows[:, TOKEN] = tokens
        rows[:, POSITION] = np.arange(start, end)
        rows[:, NAMESPACE] = self._namespace
        weights = np.full(len(tokens) + 1, _MULTIPLIER, np.int64)
        weights[0] = self._weight[0]
        np.cumprod(weights, out=weights)
        terms = (rows[:, TOKEN] + 1) * weights[:-1]
        terms[:1] += self._history
        np.cumsum(terms, out=rows[:, HISTORY])
        self._history, self._weight = rows[-1:, HISTORY].copy(), weights[-1:]
        self._length = end

    def _make_room(self, length: int) -> None:
        if length > len(self._rows):
            grown = np.empty((max(length, 2 * len(self._rows)), NUM_COLUMNS), np.int64)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
