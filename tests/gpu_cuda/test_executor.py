"""The GPU's executor step by step, on streams that run as late as they may."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.cuda.executor import GpuExecutor, PendingStep
from repertory.gpu.executor import LaunchingExecutor
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError
from repertory.protocol.ids import BlockId, Epoch, SequenceId, StepId
from repertory.protocol.messages import BlockCopy, Fences, NewRow, RunStep
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.stepping import GREEDY, Stepper
from repertory.tests.gpu.threads import begin, until
from repertory.tests.gpu_cuda import opened
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime
from repertory.tests.gpu_cuda.opened import open_late

SEEDED = SamplingParams(temperature=0.8, seed=42)
FILTERED = SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=7)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=5)
PROMPTS = {n: random.Random(n).choices(range(3, 320), k=n) for n in (1, 8, 19, 33)}
CPU: dict[str, Any] = {"dtype": "float32", "num_device_blocks": 200, "num_threads": 1, "attention_backend": "torch"}
PARAMS = {1: GREEDY, 8: SEEDED, 19: FILTERED, 33: SEEDED}


def on_cpu(model_dir: Path, prompts: dict[int, list[int]], params: dict[int, Any], num_tokens: int) -> dict[int, list[int]]:
    """What the CPU's executor draws, each alone."""
    found = {}
    for n, prompt in prompts.items():
        config = EngineConfig(
            model=str(model_dir), dtype="float32", num_device_blocks=200, num_threads=1, attention_backend="torch"
        )
        stepper = Stepper(CpuExecutor(model_dir, config=config))
        stepper.add(n, prompt, params=params.get(n, GREEDY))
        found |= stepper.run(num_tokens)
        stepper.executor.close()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[int, list[int]]:
    return on_cpu(tiny_model, PROMPTS, PARAMS, 12)


class Ahead:
    """Drives an executor as a scheduler does with two steps in flight: the next is launched before the last is answered."""

    def __init__(self, executor: GpuExecutor, *, params: dict[int, SamplingParams]) -> None:
        self.executor = executor
        self.size = executor.capacity.block_size
        self.free = [BlockId(i) for i in range(executor.capacity.num_device_blocks)]
        random.Random(7).shuffle(self.free)
        self.params = params
        self.computed: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.admitted: list[NewRow] = []
        self.released: list[SequenceId] = []
        self.pending: list[PendingStep] = []
        self.steps = 0

    def add(self, seq_id: int, prompt: list[int], *, room: int = 40) -> None:
        table = [self.free.pop() for _ in range(-(-(len(prompt) + room) // self.size))]
        params = self.params.get(seq_id, GREEDY)
        self.admitted.append(NewRow(SequenceId(seq_id), list(prompt), len(prompt), params, table))
        self.computed[seq_id], self.length[seq_id], self.tokens[seq_id] = 0, len(prompt), []

    def launch(self, counts: dict[int, int], **more: Any) -> None:
        self.steps += 1
        starts = [self.computed[seq_id] for seq_id in counts]
        ends = [start + count for start, count in zip(starts, counts.values(), strict=True)]
        samples = [int(end == self.length[seq_id]) for seq_id, end in zip(counts, ends, strict=True)]
        step = RunStep(
            epoch=Epoch(1),
            step_id=StepId(self.steps),
            after=more.pop("after", Fences()),
            seq_ids=[SequenceId(seq_id) for seq_id in counts],
            starts=starts,
            num_tokens=list(counts.values()),
            samples=samples,
            admitted=self.admitted,
            released=self.released,
            **more,
        )
        self.admitted, self.released = [], []
        self.pending.append(self.executor.launch_step(step))
        self.computed.update(zip(counts, ends, strict=True))
        for seq_id, drawn in zip(counts, samples, strict=True):
            self.length[seq_id] += drawn

    def answer(self) -> None:
        done = self.pending.pop(0).result()
        for seq_id, token in zip(done.seq_ids, done.token_ids, strict=True):
            self.tokens[seq_id].append(token)
        for row in done.failed:
            self.tokens[row.seq_id].append(-1)

    def run(self, num_tokens: int, *, chunk: int = 10**9) -> dict[int, list[int]]:
        """Until each has been launched `num_tokens` times, two steps under way at any time."""
        goal = {seq_id: length + num_tokens - len(self.tokens[seq_id]) for seq_id, length in self.length.items()}
        while active := [seq_id for seq_id in self.length if self.length[seq_id] < goal[seq_id]]:
            self.launch({seq_id: min(chunk, self.length[seq_id] - self.computed[seq_id]) for seq_id in active})
            if len(self.pending) == 2:
                self.answer()
        while self.pending:
            self.answer()
        return self.tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [5, 100])
def test_steps_launched_ahead_draw_what_the_cpu_draws(
    tiny_model: Path, expected: dict[int, list[int]], seed: int, chunk: int
) -> None:
    executor, _ = open_late(tiny_model, seed=seed)
    ahead = Ahead(executor, params=PARAMS)
    for n, prompt in PROMPTS.items():
        ahead.add(n, prompt)
    assert ahead.run(12, chunk=chunk) == expected
    assert isinstance(executor, LaunchingExecutor)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at the NaN of the pool: on the device that is no event
def test_the_kernels_and_captured_steps_draw_what_the_cpu_draws(tiny_model: Path, expected: dict[int, list[int]]) -> None:
    executor, runtime = open_late(tiny_model, triton=True, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    before = runtime.num_replays
    runtime.forbids_host_reads = True
    ahead = Ahead(executor, params=PARAMS)
    for n, prompt in PROMPTS.items():
        ahead.add(n, prompt)
    found = ahead.run(4)
    assert found == {n: tokens[:4] for n, tokens in expected.items()}
    assert runtime.num_replays - before == 3, "three of the four steps are decodes"


def test_a_look_at_a_tensor_in_a_step_would_show(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model)  # torch's operations look
    runtime.forbids_host_reads = True
    stepper = Stepper(executor)
    stepper.add(1, PROMPTS[8])
    with pytest.raises(AssertionError, match="looks at a tensor"):
        stepper.step({1: 8})


def test_a_step_ahead_waits_for_nothing_and_a_step_is_waited_for_once(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model)
    ahead = Ahead(executor, params={})
    for n, prompt in PROMPTS.items():
        ahead.add(n, prompt)
    ahead.launch({n: len(prompt) for n, prompt in PROMPTS.items()})
    runtime.history.clear()
    ahead.launch(dict.fromkeys(PROMPTS, 1))
    assert [entry for entry in runtime.history if entry[0] == "synchronize"] == []
    assert [entry[:2] for entry in runtime.history if entry[0] == "launch"] == [("launch", "compute")]
    runtime.history.clear()
    ahead.answer()
    assert [entry[:2] for entry in runtime.history] == [("synchronize", "compute")]
    ahead.launch(dict.fromkeys(PROMPTS, 1))
    runtime.history.clear()
    ahead.answer()
    assert [entry[:2] for entry in runtime.history] == [("synchronize", "compute")]


def test_a_step_that_the_host_has_a_say_in_sees_every_token_before_it(tiny_model: Path) -> None:
    params = {1: PENALISED, 8: SEEDED, 19: SamplingParams(temperature=0.0, seed=0, logprobs=2), 33: PENALISED}
    expected = on_cpu(tiny_model, PROMPTS, params, 10)
    executor, _ = open_late(tiny_model)
    ahead = Ahead(executor, params=params)
    ahead.add(8, PROMPTS[8])  # alone at first, so that plain steps are under way when the others come
    ahead.launch({8: 8})
    ahead.launch({8: 1})
    for n in (1, 19, 33):
        ahead.add(n, PROMPTS[n])
    while ahead.pending:
        ahead.answer()
    ahead.run(10)
    assert {n: tokens[:10] for n, tokens in ahead.tokens.items()} == expected


def test_prompt_logprobs_are_those_of_the_cpu(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0, seed=0, logprobs=1, prompt_logprobs=2)
    config = EngineConfig(
        model=str(tiny_model), dtype="float32", num_device_blocks=200, num_threads=1, attention_backend="torch"
    )
    parts = []
    for executor in (CpuExecutor(tiny_model, config=config), open_late(tiny_model)[0]):
        stepper = Stepper(executor)
        stepper.add(1, PROMPTS[33], params=params)
        stepper.add(2, PROMPTS[19], params=params)
        stepper.add(3, PROMPTS[8])
        first = stepper.step({3: 8, 1: 20, 2: 19})  # device order differs: nothing decodes yet; then one does
        second = stepper.step({1: 13, 3: 1, 2: 1})
        parts.append([first.prompts, second.prompts, first.logprobs, second.logprobs])
    for mine, theirs in zip(*parts, strict=True):
        assert _rounded(mine) == _rounded(theirs)


def _rounded(values: Any) -> Any:
    import msgspec

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 3)
        return [rounded(one) for one in value] if isinstance(value, list) else value

    return rounded(msgspec.to_builtins(values))


@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_that_was_on_the_host_goes_on_as_if_it_had_stayed(
    tiny_model: Path, expected: dict[int, list[int]], seed: int
) -> None:
    executor, _ = open_late(tiny_model, seed=seed)
    ahead = Ahead(executor, params=PARAMS)
    ahead.add(33, PROMPTS[33])
    table = list(ahead.admitted[0].block_table)
    ahead.launch({33: 33})
    ahead.launch({33: 1})
    for _ in range(2):
        ahead.answer()
    assert executor.copy_blocks(copy_of("out", table, list(range(len(table))), 1, Fences(2))).ok
    ahead.released.append(SequenceId(33))
    other = [block for block in ahead.free if block not in table][: len(table)]
    ahead.launch({})
    executor._open.pool.blocks[table].fill_(float("nan"))
    done = executor.copy_blocks(copy_of("in", list(range(len(table))), other, 1, Fences(3, 1)))
    assert done.ok and done.num_bytes == len(table) * executor.capacity.block_bytes
    log = PROMPTS[33] + ahead.tokens[33]
    ahead.admitted.append(NewRow(SequenceId(33), log, 33, PARAMS[33], other))
    ahead.launch({33: 1}, after=Fences(3, 1, 1))
    while ahead.pending:
        ahead.answer()
    assert ahead.run(12)[33] == expected[33]


def copy_of(direction: str, sources: list[int], targets: list[int], copy_id: int, after: Fences) -> Any:
    from repertory.protocol.messages import CopyBlocks

    return CopyBlocks(1, copy_id, direction, after, sources, targets)  # type: ignore[arg-type]


def test_copies_within_the_pool_are_made_one_after_another(tiny_model: Path) -> None:
    executor, _ = open_late(tiny_model)
    blocks = executor._open.pool.blocks
    for block in range(6):
        blocks[block].fill_(float(block))
    ahead = Ahead(executor, params={})
    chain = [BlockCopy(0, 1, 4), BlockCopy(1, 2, 2), BlockCopy(5, 1, 4), BlockCopy(3, 4, 1)]  # type: ignore[arg-type]
    ahead.launch({}, copies=chain)
    ahead.answer()
    assert blocks[1].eq(5.0).all()
    assert blocks[2, :, :, :2].eq(0.0).all() and blocks[2, :, :, 2:].eq(2.0).all()
    assert blocks[4, :, :, :1].eq(3.0).all() and blocks[4, :, :, 1:].eq(4.0).all()


def test_a_row_whose_logits_are_not_finite_fails_alone_also_with_its_next_step_under_way(
    tiny_model: Path, expected: dict[int, list[int]]
) -> None:
    executor, _ = open_late(tiny_model)
    ahead = Ahead(executor, params=PARAMS)
    ahead.add(8, PROMPTS[8])
    ahead.add(19, PROMPTS[19])
    poisoned = ahead.admitted[0].block_table[0]
    ahead.launch({8: 8, 19: 19})
    ahead.answer()
    executor._open.pool.blocks[poisoned].fill_(float("nan"))
    ahead.launch({8: 1, 19: 1})
    ahead.launch({8: 1, 19: 1})
    ahead.answer()
    ahead.answer()
    assert ahead.tokens[8][1:] == [-1, -1]
    assert ahead.tokens[19] == expected[19][:3]
    ahead.released.append(SequenceId(8))
    del ahead.length[8]
    ahead.launch({19: 1})
    ahead.answer()
    assert executor._answers._failed == {}, "a failure is remembered for as long as its sequence is known"


def test_a_token_that_nobody_knows_and_ids_out_of_range_are_refused(tiny_model: Path) -> None:
    executor, _ = open_late(tiny_model)
    stepper = Stepper(executor)
    stepper.add(1, [5, 6, 7])
    stepper.step({1: 3})
    stepper.logs[1][-1] = 5
    executor._slots._slots[SequenceId(1)].token_ids[-1] = -1
    with pytest.raises(ValueError, match="sequence 1: token 3 is known to nobody"):
        stepper.step({1: 1})
    for prompt, words in (([5, 320], "token 320 is outside the vocabulary"), ([5, -7], "token -7 is outside")):
        stepper = Stepper(open_late(tiny_model)[0])
        stepper.add(1, prompt)
        with pytest.raises(IndexError, match=words):
            stepper.step({1: 2})
    stepper = Stepper(open_late(tiny_model)[0])
    stepper.add(1, [5] * 9, shared=[BlockId(200), BlockId(3), BlockId(4)], room=0)
    with pytest.raises(IndexError, match="block 200 is outside the pool"):
        stepper.step({1: 9})


def test_waiting_is_only_what_copies_cost(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model)
    stepper = Stepper(executor)
    stepper.add(1, PROMPTS[8])
    assert stepper.step({1: 8}).waited_s == 0.0
    runtime.copies_may_end.clear()
    copy = begin(lambda: executor.copy_blocks(copy_of("out", [190], [0], 1, Fences(1))))
    until(lambda: executor._fences._launched.completed.copy_out == 1)
    pending = executor.launch_step(RunStep(Epoch(1), StepId(2), Fences(1, 1), [SequenceId(1)], [8], [1], [1]))
    assert pending.result().waited_s > 0.0
    runtime.copies_may_end.set()
    assert copy.result(60).ok


def test_a_device_that_cannot_be_opened_is_given_back(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes: list[LazyRuntime] = []

    class Poor(LazyRuntime):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            runtimes.append(self)

        def pinned(self, shape: Any, dtype: Any) -> Any:
            if len(shape) == 6:
                raise MemoryError("the host cannot page-lock so much")
            return super().pinned(shape, dtype)

    monkeypatch.setattr(opened, "LazyRuntime", Poor)
    with pytest.raises(ConfigError, match="num_host_blocks 40: the host cannot page-lock so much") as refusal:
        open_late(tiny_model)
    assert refusal.value.key == "num_host_blocks"
    assert [runtime.is_closed for runtime in runtimes] == [True]


@pytest.mark.parametrize(
    ("sources", "targets", "words"), [([200], [0], "block 200 of a device pool"), ([0], [1, 2], "1 sources")]
)
def test_a_copy_that_fails_is_answered_and_the_device_goes_on(
    tiny_model: Path, sources: list[int], targets: list[int], words: str
) -> None:
    executor, _ = open_late(tiny_model)
    done = executor.copy_blocks(copy_of("out", sources, targets, 1, Fences()))
    assert not done.ok and words in done.reason and done.num_bytes == 0
    stepper = Stepper(executor)
    stepper.add(1, PROMPTS[8])
    assert len(stepper.run(2)[1]) == 2


def test_closing_runs_what_is_launched_and_may_be_done_twice(tiny_model: Path) -> None:
    executor, runtime = open_late(tiny_model)
    ahead = Ahead(executor, params={})
    ahead.add(8, PROMPTS[8])
    ahead.launch({8: 8})
    executor.close()
    executor.close()
    assert runtime.is_closed
    assert executor.num_sequences == 0


def test_what_was_measured_and_chosen_is_told(tiny_model: Path) -> None:
    executor, _ = open_late(tiny_model, num_device_blocks=None, kv_offloading_size=0.01, num_host_blocks=None)
    capacity = executor.capacity
    assert capacity.device.startswith("late (float32, attention torch")
    assert capacity.num_device_blocks == int(0.9 * 2**30 // capacity.block_bytes)
    assert capacity.num_host_blocks == int(0.01 * 2**30 // capacity.block_bytes)
    assert capacity.copy_out_rate > 0 and capacity.copy_in_rate > 0
    assert capacity.weights_bytes > 0
    assert isinstance(LazyRuntime().device.type, str)
