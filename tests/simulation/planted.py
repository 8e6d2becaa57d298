"""Slips that somebody could make, each planted into the real code for a while: the checks are held against these.

A slip replaces one method (or two) by one that is wrong in one way. The rules that are there to catch it are said
beside it; at some seeds another one does, since the first event at which anything shows ends a run. Some need a
certain kind of trouble to show at all: theirs is said too, so that a few seeds are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.scheduling.draft import Draft
from repertory.actors.scheduling.gate import Gate
from repertory.actors.scheduling.planning import Planner
from repertory.actors.scheduling.queues import Queues
from repertory.actors.scheduling.sequence import Sequence, State
from repertory.actors.scheduling.telling import Telling
from repertory.actors.simulation.run import VirtualDevice
from repertory.actors.simulation.scenario import Fault, Scenario
from repertory.actors.simulation.texts import Texts
from repertory.protocol.messages import Fences, TokensSampled
from repertory.radix.cache import KVCache
from repertory.radix.host import HostTier
from repertory.radix.moving import Arrived, Mover
from repertory.radix.pool import BlockPool
from repertory.radix.tree import PrefixTree

Plant = Callable[[pytest.MonkeyPatch], None]


def _as_drawn(scenario: Scenario) -> Scenario:
    return scenario


def _short_of_memory(scenario: Scenario) -> Scenario:
    """Two blocks for each sequence that may run, nothing kept free."""
    config = msgspec.structs.replace(scenario.config, num_device_blocks=12, block_size=4, max_num_seqs=4)
    return msgspec.structs.replace(scenario, config=config, num_device_blocks=12, max_model_len=48, has_reserve=False)


def _slow_to_return(scenario: Scenario) -> Scenario:
    """Memory is short, and who comes back computes all of it again, a few tokens a step."""
    scenario = _short_of_memory(scenario)
    config = msgspec.structs.replace(scenario.config, enable_prefix_caching=False, max_num_batched_tokens=4)
    return msgspec.structs.replace(scenario, config=config, num_host_blocks=0)


def _failing_copies(scenario: Scenario) -> Scenario:
    """Memory is short, the host has room, and half of all copies fail."""
    scenario = _short_of_memory(scenario)
    config = msgspec.structs.replace(scenario.config, preemption_mode="swap")
    weather = msgspec.structs.replace(scenario.weather, copy_failures=0.5)
    return msgspec.structs.replace(scenario, config=config, num_host_blocks=60, weather=weather)


def _alike(scenario: Scenario) -> Scenario:
    """All prompts begin alike, and are computed beside each other in small chunks."""
    config = msgspec.structs.replace(
        scenario.config, enable_prefix_caching=True, max_num_seqs=4, max_num_batched_tokens=7, enable_chunked_prefill=True
    )
    stem = scenario.visitors[0].prompt[:16]
    visitors = [
        msgspec.structs.replace(visitor, prompt=stem + visitor.prompt[:8], cache_salt=None) for visitor in scenario.visitors
    ]
    return msgspec.structs.replace(scenario, config=config, visitors=tuple(visitors))


def _poisoned(scenario: Scenario) -> Scenario:
    """A row of every other visitor turns NaN once, and all prompts begin alike."""
    scenario = _alike(scenario)
    faults = [Fault(at_s=visitor.comes_s, kind="poison", whom=visitor.name) for visitor in scenario.visitors[::2]]
    return scenario.kept(scenario.visitors, tuple(faults))


def _poisoned_and_gone(scenario: Scenario) -> Scenario:
    """The same, and half of the visitors go within two steps."""
    scenario = _poisoned(scenario)
    step_s = scenario.weather.step_s
    visitors = [
        msgspec.structs.replace(visitor, leaves_s=visitor.name % 20 * step_s / 10) if visitor.name % 2 else visitor
        for visitor in scenario.visitors
    ]
    return scenario.kept(tuple(visitors), scenario.faults)


@dataclass(frozen=True)
class Slip:
    """`plant` puts it in, `rules` may catch it, `trouble` makes a drawn scenario one in which it can show."""

    name: str
    plant: Plant
    rules: frozenset[str]
    trouble: Callable[[Scenario], Scenario]


SLIPS: list[Slip] = []


def slip(*rules: str, trouble: Callable[[Scenario], Scenario] = _as_drawn) -> Callable[[Plant], Plant]:
    """Add a function that plants a slip to `SLIPS`."""

    def add(plant: Plant) -> Plant:
        SLIPS.append(Slip(plant.__name__, plant, frozenset(rules), trouble))
        return plant

    return add


@contextmanager
def planted(slip: Slip) -> Iterator[None]:
    """The code has this slip for the time being."""
    with pytest.MonkeyPatch.context() as patch:
        slip.plant(patch)
        yield


# ---- who holds what -----------------------------------------------------------------------------


@slip("books")
def an_unlock_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A preempted or ended sequence leaves its lock on the path's last node."""

    def unlock(self: PrefixTree, node: Any) -> None:
        if node.parent is not None:
            original(self, node.parent)
        else:
            original(self, node)

    original = PrefixTree.unlock
    patch.setattr(PrefixTree, "unlock", unlock)


@slip("books", trouble=_short_of_memory)
def a_promise_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    """Who lets go before it has taken all that it was promised keeps the rest promised."""

    def release(self: KVCache, holding: Any) -> None:
        reserved = holding.reserved
        original(self, holding)
        self.num_reserved += reserved

    original = KVCache.release
    patch.setattr(KVCache, "release", release)


@slip("books", trouble=_alike)
def only_ancestors_are_locked(patch: pytest.MonkeyPatch) -> None:
    """A match is locked down to the node above the one that it ends in."""

    def lock_path(self: PrefixTree, node: Any, below: Any = None) -> None:
        if node.parent is not None and node.parent is not below and below is not None:
            node = node.parent
        original(self, node, below)

    original = PrefixTree.lock_path
    patch.setattr(PrefixTree, "lock_path", lock_path)


@slip("books")
def a_preempted_sequence_keeps_its_table(patch: pytest.MonkeyPatch) -> None:
    """The blocks are given back, the table still names them."""

    def release(self: KVCache, holding: Any) -> None:
        table = list(holding.block_table)
        original(self, holding)
        holding.block_table = table

    original = KVCache.release
    patch.setattr(KVCache, "release", release)


# ---- copies and fences --------------------------------------------------------------------------


@slip("fences")
def blocks_are_handed_on_before_their_copy_ends(patch: pytest.MonkeyPatch) -> None:
    """Evicted blocks that are being copied out go to the next taker without a fence."""

    def take(self: KVCache, count: int) -> Any:
        self._free_up(count)
        return self.pool.take(count)

    patch.setattr(KVCache, "_take", take)


@slip("fences")
def a_copy_out_does_not_wait_for_the_step_that_writes_its_source(patch: pytest.MonkeyPatch) -> None:
    """What is copied may not have been computed yet."""

    def mark(self: HostTier, job: Any) -> None:
        original(self, job)
        job.after = msgspec.structs.replace(job.after, step=0)

    original = HostTier._mark
    patch.setattr(HostTier, "_mark", mark)


@slip("FenceViolation")
def a_device_starts_operations_before_their_fences(patch: pytest.MonkeyPatch) -> None:
    """Everything runs as soon as its own timeline is free."""

    def met(self: VirtualDevice, after: Fences) -> float:
        return 0.0

    patch.setattr(VirtualDevice, "_met", met)


@slip("MemoryFault", "books", trouble=_failing_copies)
def a_failed_copy_counts_as_arrived(patch: pytest.MonkeyPatch) -> None:
    """Whoever waited for it reads junk."""

    def on_copy_done(self: Mover, direction: Any, copy_id: Any, *, ok: bool) -> Arrived:
        return original(self, direction, copy_id, ok=True)

    original = Mover.on_copy_done
    patch.setattr(Mover, "on_copy_done", on_copy_done)


@slip("MemoryFault", "books", "fences", trouble=_short_of_memory)
def a_fetching_sequence_runs_before_its_blocks_arrive(patch: pytest.MonkeyPatch) -> None:
    """It starts at once, as if all it was given were there."""

    def fetch(self: Queues, seq: Sequence) -> None:
        seq.num_computed = seq.holding.num_tree_blocks * seq_block_size[0]
        seq.prefill_end = seq.length
        self.start(seq)

    def admit(self: KVCache, *args: Any, **kwargs: Any) -> Any:
        seq_block_size[0] = self.block_size
        return original(self, *args, **kwargs)

    seq_block_size = [1]
    original = KVCache.admit
    patch.setattr(KVCache, "admit", admit)
    patch.setattr(Queues, "fetch", fetch)


# ---- steps --------------------------------------------------------------------------------------


@slip("rows", "waiting")
def a_chunk_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The progress of a chunk that fills no block is dropped: the next step computes it again."""

    def add_chunk(self: Draft, seq: Sequence, count: int) -> None:
        original(self, seq, count)
        if seq.num_computed < seq.length and not seq.holding.num_tree_blocks:
            seq.num_computed -= count

    original = Draft.add_chunk
    patch.setattr(Draft, "add_chunk", add_chunk)


@slip("in flight")
def a_third_step_is_sent(patch: pytest.MonkeyPatch) -> None:
    """One more step is in flight than is allowed."""

    def has_room(self: SchedulerCore) -> bool:
        return self.device_is_ready and len(self._steps) <= self.config.max_steps_in_flight

    patch.setattr(SchedulerCore, "_has_room", has_room)


@slip("credit")
def tokens_in_flight_do_not_count_against_credit(patch: pytest.MonkeyPatch) -> None:
    """Credit is compared with what has come back."""

    def is_out_of_credit(self: Sequence) -> bool:
        return len(self.log) >= self.credit_length

    def decodes(self: Planner, draft: Draft, now: float) -> None:
        for seq in self.queues.running:
            seq.credit_length += 1
        original(self, draft, now)
        for seq in [*self.queues.running, *self.queues.recovery, *self.queues.paused.values()]:
            seq.credit_length -= 1

    original = Planner._decodes
    patch.setattr(Sequence, "is_out_of_credit", property(is_out_of_credit))
    patch.setattr(Planner, "_decodes", decodes)


@slip("length")
def tokens_in_flight_do_not_count_against_the_length(patch: pytest.MonkeyPatch) -> None:
    """A row is planned past the last token."""
    patch.setattr(Sequence, "is_ending", property(lambda self: len(self.log) >= self.max_length))


@slip("budget")
def a_prefill_ignores_the_budget(patch: pytest.MonkeyPatch) -> None:
    """Decodes are not taken off the token budget."""

    def prefill(self: Planner, draft: Draft, prefills: list[Sequence]) -> None:
        decodes, draft.num_decodes = draft.num_decodes, -5
        original(self, draft, prefills)
        draft.num_decodes = decodes

    original = Planner._prefill
    patch.setattr(Planner, "_prefill", prefill)


@slip("MemoryFault", trouble=_short_of_memory)
def a_pending_node_is_copied_from(patch: pytest.MonkeyPatch) -> None:
    """A partly matching block that this very step computes is a source for copy-on-write."""

    def match(self: PrefixTree, *args: Any) -> Any:
        return original(self, *args)._replace(is_partial_proven=True)

    original = PrefixTree.match
    patch.setattr(PrefixTree, "match", match)


# ---- answers ------------------------------------------------------------------------------------


@slip("outputs", trouble=_short_of_memory)
def a_token_is_delivered_again_after_recompute(patch: pytest.MonkeyPatch) -> None:
    """The first token after a return comes with the one before it."""

    def append(self: SchedulerCore, seq: Sequence, token: int, step_id: Any, now: float) -> None:
        if seq.num_preemptions and not seq.has_gained and seq.state is State.RUNNING and seq.num_output_tokens:
            self.telling._sampled.append(_token_again(seq, now))
        original(self, seq, token, step_id, now)

    original = SchedulerCore._append
    patch.setattr(SchedulerCore, "_append", append)


def _token_again(seq: Sequence, now: float) -> Any:
    return TokensSampled([seq.request_id], seq.log.tolist()[-1:], now, indices=[seq.index] if seq.index else [])


@slip("outputs", "rows", "length", "preemptions", "stuck", trouble=_short_of_memory)
def a_token_in_flight_is_lost_with_a_preemption(patch: pytest.MonkeyPatch) -> None:
    """What was being sampled when the sequence made way is sampled again."""

    def let_go(self: Planner, seq: Sequence) -> None:
        original(self, seq)
        seq.length = len(seq.log)
        seq.in_flight = 0

    original = Planner._let_go
    patch.setattr(Planner, "_let_go", let_go)


@slip("one terminal")
def an_abort_ends_a_request_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    """The end is said a second time."""

    def on_abort(self: SchedulerCore, message: Any, now: float) -> None:
        if message.request_id in self.table or message.reason != "abort":
            original(self, message, now)
        else:
            self.telling.refuse(message.request_id, None)

    original = SchedulerCore.on_abort
    patch.setattr(SchedulerCore, "on_abort", on_abort)


@slip("outputs")
def a_crashed_detokenizer_hands_over_twice(patch: pytest.MonkeyPatch) -> None:
    """What is said again is handed over again."""

    def crash(self: Texts, message: Any) -> None:
        original(self, message)
        self._heard.clear()

    original = Texts.crash
    patch.setattr(Texts, "crash", crash)


@slip("outputs")
def a_replay_lacks_its_last_token(patch: pytest.MonkeyPatch) -> None:
    """The log is said again up to the token before the last."""

    def repeat(self: Telling, request: Any, request_id: Any, now: float) -> None:
        before = len(self._sampled)
        original(self, request, request_id, now)
        for place in range(before, len(self._sampled)):
            told = self._sampled[place]
            self._sampled[place] = msgspec.structs.replace(
                told, request_ids=told.request_ids[:-1], token_ids=told.token_ids[:-1], indices=told.indices[:-1]
            )

    original = Telling.repeat
    patch.setattr(Telling, "repeat", repeat)


@slip("left over")
def a_history_is_kept_after_its_terminal(patch: pytest.MonkeyPatch) -> None:
    """`Closed` is not heard."""
    patch.setattr(SchedulerCore, "on_closed", lambda self, message: None)


@slip("hits")
def a_hit_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """What is found when a prefill looks up again counts double."""

    def count_hit(self: Planner, seq: Sequence, num_tokens: int) -> None:
        original(self, seq, num_tokens)
        original(self, seq, num_tokens)

    original = Planner._count_hit
    patch.setattr(Planner, "_count_hit", count_hit)


# ---- order --------------------------------------------------------------------------------------


@slip("newcomers", trouble=_short_of_memory)
def a_newcomer_passes_recovery(patch: pytest.MonkeyPatch) -> None:
    """Waiting requests come in before preempted ones."""

    def candidate(self: Queues) -> Sequence | None:
        return self.waiting[0] if self.waiting else self.recovery[0] if self.recovery else None

    patch.setattr(Queues, "candidate", candidate)


@slip("preemptions", trouble=_short_of_memory)
def the_first_in_order_makes_way(patch: pytest.MonkeyPatch) -> None:
    """The victim is the first that runs, not one behind the asker."""

    def later_than(self: Queues, seq: Sequence) -> Iterator[Sequence]:
        return (other for other in self.running if other is not seq)

    patch.setattr(Queues, "later_than", later_than)


@slip("preemptions", trouble=_slow_to_return)
def a_victim_may_be_chosen_before_it_has_gained(patch: pytest.MonkeyPatch) -> None:
    """Who has just come back may make way again."""

    def may_be_preempted(self: Planner, seq: Sequence) -> bool:
        return self.cache.num_freed_by(seq.holding) > 0

    patch.setattr(Planner, "_may_be_preempted", may_be_preempted)


@slip("stuck")
def the_gate_never_opens_beside_others(patch: pytest.MonkeyPatch) -> None:
    """A waiting request is held back for company that does not come."""

    def opens(self: Gate, *args: Any, **kwargs: Any) -> bool:
        self.opens_at = None
        return False

    patch.setattr(Gate, "opens", opens)


@slip("suspects")
def a_suspect_has_company(patch: pytest.MonkeyPatch) -> None:
    """Nobody is ever taken to be suspect."""
    patch.setattr(Sequence, "is_suspect", property(lambda self: False))


# ---- failures -----------------------------------------------------------------------------------


@slip("failed rows", trouble=_poisoned)
def a_node_of_a_failed_row_is_shared(patch: pytest.MonkeyPatch) -> None:
    """A row turns NaN, its request ends, and what it computed stays in the tree."""

    def fail(self: KVCache, holding: Any, log: Any = None) -> list[Any]:
        self.release(holding)
        return []

    patch.setattr(KVCache, "fail", fail)


@slip("failed rows", trouble=_poisoned_and_gone)
def a_row_that_fails_after_its_end_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Its request has been aborted while the step ran: nobody looks at what it leaves in the tree."""

    def fail_rows(self: SchedulerCore, draft: Draft, message: Any, now: float) -> None:
        known = [row for row in message.failed if row.seq_id in self.table.sequences]
        original(self, draft, msgspec.structs.replace(message, failed=known), now)

    original = SchedulerCore._fail_rows
    patch.setattr(SchedulerCore, "_fail_rows", fail_rows)


@slip("MemoryFault", "fences")
def the_cache_outlives_the_device(patch: pytest.MonkeyPatch) -> None:
    """What was cached on the device that died is taken to be on the next one."""

    def new_cache(self: SchedulerCore) -> KVCache:
        cache = getattr(self, "cache", None)
        if cache is None:
            return original(self)
        for holding in list(cache.holdings()):
            cache.close(holding)
        return cache

    original = SchedulerCore._new_cache
    patch.setattr(SchedulerCore, "_new_cache", new_cache)


@slip("rows", "outputs", "stuck")
def a_lost_step_still_counts_as_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Tokens that a dead device was sampling are waited for."""

    def forget_device(self: Sequence) -> None:
        in_flight, length = self.in_flight, self.length
        original(self)
        self.in_flight, self.length = in_flight, length

    original = Sequence.forget_device
    patch.setattr(Sequence, "forget_device", forget_device)


@slip("books")
def a_block_is_freed_twice(patch: pytest.MonkeyPatch) -> None:
    """The last private block of a sequence that lets go is given back once more."""

    def free_private(self: BlockPool, blocks: Any) -> None:
        original(self, blocks)
        self._free.extend(blocks[-1:])

    original = BlockPool.free_private
    patch.setattr(BlockPool, "free_private", free_private)
