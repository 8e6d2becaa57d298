"""Stop strings over text that arrives in pieces.

Each stop string is a Knuth-Morris-Pratt automaton whose state is the length of its longest prefix
that the text ends with. The largest state is exactly the tail that could still become a stop: that is
held, all before it is released. A failure table is built only as far as a match has come, so a
thousand-character stop string costs nothing until the text begins to repeat it, and the whole costs
time linear in the output however the strings overlap.

Rejected: searching the whole text at each piece (quadratic), and one Aho-Corasick automaton for all
(to build it takes tens of milliseconds for the 64 long strings a request may bring).
"""

from __future__ import annotations


class StopStrings:
    """The stop machine of one request. The match that completes first wins; of two that complete
    together, the one that starts first.

    With `include` the released text ends with the stop string, otherwise before it.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        """The stop string that was found; nothing is released after it."""
        self._include = include
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, delta: str, *, armed: bool = True) -> str:
        """The text that can be given out now that `delta` has arrived.

        Text fed while not `armed`, and what was held before it, can be no part of a match.
        """
        if self.matched is not None:
            return ""
        if not armed:
            return self.flush() + delta
        if not self._held and self._first_characters.isdisjoint(delta):
            return delta
        text = self._held + delta
        match = self._advance(delta)
        if match is not None:
            end = len(self._held) + match.end
            self.matched, self._held = match.stop, ""
            return text[: end if self._include else end - len(match.stop)]
        held = max(pattern.state for pattern in self._patterns)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The held tail, at the end of a text that no stop string ended."""
        tail, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.state = 0
        return tail

    def _advance(self, delta: str) -> _Match | None:
        best: _Match | None = None
        for pattern in self._patterns:
            end = pattern.advance(delta)
            if end is None:
                continue
            if best is None or (end, -len(pattern.stop)) < (best.end, -len(best.stop)):
                best = _Match(pattern.stop, end)
        return best


class _Match:
    __slots__ = ("end", "stop")

    def __init__(self, stop: str, end: int) -> None:
        self.stop = stop
        self.end = end
        """Characters of the delta up to and with the match's last."""


class _Pattern:
    """One stop string's automaton (Knuth, Morris, Pratt 1977), its failure table built on demand."""

    __slots__ = ("_failure", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        """Length of the longest prefix of `stop` that the text ends with."""
        self._failure = [0, 0]
        """Entry k: length of the longest proper prefix of `stop` that its first k characters end with."""

    def advance(self, delta: str) -> int | None:
        """Read `delta`; the number of its characters read when the stop string was complete, if it was."""
        stop, state, failure = self.stop, self.state, self._failure
        for position, character in enumerate(delta):
            while state and stop[state] != character:
                state = failure[state]
            if stop[state] == character:
                state += 1
                if state == len(stop):
                    return position + 1
                if state == len(failure):
                    self._extend()
        self.state = state
        return None

    def _extend(self) -> None:
        stop, failure = self.stop, self._failure
        last = len(failure) - 1
        border = failure[last]
        while border and stop[border] != stop[last]:
            border = failure[border]
        failure.append(border + 1 if stop[border] == stop[last] else 0)
