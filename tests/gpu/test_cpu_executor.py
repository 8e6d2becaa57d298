"""The CPU executor step by step: what a scheduler may ask of it, and what it must refuse."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from repertory.gpu.cpu import executor as executor_module
from repertory.gpu.cpu.executor import CpuExecutor
from repertory.gpu.executor import Executor
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError, ModelLoadError
from repertory.protocol.ids import BlockId, Epoch, SequenceId, StepId
from repertory.protocol.messages import BlockCopy, Fences, RunStep
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.stepping import Stepper
from repertory.tests.tiny_model import make_tiny_model

SEEDED = SamplingParams(temperature=0.8, seed=42)
PROMPTS = {n: random.Random(n).choices(range(3, 320), k=n) for n in (1, 8, 19, 33)}


def make_executor(model_dir: Path, **settings: Any) -> CpuExecutor:
    defaults = {"dtype": "float32", "block_size": 4, "num_device_blocks": 200, "num_threads": 1}
    executor = CpuExecutor(model_dir, config=EngineConfig(model=str(model_dir), **{**defaults, **settings}))
    executor._pool.blocks.fill_(float("nan"))  # whatever reads a slot that was never written must not go unseen
    return executor


@pytest.fixture
def stepper(tiny_llama: Path) -> Stepper:
    return Stepper(make_executor(tiny_llama))


def alone(model_dir: Path, prompt: list[int], num_tokens: int, params: SamplingParams) -> list[int]:
    stepper = Stepper(make_executor(model_dir))
    stepper.add(1, prompt, params=params)
    return stepper.run(num_tokens)[1]


@pytest.fixture(scope="module")
def greedy_reference(tiny_llama: Path) -> dict[int, list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    found = {}
    for n, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found[n] = out[0, n:].tolist()
    return found


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_batched_chunked_greedy_tokens_equal_transformers(
    tiny_llama: Path, greedy_reference: dict[int, list[int]], chunk: int, block_size: int
) -> None:
    stepper = Stepper(make_executor(tiny_llama, block_size=block_size, num_device_blocks=400))
    for n, prompt in PROMPTS.items():
        stepper.add(n, prompt)
    assert stepper.run(24, chunk=chunk) == greedy_reference


def test_the_reference_is_not_a_repetition(greedy_reference: dict[int, list[int]]) -> None:
    assert min(len(set(tokens)) for tokens in greedy_reference.values()) > 12


def test_a_seeded_sequence_does_not_notice_neighbours_chunks_or_preemption(tiny_llama: Path) -> None:
    expected = alone(tiny_llama, PROMPTS[19], 12, SEEDED)
    assert len(set(expected)) > 6

    stepper = Stepper(make_executor(tiny_llama))
    stepper.add(5, PROMPTS[33], params=SamplingParams(temperature=1.0, seed=1))
    stepper.add(1, PROMPTS[19], params=SEEDED)
    stepper.add(2, PROMPTS[8], params=SEEDED)
    head = stepper.run(5, chunk=3)[1]

    log = [*PROMPTS[19], *head]
    stepper.release(1)
    stepper.step({5: 1, 2: 1})
    stepper.add(1, log, params=SEEDED, num_prompt_tokens=19)
    assert head + stepper.run(7, chunk=1)[1] == expected


def test_sequences_of_one_request_draw_from_different_streams(stepper: Stepper) -> None:
    for index in range(3):
        stepper.add(index, PROMPTS[8], params=SEEDED, index=index)
    assert len({tuple(tokens) for tokens in stepper.run(10).values()}) == 3


def test_a_row_may_read_what_another_row_of_its_step_writes(tiny_llama: Path, stepper: Stepper) -> None:
    prompt = PROMPTS[33]
    expected = alone(tiny_llama, prompt, 6, SEEDED)
    stepper.add(1, prompt, params=SEEDED)
    stepper.add(2, prompt, params=SEEDED, shared=stepper.tables[1][:4], computed=16)
    # The reader stands before the writer in the step: order must not matter.
    stepper.step({2: 17, 1: 33})
    assert stepper.logs[1][33:] == stepper.logs[2][33:] == expected[:1]
    assert stepper.run(5) == {1: expected[1:], 2: expected[1:]}


def test_a_copied_partial_block_goes_on_independently(tiny_llama: Path, stepper: Stepper) -> None:
    prompt = PROMPTS[19]
    stepper.add(1, prompt)
    stepper.step({1: 19})
    other = [*prompt[:18], 7]
    stepper.add(2, other, shared=stepper.tables[1][:4], computed=18)
    source, target = stepper.tables[1][4], stepper.tables[2][4]
    done = stepper.step({1: 1, 2: 1}, copies=[BlockCopy(source, target, 2)])
    assert done.seq_ids == [1, 2]
    stepper.run(4)
    assert stepper.logs[1][19:] == alone(tiny_llama, prompt, 6, SamplingParams(temperature=0))
    assert stepper.logs[2][19:] == alone(tiny_llama, other, 5, SamplingParams(temperature=0))


def test_copies_run_in_order_and_move_exactly_the_leading_slots(stepper: Stepper) -> None:
    blocks = stepper.executor._pool.blocks
    blocks[:4] = torch.arange(4.0).view(4, 1, 1, 1, 1, 1)
    copies = [(0, 1, 4), (1, 2, 2), (3, 0, 1)]  # a target becomes a source, a source a target
    stepper.step({}, copies=[BlockCopy(BlockId(source), BlockId(target), n) for source, target, n in copies])
    slots = [[float(blocks[block, -1, 1, slot, 0, 0]) for slot in range(4)] for block in range(4)]
    assert slots == [[3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 2], [3, 3, 3, 3]]


def test_a_row_that_is_not_finite_fails_alone_and_stays_failed(tiny_llama: Path, stepper: Stepper) -> None:
    for n, prompt in PROMPTS.items():
        stepper.add(n, prompt, params=SEEDED)
    stepper.run(2)
    stepper.executor._pool.blocks[stepper.tables[19][0], 1] = float("nan")
    done = stepper.step(dict.fromkeys(PROMPTS, 1))
    assert done.seq_ids == [1, 8, 33]
    assert [row.seq_id for row in done.failed] == [19]
    assert "not finite" in done.failed[0].message

    # A step that was sent before the failure was known holds a row of the failed sequence.
    stepper.executor._pool.blocks[stepper.tables[19][0], 1] = 0.0
    assert [row.seq_id for row in stepper.step(dict.fromkeys(PROMPTS, 1)).failed] == [19]

    stepper.release(19)
    stepper.add(19, PROMPTS[19], params=SEEDED)
    stepper.run(3)
    for n, prompt in PROMPTS.items():
        count = len(stepper.logs[n]) - n
        assert stepper.logs[n][n:] == alone(tiny_llama, prompt, count, SEEDED)


def test_a_step_without_rows_or_without_samples_is_answered(stepper: Stepper) -> None:
    stepper.add(1, PROMPTS[8])
    assert stepper.step({}).seq_ids == []
    done = stepper.step({1: 5})
    assert (done.seq_ids, done.token_ids, done.failed) == ([], [], [])
    assert done.seconds > 0


def test_released_sequences_are_forgotten_by_a_step_without_rows(stepper: Stepper) -> None:
    stepper.add(1, PROMPTS[8])
    stepper.add(2, PROMPTS[19])
    stepper.run(1)
    assert stepper.executor.num_sequences == 2
    stepper.release(1)
    stepper.release(2)
    stepper.step({})
    assert stepper.executor.num_sequences == 0


def test_the_executor_fulfils_the_contract(tiny_llama: Path) -> None:
    executor: Executor = make_executor(tiny_llama)
    for name in ("capacity", "num_sequences", "run_step", "copy_blocks", "interrupt", "close"):
        assert hasattr(executor, name)


def raw_step(**columns: Any) -> RunStep:
    defaults = {"seq_ids": [SequenceId(1)], "starts": [0], "num_tokens": [8], "samples": [1]}
    return RunStep(Epoch(1), StepId(9), Fences(), **{**defaults, **columns})


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"seq_ids": [SequenceId(3)]}, KeyError),
        ({"num_tokens": [9]}, ValueError),
        ({"num_tokens": [0]}, ValueError),
        ({"num_tokens": [5]}, ValueError),  # samples before the end of its log
        ({"copies": [BlockCopy(BlockId(0), BlockId(200), 1)]}, IndexError),
    ],
)
def test_a_step_at_odds_with_the_state_raises(stepper: Stepper, columns: dict[str, Any], error: type[Exception]) -> None:
    stepper.add(1, PROMPTS[8])
    stepper.step({})
    with pytest.raises(error):
        stepper.executor.run_step(raw_step(**columns))


@pytest.mark.parametrize("table", [[0], [0, 200], [0, -1], []])
def test_a_block_table_that_is_short_or_points_outside_the_pool_raises(stepper: Stepper, table: list[int]) -> None:
    stepper.add(1, PROMPTS[8])
    stepper._admitted[0] = msgspec.structs.replace(stepper._admitted[0], block_table=[BlockId(i) for i in table])
    with pytest.raises((ValueError, IndexError)):
        stepper.step({1: 8})


def test_a_token_outside_the_vocabulary_raises(stepper: Stepper) -> None:
    stepper.add(1, [5, 320])
    with pytest.raises(IndexError):
        stepper.step({1: 2})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_other_dtypes_run(tiny_llama: Path, dtype: str) -> None:
    stepper = Stepper(make_executor(tiny_llama, dtype=dtype))
    stepper.add(1, PROMPTS[33])
    assert len(stepper.run(4, chunk=9)[1]) == 4
    assert stepper.executor.capacity.block_bytes == 3 * 2 * 4 * 2 * 16 * stepper.executor._pool.blocks.dtype.itemsize


def test_auto_is_bfloat16_only_where_the_cpu_has_instructions_for_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from repertory.gpu.cpu import machine

    for flags, dtype in (({"avx2"}, torch.float32), ({"avx2", "avx512_bf16"}, torch.bfloat16), (set(), torch.float32)):
        monkeypatch.setattr(machine, "_cpu_flags", lambda flags=flags: frozenset(flags))
        assert machine.compute_dtype("auto") == dtype
        assert machine.compute_dtype("float16") == torch.float16
        with pytest.raises(ModelLoadError, match="dtype 'int8' is not supported on CPU"):
            machine.compute_dtype("int8")


def test_capacity_says_what_the_device_offers(tiny_llama: Path) -> None:
    capacity = make_executor(
        tiny_llama, num_device_blocks=None, cpu_kv_cache_bytes=1_000_000, max_model_len=100, num_host_blocks=9
    ).capacity
    assert capacity.block_bytes == 3 * 2 * 4 * 2 * 16 * 4
    assert capacity.num_device_blocks == 1_000_000 // capacity.block_bytes
    assert (capacity.vocab_size, capacity.max_model_len, capacity.num_host_blocks) == (320, 100, 9)
    header_bytes = (tiny_llama / "model.safetensors").stat().st_size - capacity.weights_bytes
    assert 0 < header_bytes < 10_000
    assert "cpu" in capacity.device
    assert make_executor(tiny_llama).capacity.max_model_len == 4096


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_device_blocks", 2**40, "GiB of memory"),
        ("cpu_kv_cache_bytes", 2**60, "GiB of memory"),
        ("cpu_kv_cache_bytes", 5000, "at least 2"),
        ("max_model_len", 5000, "4096"),
        ("attention_backend", "flash", "torch"),
        ("kv_cache_dtype", "fp8", "auto"),
        ("quantization", "fp8", "CPU"),
    ],
)
def test_a_setting_the_device_cannot_satisfy_is_refused_by_name(tiny_llama: Path, key: str, value: Any, said: str) -> None:
    settings = {"num_device_blocks": None, key: value}
    with pytest.raises(ConfigError, match=said) as caught:
        make_executor(tiny_llama, **settings)
    assert caught.value.key == key
    assert key in str(caught.value)


def test_a_pool_larger_than_memory_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, weights=False)
    with pytest.raises(ConfigError, match="cpu_kv_cache_bytes"):
        make_executor(tmp_path, num_device_blocks=None, cpu_kv_cache_bytes=2**60)
    with pytest.raises(ModelLoadError, match="no safetensors"):
        make_executor(tmp_path)


def test_threads_are_set_in_the_thread_that_computes(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(executor_module.torch, "set_num_threads", lambda count: calls.append((threading.get_ident(), count)))
    worker = threading.Thread(target=lambda: (stepper.step({}), stepper.step({})))
    worker.start()
    worker.join()
    assert calls == [(worker.ident, 1)]


def test_close_frees_the_pool_and_may_be_called_twice(stepper: Stepper) -> None:
    pool = weakref.ref(stepper.executor._pool)
    stepper.executor.close()
    stepper.executor.close()
    gc.collect()
    assert pool() is None
