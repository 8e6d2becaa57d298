"""Tokens for the blocks that a trace only names: other ones than were there, which compare as those did.

Children of one block are put in the order that `Named` tells, each beside the neighbours it was named with, and get
symbols accordingly: the first is all zeros, and each next one keeps what it shares with the one before it and goes on
with the next higher symbol. For blocks in order that is enough, because what two of them share is the least that any
two neighbours between them do.

A recorder that has forgotten a name does not say how a new one compares to it, and no scheduler could ask. The new one
then has any place that agrees with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...protocol.errors import ValidationError
from ...protocol.trace import NOBODY, Named

_SYMBOL_BYTES = 3


class _Siblings:
    """Blocks that follow the same parent, as a chain in order; `shared[name]` leading tokens are common to it and the next."""

    def __init__(self) -> None:
        self.after: dict[int, int] = {NOBODY: NOBODY}  # a ring through `NOBODY`, which stands at both ends
        self.before: dict[int, int] = {NOBODY: NOBODY}
        self.shared: dict[int, int] = {NOBODY: 0}

    def add(self, name: int, named: Named) -> None:
        """Put `name` between its neighbours. Those between them, if any, were forgotten. Raises `KeyError`."""
        shared = self.shared
        if named.left != NOBODY and (named.num_left > named.num_right or named.right == NOBODY):
            left = named.left
            while shared[left] > named.num_left:
                left = self.after[left]
            self._insert(name, left, named.num_left, shared[left])
        elif named.right != NOBODY:
            left = self.before[named.right]
            while shared[left] > named.num_right:
                left = self.before[left]
            self._insert(name, left, shared[left], named.num_right)
        else:
            self._insert(name, self.before[NOBODY], 0, 0)

    def _insert(self, name: int, left: int, num_left: int, num_right: int) -> None:
        right = self.after[left]
        self.after[left] = self.before[right] = name
        self.after[name], self.before[name] = right, left
        self.shared[left], self.shared[name] = num_left, num_right

    def __iter__(self) -> Iterator[int]:
        name = self.after[NOBODY]
        while name != NOBODY:
            yield name
            name = self.after[name]


class BlockContents:
    """What stands in each block that `named` names. Raises `ValidationError` where the records contradict each other."""

    def __init__(self, named: Iterable[Named], block_size: int) -> None:
        self.block_size = block_size
        self._lengths: dict[int, int] = {}
        self._only: dict[int, int] = {}  # by parent: most blocks have no sibling, and all zeros will do for them
        self._families: dict[int, _Siblings] = {}
        for record in named:
            self._add(record)
        self._tokens: dict[int, list[int]] = {}
        for family in self._families.values():
            self._fill(family)

    def of(self, hash_ids: Iterable[int]) -> list[int]:
        """The tokens of these blocks, one after the other. Raises `ValidationError` for a block that was never named."""
        tokens: list[int] = []
        for name in hash_ids:
            found = self._tokens.get(name)
            if found is None:
                if name not in self._lengths:
                    raise ValidationError(f"hash_ids: block {name} was never named", field="hash_ids", value=name)
                found = [0] * self._lengths[name]
            tokens += found
        return tokens

    def _add(self, record: Named) -> None:
        last = record.first + record.count - 1
        only = self._only.get(record.parent)
        if only is None:
            self._only[record.parent] = record.first
        else:
            self._join(record, only)
        for name in range(record.first, last):
            self._only[name] = name + 1
            self._lengths[name] = self.block_size
        self._lengths[last] = record.num_tokens or self.block_size

    def _join(self, record: Named, only: int) -> None:
        family = self._families.get(record.parent)
        if family is None:
            family = self._families[record.parent] = _Siblings()
            family.add(only, Named(first=only, parent=record.parent))
        try:
            family.add(record.first, record)
        except KeyError:
            raise ValidationError(
                f"block {record.first} stands beside {record.left} and {record.right}, which do not follow {record.parent}",
                field="Named",
                value=record.first,
            ) from None

    def _fill(self, family: _Siblings) -> None:
        symbols: list[int] = []
        for name in family:
            length = self._lengths[name]
            shared = family.shared[family.before[name]]
            raised = [symbols[shared] + 1] if shared < len(symbols) else []
            symbols = [*symbols[:shared], *raised]
            symbols += [0] * (length - len(symbols))
            self._tokens[name] = [_token(symbol) for symbol in symbols]


def _token(symbol: int) -> int:
    """A token whose little-endian bytes are in the order of symbols: the tree compares logs as bytes."""
    return int.from_bytes(symbol.to_bytes(_SYMBOL_BYTES, "big"), "little")
