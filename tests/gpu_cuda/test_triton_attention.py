"""Our Triton attention on the shapes where such code breaks, against softmax over gathered pages in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from repertory.gpu.cuda.attention import triton_paged
from repertory.gpu.cuda.attention.contract import PagedKeysValues
from repertory.gpu.cuda.attention.splits import MIN_SPLIT_KEYS, num_splits
from repertory.gpu.cuda.attention.triton_paged import HeadShape, TritonPaged
from repertory.tests.gpu_cuda.paged_steps import SMALL, PagedStep, Row, Run, make_backend

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error; results are averages of numbers of about 1."""

MANY = 200
"""Multiprocessors of a device on which a few rows' contexts are split as far as their keys allow."""


pytestmark = pytest.mark.usefixtures("quick_interpreter")


def assert_right(step: PagedStep, backend: TritonPaged | None = None, tolerance: float | None = None) -> Tensor:
    found = step.attend(backend or make_backend(step.heads))
    atol = tolerance or TOLERANCE[step.query.dtype]
    torch.testing.assert_close(found, step.expected(), rtol=0, atol=atol)
    return found


def decodes(*contexts: int) -> list[Row]:
    return [Row(1, context) for context in contexts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_step_of_decode_rows_and_chunks(dtype: torch.dtype) -> None:
    rows = [Row(1, 45), Row(1, 1), Row(17, 40), Row(5, 5)]
    assert_right(PagedStep(rows, HeadShape(4, 1, 64), dtype=dtype))


@pytest.mark.parametrize(("block_size", "num_sms"), [(1, 1), (16, MANY), (24, MANY), (256, 1)])
def test_decode_rows_of_any_context_and_block_size(block_size: int, num_sms: int) -> None:
    contexts = {1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 530} - {0}
    step = PagedStep(decodes(*contexts), block_size=block_size, dtype=torch.float16)
    assert_right(step, make_backend(num_sms=num_sms))


@pytest.mark.parametrize("block_size", [1, 16, 24, 256])
def test_chunks_of_any_length_context_and_block_size(block_size: int) -> None:
    rows = [Row(2, 2), Row(17, 17), Row(5, block_size + 5), Row(2, 64), Row(2, 300), Row(70, 135), Row(64, 128)]
    assert_right(PagedStep(rows, block_size=block_size, dtype=torch.float16))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (HeadShape(1, 1, 64), torch.float32),
        (HeadShape(6, 2, 64), torch.float16),
        (HeadShape(4, 1, 80), torch.float32),
        (HeadShape(5, 1, 96), torch.float16),
        (HeadShape(8, 1, 128), torch.float32),
        (HeadShape(8, 2, 128), torch.float16),
        (HeadShape(2, 2, 256), torch.float16),
        (HeadShape(1, 1, 200), torch.float32),
        (HeadShape(20, 1, 16), torch.float16),
        (HeadShape(3, 3, 8), torch.float32),
    ],
    ids=str,
)
def test_any_shape_of_heads(heads: HeadShape, dtype: torch.dtype) -> None:
    rows = [Row(1, 1), Row(1, 70), Row(9, 20)]
    step = PagedStep(rows, heads, dtype=dtype)
    step.inputs = replace(step.inputs, max_context_len=2 * MIN_SPLIT_KEYS)
    assert_right(step, make_backend(heads, num_sms=MANY))


def test_a_step_without_decode_rows() -> None:
    assert_right(PagedStep([Row(3, 20)]))


def test_a_step_without_chunks() -> None:
    assert_right(PagedStep(decodes(20)))


def test_a_step_without_rows() -> None:
    assert PagedStep([]).attend(make_backend()).shape == (0, 3, 16)


def test_a_chunk_without_tokens_is_passed_over() -> None:
    step = PagedStep([Row(2, 9), Row(3, 20)], dtype=torch.float16)
    step.inputs = replace(step.inputs, max_query_len=5)
    step.fill([Row(0, 9), Row(5, 20)], seed=1)
    assert_right(step)


@pytest.mark.parametrize("num_sms", [1, 2, MANY])
def test_a_context_is_split_any_number_of_times(num_sms: int) -> None:
    step = PagedStep(decodes(1500, 257, 256, 1), dtype=torch.float16, block_size=24)
    assert_right(step, make_backend(num_sms=num_sms))


def test_there_may_be_more_splits_than_are_merged_at_once() -> None:
    """Among those that are merged last are the largest scores, so that what was merged before must fade."""
    splits = 20
    step = PagedStep(decodes(splits * MIN_SPLIT_KEYS, 5), HeadShape(1, 1, 16), dtype=torch.float16)
    assert num_splits(2, num_kv_heads=1, max_context_len=splits * MIN_SPLIT_KEYS, num_sms=MANY) == splits
    last_blocks = step.inputs.block_tables[0, (splits - 2) * MIN_SPLIT_KEYS // 16 : splits * MIN_SPLIT_KEYS // 16]
    step.cache.keys[last_blocks.long()] *= 4
    assert_right(step, make_backend(step.heads, num_sms=MANY))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("num_sms", [1, MANY])
def test_rows_that_nobody_needs_have_a_context_of_one(num_sms: int) -> None:
    """Their tables are padding: they may read the junk of block 0, and nobody else may see what comes of it."""
    step = PagedStep(decodes(40, 530, 1, 1), dtype=torch.float16)
    expected = step.expected()
    step.inputs.block_tables[2:] = 0
    found = step.attend(make_backend(num_sms=num_sms))
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:invalid value encountered")
def test_a_row_that_went_wrong_spoils_nobody_else() -> None:
    """A member of a shared run and a row of no run, with NaN in their queries."""
    step = PagedStep([*decodes(90, 100, 95, 40), Row(6, 30)], dtype=torch.float16, runs=[Run((0, 1, 2), 5)])
    expected = step.expected()
    step.query[1] = step.query[3] = float("nan")
    found = step.attend(make_backend())
    assert found[[1, 3]].isnan().all()
    sound = [0, 2, *range(4, 10)]
    torch.testing.assert_close(found[sound], expected[sound], rtol=0, atol=2e-3)


@pytest.mark.parametrize(("dtype", "context"), [(torch.float32, 70), (torch.float16, 530)])
def test_large_scores_do_not_overflow(dtype: torch.dtype, context: int) -> None:
    """Scores of 1e4 and more: a softmax is nearly all one key's, and no other exponential may become infinite."""
    step = PagedStep([*decodes(context, 30, 1), Row(9, 40)], dtype=dtype)
    step.query.mul_(1e4)
    assert_right(step, make_backend(num_sms=MANY), tolerance=2e-2)


def test_equal_scores_average_the_values() -> None:
    step = PagedStep([*decodes(300, 70), Row(9, 70)])
    step.query.zero_()
    assert_right(step, make_backend(num_sms=MANY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_float8_pool_is_widened_and_scaled(dtype: torch.dtype) -> None:
    rows = [*decodes(1, 280, 33, 34), Row(5, 40)]
    step = PagedStep(rows, dtype=dtype, pool_dtype=torch.float8_e4m3fn, runs=[Run((2, 3), 2)])
    step.cache = replace(step.cache, key_scale=0.25, value_scale=3.0)
    for sharing_costs_bytes in (0, 1 << 30):
        backend = make_backend(sharing_costs_bytes=sharing_costs_bytes)
        assert_right(step, backend, tolerance=3 * TOLERANCE[dtype])


def test_a_pool_may_have_more_elements_than_32_bits_count() -> None:
    """Wrapped to 32 bits, the last block's address would be the memory's beginning, which is zeros."""
    stride, block_size, heads = 1 << 30, 16, HeadShape(2, 1, 16)
    memory = torch.empty((1 << 32) + block_size * 16, dtype=torch.float8_e4m3fn)  # pages that nobody writes do not exist
    step = PagedStep([Row(1, 30), Row(2, 32)], heads, dtype=torch.float16, pool_dtype=memory.dtype)
    step.inputs.block_tables[:, :2] = torch.tensor([[3, 1], [1, 3]])
    pool = memory.as_strided((4, block_size, 1, 16), (stride, 16, 16, 1), storage_offset=stride)
    step.cache = PagedKeysValues(pool, pool)
    pool[1:] = torch.randn(3, block_size, 1, 16).to(memory.dtype)
    memory[: block_size * 16] = 0
    assert_right(step)


# Shared runs.


def test_members_of_a_run_need_not_be_neighbours_and_there_may_be_several_runs() -> None:
    rows = decodes(100, 70, 30, 81, 97, 150, 33)
    runs = [Run((3, 0, 5), 5), Run((6, 1), 2)]
    for dtype in (torch.float16, torch.float32):
        assert_right(PagedStep([*rows, Row(4, 9)], dtype=dtype, runs=runs))


@pytest.mark.parametrize("block_size", [1, 24, 256])
def test_the_shared_keys_end_anywhere_in_a_tile(block_size: int) -> None:
    num_blocks = -(-280 // block_size)
    keys = num_blocks * block_size
    step = PagedStep(
        decodes(keys + 1, 5, keys + 40), block_size=block_size, dtype=torch.float16, runs=[Run((0, 2), num_blocks)]
    )
    assert_right(step)


@pytest.mark.parametrize("num_sms", [1, 20, MANY])
def test_a_long_run_is_split_and_its_members_own_keys_too(num_sms: int) -> None:
    rows = decodes(600, 512 + 530, 3, 513)
    step = PagedStep(rows, dtype=torch.float16, runs=[Run((3, 1, 0), 32)])
    assert_right(step, make_backend(num_sms=num_sms))


def test_a_run_may_have_more_queries_than_a_tile_has_rows() -> None:
    """25 members of 3 heads: 75 rows, of which the 64th is in the middle of a member."""
    rows = decodes(*range(33, 58), 12)
    assert_right(PagedStep(rows, dtype=torch.float16, runs=[Run(range(25), 2)]), make_backend(num_sms=MANY))


def test_more_runs_than_scratch_has_room_to_split() -> None:
    rows = decodes(*[600] * 8)
    step = PagedStep(rows, HeadShape(1, 1, 16), dtype=torch.float16, runs=[Run((i, i + 1), 32) for i in range(0, 8, 2)])
    backend = make_backend(step.heads, num_sms=MANY)
    backend._shared_states = 11
    assert_right(step, backend)


def test_runs_are_shared_only_where_that_pays() -> None:
    rows = decodes(100, 90)
    step = PagedStep(rows, runs=[Run((0, 1), 5)])
    apart, shared = make_backend(sharing_costs_bytes=1 << 30), make_backend()
    assert_right(step, apart)
    assert_right(step, shared)
    junk = torch.tensor([2**30] * 3)
    assert (apart._scratch.sharing == junk).all()
    assert shared._scratch.sharing[:2].tolist() == [[80, 2, 1], [80, 3, 1]]


@pytest.mark.parametrize("forced", [False, True])
def test_a_run_of_one_row(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    if forced:
        monkeypatch.setattr(triton_paged, "worth_sharing", lambda *counts, **sizes: True)
    assert_right(PagedStep(decodes(20, 50), dtype=torch.float16, runs=[Run((1,), 3)]))


def test_a_row_that_was_in_a_run_is_in_none_in_the_next_step() -> None:
    backend = make_backend()
    assert_right(PagedStep(decodes(100, 90, 95), dtype=torch.float16, runs=[Run((0, 1), 5)]), backend)
    assert_right(PagedStep(decodes(100, 90, 95), dtype=torch.float16, runs=[Run((1, 2), 5)]), backend)
    assert_right(PagedStep(decodes(100, 90, 95), dtype=torch.float16), backend)


# Graphs and reproducibility.


def test_nothing_of_a_step_is_kept_for_the_next_with_the_same_tensors() -> None:
    """What a captured graph does: the same call, bounds for the longest step that may come, other contents."""
    first = [*decodes(530, 20, 300, 1), Row(5, 9), Row(2, 40)]
    second = [*decodes(1, 270, 90, 530), Row(2, 2), Row(5, 25)]
    step = PagedStep(first, dtype=torch.float16)
    step.pool = torch.cat([step.pool, step.pool])
    step.cache = PagedKeysValues(step.pool[:, 1, 0], step.pool[:, 1, 1])
    step.inputs = replace(step.inputs, max_context_len=100_000, max_query_len=64)
    backend = make_backend(num_sms=16)
    for seed, rows in enumerate((first, second)):
        step.fill(rows, seed=seed)
        assert_right(step, backend)


def test_members_of_a_run_are_read_from_the_device() -> None:
    step = PagedStep(decodes(90, 100, 95), dtype=torch.float16, runs=[Run((0, 1), 5)])
    backend = make_backend()
    assert_right(step, backend)
    step.fill(decodes(100, 90, 95), [Run((2, 1), 5)], seed=1)
    assert_right(step, backend)


@pytest.mark.parametrize("num_sms", [1, MANY])
def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours_are(num_sms: int) -> None:
    """With as many splits: neighbours change the batch's number of them, and nothing else."""
    heads = SMALL
    backend = make_backend(heads, num_sms=num_sms)
    step = PagedStep(decodes(530, 300, 40), heads, dtype=torch.float16)
    found = step.attend(backend)
    assert torch.equal(found, step.attend(backend))
    order = [2, 0, 1]
    step.query.copy_(step.query[order].clone())
    step.inputs.block_tables.copy_(step.inputs.block_tables[order].clone())
    step.inputs.context_lens.copy_(step.inputs.context_lens[order].clone())
    assert torch.equal(step.attend(backend), found[order])
    step.inputs.context_lens[0] = 1
    assert torch.equal(step.attend(backend)[1:], found[order][1:])


# What is refused, and how kernels are called.


def test_more_decode_rows_than_scratch_was_made_for_are_refused() -> None:
    step = PagedStep(decodes(*[1] * 33))
    with pytest.raises(ValueError, match="33 decode rows, of at most 32"):
        step.attend(make_backend())


def test_keys_and_values_with_different_strides_are_refused() -> None:
    step = PagedStep(decodes(3))
    step.cache = PagedKeysValues(step.cache.keys, step.cache.values.contiguous())
    with pytest.raises(ValueError, match="must be equal"):
        step.attend(make_backend())


def test_kernels_are_called_with_exactly_their_arguments(launches: list[Launch]) -> None:
    """The interpreter passes over arguments that a compiled kernel would refuse."""
    PagedStep([*decodes(70, 80), Row(3, 4)], runs=[Run((0, 1), 4)]).attend(make_backend())
    assert [launch.name for launch in launches] == ["paged_shared", "paged_decode", "merge_states", "paged_chunks"]
    for launch in launches:
        arguments = getattr(triton_paged, launch.name).arg_names
        assert launch.arguments.keys() - {"num_warps", "num_stages"} == set(arguments)


@pytest.mark.parametrize("heads", [HeadShape(1, 1, 16), HeadShape(8, 2, 16), HeadShape(32, 1, 16)], ids=str)
def test_after_warming_up_no_step_needs_a_kernel_compiled(heads: HeadShape, launches: list[Launch]) -> None:
    run = Run(range(25), 4)
    steps = [PagedStep([*decodes(*[70] * 30), Row(3, 4), Row(64, 90)], heads, runs=[run, Run((26, 28), 3)])]
    steps += [PagedStep(decodes(*contexts), heads) for contexts in ((1,), (5000, 3), (600, 70, 80))]
    make_backend(heads).warm_up(steps[0].cache, steps[0].query.dtype)
    known = {launch.form for launch in launches}
    launches.clear()
    for step in steps:
        for num_sms in (1, MANY):
            step.attend(make_backend(heads, num_sms=num_sms))
    assert {launch.form for launch in launches} == known


def test_warming_up_needs_a_pool_of_one_block_only() -> None:
    pool = torch.zeros(1, 2, 16, 1, 16, dtype=torch.float16)
    for max_rows in (1, 40):
        backend = TritonPaged(SMALL, max_rows=max_rows, num_sms=8, device=torch.device("cpu"))
        backend.warm_up(PagedKeysValues(pool[:, 0], pool[:, 1]), torch.float16)
        assert not pool.any(), "it writes nothing there"


class Launch(NamedTuple):
    """A call of a kernel that was not made."""

    name: str
    arguments: dict[str, Any]

    @property
    def form(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """All that it is compiled for."""
        constants = {key: value for key, value in self.arguments.items() if key.isupper() or key.startswith("num_")}
        for count in ("num_splits", "num_members", "num_keys"):
            constants.pop(count, None)
        return self.name, tuple(sorted(constants.items()))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Calls of kernels, which are kept instead."""
    made: list[Launch] = []

    class Recorded:
        def __init__(self, name: str, kernel: Any) -> None:
            self.arg_names = kernel.arg_names
            self._name = name

        def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
            assert all(size > 0 for size in grid)
            return lambda **arguments: made.append(Launch(self._name, arguments))

    for name in ("paged_chunks", "paged_decode", "paged_shared", "merge_states"):
        monkeypatch.setattr(triton_paged, name, Recorded(name, getattr(triton_paged, name)))
    return made
