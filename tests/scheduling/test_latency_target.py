"""`target_itl_ms`: prompts get what time decodes leave, as it is predicted; decodes always run, prompts never starve."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from repertory.actors.scheduling.core import SchedulerCore
from repertory.actors.scheduling.step_time import attended
from repertory.gpu.executor import Capacity
from repertory.protocol.config import EngineConfig, checked
from repertory.protocol.errors import ConfigError
from repertory.protocol.ids import Epoch, RequestId
from repertory.protocol.messages import Admit, RunStep, StepDone
from repertory.protocol.sampling import SamplingParams

CONSTANT_S, TOKEN_S, PAIR_S, ROW_S = 0.010, 250e-6, 1e-8, 500e-6
NUM_DECODES = 8
DECODES_S = CONSTANT_S + NUM_DECODES * ROW_S


class Step(NamedTuple):
    """One step as it was planned, and how long it took."""

    num_decodes: int
    num_prefill_tokens: int
    predicted_s: float | None
    seconds: float


class Drive:
    """A core whose device takes `CONSTANT_S` and so on, times what `noise` draws."""

    def __init__(self, noise: Callable[[random.Random], float] = lambda rng: 1.0, **config: Any) -> None:
        self.config = EngineConfig(model="none", block_size=16, max_num_seqs=64, max_num_batched_tokens=512, **config)
        capacity = Capacity(
            device="none",
            num_device_blocks=20_000,
            num_host_blocks=0,
            block_size=16,
            block_bytes=0,
            vocab_size=1000,
            max_model_len=100_000,
        )
        self.core = SchedulerCore(self.config, capacity, epoch=Epoch(1))
        self.noise = noise
        self.now = 0.0
        self.rng = random.Random(7)
        self.num_requests = 0
        self.steps: list[Step] = []
        self._in_flight: list[tuple[RunStep, Step]] = []

    def submit(self, num_tokens: int, max_tokens: int = 100_000) -> RequestId:
        self.num_requests += 1
        prompt = [self.rng.randrange(1000) for _ in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind="final_only")
        request = RequestId(self.num_requests)
        self.core.on_admit(Admit(request, "", prompt, params, self.now), self.now)
        return request

    def step(self) -> Step:
        """Plan as far ahead as may be, and let the oldest step end."""
        while True:
            decoding = {seq.seq_id for seq in self.core.queues.running if not seq.is_prefilling}
            planned = self.core.plan(self.now)
            if planned is None:
                break
            self._in_flight.append((planned, self._timed(planned, decoding)))
        planned, step = self._in_flight.pop(0)
        self.now += step.seconds
        sampled = [seq_id for seq_id, samples in zip(planned.seq_ids, planned.samples, strict=True) if samples]
        tokens = [self.rng.randrange(1000) for _ in sampled]
        self.core.on_step_done(StepDone(Epoch(1), planned.step_id, sampled, tokens, step.seconds), self.now)
        self.core.take_outputs(self.now)
        self.steps.append(step)
        return step

    def _timed(self, step: RunStep, decoding: set[int]) -> Step:
        counts = dict(zip(step.seq_ids, step.num_tokens, strict=True))
        num_decodes = sum(seq_id in decoding for seq_id in counts)
        num_prefill = sum(count for seq_id, count in counts.items() if seq_id not in decoding)
        pairs = sum(attended(start, count) for start, count in zip(step.starts, step.num_tokens, strict=True))
        seconds = CONSTANT_S + TOKEN_S * num_prefill + PAIR_S * pairs + ROW_S * len(counts)
        return Step(num_decodes, num_prefill, self.core.predicted_s(step), seconds * self.noise(self.rng))

    def decode(self, count: int = NUM_DECODES) -> None:
        """`count` streams decode, and the model has seen prompts and decodes."""
        for _ in range(count):
            self.submit(40)
        for _ in range(40):
            self.step()

    def prefill(self, num_tokens: int) -> list[Step]:
        """Steps until a prompt of that length has its token."""
        request, first = self.submit(num_tokens, 1), len(self.steps)
        while self.core.table.get(request) is not None:
            self.step()
            assert len(self.steps) < first + 20_000
        return [step for step in self.steps[first:] if step.num_prefill_tokens]


def test_without_a_target_a_chunk_takes_the_whole_budget() -> None:
    drive = Drive()
    drive.decode()
    steps = drive.prefill(4096)
    assert {step.num_prefill_tokens for step in steps[:-1]} == {512 - NUM_DECODES}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_chunks_are_the_largest_that_stay_under_the_target(factor: float, in_flight: int) -> None:
    target_s = factor * DECODES_S
    drive = Drive(target_itl_ms=1e3 * target_s, max_steps_in_flight=in_flight)
    drive.decode()
    drive.prefill(4096)
    steps = drive.prefill(4096)
    assert len(steps) > 10
    for step in steps:
        assert step.num_decodes == NUM_DECODES
        assert step.seconds <= 1.02 * target_s
    for step in steps[:-1]:
        assert step.seconds >= 0.9 * target_s or step.num_prefill_tokens == 512 - NUM_DECODES, "it leaves time unused"


def test_a_prompt_far_into_its_context_gets_smaller_chunks() -> None:
    drive = Drive(target_itl_ms=2e3 * DECODES_S)
    drive.decode()
    drive.prefill(8192)
    steps = drive.prefill(16_384)
    counts = [step.num_prefill_tokens for step in steps[1:-1]]
    assert sum(counts[-10:]) < 0.8 * sum(counts[:10])
    assert all(step.seconds <= 1.03 * 2 * DECODES_S for step in steps)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_where_decodes_alone_take_longer_than_the_target_a_prompt_gets_a_token_a_step(in_flight: int) -> None:
    drive = Drive(target_itl_ms=500 * DECODES_S, max_steps_in_flight=in_flight)
    drive.decode()
    steps = drive.prefill(60)
    assert {step.num_prefill_tokens for step in steps} == {1}
    assert all(step.num_decodes == NUM_DECODES for step in steps)


def test_several_prompts_share_the_time_and_only_one_token_is_owed_when_there_is_none() -> None:
    drive = Drive(target_itl_ms=500 * DECODES_S)
    drive.decode()
    requests = [drive.submit(30, 1) for _ in range(3)]
    while any(drive.core.table.get(request) is not None for request in requests):
        assert drive.step().num_prefill_tokens <= 1


def test_a_step_without_decodes_takes_the_whole_budget() -> None:
    drive = Drive(target_itl_ms=1.0)
    drive.decode(1)
    for seq in list(drive.core.table.sequences.values()):
        seq.max_length = len(seq.log) + 3
    while drive.core.num_live:
        drive.step()
    assert {step.num_prefill_tokens for step in drive.prefill(2048)[:-1]} == {512}


def test_under_noise_the_target_is_kept_by_most_steps() -> None:
    target_s = 2 * DECODES_S
    drive = Drive(lambda rng: rng.uniform(0.93, 1.07), target_itl_ms=1e3 * target_s)
    drive.decode()
    drive.prefill(4096)
    seconds = sorted(step.seconds for _ in range(6) for step in drive.prefill(4096))
    assert seconds[int(0.9 * len(seconds))] <= 1.1 * target_s
    assert seconds[len(seconds) // 2] >= 0.8 * target_s
    errors = sorted(abs((step.predicted_s or 0.0) / step.seconds - 1) for step in drive.steps[-300:])
    assert errors[int(0.9 * len(errors))] < 0.15


def test_one_step_that_somebody_else_held_up_does_not_stop_prompts_for_long() -> None:
    target_s = 2 * DECODES_S
    drive = Drive(lambda rng: 1.0, target_itl_ms=1e3 * target_s)
    drive.decode()
    before = drive.prefill(4096)
    drive.noise = lambda rng: 20.0
    drive.submit(600, 1)
    drive.step()
    drive.noise = lambda rng: 1.0
    after = drive.prefill(4096)
    assert len(after) <= 2 * len(before) + 10
    assert sum(step.seconds for step in after) <= 2 * sum(step.seconds for step in before)


def test_a_device_that_becomes_slower_is_followed() -> None:
    target_s = 3 * DECODES_S
    drive = Drive(target_itl_ms=1e3 * target_s)
    drive.decode()
    drive.prefill(4096)
    drive.noise = lambda rng: 1.6
    drive.prefill(4096)
    late = drive.prefill(4096)
    assert sorted(step.seconds for step in late)[int(0.9 * len(late))] <= 1.1 * target_s


def test_a_target_without_chunks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"target_itl_ms 50 .*enable_chunked_prefill") as caught:
        checked(EngineConfig(model="demo", target_itl_ms=50.0, enable_chunked_prefill=False))
    assert caught.value.key == "target_itl_ms"


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast"])
def test_a_target_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        checked(EngineConfig(model="demo", target_itl_ms=value))
