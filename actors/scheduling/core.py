"""The scheduler without its actor: messages in, messages out, no clock and no I/O of its own.

    on_admit, on_abort      requests come and go
    plan                    the next step, or None when there is nothing to do
    on_step_done            tokens come back: logs grow, ends are found, text is on its way
    on_credit               a reader has taken tokens: its request may go on
    on_device_lost          everything the device held is gone; the token logs are here, so nothing else is
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
    PROMPT_TAIL,
    Abort,
    Admit,
    Closed,
    Credit,
    DeviceLost,
    DeviceReady,
    Open,
    Refused,
    Resend,
    RunStep,
    SequenceEnd,
    StepDone,
    TokensSampled,
)
from ...protocol.outputs import BlockCounts, EngineStats
from ...protocol.sampling import FinishReason
from ...radix.cache import KVCache
from .draft import Draft
from .gate import Gate
from .histories import Histories, replay
from .limits import check_fits, longest_sequence
from .pacing import Pacer
from .planning import Planner
from .policies import load_policy
from .queues import Queues
from .reports import Finished, Paused, Preempted, Report
from .sequence import Sequence, State
from .sharing import SharedGroups


class SchedulerCore:
    """Request table, queues, KV bookkeeping and planner of one engine.

    Raises `ConfigError` when the policy is not installed.
    """

    def __init__(self, config: EngineConfig, capacity: Capacity, *, epoch: Epoch) -> None:
        self.config = config
        self.capacity = capacity
        self.epoch = epoch
        self.policy = load_policy(config.scheduling_policy)
        self.cache = self._new_cache()
        self.queues = Queues()
        self.gate = Gate(config, self.policy)
        self.pacer = Pacer()
        self.groups = SharedGroups(capacity.block_size)
        self.histories = Histories()
        self.planner = Planner(
            config,
            cache=self.cache,
            queues=self.queues,
            gate=self.gate,
            on_preempt=self._on_preempt,
            on_pause=self._on_pause,
        )
        self.max_length = longest_sequence(capacity)
        self.draining = False
        self.device_is_ready = True
        self.num_restarts = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_preemptions = {"recompute": 0, "swap": 0}
        self._requests: dict[RequestId, Sequence] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._steps: dict[StepId, Draft] = {}
        self._released: list[SequenceId] = []
        self._refused: list[Refused] = []
        self._ended: list[SequenceEnd] = []
        self._reports: list[Report] = []
        self._sampled: list[TokensSampled] = []
        self._preempted: dict[RequestId, int] = {}
        self._last_seq_id = 0
        self._last_step_id = StepId(0)
        self._planned_s = float("-inf")

    # ---- requests come and go -------------------------------------------------------------------

    def on_admit(self, message: Admit, now: float) -> None:
        """Queue a request, or refuse it. One that is here already (its sender crashed and said it again) is a no-op."""
        if message.request_id in self._requests:
            return
        try:
            self._check_admissible(message)
        except (NeverFitsError, QueueFullError, EngineDrainingError) as error:
            self.refuse(message.request_id, problem_of(error))
            return
        seq_id = SequenceId(self._last_seq_id + 1)
        rank = (self.policy.priority_class(message), seq_id)  # a policy may be anybody's: nothing has changed yet if it raises
        self._last_seq_id = seq_id
        wanted = message.params.max_tokens
        room = self.max_length if wanted is None else len(message.token_ids) + wanted
        seq = Sequence(
            seq_id,
            message,
            self.cache.open(seq_id, message.cache_salt),
            max_length=min(self.max_length, room),
            rank=rank,
        )
        seq.queued_s = now
        if message.params.output_kind != "final_only":
            seq.credit_length = seq.num_prompt_tokens + self.config.credit_window
        self._requests[message.request_id] = seq
        self._sequences[seq_id] = seq
        self.queues.add_waiting(seq)

    def refuse(self, request_id: RequestId, problem: Problem) -> None:
        """End a request that was never queued."""
        self._refused.append(Refused(request_id, problem))

    def _check_admissible(self, message: Admit) -> None:
        if self.draining:
            raise EngineDrainingError("the engine is draining and takes no new requests")
        check_fits(len(message.token_ids), self.capacity)
        queues = self.queues
        num_free = max(0, self.config.running_limit - len(queues.running) - len(queues.recovery))
        if len(queues.waiting) - num_free >= self.config.max_num_queued:
            raise QueueFullError(f"{len(queues.waiting)} requests are waiting already (max_num_queued)")

    def on_abort(self, message: Abort, now: float) -> None:
        """End a request. Unknown and ended ids are a no-op."""
        seq = self._requests.get(message.request_id)
        if seq is not None:
            reason: FinishReason = "stop" if message.reason == "stop" else "error" if message.reason == "error" else "abort"
            self._finish(seq, reason, now)

    def on_credit(self, message: Credit) -> None:
        """A reader has taken tokens. If that was what its request waited for, it comes back at its rank."""
        seq = self._requests.get(message.request_id)
        if seq is None:
            return
        seq.credit_length += message.num_tokens
        if seq.state is State.PAUSED and not seq.is_out_of_credit:
            self.queues.resume(seq)

    def on_resend(self, message: Resend, now: float) -> None:
        """Repeat what the detokenizer was told of a request, running or ended."""
        seq = self._requests.get(message.request_id)
        told = self.histories.get(message.request_id)
        if seq is not None and seq.opening is not None:
            told = replay(seq, seq.opening, now)
        if told is not None:
            self._sampled.append(told)

    def on_closed(self, message: Closed) -> None:
        """The terminals of these requests are out."""
        for request_id in message.request_ids:
            self.histories.close(request_id)

    def on_reset(self) -> None:
        """Forget every cached prefix that nobody holds."""
        self.cache.reset()

    # ---- steps ----------------------------------------------------------------------------------

    def plan(self, now: float) -> RunStep | None:
        """The next step, or None: nothing to compute, enough steps in flight, too early, or no device."""
        self._expire(now)
        if not self._may_plan(now):
            return None
        self._planned_s = now
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
        self.pacer.on_sent(draft.load, now)
        released, self._released = self._released, []
        return draft.message(released)

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

    def predicted_s(self, step: RunStep) -> float | None:
        """How long a step in flight should take."""
        draft = self._steps.get(step.step_id)
        return None if draft is None else self.pacer.model.predict(draft.load)

    def _sweep(self, now: float) -> RunStep | None:
        """A step without rows, when everything has ended: so that an idle device remembers nobody."""
        if self._sequences or self._steps or not self._released:
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
            self._finish(seq, "error", now, problem=problem_of(error))

    def on_step_done(self, message: StepDone, now: float) -> None:
        """Take in a step's tokens. Messages of another epoch, or of a device that is lost, are dropped."""
        if message.epoch != self.epoch or not self.device_is_ready:
            return
        draft = self._steps.pop(message.step_id)
        self.pacer.on_done(message.seconds, now)
        if draft.num_prefills:
            self.gate.last_prefill_s = message.seconds
        for seq, samples in zip(draft.rows, draft.samples, strict=True):
            seq.in_flight -= samples
        self._fail_rows(message, now)
        request_ids: list[RequestId] = []
        token_ids: list[int] = []
        opened: list[Open] = []
        for seq_id, token in zip(message.seq_ids, message.token_ids, strict=True):
            known = self._sequences.get(seq_id)
            if known is None or message.step_id <= known.void_until:
                continue  # ended or rolled back meanwhile: a surplus token
            seq = known
            if seq.first_token_s is None:
                seq.first_token_s = now
                seq.opening = _open(seq)
                opened.append(seq.opening)
            request_ids.append(seq.request_id)
            token_ids.append(token)
            self._append(seq, token, message.step_id, now)
        ended, self._ended = self._ended, []
        if token_ids or ended:
            preempted, self._preempted = list(self._preempted.items()), {}
            self._sampled.append(TokensSampled(request_ids, token_ids, now, opened=opened, ended=ended, preempted=preempted))

    def _append(self, seq: Sequence, token: int, step_id: StepId, now: float) -> None:
        seq.log.append(token)
        seq.last_token_s = now
        if seq.num_deaths:
            seq.num_deaths = 0
            self.planner.suspects.pop(seq.seq_id, None)
        if seq.state is State.RUNNING:  # else it was preempted with this token in flight: not a gain of its return
            seq.has_gained = True
            self.cache.prove(seq.holding, step_id)
        if token in seq.stop_ids:
            given = seq.admit.params.stop_token_ids
            self._finish(seq, "stop", now, stop_token_id=token if given and token in given else None)
        elif len(seq.log) >= seq.max_length:
            self._finish(seq, "length", now)

    def _fail_rows(self, message: StepDone, now: float) -> None:
        """End the sequences whose logits were not finite; roll back whoever shared what they computed."""
        for failure in message.failed:
            seq = self._sequences.get(failure.seq_id)
            if seq is None or message.step_id <= seq.void_until:
                continue  # rolled back: it read what another one spoilt, and fails again if it was not that
            for victim in self.cache.fail(seq.holding, seq.log):
                self._roll_back(self._sequences[victim.seq_id])
            self._finish(seq, "error", now, problem=problem_of(RequestFailedError(failure.message)))

    def _roll_back(self, seq: Sequence) -> None:
        """All that steps in flight sample for `seq` rests on KV that is gone: this answer and the next ones."""
        self._leave_device(seq)
        self.planner.set_back(seq)
        seq.length = len(seq.log)
        seq.void_until = self._last_step_id

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
        present = {seq.seq_id: seq for draft in self._steps.values() for seq in draft.rows}
        alive = [seq for seq in present.values() if seq.state is not State.FINISHED]
        for seq in alive:
            seq.num_deaths += 1
            if seq.is_suspect:
                self.planner.suspects[seq.seq_id] = seq
        self._forget_device()
        # A culprit was suspect before it, so it was alone: with it there is nobody else.
        culprits = [seq for seq in alive if seq.is_culprit]
        for seq in culprits:
            error = RequestFailedError(f"the device died {seq.num_deaths} times while it computed this request")
            self._finish(seq, "error", now, problem=problem_of(error))
        return bool(culprits)

    def on_device_ready(self, message: DeviceReady) -> None:
        """A new device has taken over, and remembers nothing."""
        self.epoch = message.epoch
        self.device_is_ready = True
        self.num_restarts += 1

    def _forget_device(self) -> None:
        self._steps.clear()
        self._released.clear()
        self._last_step_id = StepId(0)
        self.pacer.reset()
        self.cache = self.planner.cache = self._new_cache()
        self.groups = SharedGroups(self.capacity.block_size)
        for seq in self._sequences.values():
            seq.holding = self.cache.open(seq.seq_id, seq.admit.cache_salt)
            if seq.state is State.RUNNING:
                self.queues.preempt(seq)
            seq.forget_device()

    def _new_cache(self) -> KVCache:
        return KVCache(
            self.capacity.num_device_blocks,
            self.capacity.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )

    # ---- ends -----------------------------------------------------------------------------------

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        problem: Problem | None = None,
    ) -> None:
        self._leave_device(seq)
        self.queues.remove(seq)
        seq.state = State.FINISHED
        self.planner.keep(seq)
        self.cache.close(seq.holding)
        del self._requests[seq.request_id]
        del self._sequences[seq.seq_id]
        self.planner.suspects.pop(seq.seq_id, None)
        self._preempted.pop(seq.request_id, None)
        end = SequenceEnd(
            seq.request_id, reason, stop_token_id=stop_token_id, problem=problem, num_preemptions=seq.num_preemptions
        )
        self._ended.append(end)
        self.histories.keep(seq, end, now)
        self._reports.append(Finished.of(seq, reason, now, problem))

    def _leave_device(self, seq: Sequence) -> None:
        if seq.is_on_device:
            seq.is_on_device = False
            self._released.append(seq.seq_id)

    def _on_preempt(self, seq: Sequence, freed: int) -> None:
        self._leave_device(seq)
        self.num_preemptions["recompute"] += 1
        self._preempted[seq.request_id] = seq.num_preemptions
        self._reports.append(Preempted(seq.request_id, "recompute", len(seq.log), freed, seq.num_preemptions))

    def _on_pause(self, seq: Sequence) -> None:
        self._leave_device(seq)
        self._reports.append(Paused(seq.request_id, seq.num_output_tokens))

    # ---- what has been decided and what has happened ---------------------------------------------

    def take_outputs(self, now: float) -> list[TokensSampled | Refused]:
        """Messages for the detokenizer, in order, since the last call."""
        outputs: list[TokensSampled | Refused] = [*self._refused, *self._sampled]
        if self._ended:
            outputs.append(TokensSampled([], [], now, ended=self._ended))
        self._refused, self._sampled, self._ended = [], [], []
        return outputs

    def take_reports(self) -> list[Report]:
        """Facts for the logs since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # ---- facts ----------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._steps)

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        return EngineStats(
            num_running=sum(not seq.is_ending for seq in self.queues.running),
            num_waiting=len(self.queues.waiting),
            num_preempted=len(self.queues.recovery),
            device_blocks=self.cache.counts(),
            host_blocks=BlockCounts(0, 0, 0, 0),
            prefix_cache_queries=self.planner.num_queried_tokens,
            prefix_cache_hits=self.planner.num_hit_tokens,
            num_preemptions=dict(self.num_preemptions),
            swap_out_bytes=0,
            swap_in_bytes=0,
            num_steps=self.num_steps,
            num_restarts=self.num_restarts,
            num_paused=len(self.queues.paused),
            num_computed_tokens=self.num_computed_tokens,
        )

    def audit(self) -> list[str]:
        """Everything that does not add up, in words; live requests are accounted for, not faults."""
        found = self.cache.check_integrity()
        queues = self.queues
        queued = [*queues.running, *queues.recovery, *queues.waiting, *queues.paused.values()]
        if {seq.seq_id for seq in queued} != set(self._sequences) or len(queued) != len(self._sequences):
            found.append(f"{len(self._sequences)} sequences in the table, {len(queued)} in the queues")
        if {seq.request_id for seq in self._sequences.values()} != set(self._requests):
            found.append("the request table and the sequence table differ")
        if {holding.seq_id for holding in self.cache.holdings()} != set(self._sequences):
            found.append("a holding without a sequence, or the reverse")
        return found


def _open(seq: Sequence) -> Open:
    assert seq.first_scheduled_s is not None
    return Open(
        request_id=seq.request_id,
        prompt_tail=seq.admit.token_ids[-PROMPT_TAIL:],
        params=seq.admit.params,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        queued_s=seq.queued_s,
        first_scheduled_s=seq.first_scheduled_s,
    )
