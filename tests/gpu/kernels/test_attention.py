"""Attention over pages: decodes, chunks and shared prefixes, on the shapes where such code breaks."""

from __future__ import annotations

import pytest
import torch

from repertory.tests.gpu.kernels.calls import (
    KERNELS,
    LIBRARY,
    Kernel,
    Pool,
    assert_near,
    attend_chunk,
    attend_decodes,
    attend_group,
    scattered,
)

SHAPES = [
    (1, 1, 64),
    (2, 1, 128),
    (6, 2, 96),
    (9, 3, 64),
    (8, 2, 128),
    (8, 2, 96),
    (10, 2, 64),
    (6, 1, 128),
    (7, 1, 64),
    (16, 2, 96),
    (16, 2, 128),
    (32, 32, 128),
    (20, 20, 64),
]
"""Query heads, KV heads, head_dim: 1 to 8 query heads to a KV head, several packs of KV heads, packs that are not full."""


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    torch.manual_seed(0)
    return request.param


def check_decodes(kernel: Kernel, contexts: list[int], **shape: int) -> None:
    size = shape.get("block_size", 16)
    needed = [-(-context // size) for context in contexts]
    pool = Pool.make(kernel[1], tokens=len(contexts), num_blocks=sum(needed) + 3, **shape)
    free = scattered(sum(needed) + 3)
    rows = []
    for token, (context, blocks) in enumerate(zip(contexts, needed, strict=True)):
        rows.append((token, context, 0, pool.fill(context, [free.pop() for _ in range(blocks)])))
    found = attend_decodes(kernel, pool, rows)
    for token, context, _, table in rows:
        expected = pool.expected(token, table, context)
        assert_near(found[token], expected, dtype=kernel[1])


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 48, 256])
def test_decodes_of_any_context_and_block_size(kernel: Kernel, block_size: int) -> None:
    check_decodes(kernel, [1, 2, 15, 16, 17, 63, 64, 65, 130], block_size=block_size)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_decodes_of_any_head_shape(kernel: Kernel, heads: int, kv_heads: int, head_dim: int) -> None:
    check_decodes(kernel, [1, 70], heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize(("count", "context"), [(2, 2), (16, 16), (17, 33), (31, 100), (65, 65), (5, 130)])
def test_chunks_of_any_length_context_and_block_size(kernel: Kernel, count: int, context: int, block_size: int) -> None:
    pool = Pool.make(kernel[1], tokens=count + 2, num_blocks=-(-context // block_size) + 2, block_size=block_size)
    table = pool.fill(context, scattered(-(-context // block_size) + 2)[2:])
    found = attend_chunk(kernel, pool, token=1, count=count, context=context, table=table)
    for i in range(count):
        expected = pool.expected(1 + i, table, context - count + 1 + i)
        assert_near(found[1 + i], expected, dtype=kernel[1])
    assert found[0].isnan().all() and found[-1].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_chunks_of_any_head_shape(kernel: Kernel, heads: int, kv_heads: int, head_dim: int) -> None:
    pool = Pool.make(kernel[1], tokens=20, num_blocks=3, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    table = pool.fill(37, [2, 0, 1])
    found = attend_chunk(kernel, pool, token=0, count=20, context=37, table=table)
    for i in (0, 1, 19):
        expected = pool.expected(i, table, 18 + i)
        assert_near(found[i], expected, dtype=kernel[1])


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("members", [2, 11, 30])
@pytest.mark.parametrize("shared", [48, 64, 112])
def test_decodes_go_on_from_what_their_group_found(kernel: Kernel, shared: int, members: int, block_size: int) -> None:
    own = [1 + 5 * i % 40 for i in range(members)]
    blocks_own = -(-max(own) // block_size)
    pool = Pool.make(
        kernel[1],
        tokens=members,
        num_blocks=shared // block_size + members * blocks_own,
        block_size=block_size,
        heads=6,
        kv_heads=2,
    )
    free = scattered(len(pool.keys))
    prefix = pool.fill(shared, [free.pop() for _ in range(shared // block_size)])
    rows = []
    for token in range(members):
        table = pool.fill(own[token], [free.pop() for _ in range(blocks_own)])
        rows.append((token, shared + own[token], shared, prefix + table))
    state = attend_group(kernel, pool, tokens=list(range(members)), keys=shared, table=prefix)
    found = attend_decodes(kernel, pool, rows, state)
    for token, context, _, table in rows:
        expected = pool.expected(token, table, context)
        assert_near(found[token], expected, dtype=kernel[1])


@pytest.mark.parametrize("scale", [20.0, 1e-3])
def test_scores_of_any_size_are_weighed_exactly(kernel: Kernel, scale: float) -> None:
    pool = Pool.make(kernel[1], tokens=1, num_blocks=9)
    pool.queries *= scale
    table = pool.fill(140, scattered(9))
    found = attend_decodes(kernel, pool, [(0, 140, 0, table)])
    assert_near(found[0], pool.expected(0, table, 140), dtype=kernel[1], factor=2)


@pytest.mark.parametrize("rise", [-0.02, 0.004, 0.02])
def test_scores_that_rise_or_fall_with_the_context_are_weighed_exactly(kernel: Kernel, rise: float) -> None:
    pool = Pool.make(kernel[1], tokens=40, num_blocks=25)
    table = pool.fill(390, scattered(25))
    direction = torch.randn(64)
    pool.queries += direction.repeat(3)
    for t in range(390):
        pool.keys[table[t // 16], t % 16] += rise * t * direction
    found = attend_chunk(kernel, pool, token=0, count=40, context=390, table=table)
    for i in (0, 20, 39):
        assert_near(found[i], pool.expected(i, table, 351 + i), dtype=kernel[1], factor=2)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_nan_in_a_context_reaches_its_own_row_and_no_other(kernel: Kernel, side: str) -> None:
    pool = Pool.make(kernel[1], tokens=3, num_blocks=6, heads=6, kv_heads=2)
    tables = [pool.fill(20, [0, 1]), pool.fill(20, [2, 3]), pool.fill(20, [4, 5])]
    getattr(pool, side)[2, 7, 1, 5] = float("nan")
    found = attend_decodes(kernel, pool, [(i, 20, 0, table) for i, table in enumerate(tables)])
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()
    chunk = attend_chunk(kernel, pool, token=0, count=3, context=20, table=tables[1])
    assert chunk.isnan().any(dim=1).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(kernel: Kernel) -> None:
    pool = Pool.make(kernel[1], tokens=4, num_blocks=30)
    free = scattered(30)
    rows = [(i, n, 0, pool.fill(n, [free.pop() for _ in range(-(-n // 16))])) for i, n in enumerate([100, 1, 33, 64])]
    together = attend_decodes(kernel, pool, rows)
    for row in rows:
        assert torch.equal(attend_decodes(kernel, pool, [row])[row[0]], together[row[0]])


def test_auto_takes_the_best_level_there_is() -> None:
    from repertory.gpu.cpu.library import level_for

    for dtype in (torch.float32, torch.bfloat16):
        best = max(level for level in range(4) if LIBRARY.has_kernels(level, dtype is torch.bfloat16))
        if best:
            assert level_for(LIBRARY, dtype) == best
