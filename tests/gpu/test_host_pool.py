"""The CPU's host tier: its size, its memory, and copies that are equal bit for bit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repertory.gpu.cpu import pool as pool_module
from repertory.gpu.cpu import sizing
from repertory.gpu.cpu.library import KernelsUnavailableError, open_library
from repertory.gpu.cpu.memory import PagesAhead, huge_empty
from repertory.gpu.cpu.pool import HostPool, KvPool, MoveBlocks, block_mover, move_one_by_one
from repertory.gpu.cpu.sizing import pool_sizes
from repertory.gpu.models.config import load_model_config
from repertory.protocol.config import EngineConfig
from repertory.protocol.errors import ConfigError
from repertory.tests.gpu.threads import until

GIB = 1 << 30


def has_kernels() -> bool:
    try:
        open_library()
    except KernelsUnavailableError:
        return False
    return True


MOVERS = [pytest.param(move_one_by_one, id="one-by-one"), pytest.param(block_mover(), id="fastest")]


def fill_with_any_bits(pool: Tensor, seed: int) -> Tensor:
    """Fill with random bits - infinities, NaN and denormal numbers among them - and return those, `[num_blocks, bytes]`."""
    found = bits(pool)
    found.copy_(torch.randint(0, 256, found.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return found.clone()


def bits(pool: Tensor) -> Tensor:
    return pool.view(torch.uint8).view(len(pool), -1)


def pools(model_dir: Path, *, block_size: int, dtype: torch.dtype) -> tuple[KvPool, HostPool]:
    model = load_model_config(model_dir, max_model_len=None)
    device = KvPool(model, num_blocks=12, block_size=block_size, dtype=dtype)
    return device, HostPool(device, num_blocks=7)


@pytest.mark.parametrize("move", MOVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_copies_are_equal_bit_for_bit_and_touch_no_other_block(
    tiny_llama: Path, move: MoveBlocks, dtype: torch.dtype, block_size: int
) -> None:
    device, host = pools(tiny_llama, block_size=block_size, dtype=dtype)
    host._move = move
    before, there = fill_with_any_bits(device.blocks, 1), fill_with_any_bits(host.blocks, 2)

    host.copy_out([11, 0, 5], [2, 6, 0])
    assert torch.equal(bits(device.blocks), before), "a copy out only reads the device"
    assert torch.equal(bits(host.blocks)[[2, 6, 0]], before[[11, 0, 5]])
    assert torch.equal(bits(host.blocks)[[1, 3, 4, 5]], there[[1, 3, 4, 5]])

    host.copy_in([6, 2, 6], [3, 0, 11])
    assert torch.equal(bits(device.blocks)[[3, 0, 11]], before[[0, 11, 0]])
    others = [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert torch.equal(bits(device.blocks)[others], before[others])


@pytest.mark.parametrize("move", MOVERS)
@pytest.mark.parametrize("block_bytes", [2, 48, 64, 4096, 16384, 16384 * 3 + 64 * 5, 16384 + 32])
def test_blocks_of_every_length_arrive_whole(move: MoveBlocks, block_bytes: int) -> None:
    source, target = huge_empty((5, block_bytes), torch.uint8), huge_empty((5, block_bytes), torch.uint8)
    expected = fill_with_any_bits(source, 3)
    target.fill_(0)
    move(source, target, [4, 0], [0, 3])
    assert torch.equal(target[[0, 3]], expected[[4, 0]])
    assert not target[[1, 2, 4]].any()


@pytest.mark.parametrize("move", MOVERS)
def test_pools_that_lie_askew_are_copied_too(move: MoveBlocks) -> None:
    source, target = huge_empty((5 * 128 + 3,), torch.uint8)[3:].view(5, 128), huge_empty((5, 128), torch.uint8)
    expected = fill_with_any_bits(source, 3)
    move(source, target, [1, 2, 3], [3, 2, 1])
    assert torch.equal(target[[3, 2, 1]], expected[[1, 2, 3]])


def test_without_kernels_blocks_are_moved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise KernelsUnavailableError("not built")

    monkeypatch.setattr(pool_module, "open_library", missing)
    assert block_mover() is move_one_by_one


@pytest.mark.skipif(not has_kernels(), reason="the C kernels are not built")
def test_with_kernels_they_move_the_blocks() -> None:
    assert block_mover() is not move_one_by_one


def test_no_blocks_are_a_pool_of_none(tiny_llama: Path) -> None:
    model = load_model_config(tiny_llama, max_model_len=None)
    host = HostPool(KvPool(model, num_blocks=2, block_size=4, dtype=torch.float32), num_blocks=0)
    host.copy_out([], [])
    assert len(host.blocks) == 0


# ---- memory -----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_host_pool_takes_no_memory_before_it_is_used(tiny_llama: Path) -> None:
    model = load_model_config(tiny_llama, max_model_len=None)
    device = KvPool(model, num_blocks=2, block_size=64, dtype=torch.float32)
    before = resident_bytes()
    host = HostPool(device, num_blocks=GIB // device.blocks[0].nbytes)
    assert host.blocks.nbytes > 0.9 * GIB
    assert resident_bytes() - before < 50 << 20


def test_pages_are_found_near_what_is_written_and_nowhere_else_and_keep_what_they_hold() -> None:
    memory = huge_empty((1 << 28,), torch.uint8)
    memory[100 << 20] = 7
    before = resident_bytes()
    pages = PagesAhead(memory)
    pages.reach([100 << 20])
    until(lambda: not pages._is_running)
    found = resident_bytes() - before
    if found < 1 << 20:
        pytest.skip("this system does not find pages ahead")
    assert 64 << 20 <= found <= 128 << 20
    assert memory[100 << 20] == 7
    assert not memory[(64 << 20) : (68 << 20)].any()


def test_pages_are_asked_for_once_and_not_after_the_end() -> None:
    pages = PagesAhead(huge_empty((1 << 26,), torch.uint8))
    pages.reach([0, (1 << 26) - 1])
    assert pages._unasked == set()
    until(lambda: not pages._is_running)
    pages.close()
    pages.reach([0])
    assert not pages._is_running


# ---- sizes ------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def has(num_bytes: int) -> None:
        monkeypatch.setattr(sizing, "memory_bytes", lambda: num_bytes)

    has(8 * GIB)
    return has


def sizes(block_bytes: int = 1 << 20, **settings: Any) -> tuple[int, int]:
    return pool_sizes(EngineConfig(model="m", **settings), block_bytes)


@pytest.mark.usefixtures("memory")
def test_the_host_tier_has_the_blocks_that_are_asked_for_or_as_many_as_its_bytes_hold() -> None:
    assert sizes() == (1024, 512)
    assert sizes(kv_offloading_size=2) == (1024, 2048)
    assert sizes(kv_offloading_size=0) == (1024, 0)
    assert sizes(kv_offloading_size=0.0001) == (1024, 0)
    assert sizes(kv_offloading_size=2, num_host_blocks=3, num_device_blocks=5) == (5, 3)
    assert sizes(num_host_blocks=0) == (1024, 0)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_host_blocks": 7169}, "num_host_blocks"),
        ({"kv_offloading_size": 7.01}, "kv_offloading_size"),
        ({"kv_offloading_size": 1e300}, "kv_offloading_size"),
        ({"cpu_kv_cache_bytes": 8 * GIB, "num_host_blocks": 1}, "num_host_blocks"),
        ({"cpu_kv_cache_bytes": 8 * GIB + (1 << 20)}, "cpu_kv_cache_bytes"),
    ],
)
@pytest.mark.usefixtures("memory")
def test_two_tiers_that_do_not_fit_in_memory_together_are_refused_by_name(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        sizes(**settings)
    assert caught.value.key == key


@pytest.mark.usefixtures("memory")
def test_two_tiers_may_fill_the_memory_to_the_last_byte() -> None:
    assert sizes(num_host_blocks=7168) == (1024, 7168)


def test_a_host_tier_that_nobody_asked_for_shrinks_with_a_warning(
    memory: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    memory(GIB + (100 << 20) + 5)
    with caplog.at_level(logging.WARNING):
        assert sizes() == (1024, 100)
    (record,) = caplog.records
    assert "kv_offloading_size 0.5 needs 0.5 GiB" in record.message
    memory(GIB)
    assert sizes() == (1024, 0)


def test_random_jobs_leave_both_pools_as_a_list_of_blocks_would_be(tiny_llama: Path) -> None:
    device, host = pools(tiny_llama, block_size=16, dtype=torch.bfloat16)
    tiers = fill_with_any_bits(device.blocks, 5), fill_with_any_bits(host.blocks, 6)
    rng = random.Random(9)
    for _ in range(200):
        count = rng.randint(0, 7)
        inside, outside = rng.sample(range(12), count), rng.sample(range(7), count)
        if rng.random() < 0.5:
            host.copy_out(inside, outside)  # type: ignore[arg-type]
            tiers[1][outside] = tiers[0][inside]
        else:
            host.copy_in(outside, inside)  # type: ignore[arg-type]
            tiers[0][inside] = tiers[1][outside]
    assert torch.equal(bits(device.blocks), tiers[0])
    assert torch.equal(bits(host.blocks), tiers[1])
