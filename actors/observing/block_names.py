"""Numbers for the blocks of token logs, so that a trace can say what is alike without saying what it is.

A scheduler tells tokens apart in one way only: by how far two logs agree in the block that follows the same blocks, and
among several logs that agree equally far by their order. So a block is named by its parent and its tokens, and a new
name comes with its place among its siblings: the neighbours on both sides and how many leading tokens it shares with
each. `actors/simulation/contents.py` makes tokens of that again, which differ from the real ones and compare as they do.

What is remembered is bounded. The least recently used names go first, leaves before what they hang on; a block that
comes again after that gets another number. The bound is several times the KV pools, which forget in the same way, so
what a scheduler could still compare is as good as never forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...protocol.trace import NOBODY, Named
from ...radix.tokens import TOKEN_BYTES, TokenLog, common_tokens

SPARE_NAMES = 16_384
"""Names remembered beside several times the blocks there are."""
POOLS = 4


class _Key(NamedTuple):
    parent: int
    tokens: bytes


class BlockNames:
    """Names blocks of `block_size` tokens. `limit` is how many names are remembered."""

    def __init__(self, block_size: int, *, limit: int) -> None:
        self._width = block_size * TOKEN_BYTES
        self._limit = limit
        self._names: OrderedDict[_Key, int] = OrderedDict()  # the least recently used first, children before parents
        self._siblings: dict[int, list[bytes]] = {}
        self._namespaces: dict[str, int] = {}
        self._last_namespace = 0
        self._last = -1
        self._new: list[Named] = []

    def __len__(self) -> int:
        return len(self._names)

    def namespace(self, salt: str | None) -> int:
        """The number of the namespace of a `cache_salt`: 0 without one."""
        if salt is None:
            return 0
        number = self._namespaces.pop(salt, None)
        if number is None:
            number = self._last_namespace = self._last_namespace + 1
        self._namespaces[salt] = number
        if len(self._namespaces) > self._limit:
            del self._namespaces[next(iter(self._namespaces))]
        return number

    def of_tokens(self, token_ids: Sequence[int], namespace: int) -> list[int]:
        """The names of the blocks of these tokens."""
        return self.of(TokenLog(token_ids).buffer, namespace)

    def of(self, log: bytes | bytearray, namespace: int) -> list[int]:
        """The names of the blocks of `log` (int32 tokens), the last one too if it is not whole."""
        names: list[int] = []
        keys: list[_Key] = []
        parent = -1 - namespace
        for tokens in self._blocks(log):
            key = _Key(parent, tokens)
            keys.append(key)
            name = self._names.get(key)
            parent = self._add(key) if name is None else name
            names.append(parent)
        for key in reversed(keys):
            self._names.move_to_end(key)
        while len(self._names) > self._limit:
            self._forget()
        return names

    def take_new(self) -> list[Named]:
        """What has been named since the last call."""
        new, self._new = self._new, []
        return new

    def _blocks(self, log: bytes | bytearray) -> Iterator[bytes]:
        return (bytes(log[start : start + self._width]) for start in range(0, len(log), self._width))

    def _add(self, key: _Key) -> int:
        parent, tokens = key
        self._last += 1
        self._names[key] = self._last
        siblings = self._siblings.setdefault(parent, [])
        place = bisect_left(siblings, tokens)
        left = siblings[place - 1] if place else None
        right = siblings[place] if place < len(siblings) else None
        siblings.insert(place, tokens)
        short = len(tokens) // TOKEN_BYTES if len(tokens) < self._width else 0
        self._say(
            Named(
                first=self._last,
                parent=parent,
                left=NOBODY if left is None else self._names[_Key(parent, left)],
                right=NOBODY if right is None else self._names[_Key(parent, right)],
                num_left=0 if left is None else common_tokens(left, tokens),
                num_right=0 if right is None else common_tokens(tokens, right),
                num_tokens=short,
            )
        )
        return self._last

    def _say(self, named: Named) -> None:
        """One record for a run of blocks that only follow one another."""
        before = self._new[-1] if self._new else None
        if (
            before is not None
            and not before.num_tokens
            and named.parent == before.first + before.count - 1 == named.first - 1
            and named.left == named.right == NOBODY
        ):
            self._new[-1] = Named(
                first=before.first,
                parent=before.parent,
                count=before.count + 1,
                left=before.left,
                right=before.right,
                num_left=before.num_left,
                num_right=before.num_right,
                num_tokens=named.num_tokens,
            )
        else:
            self._new.append(named)

    def _forget(self) -> None:
        (parent, tokens), name = self._names.popitem(last=False)
        siblings = self._siblings[parent]
        del siblings[bisect_left(siblings, tokens)]
        if not siblings:
            del self._siblings[parent]
        assert name not in self._siblings, "a name is forgotten before what follows it"
