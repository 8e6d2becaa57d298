"""Whose prompt the cache holds the most of comes first: what is cached is used before it is evicted.

On which tier it is cached makes no difference, nor whether its step has ended: it counts what need not be computed. Equals
go by arrival. Whoever needs next what one that runs is about to compute (a twin of an uncached prefix) is deferred until
that has come as far as the two go together, or has stopped. `waiting_prefixes.py` follows both, at the cost of what
changes in the tree. The order is that of SGLang's `lpm`, without its limit of 128 waiting requests (Zheng et al., SGLang,
2312.07104, section 3); the deferral is its in-batch prefix caching, with those that run instead of a second tree.

Ageing (`ageing.py`): after 16 admissions that passed the one that has waited longest, the next is its own, deferred or not.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ....protocol.messages import Admit
from ....radix.tree import PrefixTree
from ..ageing import Ageing
from ..sequence import Sequence, State
from ..waiting_prefixes import WaitingPrefixes


class Policy:
    """One class; the longest cached prefix first."""

    def __init__(self) -> None:
        self._ageing = Ageing()
        self.prefixes = WaitingPrefixes()

    def priority_class(self, admit: Admit) -> int:
        """All requests are of one class."""
        return 0

    def admits_beside(self, num_running: int) -> bool:
        """Always: continuous batching."""
        return True

    def watch(self, tree: PrefixTree) -> None:
        """Follow this tree."""
        self.prefixes.watch(tree)

    def on_queued(self, seq: Sequence) -> None:
        """Only the new are ordered: the preempted come before them."""
        if seq.state is State.WAITING:
            self._ageing.add(seq)
            self.prefixes.add(seq)

    def on_left(self, seq: Sequence) -> None:
        """It neither waits nor computes any more."""
        self._ageing.remove(seq)
        self.prefixes.remove(seq)

    def on_admitted(self, seq: Sequence) -> None:
        """It computes from here on what its twins can wait for."""
        if seq.state is State.WAITING:
            self._ageing.admit(seq)
        self.prefixes.begin(seq)

    def next_of(self, waiting: Items[Sequence], recovery: Items[Sequence]) -> Sequence | None:
        """The preempted, then whose turn has come by age, then the longest prefix among those not deferred."""
        if recovery:
            return recovery[0]
        return self._ageing.due() or self.prefixes.longest()
