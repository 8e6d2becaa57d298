"""The cache as one would describe it in words: a dictionary from prefixes to blocks. Slow, obvious, no tree.

Every cached block is an entry `(namespace, all tokens up to the block's end)`. Nodes, runs, splits,
locks and lists do not exist here; what they are for does.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

Prefix = tuple[Hashable, tuple[int, ...]]


@dataclass
class Cached:
    """One cached block."""

    block: int
    written: int
    """Step that wrote it; in that step it may be shared, not copied."""
    holders: set[int] = field(default_factory=set)
    proven: bool = False
    """Whether a token was drawn from finite logits by a row that read this very block."""
    unheld_since: int = 0
    """When its last holder let go: eviction goes by this."""


class NaiveCache:
    """What is cached, who holds it, and in which order it would go."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.blocks: dict[Prefix, Cached] = {}
        self._clock = itertools.count()

    def path(self, namespace: Hashable, tokens: list[int], limit: int) -> list[Prefix]:
        """The longest run of cached whole blocks that `tokens` starts with, up to `limit` tokens."""
        found: list[Prefix] = []
        for end in range(self.size, max(limit, 0) + 1, self.size):
            prefix = (namespace, tuple(tokens[:end]))
            if prefix not in self.blocks:
                break
            found.append(prefix)
        return found

    def partial(self, namespace: Hashable, tokens: list[int], depth: int, limit: int) -> tuple[int, list[Prefix]]:
        """Most leading tokens that the block after `depth` shares with a cached one in its place; which ones do."""
        start = depth * self.size
        wanted = tokens[start : min(start + self.size, limit)]
        best, sources = 0, []
        for prefix in self.blocks:
            if prefix[0] != namespace or len(prefix[1]) != start + self.size or prefix[1][:start] != tuple(tokens[:start]):
                continue
            common = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(wanted, prefix[1][start:], strict=False))
            )
            if common > best:
                best, sources = common, []
            if common == best and best:
                sources.append(prefix)
        return best, sources

    def evictable(self) -> list[Prefix]:
        """What nobody holds, in the order it goes."""
        free = [prefix for prefix, cached in self.blocks.items() if not cached.holders]
        return sorted(free, key=lambda prefix: self.blocks[prefix].unheld_since)

    def hold(self, seq_id: int, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            self.blocks[prefix].holders.add(seq_id)

    def let_go(self, seq_id: int) -> None:
        """Deepest first, so that a prefix outlives what hangs on it."""
        held = [prefix for prefix, cached in self.blocks.items() if seq_id in cached.holders]
        for prefix in sorted(held, key=lambda prefix: -len(prefix[1])):
            cached = self.blocks[prefix]
            cached.holders.remove(seq_id)
            if not cached.holders:
                cached.unheld_since = next(self._clock)

    def evict(self, count: int) -> None:
        for prefix in self.evictable()[:count]:
            del self.blocks[prefix]

    def below(self, prefix: Prefix) -> list[Prefix]:
        """`prefix` and every cached continuation of it."""
        namespace, tokens = prefix
        return [other for other in self.blocks if other[0] == namespace and other[1][: len(tokens)] == tokens]
