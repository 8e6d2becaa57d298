"""Memory pressure: how a request gives its blocks up, and whether what the host holds is fetched or computed again.

Decisions are the cost model's (`cost.py`), facts the cache's, and what was decided is counted here. Copies are the
cache's too: this file turns them into messages and what comes back into what the cost model learns.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from ...gpu.executor import Capacity
from ...protocol.config import EngineConfig
from ...protocol.ids import Epoch, SequenceId
from ...protocol.messages import CopyBlocks, CopyDone
from ...radix.cache import KVCache
from ...radix.moving import Arrived, MayFetch
from .cost import Choice, CostModel, Decision, Victim
from .sequence import Sequence
from .step_time import StepTimeModel

WRITE_BACK_BLOCKS = 32
"""Blocks of one copy ahead of need, at most."""
WRITE_BACK_SHARE = 0.5
"""Of the step that it runs beside: it is over before the next one could need its blocks, or its lane."""
NEXT_VICTIMS = 4
"""Running sequences, the last in order, that are copied out ahead: a swap of them has little left to copy."""
SCARCE = 4
"""Write-back begins when less than one in this many device blocks is free."""


class Pressure:
    """Decides, copies and counts. `cache` is replaced with every life of the device."""

    def __init__(self, config: EngineConfig, capacity: Capacity, cache: KVCache, step_time: StepTimeModel) -> None:
        self.cache = cache
        self.mode = config.preemption_mode
        self.cost = CostModel(
            step_time,
            block_bytes=capacity.block_bytes,
            block_size=capacity.block_size,
            token_budget=config.token_budget,
        )
        if capacity.copy_out_rate and capacity.copy_in_rate:
            self.cost.calibrate(capacity.copy_out_rate, capacity.copy_in_rate)
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self.num_fallbacks = 0
        """Preemptions that should have been swaps, had there been room on the host."""
        self.num_failed_copies = 0
        self.num_bytes = {"out": 0, "in": 0}
        self.step_wait_s = 0.0
        self.fetch_wait_s = 0.0
        self._still_since: float | None = None

    # ---- giving up ------------------------------------------------------------------------------

    def decide(self, seq: Sequence, later: Iterable[SequenceId]) -> Decision:
        """How `seq` would give its blocks up; `later` are the preempted behind it in order."""
        host, victim = self.cache.host, self._victim(seq)
        if seq.is_held or (host is None and self.mode == "auto"):
            return self.cost.choose("recompute", victim)  # it will not be back, or there is nowhere to go
        if host is not None:
            victim = victim._replace(num_host_blocks=host.room(victim.num_blocks_to_save, later))
        return self.cost.choose(self.mode, victim)

    def give_up(self, seq: Sequence, later: Iterable[SequenceId]) -> Decision:
        """Decide, and save what is to be saved: `seq` is released next. Counted."""
        decision = self.decide(seq, later)
        if decision.mode == "swap" and not self.cache.swap_out(seq.holding, later):
            decision = decision._replace(mode="recompute", reason="host full")
        self.num_preemptions[decision.mode] += 1
        self.num_fallbacks += decision.reason == "host full"
        return decision

    def _victim(self, seq: Sequence) -> Victim:
        size = self.cache.block_size
        facts = self.cache.swap_facts(seq.holding)
        num_full = min(seq.num_computed, len(seq.log)) // size
        num_new = max(0, num_full - seq.holding.num_tree_blocks)  # full, and entering the tree as it is preempted
        return Victim(
            num_prompt_tokens=seq.num_prompt_tokens,
            num_output_tokens=seq.num_output_tokens,
            num_uncached_tokens=len(seq.log) - facts.num_shared * size,
            num_tail_tokens=len(seq.log) - min(num_full, (len(seq.log) - 1) // size) * size,
            num_blocks_to_save=facts.num_unsaved + num_new,
            num_blocks_to_fetch=facts.num_alone + num_new,
            num_host_blocks=0,
        )

    # ---- bringing back --------------------------------------------------------------------------

    def may_fetch(self, choices: list[Choice], *, alone: bool) -> MayFetch:
        """Answers whether tokens that only the host holds are fetched, and notes what was weighed in `choices`.

        `alone`: nothing else could run meanwhile, so all of the copying would be waited for.
        """

        def decide(start: int, num_tokens: int) -> bool:
            choice = self.cost.fetch_or_recompute(num_tokens, start, alone=alone)
            if self.mode in ("swap", "heuristic"):
                choice = choice._replace(fetch=True)
            choices.append(choice)
            return choice.fetch

        return decide

    # ---- copies ---------------------------------------------------------------------------------

    def write_back(self, step_s: float | None, running: Items[Sequence]) -> None:
        """Use idle lanes to make the next evictions and preemptions free, once device blocks are getting scarce.

        `step_s`: what the step just sent should take. Before that is known nothing is copied.
        """
        if step_s is None or self.cache.pool.num_free * SCARCE >= self.cache.num_blocks:
            return
        next_victims = [seq.holding for seq in running[-NEXT_VICTIMS:]][::-1] if self.mode != "recompute" else []
        num_blocks = int(WRITE_BACK_SHARE * step_s * self.cost.rate("out")) // self.cost.block_bytes
        if num_blocks:
            self.cache.write_back(min(WRITE_BACK_BLOCKS, num_blocks), next_victims)

    def take_copies(self, epoch: Epoch) -> list[CopyBlocks]:
        """What is to be copied since the last call."""
        copies = []
        for job in self.cache.take_copies():
            self.cost.on_copy_sent(job.direction, len(job.sources) * self.cost.block_bytes)
            copies.append(CopyBlocks(epoch, job.copy_id, job.direction, job.after, job.sources, job.targets))
        return copies

    def predicted_s(self, copy: CopyBlocks) -> float:
        """How long a copy should take once it can begin."""
        return len(copy.sources) * self.cost.block_bytes / self.cost.rate(copy.direction)

    def on_copy_done(self, done: CopyDone) -> Arrived:
        """A copy has ended: who can go on, and who has waited for nothing."""
        self.cost.on_copy_done(done)
        if done.ok:
            self.num_bytes[done.direction] += done.num_bytes
        self.num_failed_copies += not done.ok
        return self.cache.on_copy_done(done.direction, done.copy_id, ok=done.ok)

    def on_step_done(self, waited_s: float) -> None:
        """A step has ended that had waited this long for copies."""
        self.cost.on_step_waited(waited_s)
        self.step_wait_s += waited_s

    def on_still(self, now: float) -> None:
        """Nothing runs, and somebody waits for a fetch."""
        if self._still_since is None:
            self._still_since = now

    def on_moving(self, now: float) -> None:
        """A step is on its way, or nobody waits any more."""
        if self._still_since is not None:
            self.cost.on_fetch_waited(now - self._still_since)
            self.fetch_wait_s += now - self._still_since
            self._still_since = None

    def reset(self, cache: KVCache) -> None:
        """Another device: what was in flight is gone."""
        self.cache = cache
        self.cost.reset()
        self._still_since = None
