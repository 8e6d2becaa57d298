"""One step's plan: who computes what, and who must make room.

    0. classes      the next candidate is of a higher class than the last that runs, and lacks a slot or
                    blocks -> preempt from the end of the order, lower classes only, if that is enough.
    1. decodes      every running sequence that only lacks the token sampled last gets it, in order.
                    No block left -> evict cache; still none -> preempt the last sequence in order.
    2. admission    if memory did not run out: recovery and waiting merged, until one does not fit. Who finds part of
                    its tokens on the host is admitted, and runs when they have been copied in.
    3. prefill      what is left of the budget, split: half to the first prefill in order, the rest
                    to the others by fewest remaining tokens; what one side cannot use, the other does.

A suspect (the device died under it twice) runs alone: while one does, nobody else has a row. Suspects are
admitted before all others of their class, so that a new device clears them, or not, before it has computed much.

Step 1 asks memory only for growth, because admission promises each sequence the blocks of all its
known tokens (see `radix/cache.py`): a prefill cannot stop half way, so two sequences that both
hold blocks and both wait for more cannot exist. A victim is later in order than the asker, frees
at least one block and has gained a token since it last came back; each preemption therefore
follows at least one new token of somebody, and their number is bounded. Of those the order allows, the
one goes whose blocks are cheapest to give up and have again (`pressure.py`).

Sequences of one request share the whole blocks of their prompt through the tree, like anybody. The tokens behind
the last whole block are in a block of the first sequence's own: when that has computed them, the others copy them in
the next step and compute only the prompt's last token. They wait for it: a step later, but for a token each.
A request that follows another does the same with that one, which holds its blocks for it after its last token; held
blocks are the first to go when a candidate lacks some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from ...protocol.config import EngineConfig
from ...protocol.ids import SequenceId
from ...protocol.messages import BlockCopy
from ...radix.cache import Advance, KVCache
from ...radix.moving import MayFetch
from ...radix.tokens import common_tokens
from .cost import Choice, Decision, per_block
from .draft import Draft
from .gate import Gate
from .latency_target import LatencyTarget
from .pressure import Pressure
from .queues import Queues
from .reserve import Reserve
from .sequence import Sequence, State

MOST_VICTIMS = 16
"""Sequences, the last in order, among which the cheapest to preempt is looked for."""


class Planner:
    """Fills a `Draft` from the queues and the cache.

    `on_preempt(seq, freed, decision)` is told of each victim, `on_pause(seq)` of each that its reader holds up,
    `on_host_hit(seq, choice)` of each that was admitted with part of its tokens on the host, `on_start(seq)` of each that
    is to run, every time.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        cache: KVCache,
        queues: Queues,
        gate: Gate,
        pressure: Pressure,
        latency: LatencyTarget,
        on_preempt: Callable[[Sequence, int, Decision], None],
        on_pause: Callable[[Sequence], None],
        on_host_hit: Callable[[Sequence, Choice], None],
        on_start: Callable[[Sequence], None],
    ) -> None:
        self.config = config
        self.cache = cache
        self.queues = queues
        self.gate = gate
        self.reserve = Reserve(cache.block_size)
        self.suspects: dict[SequenceId, Sequence] = {}
        self.pressure = pressure
        self.latency = latency
        self._on_preempt = on_preempt
        self._on_host_hit = on_host_hit
        self._on_start = on_start
        self._on_pause = on_pause
        self._odd_to_first = True
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def fill(self, draft: Draft, now: float) -> None:
        """Plan one step into `draft`. Leaves it without rows when there is nothing to compute."""
        self.cache.begin_step(draft.step_id)
        suspect = self.running_suspect()
        if suspect is not None:
            self._prefill(draft, [suspect])
            return
        self._make_way(draft, now)
        num_victims = draft.num_preempted
        self._decodes(draft, now)
        if draft.num_preempted == num_victims:
            self.reserve.on_step()
            self._admit(draft, now)
        suspect = self.running_suspect()
        if suspect is not None and draft.is_only and not draft.rows:
            self._prefill(draft, [suspect])
        else:
            self._prefill(draft, [seq for seq in self.queues.running if seq.is_prefilling and not seq.is_suspect])

    def running_suspect(self) -> Sequence | None:
        """The suspect that runs, and so must run alone."""
        if not self.suspects:
            return None  # asked several times a step, and nearly always so
        return next((seq for seq in self.suspects.values() if seq.state is State.RUNNING), None)

    def _suspects_first(self, candidate: Sequence | None) -> Sequence | None:
        """The suspect that is to come in before `candidate`, or else that one."""
        preempted = [seq for seq in self.suspects.values() if seq.state is State.PREEMPTED]
        suspect = min(preempted, key=lambda seq: seq.rank, default=candidate)
        return candidate if suspect is None or candidate is None or candidate.rank[0] < suspect.rank[0] else suspect

    # ---- 0. classes -----------------------------------------------------------------------------

    def _make_way(self, draft: Draft, now: float) -> None:
        """Preempt lower classes for the next candidate, but only if it can come in then."""
        running, seq = self.queues.running, self.queues.first_by_rank()
        if seq is None or not running or running[-1].rank[0] <= seq.priority_class:
            return
        if seq.in_flight or seq.is_out_of_credit or (seq.state is State.WAITING and not self._may_join(now)):
            return
        missing = self.cache.num_missing(seq.holding, seq.log, limit=seq.lookup_limit)
        growth = self._growth()  # admission will ask for this reserve beside the blocks
        num_slots = self.config.running_limit - sum(not other.is_ending for other in running) - len(self.queues.fetching)
        victims: list[Sequence] = []
        for victim in reversed(running):
            if missing + self.reserve.blocks(growth) <= 0 and num_slots > 0:
                break
            if victim.rank[0] <= seq.priority_class:
                return
            if self._may_be_preempted(victim):
                victims.append(victim)
                missing -= self.cache.num_freed_by(victim.holding)
                growth -= self.reserve.growth([victim])
                num_slots += not victim.is_ending
        if missing + self.reserve.blocks(growth) <= 0 and num_slots > 0:
            draft.way_was_made_for = seq
            for victim in victims:
                self.preempt(draft, victim)

    # ---- 1. decodes -----------------------------------------------------------------------------

    def _decodes(self, draft: Draft, now: float) -> None:
        size = self.cache.block_size
        for seq in list(self.queues.running):
            if seq.state is not State.RUNNING or seq.is_prefilling:
                continue
            if seq.is_ending:
                draft.num_ending += 1
                continue
            if seq.length >= seq.credit_length:
                if not seq.in_flight:
                    self._pause(seq, now)
                continue
            start = seq.num_computed
            if start >= len(seq.holding.block_table) * size and not self._make_room(draft, seq):
                continue
            if (start + 1) % size < 2:  # a block is full, or was by a token that was not known then
                self.cache.enter(seq.holding, seq.log, start, start + 1)
            draft.add_decode(seq)

    def _make_room(self, draft: Draft, asker: Sequence) -> bool:
        """Get `asker` a block for its next token. False: it is not run in this step."""
        while not self.cache.grow(asker.holding, asker.num_computed + 1):
            if self.cache.cancel_unwanted():
                continue
            later = list(self.queues.later_than(asker))
            victim = self._cheapest(seq for seq in later if self._may_be_preempted(seq))
            if victim is None and (later or any(seq.rank > asker.rank for seq in self.queues.fetching.values())):
                return False  # those behind it were only just brought back: they get their token first
            self.reserve.on_preemption()
            self.preempt(draft, asker if victim is None else victim)
            if victim is None:
                return False
        return True

    def _cheapest(self, eligible: Iterator[Sequence]) -> Sequence | None:
        """Of those who may go, the last in order first: whose blocks cost the least, each; the later one among equals."""
        candidates = list(islice(eligible, MOST_VICTIMS))
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return min(candidates, key=self._price)

    def _price(self, seq: Sequence) -> float:
        decision = self.pressure.decide(seq, self.queues.behind(seq))
        return per_block(decision, self.cache.num_freed_by(seq.holding))

    def _may_be_preempted(self, seq: Sequence) -> bool:
        return seq.has_gained and self.cache.num_freed_by(seq.holding) > 0

    def preempt(self, draft: Draft, victim: Sequence) -> None:
        """Give up a sequence's blocks; its full ones stay in the tree as cache, or move to the host, its tokens in its log."""
        freed = self.cache.num_freed_by(victim.holding)
        draft.num_preempted += 1
        self.keep(victim)
        decision = self.pressure.give_up(victim, self.queues.behind(victim))
        self.set_back(victim)
        victim.num_preemptions += 1
        self._on_preempt(victim, freed, decision)

    def set_back(self, seq: Sequence) -> None:
        """From running or fetching to recovery: it holds nothing, and computes again what the cache does not keep."""
        self._let_go(seq)
        self.queues.preempt(seq)

    def _pause(self, seq: Sequence, now: float) -> None:
        """Its reader is out of credit: it lets go as in a preemption, and is in nobody's way until there is more."""
        if seq.state is State.RUNNING:
            self._let_go(seq)
        self.cache.unpin(seq.holding)
        self.queues.pause(seq, now)
        self._on_pause(seq)

    def _let_go(self, seq: Sequence) -> None:
        self.keep(seq)
        self.cache.release(seq.holding)
        seq.num_computed = 0
        seq.has_gained = False
        seq.has_fetched_ahead = False
        if seq.state is not State.FETCHING:  # else what it found has not been counted
            seq.counts_hits = False

    def keep(self, seq: Sequence) -> None:
        """Make cache of what is full and known by now, before `seq` lets go of it.

        With two steps in flight the last token of a block is often known only after the row that filled it was planned.
        """
        size, holding = self.cache.block_size, seq.holding
        full = min(seq.num_computed, len(seq.log)) // size
        if holding.node is not None and full > holding.num_tree_blocks:
            self.cache.enter(holding, seq.log, full * size, full * size)

    # ---- 2. admission ---------------------------------------------------------------------------

    def _admit(self, draft: Draft, now: float) -> None:
        queues, limit = self.queues, self.config.running_limit
        may_join = self._may_join(now)
        growth: int | None = None  # counted once a step, and only when somebody asks
        # Whoever's last token is in flight has no row any more: its slot is free for this step already.
        while len(queues.running) + len(queues.fetching) - draft.num_ending < limit:
            # Whoever others were preempted for is next, whatever the policy thinks of those who wait for a free slot.
            favoured, draft.way_was_made_for = draft.way_was_made_for, None
            seq = self._suspects_first(favoured or queues.candidate())
            if seq is None or (seq.state is State.WAITING and not may_join) or seq.in_flight:
                return
            if seq.is_out_of_credit:
                self._pause(seq, now)
                continue
            growth = self._growth() if growth is None else growth
            choices: list[Choice] = []
            found = self.cache.admit(
                seq.holding,
                seq.log,
                limit=seq.lookup_limit,
                spare=self.reserve.blocks(growth),
                may_fetch=self._may_fetch(draft, choices),
            )
            if found is None:
                if seq.state is State.WAITING:
                    seq.traveller.enter("blocks")
                held = next((other for other in reversed(queues.running) if other.is_held), None)
                if held is None:
                    return
                self._pause(held, now)
                draft.num_ending -= 1
                continue
            growth += self.reserve.growth([seq])
            if choices:
                self._on_host_hit(seq, choices[0])
            if seq.holding.jobs:
                queues.fetch(seq)
                continue
            self.start(seq)
            if seq.is_suspect:
                return  # it runs alone: now if nobody else has a row, else in a step of its own
        self._fetch_ahead(draft, growth)

    def _growth(self) -> int:
        return self.reserve.growth(self.queues.running) + self.reserve.growth(self.queues.fetching.values())

    def start(self, seq: Sequence) -> None:
        """Run `seq`, which is admitted, and has all that it found on the device."""
        seq.num_computed = seq.holding.num_tree_blocks * self.cache.block_size
        seq.prefill_end = seq.length
        if seq.counts_hits:
            self.num_queried_tokens += seq.num_prompt_tokens
            self._count_hit(seq, seq.num_computed)
        self.queues.start(seq)
        self._on_start(seq)

    def _may_fetch(self, draft: Draft, choices: list[Choice]) -> MayFetch:
        return self.pressure.may_fetch(choices, alone=draft.is_only and not draft.rows and not self.queues.running)

    def _fetch_ahead(self, draft: Draft, growth: int | None) -> None:
        """All slots are taken: bring what the next one has on the host in already, as cache, if there is room for it."""
        seq = self.queues.candidate()
        if seq is None or seq.state is not State.PREEMPTED or seq.has_fetched_ahead or seq.is_out_of_credit or seq.in_flight:
            return
        growth = self._growth() if growth is None else growth
        choices: list[Choice] = []
        may_fetch = self._may_fetch(draft, choices)
        seq.has_fetched_ahead = self.cache.fetch_ahead(
            seq.holding, seq.log, limit=seq.lookup_limit, spare=self.reserve.blocks(growth), may_fetch=may_fetch
        )
        if seq.has_fetched_ahead:
            self._on_host_hit(seq, choices[0])

    def _may_join(self, now: float) -> bool:
        """Whether waiting requests may come in, as far as policy and gathering go."""
        queues = self.queues
        num_begun = len(queues.running) + len(queues.recovery) + len(queues.fetching)
        return self.gate.opens(now, queues.waiting, num_running=num_begun, limit=self.config.running_limit)

    # ---- 3. prefill -----------------------------------------------------------------------------

    def _prefill(self, draft: Draft, prefills: list[Sequence]) -> None:
        budget = max(1, self.config.token_budget - draft.num_decodes)
        if self.config.enable_chunked_prefill:
            self._chunks(draft, prefills, budget)
        else:
            self._whole_prefills(draft, prefills, budget)

    def _chunks(self, draft: Draft, prefills: list[Sequence], budget: int) -> None:
        if not prefills:
            return
        first, others = prefills[0], prefills[1:]
        half = budget = self.latency.most_tokens(draft, first, budget)
        if others:
            half = budget // 2 + (budget % 2 if self._odd_to_first else 0)
            self._odd_to_first = not self._odd_to_first
        draft.first_prefill = first
        left = budget - self._chunk(draft, first, half)
        for seq in sorted(others, key=lambda seq: seq.num_remaining):
            if left == 0 or not self._takes_more(draft):
                break
            left -= self._chunk(draft, seq, left)
        if left and others:
            left -= self._go_on(draft, first, left)
        for seq in list(draft.may_wait):
            if left == 0 or not self._takes_more(draft):
                break
            left -= self._chunk(draft, seq, left)

    def _go_on(self, draft: Draft, first: Sequence, left: int) -> int:
        """The others could not use their half: the first goes on, unless another row computes what it needs."""
        if first in draft.may_wait:
            return 0
        if first not in draft.rows:
            return self._chunk(draft, first, left) if self._takes_more(draft) else 0
        if not first.is_prefilling or not self.cache.is_alone(first.holding, first.log, first.num_computed):
            return 0
        count = self.latency.most_tokens(draft, first, min(left, first.num_remaining))
        if count:
            self._enter(first, first.num_computed, count)
            draft.extend_chunk(first, count)
        return count

    def _follows(self, seq: Sequence, first: Sequence | None) -> bool:
        """Whether the first prefill goes on into the very block that `seq` needs next: then it fills it for both.

        It has not come there in this step, so the cache does not know. Without this the two would take
        turns at private copies of the block, wherever a budget ends inside it.
        """
        if first is None or first is seq or first.holding.node is not seq.holding.node or not first.is_prefilling:
            return False
        index, size = seq.holding.num_tree_blocks, self.cache.block_size
        block = first.log.block(index, size)
        is_whole = len(block) == self.cache.tree.width
        return is_whole and index * size + common_tokens(block, seq.log.block(index, size)) > seq.num_computed

    def _whole_prefills(self, draft: Draft, prefills: list[Sequence], budget: int) -> None:
        left = budget
        for seq in prefills:
            if not self._takes_more(draft):
                break
            if self._look_up(draft, seq).must_wait:
                continue
            if seq.num_remaining > left and draft.num_prefills:
                break
            left -= self._compute(draft, seq, seq.num_remaining)
            if left <= 0:
                break

    def _chunk(self, draft: Draft, seq: Sequence, allowance: int) -> int:
        """Plan up to `allowance` tokens of `seq` and return how many, or put it with those that may wait."""
        if allowance == 0 or not self.latency.most_tokens(draft, seq, 1):
            return 0
        advance = self._look_up(draft, seq)
        if advance.must_wait or self._follows(seq, draft.first_prefill):
            return 0
        if advance.may_wait and seq.waited_for != seq.holding.num_tree_blocks:
            seq.waited_for = seq.holding.num_tree_blocks  # once for each block: steady traffic must not hold it back
            draft.may_wait.append(seq)
            return 0
        count = self.latency.most_tokens(draft, seq, min(allowance, seq.num_remaining))
        return self._compute(draft, seq, max(1, count))  # it found more, and may have come a token's time too far by it

    def _look_up(self, draft: Draft, seq: Sequence) -> Advance:
        """Take what others have entered meanwhile."""
        if self._waits_for_leader(draft, seq):
            return Advance(seq.num_computed, None, must_wait=True)
        if seq.reads_its_prompt:
            return Advance(seq.num_computed, None, must_wait=False)
        advance = self.cache.advance(seq.holding, seq.log, seq.num_computed)
        gained = advance.num_computed - seq.num_computed
        seq.num_computed = advance.num_computed
        if seq.counts_hits:
            self._count_hit(seq, gained)
        if advance.copy is not None:
            draft.copies.append(advance.copy)
        if not advance.must_wait and self._copies_from_leader(draft, seq):
            return Advance(seq.num_computed, None, must_wait=False)
        return advance

    def _leader(self, seq: Sequence) -> Sequence | None:
        """Whom `seq` may take the part of its prompt from that fills no block.

        Only before the first token of `seq`, so that what it copies enters the tree no sooner than that token shows
        it to be sound. A leader of the same request has perhaps not shown it yet, but all of it ends when a row fails.
        """
        leader = seq.leader
        if (
            leader is None
            or leader.state is not State.RUNNING
            or seq.num_computed >= seq.num_prompt_tokens - 1
            or len(seq.log) > seq.num_prompt_tokens
            or seq.is_suspect  # it has to run alone
            or not self.cache.enable_prefix_caching
        ):
            return None
        return leader

    def _waits_for_leader(self, draft: Draft, seq: Sequence) -> bool:
        """Whether the leader still computes, in this step or later, what `seq` will copy."""
        leader, last = self._leader(seq), seq.num_prompt_tokens - 1
        return leader is not None and (leader.num_computed < last or draft.computes(leader, last - 1))

    def _copies_from_leader(self, draft: Draft, seq: Sequence) -> bool:
        """Take the part of the prompt that fills no block from the leader, which has it, if there is room for it."""
        leader, size, last = self._leader(seq), self.cache.block_size, seq.num_prompt_tokens - 1
        index = last // size
        if leader is None or seq.holding.num_tree_blocks != index or not self.cache.grow(seq.holding, last + 1):
            return False
        source, target = leader.holding.block_table[index], seq.holding.block_table[index]
        draft.copies.append(BlockCopy(source, target, last - index * size))
        seq.num_computed = last
        return True

    def _count_hit(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_cached_tokens += num_tokens
        self.num_hit_tokens += num_tokens

    def _compute(self, draft: Draft, seq: Sequence, count: int) -> int:
        self._enter(seq, seq.num_computed, count)
        draft.add_chunk(seq, count)
        return count

    def _enter(self, seq: Sequence, start: int, count: int) -> None:
        grown = self.cache.grow(seq.holding, start + count)
        assert grown, "a prefill's blocks were promised when it was admitted"
        self.cache.enter(seq.holding, seq.log, start, start + count)

    def _takes_more(self, draft: Draft) -> bool:
        most = self.config.max_prefill_batch_size
        return most is None or draft.num_prefills < most
