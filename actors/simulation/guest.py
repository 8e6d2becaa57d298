"""A visitor while it is here: what it has been given, how it reads, when it goes."""

from __future__ import annotations

from collections.abc import Iterator

from ...protocol.ids import RequestId
from ...protocol.messages import Admit, TextDelta
from ...protocol.sampling import FinishReason
from .scenario import Visitor


class Guest:
    """`visitor`, whose request was sent as `admit`."""

    def __init__(self, visitor: Visitor, admit: Admit) -> None:
        self.visitor = visitor
        self.admit = admit
        self.given: dict[int, list[int]] = {index: [] for index in range(admit.params.n)}
        """Tokens of each sequence."""
        self.reasons: dict[int, FinishReason] = {}
        """How each sequence has ended."""
        self.num_terminals = 0
        self.has_left = False
        self._read_until_s = 0.0
        self._num_read = dict.fromkeys(self.given, 0)

    @property
    def request_id(self) -> RequestId:
        """Its request."""
        return self.admit.request_id

    @property
    def num_given(self) -> int:
        """Tokens of all its sequences."""
        return sum(map(len, self.given.values()))

    def take(self, delta: TextDelta, now: float) -> Iterator[float]:
        """It is handed `delta`; gives the moments at which it has read each token of it that it reads."""
        self.given[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason
        self.num_terminals += delta.is_terminal
        most = self.visitor.reads
        self._read_until_s = max(self._read_until_s, now)
        for _ in delta.token_ids:
            if self.has_left or (most is not None and self._num_read[delta.index] >= most):
                return
            self._num_read[delta.index] += 1
            self._read_until_s += self.visitor.read_s
            yield self._read_until_s

    def wants_to_go(self) -> bool:
        """Whether it has been given all that it wanted to see."""
        most = self.visitor.leaves_after
        return not self.has_left and most is not None and self.num_given >= most
