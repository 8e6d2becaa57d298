"""How a step is laid out for a GPU, and how large things are made."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from repertory.gpu.cuda import sizing
from repertory.gpu.cuda.graphs import LARGEST, DecodeGraphs, captured_sizes
from repertory.gpu.cuda.plan import UNKNOWN, GpuPlan, PoolShape, make_plan
from repertory.gpu.cuda.pools import independent
from repertory.gpu.cuda.runtime import DeviceMemory
from repertory.gpu.cuda.sizing import num_device_blocks, num_host_blocks
from repertory.gpu.slots import Row, Slot
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError
from repertory.protocol.messages import BlockCopy, NewRow
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu_cuda.lazy_runtime import LazyRuntime

SHAPE = PoolShape(num_blocks=100, block_size=4, vocab_size=1000)
GIB = 2**30


def row(seq_id: int, tokens: list[int], table: list[int], start: int, end: int, samples: int = 1) -> Row:
    slot = Slot(NewRow(seq_id, tokens, len(tokens), SamplingParams(seed=0), table))  # type: ignore[arg-type]
    return Row(slot, start, end, samples)


def plan_of(rows: list[Row], groups: Any = (), pending: dict[int, int] | None = None) -> GpuPlan:
    return make_plan(rows, list(groups), SHAPE, pending or {})  # type: ignore[arg-type]


def test_decodes_come_first_and_samples_stay_in_the_steps_order() -> None:
    chunk = row(1, list(range(10)), [7, 8, 9], 4, 10)
    decode = row(2, list(range(20, 25)), [3, 5], 4, 5)
    silent = row(3, list(range(30, 39)), [1, 2, 4], 0, 3, samples=0)
    plan = plan_of([chunk, decode, silent])
    assert [one.slot.seq_id for one in plan.rows] == [2, 1, 3]
    assert [one.slot.seq_id for one in plan.sampling] == [1, 2]
    assert plan.token_ids.tolist() == [24, 4, 5, 6, 7, 8, 9, 30, 31, 32]
    assert plan.positions.tolist() == [4, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert plan.slots.tolist() == [20, 32, 33, 34, 35, 36, 37, 4, 5, 6]
    assert plan.block_tables.tolist() == [[3, 5, 0], [7, 8, 9], [1, 0, 0]]
    assert plan.context_lens.tolist() == [5, 10, 3]
    assert plan.query_starts.tolist() == [0, 1, 7, 10]
    assert plan.sample_at.tolist() == [6, 0]
    assert (plan.num_decodes, plan.max_query_len, plan.max_context_len) == (1, 6, 10)
    assert not plan.is_pure_decode


def test_a_token_that_only_the_device_knows_is_taken_from_its_place_among_the_samples() -> None:
    rows = [row(1, [5, 6, UNKNOWN], [1], 2, 3), row(2, [7, 8], [2], 1, 2), row(3, [9, UNKNOWN], [3], 1, 2)]
    plan = plan_of(rows, pending={3: 4, 1: 0})
    assert plan.from_sample.tolist() == [0, -1, 4]
    assert plan.token_ids.tolist() == [0, 8, 0]
    assert plan.is_pure_decode
    with pytest.raises(ValueError, match="sequence 3: token 1 is known to nobody"):
        plan_of(rows, pending={1: 0})


def test_rows_that_share_a_prefix_are_grouped_by_their_places_on_the_device() -> None:
    rows = [
        row(1, list(range(9)), [50, 51, 1], 8, 9),
        row(2, list(range(12)), [60, 61, 62], 6, 12),
        row(3, list(range(14)), [50, 51, 2, 3], 13, 14),
        row(4, list(range(9)), [50, 51, 4], 8, 9),
    ]
    plan = plan_of(rows, [([0, 1, 2, 3], 2), ([2, 3], 1)])
    assert plan.runs == [([0, 1, 2], 8)], "the chunk is not in it, and a row is in one only"
    assert plan_of(rows, [([0], 2)]).runs == [], "one row shares with nobody"
    full = [row(n, list(range(8)), [50, 51], 7, 8) for n in (1, 2)]
    assert plan_of(full, [([0, 1], 2)]).runs == [([0, 1], 4)], "each keeps its own last token"
    with pytest.raises(ValueError, match="does not share its first 2 blocks"):
        plan_of([rows[0], row(5, list(range(9)), [50, 52, 4], 8, 9)], [([0, 1], 2)])


def test_a_step_without_rows_has_a_plan() -> None:
    plan = plan_of([])
    assert len(plan.token_ids) == len(plan.rows) == 0
    assert plan.block_tables.shape == (0, 0)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 17, 64, 100, 256, 512, 5000])
def test_every_decode_step_has_a_captured_one_that_is_not_much_larger(max_rows: int) -> None:
    sizes = captured_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(max_rows, LARGEST)
    graphs = DecodeGraphs(LazyRuntime(), sizes, lambda num_rows: None)
    for num_rows in range(1, min(max_rows, LARGEST) + 1):
        size = graphs.size_for(num_rows)
        most = 3 if num_rows <= 8 else 7 if num_rows <= 64 else 15 if num_rows <= 256 else 31
        assert size is not None and num_rows <= size <= num_rows + most
    assert graphs.size_for(0) is None
    assert graphs.size_for(min(max_rows, LARGEST) + 1) is None


def test_copies_that_need_each_other_are_in_different_runs() -> None:
    def copies(*pairs: tuple[int, int]) -> list[BlockCopy]:
        return [BlockCopy(source, target, 1) for source, target in pairs]  # type: ignore[arg-type]

    assert independent([]) == []
    assert independent(copies((1, 2), (1, 3), (4, 5))) == [(0, 3)]
    assert independent(copies((1, 2), (2, 3))) == [(0, 1), (1, 2)]
    assert independent(copies((1, 2), (3, 1))) == [(0, 1), (1, 2)]
    assert independent(copies((1, 2), (3, 2), (5, 6))) == [(0, 1), (1, 3)]
    simulated, made = list(range(9)), list(range(9))
    chain = copies(*((int(a), int(b)) for a, b in np.random.default_rng(3).integers(9, size=(40, 2)) if a != b))
    for copy in chain:
        simulated[copy.target] = simulated[copy.source]
    for first, last in independent(chain):
        before = list(made)
        for copy in chain[first:last]:
            made[copy.target] = before[copy.source]
    assert made == simulated


# ---- sizes ----------------------------------------------------------------------------------------

MEMORY = DeviceMemory(total_bytes=100 * GIB, free_bytes=60 * GIB, reserved_bytes=30 * GIB, peak_bytes=34 * GIB)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="m", device="cuda", **settings)


def test_the_pool_gets_what_is_left_of_the_share_beside_all_that_was_measured() -> None:
    # 10 GiB are neither free nor ours; at most 34 are ours.
    assert num_device_blocks(config(), MEMORY, GIB) == 90 - 34 - 10
    assert num_device_blocks(config(gpu_memory_utilization=0.5), MEMORY, GIB) == 50 - 34 - 10
    assert num_device_blocks(config(num_device_blocks=7), MEMORY, GIB) == 7


@pytest.mark.parametrize(
    ("settings", "words", "key"),
    [
        ({"gpu_memory_utilization": 0.45}, "no room for two KV blocks", "gpu_memory_utilization"),
        ({"num_device_blocks": 57}, "num_device_blocks 57 needs 57.0 GiB", "num_device_blocks"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_figures(settings: dict[str, Any], words: str, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        num_device_blocks(config(**settings), MEMORY, GIB)
    assert words in str(refusal.value) and "weights and the largest step take 34.0 GiB" in str(refusal.value)
    assert refusal.value.key == key


def test_page_locked_memory_is_bounded_by_the_machines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sizing, "memory_bytes", lambda: GIB // 2)
    with caplog.at_level(logging.WARNING):
        assert num_host_blocks(config(), 1 << 20) == 256, "a default shrinks to half of what there is"
    assert "page-locked" in caplog.text
    assert num_host_blocks(config(num_host_blocks=500), 1 << 20) == 500
    for settings in ({"num_host_blocks": 600}, {"kv_offloading_size": 0.75}):
        with pytest.raises(ConfigError) as refusal:
            num_host_blocks(config(**settings), 1 << 20)
        assert refusal.value.key in settings
    assert num_host_blocks(config(kv_offloading_size=0.0), 1 << 20) == 0
