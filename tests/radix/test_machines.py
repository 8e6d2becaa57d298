"""Random orders of events against naive models, with the books proven after every one.

The machine for the cache plans as the scheduler does: up to two steps in flight, one row a sequence
and step, tokens drawn when a step ends, rows that fail, preemptions and ends at any moment.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import Fences
from repertory.radix.cache import KVCache
from repertory.radix.pool import FREE, IN_TREE, PRIVATE, BlockPool
from repertory.radix.tokens import TokenLog
from repertory.tests.radix.drive import Seq, snapshot
from repertory.tests.radix.naive import Cached, NaiveCache

FEW = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    # What fails is shown as it is: to shrink a failure that the next run does not repeat takes for ever, and hides it.
    phases=[Phase.explicit, Phase.generate],
)
MANY = settings(FEW, max_examples=600, stateful_step_count=60, derandomize=False, phases=list(Phase))

TOKENS = st.sampled_from([0, 2**31 - 1])
INDEX = st.integers(0, 59)
SPARE = st.sampled_from([0, 0, 0, 1, 2])
SIX_TOKENS = st.lists(TOKENS, min_size=6, max_size=6)
RARELY_BAD = st.sampled_from([None] * 8 + [0, 1])
PROMPTS = st.lists(
    st.tuples(st.sampled_from("aaaab"), INDEX, st.sampled_from([99, 99, 9, 6, 4, 2]), st.lists(TOKENS, max_size=6), SPARE),
    max_size=2,
)
ROWS = st.lists(
    st.tuples(INDEX, st.sampled_from([99, 9, 5, 3, 2, 1]), st.integers(0, 5), st.booleans()), min_size=1, max_size=6
)


class PoolMachine(RuleBasedStateMachine):
    """Blocks go from hand to hand, and copies and steps use them; sets say where each must be, and who still uses it."""

    taken = Bundle("taken")
    entered = Bundle("entered")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.hands = {FREE: set(range(num_blocks)), PRIVATE: set(), IN_TREE: set()}
        self.users = {block: {"step": 0, "out": 0, "in": 0} for block in range(num_blocks)}
        self.sent = {"out": 0, "in": 0}
        self.ended = {"out": 0, "in": 0}
        self.num_steps = 0

    def _is_fenced(self, block):
        """Whether a copy that has not ended uses it."""
        return any(self.users[block][lane] > self.ended[lane] for lane in self.ended)

    def _moved(self, blocks, source, target):
        assert self.hands[source].issuperset(blocks)
        self.hands[source].difference_update(blocks)
        self.hands[target].update(blocks)

    @rule(target=taken, count=st.integers(0, 5), oldest=st.booleans())
    def take(self, count, oldest):
        count = min(count, len(self.hands[FREE]))
        num_fenced = sum(map(self._is_fenced, self.hands[FREE]))
        blocks = self.pool.take(count, oldest=oldest)
        assert len(set(blocks)) == count
        taken_early = sum(map(self._is_fenced, blocks))
        assert taken_early == max(0, count - (len(self.hands[FREE]) - num_fenced)), "a fenced block, and there were others"
        self._moved(blocks, FREE, PRIVATE)
        return blocks

    @rule(count=st.integers(1, 5))
    def take_too_many(self, count):
        with pytest.raises(AssertionError):
            self.pool.take(len(self.hands[FREE]) + count)

    @rule(target=entered, blocks=consumes(taken))
    def enter(self, blocks):
        self.pool.enter_tree(blocks)
        self._moved(blocks, PRIVATE, IN_TREE)
        return blocks

    @rule(blocks=consumes(taken))
    def give_back(self, blocks):
        self.pool.free_private(blocks)
        self._moved(blocks, PRIVATE, FREE)
        for block in blocks:
            self.users[block]["step"] = max(self.users[block]["step"], self.num_steps)

    @rule()
    def send_step(self):
        self.num_steps += 1
        self.pool.used_in = self.num_steps

    @rule(blocks=st.one_of(taken, entered), lane=st.sampled_from(["out", "in"]))
    def send_copy(self, blocks, lane):
        self.sent[lane] += 1
        self.pool.on_copy_sent(blocks, lane, self.sent[lane])
        for block in blocks:
            self.users[block][lane] = self.sent[lane]

    @precondition(lambda self: hasattr(self, "ended") and self.ended != self.sent)
    @rule(lane=st.sampled_from(["out", "in"]))
    def end_copy(self, lane):
        if self.ended[lane] == self.sent[lane]:
            lane = "in" if lane == "out" else "out"
        self.ended[lane] += 1
        self.pool.on_copy_done(Fences(copy_out=self.ended["out"], copy_in=self.ended["in"]))
        assert self.pool.has_copies == (self.ended != self.sent)

    @rule(blocks=consumes(entered), tail=st.integers(0, 5))
    def evict(self, blocks, tail):
        self.pool.free_from_tree(blocks[tail:], 0)
        self.pool.free_from_tree(blocks[:tail], 0)
        self._moved(blocks, IN_TREE, FREE)

    @rule(block=INDEX)
    def a_wrong_move_is_caught(self, block):
        block %= self.pool.num_blocks
        if block not in self.hands[PRIVATE]:
            with pytest.raises(AssertionError):
                self.pool.free_private([block])
        if block not in self.hands[IN_TREE]:
            with pytest.raises(AssertionError):
                self.pool.free_from_tree([block], 0)

    @invariant()
    def every_block_is_in_its_hand(self):
        if hasattr(self, "pool"):
            assert self.pool.num_free == len(self.hands[FREE])
            for hand, blocks in self.hands.items():
                assert all(self.pool.hand(block) == hand for block in blocks)
            for block, users in self.users.items():
                assert self.pool.fences([block]) == Fences(users["step"], users["out"], users["in"])
            assert self.pool.problems(sorted(self.hands[PRIVATE]), sorted(self.hands[IN_TREE])) == []


class CacheMachine(RuleBasedStateMachine):
    """Sequences live and die in a small cache; the naive cache says what each of them must find."""

    @initialize(
        block_size=st.sampled_from([2, 4, 3, 1]),
        num_blocks=st.sampled_from([20, 12, 7, 4]),
        caching=st.sampled_from([True, True, True, False]),
        collide=st.booleans(),
    )
    def start(self, block_size, num_blocks, caching, collide):
        self.size, self.num_blocks = block_size, num_blocks
        self.cache = KVCache(num_blocks, block_size, enable_prefix_caching=caching)
        if collide:
            self.cache.tree.key = lambda first: 0
        self.naive = NaiveCache(block_size)
        self.seqs: dict[int, Seq] = {}
        self.reserved: dict[int, int] = {}
        self.written: dict[tuple[int, int], int] = {}  # (sequence, index in its table): step that wrote there last
        self.read: dict[tuple[int, int], list[int]] = {}  # (step, sequence): whole blocks its row reads or writes
        self.promised: dict[int, int] = {}  # tokens whose blocks were promised at admission
        self.known: list[list[int]] = [[0]]
        self.steps: list[dict[int, bool]] = []  # steps in flight: the rows of each, and whether they sample
        self.first_in_flight = 1
        self.num_opened = 0
        self._begin()

    # ---- helpers --------------------------------------------------------------------------------

    @property
    def step_id(self):
        return self.first_in_flight + len(self.steps) - 1

    def _begin(self):
        self.steps.append({})
        self.cache.begin_step(self.step_id)
        self.copied: set[int] = set()
        self.filling: list[tuple[int, tuple, tuple]] = []

    def _in_flight(self, seq_id):
        return sum(rows.get(seq_id, False) for rows in self.steps)

    def _pick(self, index, wanted):
        chosen = sorted(filter(wanted, self.seqs))
        return chosen[index % len(chosen)]

    def _holds(self, seq_id):
        return self.seqs[seq_id].holding.node is not None

    def _may_come_back(self, seq_id):
        return not self._holds(seq_id) and not self._in_flight(seq_id)

    def _may_run(self, seq_id):
        """It holds something, has no row in this step, and has a token to compute that is known or in flight."""
        seq = self.seqs[seq_id]
        if not self._holds(seq_id) or seq_id in self.steps[-1]:
            return False
        return seq.num_computed < len(seq.log) + self._in_flight(seq_id)

    def _available(self):
        free = self.num_blocks - len(self.naive.blocks) - sum(len(seq.holding.private_blocks) for seq in self.seqs.values())
        return free + len(self.naive.evictable()) - sum(self.reserved.values())

    def _path(self, seq, limit):
        return self.naive.path(seq.holding.namespace, seq.log.tolist(), limit)

    def _forget(self, seq_id):
        self.naive.let_go(seq_id)
        self.reserved[seq_id] = 0
        self.seqs[seq_id].num_computed = 0

    # ---- arrival and end ------------------------------------------------------------------------

    def _arrive(self, namespace, index, keep, tail, spare):
        """A prompt that starts like an earlier one."""
        tokens = [*self.known[index % len(self.known)][:keep], *tail] or [0]
        tokens = tokens[: self.num_blocks * self.size - 1]
        self.num_opened += 1
        holding = self.cache.open(SequenceId(self.num_opened), namespace)
        self.seqs[self.num_opened] = Seq(holding, tokens)
        self.reserved[self.num_opened] = 0
        self.known = [*self.known[-4:], tokens]
        self._admit(self.num_opened, spare)

    @precondition(lambda self: any(map(self._may_come_back, self.seqs)))
    @rule(index=INDEX, spare=SPARE)
    def come_back(self, index, spare):
        self._admit(self._pick(index, self._may_come_back), spare)

    def _admit(self, seq_id, spare):
        seq = self.seqs[seq_id]
        path = self._path(seq, len(seq.log) - 1)
        needed = -(-len(seq.log) // self.size) - len(path)
        unheld = sum(not self.naive.blocks[prefix].holders for prefix in path)
        fits = needed + spare <= self._available() - unheld
        before = snapshot(self.cache)
        assert (self.cache.num_missing(seq.holding, seq.log) + spare <= 0) == fits
        assert snapshot(self.cache) == before
        found = self.cache.admit(seq.holding, seq.log, spare=spare)
        assert (found is not None) == fits
        if found is None:
            assert snapshot(self.cache) == before
            return
        assert found == len(path) * self.size
        self.naive.hold(seq_id, path)
        self.reserved[seq_id] = needed
        self.promised[seq_id] = len(seq.log)
        seq.num_computed = found

    @precondition(lambda self: any(map(self._holds, self.seqs)))
    @rule(index=INDEX, keep=st.booleans())
    def preempt(self, index, keep):
        seq_id = self._pick(index, self._holds)
        if keep:
            self._keep(seq_id)
        holding = self.seqs[seq_id].holding
        available, freed = self.cache.num_available, self.cache.num_freed_by(holding)
        self.cache.release(holding)
        assert self.cache.num_available == available + freed
        self._forget(seq_id)

    @precondition(lambda self: self.seqs)
    @rule(index=INDEX, keep=st.booleans())
    def end(self, index, keep):
        seq_id = self._pick(index, lambda _: True)
        if keep and self._holds(seq_id):
            self._keep(seq_id)
        self._close(seq_id)

    def _keep(self, seq_id):
        """Make cache of what became full and known since its last row."""
        seq = self.seqs[seq_id]
        full = min(seq.num_computed, len(seq.log)) // self.size
        if full > seq.holding.num_tree_blocks:
            self.cache.enter(seq.holding, seq.log, full * self.size, full * self.size)
            self._entered(seq_id, seq, full * self.size, full * self.size)

    def _close(self, seq_id):
        holding = self.seqs[seq_id].holding
        self.cache.close(holding)
        self._forget(seq_id)
        if not self.cache.enable_prefix_caching:
            for prefix in [prefix for prefix in self.naive.blocks if prefix[0] == holding.namespace]:
                del self.naive.blocks[prefix]
        for rows in self.steps:
            rows.pop(seq_id, None)
        del self.seqs[seq_id], self.reserved[seq_id]

    @precondition(lambda self: self.naive.evictable())
    @rule(count=st.integers(1, 9))
    def evict_or_reset(self, count):
        """Rarely everything: an empty cache has little to say."""
        if count == 9:
            self.cache.reset()
            self.naive.evict(len(self.naive.blocks))
        else:
            count = min(count, len(self.naive.evictable()), max(0, self._available()))
            assert self.cache.tree.evict(count) == count
            self.naive.evict(count)

    # ---- steps ----------------------------------------------------------------------------------

    @rule(overlap=st.booleans(), tokens=SIX_TOKENS, bad=RARELY_BAD, prompts=PROMPTS, rows=ROWS)
    def step(self, overlap, tokens, bad, prompts, rows):
        """Before or after the oldest step ends, a new one is planned: some arrive, some compute."""
        while len(self.steps) > int(overlap):
            self._finish(tokens, bad)
        self._begin()
        for prompt in prompts[: 6 - len(self.seqs)]:
            self._arrive(*prompt)
        for index, count, further, patient in rows:
            if any(map(self._may_run, self.seqs)):
                self._plan_row(self._pick(index, self._may_run), count, further, patient)
                self.the_books_are_right()

    def _plan_row(self, seq_id, count, further, patient):
        """Look up, then compute; perhaps go on with what is left of the budget."""
        seq = self.seqs[seq_id]
        if seq.num_computed < len(seq.log):
            advance = self._look_up(seq_id, seq)
            if advance.must_wait or (advance.may_wait and patient):
                return
        self._compute(seq_id, seq, count)
        going_on = seq_id in self.steps[-1] and seq.num_computed < len(seq.log) and further > 0
        if going_on and self.cache.is_alone(seq.holding, seq.log, seq.num_computed):
            self._compute(seq_id, seq, further)

    def _look_up(self, seq_id, seq):
        log, size = seq.log.tolist(), self.size
        path = self._path(seq, len(log) - 1)
        depth = max(len(path), seq.holding.num_tree_blocks)
        best, sources = self.naive.partial(seq.holding.namespace, log, depth, len(log) - 1)
        computed = max(seq.num_computed, len(path) * size)
        kinds = {prefix: self._kind(prefix) for prefix in sources}
        filled = max((self._reaches(log, *fill) for fill in self._fills(seq_id, seq, depth)), default=0)
        blocks = {self.naive.blocks[prefix].block: kind for prefix, kind in kinds.items()}
        reach = depth * size + best
        room = self._available()
        advance = self.cache.advance(seq.holding, seq.log, seq.num_computed)
        self._looked_up(seq_id, seq, path, advance)
        assert self._available() >= room
        copied = advance.num_computed > computed
        whole = (depth + 1) * size
        verdicts = {self._verdict(kind, reach, computed, filled, whole) for kind in kinds.values() or ["none"]}
        assert (*advance[2:], copied) in verdicts, (advance, verdicts, kinds, log, computed, filled, self.filling)
        if copied:
            self._check_copy(seq, advance, blocks, depth)
        seq.num_computed = advance.num_computed
        return advance

    def _verdict(self, kind, reach, computed, filled, whole):
        """Must wait, may wait, copies: what is right if the best partial match is of this kind."""
        if filled == whole > computed:
            return True, False, False
        if kind == "proven" and reach > computed:
            return False, False, True
        return False, max(filled, reach if kind == "pending" else 0) > computed, False

    def _kind(self, prefix):
        if self.naive.blocks[prefix].written == self.step_id:
            return "pending"
        return "proven" if self._is_proven(prefix) else "unproven"

    def _looked_up(self, seq_id, seq, path, advance):
        """Bring the naive cache to where the look-up must have brought the real one."""
        self.naive.hold(seq_id, path)
        missing = len(self.naive.evictable()) - self.cache.tree.num_evictable
        assert 0 <= missing <= (advance.num_computed % self.size > 0), "only the block to copy into may cost another"
        self.naive.evict(missing)
        self.reserved[seq_id] = -(-len(seq.log) // self.size) - len(seq.table) if self.reserved[seq_id] else 0

    def _check_copy(self, seq, advance, blocks, depth):
        target = seq.table[depth]
        if advance.copy is None:
            assert blocks[target] == "proven", "evicted to be itself"
        else:
            assert blocks[advance.copy.source] == "proven"
            assert advance.copy.target == target
            left = {one.block for one in self.naive.blocks.values()}
            assert advance.copy.source in left
            assert target not in left, "at most evicted for this: then it may have been as good a source as the one copied"
            assert advance.copy.num_tokens == advance.num_computed - depth * self.size

    def _fills(self, seq_id, seq, depth):
        for (namespace, owner), start, block in self.filling:
            if namespace == seq.holding.namespace and owner != seq_id and len(start) == depth * self.size:
                yield start, block

    def _reaches(self, log, start, block):
        if tuple(log[: len(start)]) != start:
            return 0
        own = log[len(start) : len(start) + self.size]
        common = next((i for i, (a, b) in enumerate(zip(own, block, strict=False)) if a != b), min(len(own), len(block)))
        return min(len(start) + common, len(log) - 1) if common else 0

    def _is_proven(self, prefix):
        """As the cache sees it, which may be later than could be known: a run is proven when its last block is."""
        namespace, tokens = prefix
        root = self.cache.tree.peek(namespace)
        match = self.cache.tree.match(root, TokenLog(tokens), len(tokens))
        return match.depth - match.node.start <= match.node.num_proven

    def _compute(self, seq_id, seq, count):
        before = seq.num_computed
        known = len(seq.log)
        after = min(before + count, known) if before < known else before + 1
        needed = max(0, -(-after // self.size) - len(seq.table))
        fits = needed <= self.reserved[seq_id] + self._available()
        free = self.cache.pool.num_free
        untouched = None if fits else snapshot(self.cache)
        assert self.cache.grow(seq.holding, after) == fits
        if not fits:
            assert after > self.promised[seq_id], "a promised prefill must always grow"
            assert snapshot(self.cache) == untouched
            return
        self.naive.evict(max(0, needed - free))
        self.reserved[seq_id] -= min(needed, self.reserved[seq_id])
        self.cache.enter(seq.holding, seq.log, before, after)
        self.written.update({(seq_id, index): self.step_id for index in range(before // self.size, -(-after // self.size))})
        self._entered(seq_id, seq, before, after)
        self.read[self.step_id, seq_id] = seq.table[: after // self.size]
        self.steps[-1][seq_id] = after >= known + self._in_flight(seq_id)
        seq.num_computed = after

    def _entered(self, seq_id, seq, before, after):
        """Blocks of known tokens are in the tree now, ours or another's, unless another's came in this very step."""
        log = seq.log.tolist()
        for index in range(min(after, len(log)) // self.size):
            prefix = (seq.holding.namespace, tuple(log[: (index + 1) * self.size]))
            mine = seq.table[index]
            there = self.naive.blocks.get(prefix)
            if there is None:
                assert index < seq.holding.num_tree_blocks
                self.naive.blocks[prefix] = Cached(mine, self.written[seq_id, index], {seq_id})
            elif index < seq.holding.num_tree_blocks:
                assert there.block == mine
                there.holders.add(seq_id)
            else:
                assert self.cache.pool.last_step[mine] == self.step_id or index > seq.holding.num_tree_blocks
                break
        full = min(after, len(log)) // self.size
        if after % self.size and full == seq.holding.num_tree_blocks and len(log) >= (full + 1) * self.size:
            start = tuple(log[: full * self.size])
            self.filling.append(((seq.holding.namespace, seq_id), start, tuple(log[full * self.size : (full + 1) * self.size])))

    def _finish(self, tokens, bad):
        """The oldest step ends: its rows draw tokens, one of them perhaps from what is not finite."""
        rows = self.steps.pop(0)
        done = self.first_in_flight
        self.first_in_flight += 1
        samplers = sorted(seq_id for seq_id, samples in rows.items() if samples)
        failing = samplers[bad % len(samplers)] if bad is not None and samplers else None
        dropped = self._fail(failing) if failing is not None else set()
        for seq_id, token in zip(samplers, tokens, strict=False):
            if seq_id not in dropped:
                seq = self.seqs[seq_id]
                seq.log.append(token)
                if seq.holding.node is not None:
                    self.cache.prove(seq.holding, done)
                    self._proved(seq, self.read[done, seq_id])

    def _proved(self, seq, blocks):
        log = seq.log.tolist()
        for index, block in enumerate(blocks):
            cached = self.naive.blocks.get((seq.holding.namespace, tuple(log[: (index + 1) * self.size])))
            if cached is not None and cached.block == block:
                cached.proven = True

    def _fail(self, failing):
        """What was not proven on its path goes, with all that hangs on it; who holds of that is rolled back."""
        seq = self.seqs[failing]
        before = set(self.naive.blocks)
        own = self._path(seq, len(seq.log))
        if seq.holding.node is not None:
            own = own[: seq.holding.num_tree_blocks]
        proven = list(map(self._is_proven, own))
        assert sorted(proven, reverse=True) == proven, "proven blocks come first on a path"
        victims = {victim.seq_id: victim.num_tokens for victim in self.cache.fail(seq.holding, seq.log)}
        assert failing not in victims
        kept = sum(proven)
        lost = set(self.naive.below(own[kept])) if kept < len(own) else set()
        holders = set().union(*(self.naive.blocks[prefix].holders for prefix in lost)) if lost else set()
        assert set(victims) == holders - {failing}
        assert set(victims.values()) <= {kept * self.size}
        for seq_id in [failing, *(other.seq_id for other in self.cache.holdings() if other.seq_id in victims)]:
            self._forget(seq_id)
        for seq_id in victims:
            for rows in self.steps:
                rows.pop(seq_id, None)  # what they draw is dropped
        for prefix in lost:
            del self.naive.blocks[prefix]
        assert before - set(self.naive.blocks) == lost
        self._close(failing)
        return {failing, *victims}

    # ---- what must be true after every rule -----------------------------------------------------

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "cache"):
            assert self.cache.check_integrity() == []

    @invariant()
    def the_cache_holds_what_the_naive_one_holds(self):
        if not hasattr(self, "cache"):
            return
        real = {}
        for namespace in self.cache.tree.namespaces():
            self._collect(namespace, self.cache.tree.peek(namespace), (), real)
        expected = {prefix: (cached.block, len(cached.holders)) for prefix, cached in self.naive.blocks.items()}
        assert {prefix: known[:2] for prefix, known in real.items()} == expected
        assert all(self.naive.blocks[prefix].proven for prefix, known in real.items() if known[2])
        order = [block for node in self.cache.tree.oldest_first() for block in reversed(node.blocks)]
        assert order == [self.naive.blocks[prefix].block for prefix in self.naive.evictable()]
        assert self.cache.num_available == self._available()

    def _collect(self, namespace, node, above, into):
        tokens = TokenLog([])
        tokens.buffer[:] = node.tokens
        path = [*above, *tokens.tolist()]
        for index, block in enumerate(node.blocks):
            into[namespace, tuple(path[: (node.start + index + 1) * self.size])] = (block, node.locks, index < node.num_proven)
        for bucket in node.children.values():
            for child in bucket:
                self._collect(namespace, child, path, into)

    def teardown(self):
        if hasattr(self, "cache"):
            for seq in self.seqs.values():
                self.cache.close(seq.holding)
            self.cache.reset()
            assert self.cache.check_integrity() == []
            assert self.cache.counts().free == self.num_blocks
            assert self.cache.tree.namespaces() == []


TestPool = PoolMachine.TestCase
TestPool.settings = FEW
TestCache = CacheMachine.TestCase
TestCache.settings = FEW


@pytest.mark.slow
@pytest.mark.parametrize("machine", [PoolMachine, CacheMachine])
def test_the_same_for_much_longer(machine):
    run_state_machine_as_test(machine, settings=MANY)
