"""The scheduler under orders of events that Hypothesis chooses, and cuts down where a rule is broken."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from repertory.protocol.config import EngineConfig
from repertory.protocol.ids import RequestId
from repertory.protocol.sampling import SamplingParams

from .hand_driven import HandDriven

FEW = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=1000, stateful_step_count=120, derandomize=False)

INDEX = st.integers(0, 30)
LANES = st.sampled_from(["out", "in"])
RARELY = st.sampled_from([False] * 4 + [True])
STEMS = {"a": [1] * 40, "b": [1, 2] * 20, "c": list(range(40))}


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, read and do not; steps, copies and messages end when they like; things die."""

    @initialize(
        block_size=st.sampled_from([4, 2, 1]),
        num_blocks=st.sampled_from([12, 6, 30]),
        num_host_blocks=st.sampled_from([0, 12, 60, 2]),
        mode=st.sampled_from(["swap", "auto", "recompute"]),
        window=st.sampled_from([1000, 2, 1]),
        budget=st.sampled_from([64, 5, 1]),
        num_seqs=st.sampled_from([4, 16, 2]),
        steps=st.sampled_from([2, 1]),
        chunks=st.booleans(),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, block_size, num_blocks, num_host_blocks, mode, window, budget, num_seqs, steps, chunks, caching):
        config = EngineConfig(
            model="simulated",
            block_size=block_size,
            num_device_blocks=num_blocks,
            preemption_mode=mode,
            credit_window=window,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            max_steps_in_flight=steps,
            enable_chunked_prefill=chunks,
            enable_prefix_caching=caching,
        )
        self.engine = HandDriven(config, num_host_blocks=num_host_blocks)
        self.num_tokens = num_blocks * block_size

    def _somebody(self, index) -> RequestId:
        return RequestId(index % len(self.engine.guests) + 1)

    # ---- visitors -------------------------------------------------------------------------------

    @rule(
        stem=st.sampled_from(sorted(STEMS)),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 49), max_size=3),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        seed=st.sampled_from([None, None, 1]),
        stops=st.sampled_from([[], [], [7, 8, 9]]),
    )
    def come(self, stem, length, tail, max_tokens, n, seed, stops):
        prompt = [*STEMS[stem][: min(length, self.num_tokens - 2)], *tail]
        params = SamplingParams(n=n, temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=max_tokens)
        self.engine.come(prompt, params, stop_token_ids=stops)

    @precondition(lambda self: self.engine.guests)
    @rule(index=INDEX)
    def leave(self, index):
        self.engine.leave(self._somebody(index))

    @precondition(lambda self: self.engine.unread)
    @rule()
    def read(self):
        self.engine.read()

    # ---- the engine -----------------------------------------------------------------------------

    @rule()
    def plan(self):
        self.engine.plan()

    @rule()
    def plan_and_run(self):
        """What happens most often, as one event: else little would come of it in so few."""
        for _ in range(3):
            self.engine.plan()
            self.engine.run_step()
            while self.engine.answers:
                self.engine.answer()

    @precondition(lambda self: self.engine.steps)
    @rule()
    def run_step(self):
        self.engine.run_step()

    @precondition(lambda self: any(self.engine.copies.values()))
    @rule(lane=LANES, fails=RARELY)
    def run_copy(self, lane, fails):
        self.engine.run_copy(lane, fails=fails)

    @precondition(lambda self: self.engine.answers)
    @rule()
    def answer(self):
        self.engine.answer()

    @precondition(lambda self: self.engine.to_texts)
    @rule(crash=st.booleans())
    def tell(self, crash):
        self.engine.tell(crash=crash)

    @rule()
    def talk(self):
        """Everything that is said is heard."""
        while self.engine.to_texts or self.engine.replies:
            while self.engine.to_texts:
                self.engine.tell()
            while self.engine.replies:
                self.engine.reply()

    @precondition(lambda self: self.engine.replies)
    @rule()
    def reply(self):
        self.engine.reply()

    # ---- trouble --------------------------------------------------------------------------------

    @precondition(lambda self: self.engine.guests)
    @rule(index=INDEX, is_cured=st.booleans())
    def poison(self, index, is_cured):
        self.engine.poisoned.clear()
        if not is_cured:
            self.engine.poisoned.add(self._somebody(index))

    @precondition(lambda self: self.engine.core.device_is_ready and self.engine.steps)
    @rule()
    def die(self):
        self.engine.die()

    @precondition(lambda self: not self.engine.core.device_is_ready)
    @rule()
    def come_back(self):
        self.engine.come_back()

    @rule(seconds=st.sampled_from([0.001, 1.0, 400.0]))
    def time_passes(self, seconds):
        self.engine.now += seconds

    @rule()
    def reset(self):
        self.engine.core.on_reset()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run_to_the_end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = FEW


@pytest.mark.slow
def test_the_same_for_much_longer():
    run_state_machine_as_test(SchedulerMachine, settings=MANY)
