"""The scheduler without its actor: messages in, messages out, no clock and no I/O of its own.

    on_admit, on_abort      requests come and go
    plan                    the next step, or None when there is nothing to do
    take_copies             blocks to move between the tiers, decided on while planning
    on_step_done            tokens come back: logs grow, ends are found, text is on its way
    on_copy_done            blocks have moved, or not: who waited for them goes on, or starts over
    on_credit               a reader has taken tokens: its request may go on
    on_device_lost          everything the device held is gone; the token logs are here, so nothing else is
    on_frontend_lost        nobody reads its requests any more
    on_resend, on_closed    the detokenizer lost a request's state, or needs nothing more of it
    take_outputs            what has been decided meanwhile, for the detokenizer
    take_reports            what has happened meanwhile, for the logs

Every method is a function of the state and its arguments, so a recorded run replays to the same
decisions. `now` is monotonic seconds.
"""

from __future__ import annotations

from ...gpu.executor import Capacity
from ...protocol.config import EngineConfig
from ...protocol.errors import (
    EngineDrainingError,
    NeverFitsError,
    Problem,
    QueueFullError,
    ReaderTooSlowError,
    RequestFailedError,
    problem_of,
)
from ...protocol.ids import Epoch, RequestId, SequenceId, StepId
from ...protocol.messages import (
    ALL_SEQUENCES,
    Abort,
    Admit,
    Closed,
    CopyBlocks,
    CopyDone,
    Credit,
    DeviceLost,
    DeviceReady,
    DeviceShared,
    FailedRow,
    FrontendLost,
    Refused,
    Resend,
    RunStep,
    SequenceEnd,
    StepDone,
    TokensSampled,
)
from ...protocol.outputs import EngineStats
from ...protocol.sampling import FinishReason
from ...radix.cache import KVCache
from .cost import Decision
from .draft import Draft
from .gate import Gate
from .journeys import Stalls
from .latency_target import LatencyTarget
from .limits import check_fits, longest_sequence
from .pacing import Pacer
from .planning import Planner
from .policies import ChoosesNext, CountsWork, WatchesTree, load_policy
from .pressure import Pressure
from .queues import Queues
from .reports import Report
from .request import Request
from .sequence import Sequence, State
from .sharing import SharedGroups
from .step_time import Load
from .table import RequestTable
from .telling import Sampled, Telling


class SchedulerCore:
    """Request table, queues, KV bookkeeping and planner of one engine.

    Raises `ConfigError` when the policy is not installed.
    """

    def __init__(self, config: EngineConfig, capacity: Capacity, *, epoch: Epoch) -> None:
        self.config = config
        self.capacity = capacity
        self.epoch = epoch
        self.policy = load_policy(config.scheduling_policy)
        self._work_counter = self.policy if isinstance(self.policy, CountsWork) else None
        self.cache = self._new_cache()
        self.queues = Queues()
        self.queues.chooser = self.policy if isinstance(self.policy, ChoosesNext) else None
        self.gate = Gate(config, self.policy)
        self.pacer = Pacer()
        self.pressure = Pressure(config, capacity, self.cache, self.pacer.model)
        self.groups = SharedGroups(capacity.block_size)
        self.telling = Telling()
        self.planner = Planner(
            config,
            cache=self.cache,
            queues=self.queues,
            gate=self.gate,
            pressure=self.pressure,
            latency=LatencyTarget(config.target_itl_s, self.pacer.model),
            on_preempt=self._on_preempt,
            on_pause=self._on_pause,
            on_host_hit=self.telling.host_hit,
            on_start=self._on_start,
        )
        self.max_length = longest_sequence(capacity)
        self.stalls = Stalls()
        self.table = RequestTable(max_length=self.max_length, credit_window=config.credit_window, stalls=self.stalls)
        self.draining = False
        self.device_is_ready = True
        self.num_restarts = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_non_finite_rows = 0
        self._steps: dict[StepId, Draft] = {}
        self._released: list[SequenceId] = []
        self._copies_before: list[CopyBlocks] = []
        self._copies_after: list[CopyBlocks] = []
        self._last_step_id = StepId(0)
        self._planned_s = float("-inf")

    # ---- requests come and go -------------------------------------------------------------------

    def on_admit(self, message: Admit, now: float) -> None:
        """Queue a request, all its sequences, or refuse it. One that is here already (its sender crashed and said it
        again) is a no-op.
        """
        self.stalls.at(now)
        if message.request_id in self.table:
            return
        try:
            self._check_admissible(message)
        except (NeverFitsError, QueueFullError, EngineDrainingError) as error:
            self.refuse(message.request_id, problem_of(error))
            return
        rank_class = self.policy.priority_class(message)  # a policy may be anybody's: nothing has changed yet if it raises
        request = self.table.add(message, rank_class, self.cache)
        try:
            for seq in request.sequences:
                seq.queued_s = now
                self.queues.add_waiting(seq)
        except Exception:
            self._withdraw(request)
            raise

    def _withdraw(self, request: Request) -> None:
        """A policy has raised over a request that it was to queue: it was never here."""
        for seq in request.sequences:
            self.queues.withdraw(seq)
            self.cache.close(seq.holding)
            self.table.remove(seq)

    def refuse(self, request_id: RequestId, problem: Problem) -> None:
        """End a request that was never queued."""
        self.telling.refuse(request_id, problem)

    def _check_admissible(self, message: Admit) -> None:
        check_fits(len(message.token_ids), self.capacity)
        if message.follows is not None:
            return  # a part of what was admitted before
        if self.draining:
            raise EngineDrainingError("the engine is draining and takes no new requests")
        queues = self.queues
        if queues.num_waiting_requests < self.config.max_num_queued:
            return
        num_begun = sum(not seq.is_ending for seq in queues.running) + len(queues.recovery) + len(queues.fetching)
        num_free = max(0, self.config.running_limit - num_begun)
        if queues.num_waiting_requests - num_free >= self.config.max_num_queued:
            raise QueueFullError(f"{queues.num_waiting_requests} requests are waiting already (max_num_queued)")

    def on_abort(self, message: Abort, now: float) -> None:
        """End a request, or one sequence of it. Unknown and ended ids are a no-op."""
        self.stalls.at(now)
        reason: FinishReason = "stop" if message.reason == "stop" else "error" if message.reason == "error" else "abort"
        if message.index is None:
            request = self.table.get(message.request_id)
            if request is not None:
                self._end(request, reason, now)
            return
        seq = self.table.sequence(message.request_id, message.index)
        if seq is not None and seq.state is not State.FINISHED:
            self._finish(seq, reason, now)

    def on_credit(self, message: Credit) -> None:
        """A reader has taken tokens. If that was what its request waited for, it comes back at its rank."""
        seq = self.table.sequence(message.request_id, message.index)
        if seq is None:
            return
        seq.credit_length += message.num_tokens
        if seq.state is State.PAUSED and not seq.is_out_of_credit:
            self.queues.resume(seq)

    def on_resend(self, message: Resend, now: float) -> None:
        """Repeat what the detokenizer was told of a request, running or ended."""
        self.telling.repeat(self.table.get(message.request_id), message.request_id, now)

    def on_closed(self, message: Closed) -> None:
        """The terminals of these requests are out."""
        for request_id in message.request_ids:
            self.telling.histories.close(request_id)

    def on_frontend_lost(self, message: FrontendLost, now: float) -> None:
        """Nobody reads these requests any more: they end, and what was kept in case it is asked for again goes."""
        self.stalls.at(now)
        for request in self.table.made_by(message.incarnation):
            self._end(request, "abort", now)
        self.telling.histories.close_all(message.incarnation)

    def on_reset(self) -> None:
        """Forget every cached prefix that nobody holds, on both tiers."""
        self.cache.reset()

    # ---- steps ----------------------------------------------------------------------------------

    def plan(self, now: float) -> RunStep | None:
        """The next step, or None: nothing to compute, enough steps in flight, too early, or no device."""
        self.stalls.at(now)
        self._expire(now)
        if not self._may_plan(now):
            return None
        self._planned_s = now
        step = self._plan(now)
        if self.cache.host is not None:
            self._move(step, now)
        return step

    def _move(self, step: RunStep | None, now: float) -> None:
        """What planning `step` has decided to copy, and what there is time to copy ahead beside it."""
        copies = self.pressure.take_copies(self.epoch)
        self._copies_before += [copy for copy in copies if copy.direction == "out"]
        self._copies_after += [copy for copy in copies if copy.direction == "in"]
        if step is not None:
            self.pressure.write_back(self.predicted_s(step), self.queues.running)
            self._copies_after += self.pressure.take_copies(self.epoch)
        if self._steps or not self.queues.fetching:
            self.pressure.on_moving(now)
        else:
            self.pressure.on_still(now)

    def _plan(self, now: float) -> RunStep | None:
        while True:
            draft = Draft(self.epoch, StepId(self._last_step_id + 1), is_only=not self._steps)
            self.planner.fill(draft, now)
            if draft.rows:
                break
            if draft.num_preempted == 0:
                return self._sweep(now)
            # Whoever was preempted without a step may be admitted by the next round.
        self.num_steps += 1
        self.num_computed_tokens += sum(draft.num_tokens)
        for seq in draft.rows:
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now
        draft.shared_groups = self.groups.of(draft.rows[: draft.num_decodes])
        return self._send(draft, now)

    def _send(self, draft: Draft, now: float) -> RunStep:
        """The draft is a step in flight from here on."""
        self._last_step_id = draft.step_id
        self._steps[draft.step_id] = draft
        draft.sent_s = now
        draft.predicted_s = self.pacer.model.predict(draft.load)
        self.pacer.on_sent(draft.load, now)
        released, self._released = self._released, []
        return draft.message(released, self.cache.end_step())

    def take_copies(self) -> tuple[list[CopyBlocks], list[CopyBlocks]]:
        """Copies decided on by the last plan: those that go to the device before its step, and those that go after it.

        The step may wait for copies out, whose blocks it writes to; a copy in for both; one ahead of need for the step.
        """
        copies = self._copies_before, self._copies_after
        self._copies_before, self._copies_after = [], []
        return copies

    def _may_plan(self, now: float) -> bool:
        if not self._has_room():
            return False
        plan_at = self.pacer.plan_at()
        return plan_at is None or now >= plan_at

    def _has_room(self) -> bool:
        """Whether the device may be sent a step, now or soon."""
        if not self.device_is_ready or len(self._steps) >= self.config.max_steps_in_flight:
            return False
        return not self._steps or self.planner.running_suspect() is None  # alone means alone

    def predicted_s(self, step: RunStep | StepDone) -> float | None:
        """How long a step in flight should take, as it was predicted when it was sent."""
        draft = self._steps.get(step.step_id) if step.epoch == self.epoch else None
        return None if draft is None else draft.predicted_s

    def load_of(self, step: RunStep) -> Load:
        """What a step in flight computes."""
        return self._steps[step.step_id].load

    def predicted_copy_s(self, copy: CopyBlocks) -> float:
        """How long a copy should take once it can begin."""
        return self.pressure.predicted_s(copy)

    def _sweep(self, now: float) -> RunStep | None:
        """A step without rows, when everything has ended: so that an idle device remembers nobody."""
        if self.table.sequences or self._steps or not self._released:
            return None
        return self._send(Draft(self.epoch, StepId(self._last_step_id + 1), is_only=True), now)

    def next_wakeup(self) -> float | None:
        """When to plan again although no message has come; None: what comes next is a message."""
        times: list[float] = []
        if self.queues.paused:
            times.append(next(iter(self.queues.paused.values())).paused_s + self.config.max_pause_s)
        if self._has_room():
            plan_at = self.pacer.plan_at()
            if self.gate.opens_at is not None:
                times.append(self.gate.opens_at if plan_at is None else max(self.gate.opens_at, plan_at))
            if plan_at is not None and plan_at > self._planned_s:
                times.append(plan_at)
        return min(times, default=None)

    def _expire(self, now: float) -> None:
        """End requests whose readers have taken nothing for too long."""
        while self.queues.paused:
            seq = next(iter(self.queues.paused.values()))
            if now < seq.paused_s + self.config.max_pause_s:
                return
            error = ReaderTooSlowError(f"the reader took nothing for {self.config.max_pause_s:g} s (max_pause_s)")
            self._end(self.table[seq.request_id], "error", now, problem=problem_of(error))

    def on_step_done(self, message: StepDone, now: float) -> None:
        """Take in a step's tokens. Messages of another epoch, or of a device that is lost, are dropped."""
        if message.epoch != self.epoch or not self.device_is_ready:
            return
        self.stalls.at(now)
        draft = self._steps.pop(message.step_id)
        draft.charge(self.stalls, self.pacer.model)
        if self._work_counter is not None:
            self._work_counter.on_computed(draft.rows, draft.num_tokens, draft.num_decodes)
        self.pacer.on_done(message.seconds, now)
        self.pressure.on_step_done(message.waited_s)
        self.planner.latency.on_step_done(draft, message.seconds)
        if draft.num_prefills:
            self.gate.last_prefill_s = message.seconds
        for seq, samples in zip(draft.rows, draft.samples, strict=True):
            seq.in_flight -= samples
        self._fail_rows(draft, message, now)
        self.telling.counts.on_answer(draft, message.seconds, now)
        sampled = self._take_in(message, now)
        self.telling.counts.on_step(len(sampled.token_ids), now)
        self.telling.say(sampled, now)

    def _take_in(self, message: StepDone, now: float) -> Sampled:
        """What a step sampled for sequences that still want it; their logs grow by it."""
        sampled = Sampled(has_logprobs=bool(message.logprobs))
        details_column = message.logprobs or [None] * len(message.token_ids)
        sequences = self.table.sequences
        for part in message.prompts:
            asking = sequences.get(part.seq_id)
            if asking is None or message.step_id <= asking.void_until:
                continue
            if not asking.learn(part.first, part.entries):
                error = RequestFailedError("the device left out how likely a part of the prompt was")
                self._end(self.table[asking.request_id], "error", now, problem=problem_of(error))
        for seq_id, token, details in zip(message.seq_ids, message.token_ids, details_column, strict=True):
            seq = sequences.get(seq_id)
            if seq is None or message.step_id <= seq.void_until:
                continue  # ended or rolled back meanwhile: a surplus token
            if seq.first_token_s is None:
                seq.first_token_s = now
                seq.traveller.reached_decode()
                request = self.table[seq.request_id]
                self.telling.counts.on_first_token(seq, now, opens=request.opening is None)
                if request.opening is None:
                    sampled.opened.append(request.open(seq))
                if seq.prompt_logprobs is not None:
                    sampled.prompts += request.prompts()
            sampled.add(seq, token, details)
            if details is not None:
                seq.logprobs.append(details)
            self._append(seq, token, message.step_id, now)
        return sampled

    def _append(self, seq: Sequence, token: int, step_id: StepId, now: float) -> None:
        seq.log.append(token)
        seq.last_token_s = now
        if seq.num_deaths:
            seq.num_deaths = 0
            self.planner.suspects.pop(seq.seq_id, None)
        if seq.state is State.RUNNING:  # else it was preempted with this token in flight: not a gain of its return
            if not seq.has_gained:
                seq.has_gained = True
                seq.traveller.reached_decode()
            self.cache.prove(seq.holding, step_id)
        if token in seq.stop_ids:
            given = seq.admit.params.stop_token_ids
            self._finish(seq, "stop", now, stop_token_id=token if given and token in given else None)
        elif len(seq.log) >= seq.max_length:
            if seq.admit.holds:
                seq.is_held = True
            else:
                self._finish(seq, "length", now)

    def _fail_rows(self, draft: Draft, message: StepDone, now: float) -> None:
        """End the requests of rows that failed. Where logits were not finite, roll back whoever shared what they computed.

        Who has ended since the step was sent has nothing to lose, but what it computed must not stay as cache.
        """
        failed: list[tuple[RequestId, FailedRow]] = []
        rows = {seq.seq_id: seq for seq in draft.rows} if message.failed else {}
        for failure in message.failed:
            seq = rows[failure.seq_id]
            if message.step_id <= seq.void_until:
                continue  # rolled back: it read what another one spoilt, and fails again if it was not that
            for victim in () if failure.is_sound else self.cache.fail(seq.holding, seq.log):
                self._roll_back(self.table.sequences[victim.seq_id])
            failed.append((seq.request_id, failure))
        # Only now: one row's request may be that of another failed row, whose part of the tree is to go as well.
        for request_id, failure in failed:
            request = self.table.get(request_id)
            if request is not None:
                self.num_non_finite_rows += not failure.is_sound
                problem = problem_of(RequestFailedError(failure.message))
                self._end(request, "error", now, problem=problem, is_sound=failure.is_sound)

    def _roll_back(self, seq: Sequence) -> None:
        """All that steps in flight sample for `seq` rests on KV that is gone: this answer and the next ones."""
        self._leave_device(seq)
        self.planner.set_back(seq)
        seq.length = len(seq.log)
        seq.void_until = self._last_step_id

    def on_copy_done(self, message: CopyDone) -> None:
        """Blocks have moved between the tiers. Whoever waited for a copy that failed computes it instead."""
        if message.epoch != self.epoch or not self.device_is_ready:
            return
        self.telling.counts.on_copy_done(message)
        arrived = self.pressure.on_copy_done(message)
        for seq_id in arrived.ready:
            self.planner.start(self.table.sequences[seq_id])
        for seq_id in arrived.lost:
            self.planner.set_back(self.table.sequences[seq_id])

    # ---- the device's death and return ------------------------------------------------------------

    def on_device_lost(self, message: DeviceLost, now: float) -> bool:
        """Both tiers of KV are gone, and every step that was not answered. Every request goes on from its log.

        Who took part in an unanswered step is counted as present at a death; after the second without a token in
        between it is suspect and runs alone. One that is alone when the device dies two times more is failed; returns
        whether that is so: the engine has got on by it, as by a token.
        """
        if message.epoch != self.epoch or not self.device_is_ready:
            return False
        self.device_is_ready = False
        self.stalls.at(now)
        present = {seq.seq_id: seq for draft in self._steps.values() for seq in draft.rows}
        alive = [seq for seq in present.values() if seq.state is not State.FINISHED]
        for seq in alive:
            seq.num_deaths += 1
            if seq.is_suspect:
                self.planner.suspects[seq.seq_id] = seq
        self._forget_device()
        for seq in self.table.sequences.values():
            if seq.state is not State.PAUSED:
                seq.traveller.enter("restart")
        # A culprit was suspect before it, so it was alone: with it there is nobody else.
        culprits = [seq for seq in alive if seq.is_culprit]
        for seq in culprits:
            error = RequestFailedError(f"the device died {seq.num_deaths} times while it computed this request")
            self._end(self.table[seq.request_id], "error", now, problem=problem_of(error))
        return bool(culprits)

    def on_device_shared(self, message: DeviceShared) -> None:
        """Somebody else uses the device now, or no more: what was measured of its lanes is out of date."""
        if message.epoch == self.epoch:
            self.pressure.cost.measure_again()

    def on_device_ready(self, message: DeviceReady) -> None:
        """A new device has taken over, and remembers nothing."""
        self.epoch = message.epoch
        self.device_is_ready = True
        for seq in self.queues.waiting:
            seq.traveller.enter("queue")
        self.num_restarts += 1

    def _forget_device(self) -> None:
        self._steps.clear()
        self._released.clear()
        self._copies_before.clear()
        self._copies_after.clear()
        self._last_step_id = StepId(0)
        self.pacer.reset()
        self.cache = self.planner.cache = self._new_cache()
        self.pressure.reset(self.cache)
        self.groups = SharedGroups(self.capacity.block_size)
        for seq in self.table.sequences.values():
            seq.holding = self.cache.open(seq.seq_id, seq.admit.cache_salt)
            counts_hits = seq.counts_hits and seq.state is State.FETCHING  # what it found has not been counted
            if seq.state in (State.RUNNING, State.FETCHING):
                self.queues.preempt(seq)
            seq.forget_device()
            seq.counts_hits = seq.counts_hits or counts_hits

    def _new_cache(self) -> KVCache:
        cache = KVCache(
            self.capacity.num_device_blocks,
            self.capacity.block_size,
            num_host_blocks=self.capacity.num_host_blocks,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        if isinstance(self.policy, WatchesTree):
            self.policy.watch(cache.tree)
        return cache

    # ---- ends -----------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason, now: float, *, stop_token_id: int | None = None) -> None:
        """One sequence ends. Its request goes on with the others, or ends with the last."""
        request = self.table[seq.request_id]
        self._close(seq)
        end = SequenceEnd(
            seq.request_id, reason, stop_token_id=stop_token_id, num_preemptions=request.num_preemptions, index=seq.index
        )
        self.telling.end(request, end, now)

    def _end(
        self, request: Request, reason: FinishReason, now: float, *, problem: Problem | None = None, is_sound: bool = True
    ) -> None:
        """A request ends as a whole. `is_sound`: what its sequences have computed may become cache."""
        for seq in list(request.live()):
            self._close(seq, is_sound=is_sound)
        request_id, num_preemptions = request.admit.request_id, request.num_preemptions
        end = SequenceEnd(request_id, reason, problem=problem, num_preemptions=num_preemptions, index=ALL_SEQUENCES)
        self.telling.end(request, end, now)

    def _close(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """Forget a sequence, save for its tokens."""
        self._leave_device(seq)
        self.queues.remove(seq)
        seq.state = State.FINISHED
        seq.journey = seq.traveller.ends()
        seq.leader = None  # no chain of all that were ever followed
        if is_sound:
            self.planner.keep(seq)
        self.cache.close(seq.holding)
        self.table.remove(seq)
        self.planner.suspects.pop(seq.seq_id, None)

    def _leave_device(self, seq: Sequence) -> None:
        if seq.is_on_device:
            seq.is_on_device = False
            self._released.append(seq.seq_id)

    def _on_preempt(self, seq: Sequence, freed: int, decision: Decision) -> None:
        self._leave_device(seq)
        self.telling.preempted(self.table[seq.request_id], seq, freed, decision)

    def _on_start(self, seq: Sequence) -> None:
        if seq.was_admitted:
            self.telling.counts.on_resumed()
        else:
            seq.was_admitted = True
            self.telling.counts.on_admitted(seq)

    def _on_pause(self, seq: Sequence) -> None:
        self._leave_device(seq)
        self.telling.paused(seq)

    # ---- what has been decided and what has happened ---------------------------------------------

    def take_outputs(self, now: float) -> list[TokensSampled | Refused]:
        """Messages for the detokenizer, in order, since the last call."""
        return self.telling.take_outputs(now)

    def take_reports(self) -> list[Report]:
        """Facts for the logs since the last call."""
        return self.telling.take_reports()

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self.table)

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._steps)

    @property
    def num_copies(self) -> int:
        """Copies between the tiers that have not ended."""
        return self.cache.num_copies

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        return EngineStats(
            num_running=sum(not seq.is_ending for seq in self.queues.running),
            num_waiting=len(self.queues.waiting),
            num_preempted=len(self.queues.recovery),
            device_blocks=self.cache.counts(),
            host_blocks=self.cache.host_counts(),
            prefix_cache_queries=self.planner.num_queried_tokens,
            prefix_cache_hits=self.planner.num_hit_tokens,
            num_preemptions=dict(self.pressure.num_preemptions),
            swap_out_bytes=self.pressure.num_bytes["out"],
            swap_in_bytes=self.pressure.num_bytes["in"],
            num_steps=self.num_steps,
            num_restarts=self.num_restarts,
            num_paused=len(self.queues.paused),
            num_fetching=len(self.queues.fetching),
            num_swap_fallbacks=self.pressure.num_fallbacks,
            num_host_hits=dict(self.telling.num_host_hits),
            num_failed_copies=self.pressure.num_failed_copies,
            step_wait_s=self.pressure.step_wait_s,
            fetch_wait_s=self.pressure.fetch_wait_s,
            num_computed_tokens=self.num_computed_tokens,
            num_non_finite_rows=self.num_non_finite_rows,
        )

    def audit(self) -> list[str]:
        """Everything that does not add up, in words; live requests are accounted for, not faults."""
        queues = self.queues
        queued = [*queues.running, *queues.recovery, *queues.waiting, *queues.paused.values(), *queues.fetching.values()]
        found = [*self.cache.check_integrity(), *self.table.problems(queued, self.cache)]
        if sum(seq.leader is None for seq in queues.waiting) != queues.num_waiting_requests:
            found.append(f"{queues.num_waiting_requests} waiting requests were counted, and that is wrong")
        return found
