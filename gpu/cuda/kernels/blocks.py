"""Moving KV blocks within the device: leading slots of one block to another, whole blocks to a buffer and back.

Contents are moved as the widest integers that fit, so a kernel does not know the pool's dtype, and no bit pattern is lost
to a float's rules. Each move is one launch over all blocks and layers: the ids are read on the device.
They may lie anywhere among other inputs: where they do must not have the kernel compiled anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Variant

_WORDS = 1024
"""Words a program moves."""


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "counts"])
def copy_slots_kernel(pool, sources, targets, counts, block_stride, part_words, slot_words, WORDS: tl.constexpr):
    """One program for WORDS words of a part of a copy; a part is one layer's keys or its values, of a block."""
    copy = tl.program_id(0)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    is_copied = words < tl.load(counts + copy) * slot_words
    places = tl.program_id(1).to(tl.int64) * part_words + words
    source = pool + tl.load(sources + copy) * block_stride
    target = pool + tl.load(targets + copy) * block_stride
    tl.store(target + places, tl.load(source + places, mask=is_copied), mask=is_copied)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def gather_blocks_kernel(pool, blocks, out, pool_stride, out_stride, block_words, WORDS: tl.constexpr):
    """One program for WORDS words of a block: from block `blocks[i]` of `pool` to block i of `out`."""
    place = tl.program_id(0)
    words = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_inside = words < block_words
    source = pool + tl.load(blocks + place) * pool_stride
    target = out + place.to(tl.int64) * out_stride
    tl.store(target + words, tl.load(source + words, mask=is_inside), mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def scatter_blocks_kernel(pool, blocks, source, pool_stride, source_stride, block_words, WORDS: tl.constexpr):
    """One program for WORDS words of a block: from block i of `source` to block `blocks[i]` of `pool`."""
    place = tl.program_id(0)
    words = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_inside = words < block_words
    target = pool + tl.load(blocks + place) * pool_stride
    origin = source + place.to(tl.int64) * source_stride
    tl.store(target + words, tl.load(origin + words, mask=is_inside), mask=is_inside)


def copy_slots(pool: Tensor, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
    """See `Glue.copy_slots`."""
    num_copies, parts, block_size = len(sources), pool.shape[1] * pool.shape[2], pool.shape[3]
    if not num_copies or not pool.numel():
        return
    (words,) = _as_words(pool, runs=parts * block_size)
    part_words = words.shape[1] // parts
    grid = (num_copies, parts, triton.cdiv(part_words, _WORDS))
    copy_slots_kernel[grid](
        words, sources, targets, counts, words.stride(0), part_words, part_words // block_size, WORDS=_WORDS
    )


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """See `Glue.gather_blocks`."""
    _move_blocks(gather_blocks_kernel, pool, blocks, out)


def scatter_blocks(pool: Tensor, blocks: Tensor, source: Tensor) -> None:
    """See `Glue.scatter_blocks`."""
    _move_blocks(scatter_blocks_kernel, pool, blocks, source)


def _move_blocks(kernel: triton.JITFunction, pool: Tensor, blocks: Tensor, other: Tensor) -> None:
    assert len(blocks) == len(other) and pool.shape[1:] == other.shape[1:] and pool.dtype == other.dtype
    if not other.numel():
        return
    pool_words, other_words = _as_words(pool, other)
    block_words = pool_words.shape[1]
    grid = (len(blocks), triton.cdiv(block_words, _WORDS))
    kernel[grid](pool_words, blocks, other_words, pool_words.stride(0), other_words.stride(0), block_words, WORDS=_WORDS)


def _as_words(*tensors: Tensor, runs: int = 1) -> list[Tensor]:
    """Views [num_blocks, words] of tensors of the same blocks, as integers of the widest type that divides each of the
    `runs` of a block and to which every block is aligned.

    Raises `RuntimeError` where a block is not contiguous.
    """
    flat = [tensor.view(len(tensor), tensor[:1].numel()) for tensor in tensors]
    itemsize = tensors[0].dtype.itemsize
    sizes = [flat[0].shape[1] // runs * itemsize]
    for tensor in flat:
        sizes += [tensor.stride(0) * itemsize, int(tensor.storage_offset()) * itemsize, tensor.data_ptr()]
    word = next(
        word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if not any(n % word.itemsize for n in sizes)
    )
    return [tensor.view(word) for tensor in flat]


def _copy_variant(word: str) -> Variant:
    types = {"pool": f"*{word}", **dict.fromkeys(("sources", "targets", "counts"), "*i64")}
    types |= {**dict.fromkeys(("block_stride", "part_words", "slot_words"), "i32"), "WORDS": "constexpr"}
    return Variant(f"copy_slots {word}", copy_slots_kernel, types, {"WORDS": _WORDS})


def _move_variant(name: str, kernel: triton.JITFunction, other: str, stride: str) -> Variant:
    types = {"pool": "*i64", "blocks": "*i64", other: "*i64", "pool_stride": stride, f"{other}_stride": stride}
    types |= {"block_words": "i32", "WORDS": "constexpr"}
    return Variant(f"{name} strides {stride}", kernel, types, {"WORDS": _WORDS})


VARIANTS: list[Variant] = [
    *(_copy_variant(word) for word in ("i64", "i32", "i16", "u8")),
    *(_move_variant("gather_blocks", gather_blocks_kernel, "out", stride) for stride in ("i32", "i64")),
    *(_move_variant("scatter_blocks", scatter_blocks_kernel, "source", stride) for stride in ("i32", "i64")),
]
