"""The one door to KV memory: every transaction on the pool, the tree and a sequence's holding.

The scheduler speaks in tokens and sequences; this class turns that into locks, blocks and table
entries. Each method either does all of what it says or changes nothing.

What is available. Blocks that could be handed out now are the free ones and the evictable ones.
A sequence that was admitted is *promised* the blocks its known tokens need (`Holding.reserved`),
so a prefill never stops half way for want of memory, and only growth past the known tokens can
fail. The invariant `num_free + num_evictable >= total reserved` is what makes a promise good:

    transaction                          free      evictable     reserved
    ----------------------------------   -------   -----------   ------------------
    admit, m matched of which u unlocked    0         -u           +(blocks needed - m)
    share k blocks instead of computing     0         -unlocked    -k (those not taken yet)
    grow by k, promised                    -k, or evicted          -k
    release                                +private   +unlocked    -what was left

One step is planned between `begin_step` calls. Within it, three facts keep a token from being
computed twice: blocks enter the tree when their step is planned (`enter`), a row looks up again
before each chunk (`advance`), and a row whose next tokens are being computed by another row of
this very step waits for the next: always, where a block is being filled that can be shared then
(`must_wait`), and while others have use for the budget, where part of a full block can only be
copied then (`may_wait`: distinct prompts with the same first few tokens must not queue up).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from ..protocol.ids import BlockId, CopyId, SequenceId, StepId
from ..protocol.messages import BlockCopy, CopyDirection, Fences
from ..protocol.outputs import BlockCounts
from .copies import CopyJob
from .holding import Holding
from .host import HostTier
from .integrity import problems
from .lookup import Match
from .moving import Arrived, MayFetch, Mover
from .node import Node
from .pool import BlockPool, latest
from .tokens import TokenLog, common_tokens
from .tree import PrefixTree


def _always(start: int, num_tokens: int) -> bool:
    return True


class Advance(NamedTuple):
    """How far a row has come after looking up again."""

    num_computed: int
    copy: BlockCopy | None
    must_wait: bool
    """Another row of this step computes the next tokens and will leave them in a block to share: plan nothing now."""
    may_wait: bool = False
    """Part of a block is computed by this step and can be copied in the next: plan others first."""


class SwapFacts(NamedTuple):
    """What is known of a sequence that may have to give its blocks up. All in whole blocks of the tree."""

    num_alone: int
    """That only it locks."""
    num_unsaved: int
    """Of these, without a copy on the host or on its way there."""
    num_shared: int
    """The others, at the head: they stay."""


class RolledBack(NamedTuple):
    """A sequence lost the KV of its tokens from `num_tokens` on; it holds nothing any more."""

    seq_id: SequenceId
    num_tokens: int


class KVCache:
    """Blocks, tree and holdings, behind transactions. With `num_host_blocks` there is a second tier (`host.py`).

    With `enable_prefix_caching` off each sequence has a namespace of its own, emptied at its end:
    the same mechanism without sharing, so preemption and resumption work alike.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size)
        self.host: HostTier | None = None
        self.mover: Mover | None = None
        if num_host_blocks:
            self.host = self.tree.host = HostTier(self.tree, num_host_blocks)
            self.mover = Mover(self.tree, self.host, release=self.release, free_up=self._free_up)
        self.num_reserved = 0
        self._after = Fences()
        self._holdings: dict[SequenceId, Holding] = {}
        self._step = StepId(0)
        # Blocks that rows of this step fill only partly, by the node they hang below and their index: who fills
        # them, and the whole block's tokens. The index, because the node grows when its row gets a second chunk.
        self._filling: dict[tuple[Node, int], list[tuple[SequenceId, bytes]]] = {}

    # ---- life of a holding ----------------------------------------------------------------------

    def open(self, seq_id: SequenceId, namespace: Hashable) -> Holding:
        """A holding for a new sequence. It holds nothing until it is admitted."""
        if not self.enable_prefix_caching:
            namespace = ("sequence", seq_id)
        assert seq_id not in self._holdings, f"sequence {seq_id} opened twice"
        holding = Holding(seq_id, namespace)
        self._holdings[seq_id] = holding
        return holding

    def close(self, holding: Holding) -> None:
        """The sequence has ended: release what it holds and forget it. What it entered stays as cache."""
        self.release(holding)
        del self._holdings[holding.seq_id]
        if self.host is not None:
            self.host.unpin(holding.seq_id)
        if not self.enable_prefix_caching:
            root = self.tree.peek(holding.namespace)
            if self.mover is not None and root is not None:
                self.mover.cancel_all(root)
            self.tree.drop_namespace(holding.namespace)

    def begin_step(self, step_id: StepId) -> None:
        """The next transactions plan step `step_id`."""
        self._step = step_id
        self._filling.clear()

    def end_step(self) -> Fences:
        """The step that was planned is sent: blocks given back from here on may be in use by it.

        Returns what must be complete before it starts.
        """
        self.pool.used_in = self._step
        after, self._after = self._after, Fences()
        return after

    # ---- transactions ---------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out and are promised to nobody."""
        return self.pool.num_free + self.tree.num_evictable - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(
        self, holding: Holding, log: TokenLog, *, limit: int | None = None, spare: int = 0, may_fetch: MayFetch = _always
    ) -> int | None:
        """Lock the longest cached prefix of `log` and promise the blocks for the rest of it.

        Returns the number of tokens found (whole blocks, at most `limit`: `len(log) - 1` unless it is less), or None, with no
        trace left, when that would leave fewer than `spare` blocks available. Where part of them is on its way
        from the host, or is on the host and `may_fetch` says to bring it, `holding.jobs` must arrive first.
        """
        assert holding.node is None, "admitted twice"
        limit = len(log) - 1 if limit is None else limit
        match = self.tree.match(self.tree.root(holding.namespace), log, limit)
        beyond = self.mover.beyond(match, log, limit, may_fetch) if self.mover is not None else None
        num_moving, num_host = (beyond.num_moving, beyond.num_host) if beyond is not None else (0, 0)
        needed = self.blocks_for(len(log)) - len(match.blocks) - num_moving
        if needed + spare > self.num_available - match.num_unlocked:
            self.tree.forget_if_empty(holding.namespace)
            return None
        if self.mover is not None and beyond is not None:
            holding.block_table = match.blocks + self.mover.bring_in(holding, match, beyond)
        else:
            holding.node = self.tree.lock(match)
            holding.block_table = match.blocks
        if self.host is not None:
            self.host.unpin(holding.seq_id)
        holding.num_tree_blocks = len(holding.block_table)
        holding.reserved = needed - num_host
        self.num_reserved += holding.reserved
        return holding.num_tree_blocks * self.block_size

    def fetch_ahead(
        self, holding: Holding, log: TokenLog, *, limit: int | None = None, spare: int, may_fetch: MayFetch
    ) -> bool:
        """Bring in what the host holds, up to `limit` tokens, for a sequence that cannot be admitted yet.

        False: nothing, or no room.
        """
        assert holding.node is None, "it is admitted"
        limit = len(log) - 1 if limit is None else limit
        root = self.tree.peek(holding.namespace)
        if self.mover is None or root is None:
            return False
        match = self.tree.match(root, log, limit)
        beyond = self.mover.beyond(match, log, limit, may_fetch)
        if beyond is None or not beyond.num_host:
            return False
        if beyond.num_host + spare > self.num_available - match.num_unlocked:
            return False
        self.mover.bring_ahead(holding.seq_id, beyond)
        return True

    def swap_out(self, holding: Holding, later: Iterable[SequenceId] = ()) -> bool:
        """Copy to the host what releasing `holding` would leave to eviction, and keep it there for its return.

        `later`: preempted sequences behind it in order, the last first, whose host blocks it may take. False, and
        nothing has changed, when there is no room or no host tier.
        """
        return self.mover is not None and self.mover.swap_out(holding, later)

    def cancel_unwanted(self) -> bool:
        """Make available what is being copied in and nobody waits for; whether there was any."""
        return self.mover is not None and self.mover.cancel_unwanted()

    def unpin(self, holding: Holding) -> None:
        """The host need not keep anything for a sequence that holds nothing: it will not be back soon."""
        if self.host is not None:
            self.host.unpin(holding.seq_id)

    def swap_facts(self, holding: Holding) -> SwapFacts:
        """What giving up `holding` would take and leave. Changes nothing."""
        num_alone = num_unsaved = 0
        node = holding.node
        while node is not None and node.locks == 1:
            num_alone += node.size
            num_unsaved += node.size - len(node.host_blocks)
            node = node.parent
        return SwapFacts(num_alone, num_unsaved, holding.num_tree_blocks - num_alone)

    def on_copy_done(self, direction: CopyDirection, copy_id: CopyId, *, ok: bool) -> Arrived:
        """A copy has ended. Sequences that waited for it are ready, or hold nothing any more."""
        assert self.mover is not None, "a copy without a host tier"
        return self.mover.on_copy_done(direction, copy_id, ok=ok)

    def write_back(self, most: int, next_victims: Iterable[Holding] = ()) -> int:
        """Copy up to `most` blocks to the host while nothing else moves; return how many.

        Of what is nearest to eviction, or if all of that is there already, of what `next_victims` alone hold.
        """
        if self.host is None or not all(self.host.lanes.is_idle(lane) for lane in ("out", "in")):
            return 0
        count = self.host.write_back(most)
        for holding in next_victims:
            if count == 0 and holding.node is not None:
                count = self.host.save_ahead(holding.node, most)
        return count

    def take_copies(self) -> list[CopyJob]:
        """Copies decided on since the last call."""
        return self.host.lanes.take_unsent() if self.host is not None else []

    def lookup(self, namespace: Hashable, log: TokenLog) -> int:
        """Tokens of `log` the cache holds in whole blocks. Changes nothing."""
        root = self.tree.peek(namespace)
        return 0 if root is None else len(self.tree.match(root, log, len(log) - 1).blocks) * self.block_size

    def advance(self, holding: Holding, log: TokenLog, num_computed: int) -> Advance:
        """Look up again before a chunk: take what others have entered meanwhile.

        Whole blocks are shared (own copies of them given back). A partly matching block, if it is proven, is
        copied into a private one. `num_computed` includes what admission found, and so does the result.
        """
        match = self.tree.match(_held(holding), log, len(log) - 1)
        if match.blocks:
            self._share(holding, match)
            num_computed = max(num_computed, match.depth * self.block_size)
        start = holding.num_tree_blocks * self.block_size
        filled = self._filled_by_others(holding, log)
        if filled == start + self.block_size and filled > num_computed:
            return Advance(num_computed, None, must_wait=True)
        reach = start + match.num_partial
        if match.partial is not None and match.is_partial_proven and reach > num_computed:
            assert match.partial_node is not None
            match.partial_node.used_in = self._step  # it need not be locked, and may be handed on after this
            return Advance(reach, self._copy(holding, match.partial, match.num_partial), must_wait=False)
        pending = match.partial is not None and self.pool.last_step[match.partial] == self._step
        soon = max(filled, reach if pending else 0)
        return Advance(num_computed, None, must_wait=False, may_wait=soon > num_computed)

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Extend the table so that it holds `num_tokens` tokens, evicting cache if need be.

        False, and nothing changed, when that takes more blocks than are promised or available.
        """
        needed = self.blocks_for(num_tokens) - len(holding.block_table)
        if needed <= 0:
            return True
        if needed - holding.reserved > self.num_available:
            return False
        promised = min(needed, holding.reserved)
        holding.reserved -= promised
        self.num_reserved -= promised
        holding.block_table += self._take(needed)
        return True

    def enter(self, holding: Holding, log: TokenLog, before: int, after: int) -> None:
        """This step computes tokens [before, after) of the sequence: put its full blocks into the tree.

        Only blocks whose tokens are all known enter. A block that the tree has already is switched to
        the tree's and given back, but not in the step that still writes it: then it stays private until
        the sequence next comes by here.
        """
        size, last_step = self.block_size, self.pool.last_step
        assert before >= holding.num_tree_blocks * size, "a row would write into a block of the tree"
        for block in holding.block_table[before // size : self.blocks_for(after)]:
            last_step[block] = self._step
        full = min(after, len(log)) // size
        while holding.num_tree_blocks < full:
            match = self.tree.match(_held(holding), log, full * size)
            done = match.depth
            while done > holding.num_tree_blocks and last_step[holding.block_table[done - 1]] == self._step:
                done -= 1
            if done > holding.num_tree_blocks:
                self._share(holding, match._replace(blocks=match.blocks[: done - holding.num_tree_blocks]))
            elif match.blocks or not self._attach(holding, log, full):
                break
        if after % size and full == holding.num_tree_blocks and len(log) >= (full + 1) * size:
            self._filling.setdefault((_held(holding), full), []).append((holding.seq_id, log.block(full, size)))

    def num_missing(self, holding: Holding, log: TokenLog, *, limit: int | None = None) -> int:
        """Blocks by which what is available falls short of admitting `log`, of which `limit` tokens may be found."""
        limit = len(log) - 1 if limit is None else limit
        root = self.tree.peek(holding.namespace)
        if root is None:
            return self.blocks_for(len(log)) - self.num_available
        match = self.tree.match(root, log, limit)
        beyond = self.tree.beyond(match, log, limit) if self.host is not None else None
        num_found = len(match.blocks) + (beyond.num_moving if beyond is not None else 0)
        return self.blocks_for(len(log)) - num_found + match.num_unlocked - self.num_available

    def is_alone(self, holding: Holding, log: TokenLog, num_computed: int) -> bool:
        """Whether no other sequence has or computes the tokens after `num_computed`. Changes nothing."""
        match = self.tree.match(_held(holding), log, len(log) - 1)
        found = max(match.depth * self.block_size, holding.num_tree_blocks * self.block_size + match.num_partial)
        return max(found, self._filled_by_others(holding, log)) <= num_computed

    def num_freed_by(self, holding: Holding) -> int:
        """Blocks that releasing `holding` would make available: its private ones, promises, and what only it locks."""
        freed = len(holding.private_blocks) + holding.reserved
        node = holding.node
        while node is not None and node.locks == 1:
            freed += len(node.blocks)
            node = node.parent
        return freed

    def prove(self, holding: Holding, step_id: StepId) -> None:
        """A token was drawn from finite logits over what the sequence held in `step_id`.

        That says nothing about a block it was switched to after that step was planned.
        """
        if step_id >= holding.switched_in:
            self.tree.prove(_held(holding), step_id)

    def release(self, holding: Holding) -> None:
        """Let go of everything (preemption, or the end): the tree's part becomes cache, the rest is free."""
        if holding.node is None:
            return
        if holding.jobs and self.mover is not None:
            self.mover.let_go(holding)
        self.pool.free_private(holding.private_blocks[::-1])
        self.tree.unlock(holding.node)
        holding.node = None
        self.num_reserved -= holding.reserved
        holding.reserved = 0
        holding.block_table = []
        holding.num_tree_blocks = 0
        holding.mark_sent()

    def fail(self, holding: Holding, log: TokenLog | None = None) -> list[RolledBack]:
        """The sequence's logits were not finite: what nobody has proven on its path leaves the tree.

        Releases `holding` and every other sequence that holds a removed block; those are returned with
        the tokens that are still cached for them. A sequence that was preempted while its row was in
        flight holds nothing any more: its path is then the one that `log` names.
        """
        node, depth = holding.node, holding.num_tree_blocks
        if node is None and log is not None and (root := self.tree.peek(holding.namespace)):
            node, depth = self.tree.deepest(root, log)
        if node is None:
            return []
        doomed = self.tree.first_unproven(node)
        keep = doomed.start + doomed.num_proven
        if keep >= depth:
            self.release(holding)
            return []
        victims = [other for other in self._holdings.values() if other is not holding and _is_below(other.node, doomed)]
        for victim in (holding, *victims):
            self.release(victim)
        self.tree.drop_unproven(doomed)
        return [RolledBack(victim.seq_id, keep * self.block_size) for victim in victims]

    def reset(self) -> None:
        """Forget every cached block that no sequence holds."""
        self.tree.clear()

    # ---- facts ----------------------------------------------------------------------------------

    def counts(self) -> BlockCounts:
        """Free, cached and referenced blocks; they add up to the pool."""
        free, cached = self.pool.num_free, self.tree.num_evictable
        return BlockCounts(self.num_blocks, free, cached, self.num_blocks - free - cached)

    @property
    def num_copies(self) -> int:
        """Copies sent, or to be sent, and not ended."""
        return len(self.host.lanes.jobs()) if self.host is not None else 0

    def host_counts(self) -> BlockCounts:
        """The same for the host: blocks that a preempted sequence keeps or a copy touches count as referenced."""
        if self.host is None:
            return BlockCounts(0, 0, 0, 0)
        total, free, cached = self.host.pool.num_blocks, self.host.pool.num_free, self.host.num_evictable
        return BlockCounts(total, free, cached, total - free - cached)

    def holdings(self) -> Iterable[Holding]:
        """Every open holding."""
        return self._holdings.values()

    def check_integrity(self) -> list[str]:
        """Everything that is wrong with pool, tree and holdings, in words. Empty: nothing is."""
        return problems(self.pool, self.tree, list(self._holdings.values()), self.num_reserved)

    # ---- pieces ---------------------------------------------------------------------------------

    def _free_up(self, count: int) -> None:
        """Have at least `count` blocks free."""
        missing = count - self.pool.num_free
        if missing > 0:
            evicted = self.tree.evict(missing)
            assert evicted == missing, "a promise was broken: fewer blocks evictable than counted"

    def _take(self, count: int) -> list[BlockId]:
        self._free_up(count)
        blocks = self.pool.take(count)
        if self.pool.has_copies:
            # Steps wait for no steps: a block that this one copies from may be one that it writes then.
            self._after = latest(self._after, replace(self.pool.fences(blocks), step=StepId(0)))
        return blocks

    def _share(self, holding: Holding, match: Match) -> None:
        """Switch the table to the tree's blocks, ours at the same places given back.

        before   [ tree: locked ) [ private: some of the matched places, maybe more ) [ promised )
        after    [ tree: locked, grown by the match ) [ private behind it ) [ promised, less what was taken )
        """
        first = holding.num_tree_blocks
        depth = first + len(match.blocks)
        if depth != match.depth:
            match = self._shorten(holding, match, depth)
        holding.node = self.tree.lock(match, below=holding.node)
        holding.switched_in = self._step
        replaced: list[BlockId] = []
        for index, block in enumerate(match.blocks, first):
            old = holding.place(index, block)
            if old is not None:
                replaced.append(old)
            else:
                assert holding.reserved, "a block beyond the promise"
                holding.reserved -= 1
                self.num_reserved -= 1
        self.pool.free_private(replaced[::-1])
        holding.num_tree_blocks = depth

    def _shorten(self, holding: Holding, match: Match, depth: int) -> Match:
        """The same match cut at `depth`: climb to the node that holds that depth."""
        node = match.node
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return match._replace(node=node, depth=depth)

    def _copy(self, holding: Holding, source: BlockId, num_tokens: int) -> BlockCopy | None:
        """The next private block starts with what `source` starts with; None: it is that block, evicted for it."""
        index = holding.num_tree_blocks
        if index == len(holding.block_table):
            grown = self.grow(holding, (index + 1) * self.block_size)
            assert grown, "the block for a partly cached prompt was not promised"
        target = holding.block_table[index]
        self.pool.last_step[target] = self._step
        return None if source == target else BlockCopy(source, target, num_tokens)

    def _attach(self, holding: Holding, log: TokenLog, full: int) -> bool:
        """Hand private blocks to the tree: as a new run, or as the device's copy of one that is on the host only.

        False: their tokens are moving in. They stay private until those have arrived.
        """
        node, first, width = _held(holding), holding.num_tree_blocks, self.tree.width
        child = self.tree.child_at(node, log, full * self.block_size) if self.host is not None else None
        if child is None:
            tokens = log.buffer[first * width : full * width]
            holding.node = self.tree.insert(node, tokens, holding.block_table[first:full], self._step)
            holding.num_tree_blocks = full
            return True
        if child.job_in is not None:
            return False
        count = self.tree.num_equal(child, log, full * self.block_size)
        holding.node = self.tree.attach(child, count, holding.block_table[first : first + count], self._step)
        holding.num_tree_blocks = first + count
        return True

    def _filled_by_others(self, holding: Holding, log: TokenLog) -> int:
        """How far rows of this step get in `log` by filling its next block, complete or not; 0: none does."""
        index = holding.num_tree_blocks
        candidates = self._filling.get((_held(holding), index), ())
        own = log.block(index, self.block_size) if candidates else b""
        shared = [common_tokens(own, block) for seq_id, block in candidates if seq_id != holding.seq_id]
        return min(index * self.block_size + max(shared, default=0), len(log) - 1) if any(shared) else 0


def _held(holding: Holding) -> Node:
    assert holding.node is not None, f"sequence {holding.seq_id} holds nothing"
    return holding.node


def _is_below(node: Node | None, ancestor: Node) -> bool:
    step = node
    while step is not None:
        if step is ancestor:
            return True
        step = step.parent
    return False
