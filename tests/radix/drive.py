"""A cache driven by hand, as the scheduler drives it, and a picture of all there is to know about one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from repertory.protocol.ids import SequenceId, StepId
from repertory.radix.cache import Advance, KVCache
from repertory.radix.holding import Holding
from repertory.radix.node import Node
from repertory.radix.tokens import TokenLog


class Seq:
    """One sequence: its holding, its log, and how many of its tokens are computed or planned."""

    def __init__(self, holding: Holding, tokens: Sequence[int]) -> None:
        self.holding = holding
        self.log = TokenLog(tokens)
        self.num_computed = 0

    @property
    def table(self) -> list[int]:
        return self.holding.block_table

    @property
    def shared(self) -> list[int]:
        return self.table[: self.holding.num_tree_blocks]


class Driver:
    """Plans steps against one `KVCache` and proves after each move that its books are right."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, **more: Any) -> None:
        self.cache = KVCache(num_blocks, block_size, **more)
        self.step_id = StepId(0)
        self.num_opened = 0
        self.begin()

    def sound(self) -> None:
        assert self.cache.check_integrity() == []

    def begin(self) -> StepId:
        """The next step is planned from here on."""
        self.step_id = StepId(self.step_id + 1)
        self.cache.begin_step(self.step_id)
        return self.step_id

    def open(self, tokens: Sequence[int], namespace: Hashable = "shared") -> Seq:
        self.num_opened += 1
        return Seq(self.cache.open(SequenceId(self.num_opened), namespace), tokens)

    def admit(self, seq: Seq, spare: int = 0) -> int | None:
        found = self.cache.admit(seq.holding, seq.log, spare=spare)
        self.sound()
        if found is not None:
            seq.num_computed = found
        return found

    def start(self, tokens: Sequence[int], namespace: Hashable = "shared") -> Seq:
        """Open and admit; both must work."""
        seq = self.open(tokens, namespace)
        assert self.admit(seq) is not None
        return seq

    def look_up(self, seq: Seq) -> Advance:
        advance = self.cache.advance(seq.holding, seq.log, seq.num_computed)
        self.sound()
        seq.num_computed = advance.num_computed
        return advance

    def compute(self, seq: Seq, count: int | None = None) -> None:
        """Plan `count` tokens of `seq` (default: all it lacks) into this step."""
        before = seq.num_computed
        after = len(seq.log) if count is None else before + count
        assert self.cache.grow(seq.holding, after), "no room"
        self.sound()
        self.cache.enter(seq.holding, seq.log, before, after)
        self.sound()
        seq.num_computed = after

    def chunk(self, seq: Seq, count: int | None = None) -> Advance:
        """Look up and, unless another row computes the next tokens, compute."""
        advance = self.look_up(seq)
        if not advance.must_wait:
            self.compute(seq, count)
        return advance

    def sample(self, seq: Seq, token: int) -> None:
        """The row of this step drew `token`."""
        self.cache.prove(seq.holding, self.step_id)
        seq.log.append(token)
        self.sound()

    def serve(self, tokens: Sequence[int], namespace: Hashable = "shared") -> Seq:
        """Admit, prefill in one step of its own and draw a first token (99): all it entered is proven."""
        seq = self.start(tokens, namespace)
        self.begin()
        self.chunk(seq)
        self.sample(seq, 99)
        self.begin()
        return seq

    def decode(self, seq: Seq, token: int) -> None:
        """One more step: compute the last token, draw `token`."""
        self.begin()
        self.compute(seq, 1)
        self.sample(seq, token)

    def release(self, seq: Seq) -> None:
        self.cache.release(seq.holding)
        seq.num_computed = 0
        self.sound()

    def close(self, *seqs: Seq) -> None:
        for seq in seqs:
            self.cache.close(seq.holding)
            self.sound()

    def remember(self, tokens: Sequence[int], namespace: Hashable = "shared") -> list[int]:
        """Leave the whole blocks of `tokens` behind as cache; return them."""
        seq = self.serve(tokens, namespace)
        shared = list(seq.shared)
        self.close(seq)
        return shared

    def found(self, tokens: Sequence[int], namespace: Hashable = "shared") -> int:
        """Tokens of `tokens` and one more that are cached in whole blocks."""
        return self.cache.lookup(namespace, TokenLog([*tokens, 12345]))


def snapshot(cache: KVCache) -> Any:
    """Everything in `cache` as plain values: equal snapshots, equal caches, order of eviction included."""
    pool, tree = cache.pool, cache.tree
    roots = {name: tree.peek(name) for name in tree.namespaces()}
    return {
        "roots": {name: _picture(root) for name, root in roots.items() if root is not None},
        "order of eviction": [(bytes(node.tokens), node.start, tuple(node.blocks)) for node in tree.oldest_first()],
        "evictable": tree.num_evictable,
        "free": list(pool._free),
        "hands": [pool.hand(block) for block in range(pool.num_blocks)],
        "last steps": list(pool.last_step),
        "reserved": cache.num_reserved,
        "filling": {(id(node), index): list(blocks) for (node, index), blocks in cache._filling.items()},
        "holdings": {holding.seq_id: _fields(holding) for holding in cache.holdings()},
    }


def _picture(node: Node) -> Any:
    children = [(key, [_picture(child) for child in bucket]) for key, bucket in node.children.items()]
    run = (bytes(node.tokens), tuple(node.blocks), node.start)
    return run, node.locks, node.num_proven, node.last_step, list(node.order), children


def _fields(holding: Holding) -> Any:
    values = {name: getattr(holding, name) for name in Holding.__slots__}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
