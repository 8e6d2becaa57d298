"""What each step's rows must be: in sequence, in blocks that are theirs, within credit, length and budget."""

from __future__ import annotations

from ...protocol.config import EngineConfig
from ...protocol.ids import RequestId, SequenceId, StepId
from ...protocol.messages import NewRow, Open, RunStep
from ...radix.pool import FREE
from ..scheduling.core import SchedulerCore
from ..scheduling.sequence import Sequence, State
from .answers import Answers, Key
from .fence_ledger import RowBlocks
from .violation import Violation

ROWS, CREDIT, LENGTH, BUDGET, HITS, IN_FLIGHT = "rows", "credit", "length", "budget", "hits", "in flight"


class Rows:
    """Steps in flight and how far each sequence has come. `answers` says what was given, `granted` what was read."""

    def __init__(self, core: SchedulerCore, config: EngineConfig, answers: Answers) -> None:
        self._core = core
        self._config = config
        self._answers = answers
        self._decodes: list[Sequence] = []
        self._num_available = 0
        self._num_prompt_computed: dict[SequenceId, int] = {}
        self._are_uncounted: set[SequenceId] = set()
        self.granted: dict[Key, int] = {}
        self.keys: dict[SequenceId, Key] = {}
        """Request and index of every sequence there ever was."""
        self.seq_ids: dict[Key, SequenceId] = {}
        self.begin_life()

    def begin_life(self) -> None:
        """Another device: it knows nobody, and nothing is in flight."""
        self.in_flight: dict[StepId, RunStep] = {}
        self._reached: dict[SequenceId, int] = {}  # computed, since it came to the device
        self._came_in: dict[SequenceId, StepId] = {}

    def set_back(self) -> None:
        """Everybody may have lost what it had computed: what is found again then is no hit."""
        self._are_uncounted.update(self._core.table.sequences)

    # ---- a plan ---------------------------------------------------------------------------------

    def before_plan(self) -> None:
        """A plan is about to be made."""
        running = self._core.queues.running
        self._num_available = self._core.cache.num_available  # what a plan sets free it does after its decodes
        self._decodes = [seq for seq in running if not (seq.is_ending or seq.is_prefilling)]

    def after_plan(self, step: RunStep | None) -> None:
        """It has been made."""
        for seq in self._core.table.sequences.values():
            if seq.seq_id not in self.keys:
                self.keys[seq.seq_id] = seq.request_id, seq.index
                self.seq_ids[seq.request_id, seq.index] = seq.seq_id
            if seq.num_preemptions:
                self._are_uncounted.add(seq.seq_id)
        if step is not None and self._core.planner.running_suspect() is None:
            self._check_budget(step)

    def _check_budget(self, step: RunStep) -> None:
        config, counts = self._config, dict(zip(step.seq_ids, step.num_tokens, strict=True))
        decodes = {seq.seq_id for seq in self._decodes}
        prefills = [count for seq_id, count in counts.items() if seq_id not in decodes]
        budget = max(1, config.token_budget - (len(counts) - len(prefills)))
        is_alone = len(prefills) == 1 and not config.enable_chunked_prefill
        if sum(prefills) > budget and not is_alone:
            raise Violation(BUDGET, f"step {step.step_id} prefills {sum(prefills)} tokens of a budget of {budget}")
        if len(prefills) > (config.max_prefill_batch_size or len(prefills)):
            raise Violation(BUDGET, f"step {step.step_id} has {len(prefills)} prefills")
        cache = self._core.cache
        owed = [seq for seq in self._decodes if seq.state is State.RUNNING and not seq.is_out_of_credit]
        missing = [seq.seq_id for seq in owed if seq.seq_id not in counts]
        if missing and min(self._num_available, cache.num_available) > cache.num_blocks // 2:
            raise Violation(BUDGET, f"step {step.step_id} has no row for sequences {missing}, which decode")

    # ---- a step ---------------------------------------------------------------------------------

    def sent(self, step: RunStep, rows: list[RowBlocks]) -> None:
        """A step goes to the device."""
        self.in_flight[step.step_id] = step
        if len(self.in_flight) > self._config.max_steps_in_flight:
            raise Violation(IN_FLIGHT, f"{len(self.in_flight)} steps")
        for new in step.admitted:
            self._come(new, step.step_id)
        hand = self._core.cache.pool.hand
        for row, start, count in zip(rows, step.starts, step.num_tokens, strict=True):
            seq_id = row.seq_id
            if start < self._reached[seq_id]:
                reached = self._reached[seq_id]
                raise Violation(ROWS, f"step {step.step_id}: sequence {seq_id} computes from {start} on, and was at {reached}")
            self._reached[seq_id] = start + count
            self._count_prompt(seq_id, start, count)
            free = [block for block in row.blocks if hand(block) == FREE]
            if free:
                raise Violation(ROWS, f"step {step.step_id}: sequence {seq_id} uses blocks {free}, which are free")
            self._check_limits(seq_id)

    def _come(self, new: NewRow, step_id: StepId) -> None:
        request, index = self.keys[new.seq_id]
        self._reached[new.seq_id] = 0
        self._came_in[new.seq_id] = step_id
        if new.token_ids != [*self._answers.admits[request].token_ids, *self._answers.given.get((request, index), [])]:
            raise Violation(ROWS, f"sequence {new.seq_id} comes to the device with a log that is not its own")

    def _check_limits(self, seq_id: SequenceId) -> None:
        key, first = self.keys[seq_id], self._came_in[seq_id]
        planned = len(self._answers.given.get(key, ()))
        for step in self.in_flight.values():
            if step.step_id >= first and seq_id in step.seq_ids:
                planned += step.samples[step.seq_ids.index(seq_id)]
        params = self._answers.admits[key[0]].params
        granted = self._config.credit_window + self.granted.get(key, 0)
        if params.output_kind != "final_only" and planned > granted:
            raise Violation(CREDIT, f"request {key[0]}, sequence {key[1]}: {planned} tokens planned, {granted} granted")
        most = self._answers.most_tokens(key[0])
        if planned > most:
            raise Violation(LENGTH, f"request {key[0]}, sequence {key[1]}: {planned} tokens planned of {most}")

    # ---- hits -----------------------------------------------------------------------------------

    def _count_prompt(self, seq_id: SequenceId, start: int, count: int) -> None:
        num_prompt = len(self._answers.admits[self.keys[seq_id][0]].token_ids)
        computed = max(0, min(start + count, num_prompt) - start)
        self._num_prompt_computed[seq_id] = self._num_prompt_computed.get(seq_id, 0) + computed

    def check_hits(self, opening: Open) -> None:
        """What a request is said to have found in the cache is what no row has computed of its prompt."""
        seq_id = self.seq_ids[opening.request_id, 0]
        if opening.params.n > 1 or seq_id in self._are_uncounted:
            return
        computed = self._num_prompt_computed.get(seq_id, 0)
        if opening.num_cached_tokens + computed != opening.num_prompt_tokens:
            raise Violation(
                HITS,
                f"request {opening.request_id}: {opening.num_cached_tokens} tokens cached and {computed} computed "
                f"of a prompt of {opening.num_prompt_tokens}",
            )

    def request_of(self, seq_id: SequenceId) -> RequestId:
        """Whose sequence it is."""
        return self.keys[seq_id][0]
