"""Copies between the simulated device's tiers: what travels, what is noticed, and what a test can arrange."""

from __future__ import annotations

import threading
import time

import pytest

from repertory.gpu.simulated import FenceViolation, MemoryFault
from repertory.gpu.timelines import FencesClosedError
from repertory.protocol.messages import CopyBlocks, Fences
from repertory.protocol.sampling import SamplingParams
from repertory.tests.gpu.threads import PATIENCE_S, begin, until

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def out(copy_id, sources, targets, after=None, epoch=1):
    return CopyBlocks(epoch, copy_id, "out", after or Fences(), sources, targets)


def back(copy_id, sources, targets, after=None, epoch=1):
    return CopyBlocks(epoch, copy_id, "in", after or Fences(), sources, targets)


@pytest.fixture
def device(drive):
    """Sequence 1 has `PROMPT` in blocks 0, 1, 2 (of 16), and its first token. The host has 8 blocks."""
    return prompted(drive)


def prompted(drive, **knobs):
    device = drive(**{"num_host_blocks": 8, **knobs})
    device.admit(1, PROMPT, [0, 1, 2])
    device.step((1, 0, 9, 1))
    return device


def test_a_sequence_goes_to_the_host_and_comes_back_to_other_blocks(device):
    run = device.executor.copy_blocks
    assert run(out(1, [0, 1, 2], [7, 0, 3], Fences(step=1))).ok
    device.release(1)
    device.admit(2, [50] * 9, [0, 1, 2])
    device.step((2, 0, 9, 1))
    assert run(back(1, [7, 0, 3], [9, 8, 15], Fences(copy_out=1))).ok
    device.admit(1, PROMPT, [9, 8, 15])
    expected = device.executor.reference(PROMPT, GREEDY, 1)
    assert device.step((1, 8, 1, 1), after=Fences(1, 0, 1)).token_ids == expected


def test_the_writer_travels_with_what_it_wrote(device):
    device.executor.copy_blocks(out(1, [0], [4]))
    device.executor.copy_blocks(back(1, [4], [9]))
    device.admit(2, [70, 71], [9])
    with pytest.raises(
        MemoryFault, match=r"sequence 2 reads position 0 in block 9.*token 5 at position 0.*written by sequence 1"
    ):
        device.step((2, 1, 1, 1))


def test_blocks_fetched_into_the_wrong_places_are_caught(device):
    device.executor.copy_blocks(out(1, [0, 1], [4, 5]))
    device.executor.copy_blocks(back(1, [4, 5], [9, 8]))
    device.admit(2, PROMPT, [8, 9, 10])
    with pytest.raises(MemoryFault, match=r"expected token 5 at position 0 .*there is token 9 at position 4"):
        device.step((2, 8, 1, 1))


def test_a_host_block_that_was_overwritten_before_it_was_fetched_is_caught(device):
    run = device.executor.copy_blocks
    run(out(1, [0], [4]))
    run(out(2, [1], [4]))
    run(back(1, [4], [9]))
    device.admit(2, [*PROMPT[:4], 70], [9, 10])
    with pytest.raises(MemoryFault, match="sequence 2 reads position 0 in block 9"):
        device.step((2, 4, 1, 1))


def test_what_was_never_written_may_be_copied_but_not_read(device):
    assert device.executor.copy_blocks(back(1, [6], [1])).ok
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 4 in block 1.*nothing was ever written there"):
        device.step((1, 9, 1, 1))


def test_a_copy_that_fails_leaves_junk_that_travels_and_is_caught_by_whoever_reads_it(drive):
    device = prompted(drive, fail_copies=lambda copy: copy.direction == "out" and copy.copy_id == 3)
    run = device.executor.copy_blocks
    assert run(out(1, [2], [1])).ok
    assert run(out(2, [0], [4])).ok
    done = run(out(3, [0, 1], [4, 5]))
    assert (done.ok, done.num_bytes, done.reason) == (False, 0, "RuntimeError: the simulated copy failed")
    assert run(back(1, [4], [0])).ok, "a copy of junk is a copy"
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 0 in block 0.*junk is there, left by 3"):
        device.step((1, 9, 1, 1))


def test_a_hook_that_raises_fails_the_copy_and_nothing_else(drive):
    def observe(copy):
        raise OSError("the bus is gone")

    device = prompted(drive, on_copy=observe)
    done = device.executor.copy_blocks(back(1, [4], [9]))
    assert (done.ok, done.reason) == (False, "OSError: the bus is gone")
    device.step((1, 9, 1, 1), after=Fences(copy_in=1))


def test_a_hook_sees_each_copy_before_it_is_applied(drive):
    seen = []
    device = prompted(drive, on_copy=lambda copy: seen.append((copy.copy_id, int(device.executor.host_memory._kv[3, 0, 0]))))
    device.executor.copy_blocks(out(1, [0], [3]))
    assert seen == [(1, -1)]
    assert device.executor.host_memory._kv[3, 0, 0] == 5


@pytest.mark.parametrize(("sources", "targets"), [([16], [0]), ([0], [8]), ([-1], [0]), ([0, 1], [0])])
def test_blocks_that_are_not_there_fail_the_copy(device, sources, targets):
    assert not device.executor.copy_blocks(out(1, sources, targets)).ok
    assert device.executor.copy_blocks(out(2, [], [])).ok


def test_bytes_are_those_of_the_capacity(drive):
    device = prompted(drive, block_bytes=16 * 128 * 1024)
    assert device.executor.capacity.block_bytes == 2 << 20
    assert device.executor.copy_blocks(out(1, [0, 1, 2], [0, 1, 2])).num_bytes == 6 << 20
    plain = drive(num_host_blocks=2)
    assert plain.executor.copy_blocks(out(1, [0], [0])).num_bytes == plain.executor.capacity.block_bytes


def test_a_record_holds_all_copies_in_order(drive):
    device = prompted(drive, record=True, fail_copies=lambda copy: copy.copy_id == 1)
    copies = [out(1, [0], [3]), back(1, [3], [9]), out(2, [9], [4])]
    for copy in copies:
        device.executor.copy_blocks(copy)
    assert device.executor.copies == copies


# ---- time --------------------------------------------------------------------------------------------


def test_copies_last_as_long_as_they_are_said_to(drive):
    device = prompted(drive, copy_seconds=lambda copy: 100.0 * len(copy.sources))
    assert device.executor.copy_blocks(out(1, [0, 1], [0, 1])).seconds == 200.0
    device = prompted(drive, copy_seconds=lambda copy: 0.03, fail_copies=lambda copy: True, real_time=True)
    started = time.perf_counter()
    assert device.executor.copy_blocks(out(1, [0], [0])).seconds == 0.03
    assert time.perf_counter() - started >= 0.03


def test_what_overwrites_a_source_while_it_is_copied_is_in_the_copy(drive):
    device = prompted(drive, on_copy=lambda copy: device.executor.memory.spoil(0, 77))
    device.executor.copy_blocks(out(1, [0], [3]))
    assert device.executor.host_memory._writers[3, 0] == 77


# ---- order and fences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [out, back])
def test_a_copy_out_of_order_or_of_another_epoch_is_refused(device, make):
    run = device.executor.copy_blocks
    with pytest.raises(ValueError, match=f"copy {make(1, [], []).direction} 2 follows number 0 of its lane"):
        run(make(2, [], []))
    assert run(make(1, [], [])).ok
    with pytest.raises(ValueError, match="follows number 1"):
        run(make(1, [], []))
    with pytest.raises(ValueError, match="is of epoch 4, this device's is 1"):
        run(make(2, [], [], epoch=4))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Fences(step=2), r"copy out 2 runs before what it waits for: step 2 \(1 is complete\)"),
        (Fences(copy_in=1), r"copy_in 1 \(0 is complete\)"),
        (Fences(step=3, copy_in=4), r"step 3 \(1 is complete\), copy_in 4 \(0 is complete\)"),
    ],
)
def test_a_copy_that_is_run_by_hand_too_early_says_so(device, after, said):
    device.executor.copy_blocks(out(1, [], []))
    with pytest.raises(FenceViolation, match=said):
        device.executor.copy_blocks(out(2, [0], [0], after))


def test_a_step_that_is_run_by_hand_before_a_copy_it_waits_for_says_so(device):
    device.executor.copy_blocks(out(1, [0], [0]))
    with pytest.raises(FenceViolation, match=r"step 2 runs before what it waits for: copy_out 2 \(1 is complete\)"):
        device.step((1, 9, 1, 1), after=Fences(copy_out=2))
    with pytest.raises(RuntimeError, match="not usable, step 2 failed"):
        device.step((1, 9, 1, 1), step_id=2)


def test_a_failed_copy_is_as_complete_as_a_good_one(drive):
    device = prompted(drive, fail_copies=lambda copy: True)
    assert not device.executor.copy_blocks(back(1, [0], [9])).ok
    assert device.step((1, 9, 1, 1), after=Fences(copy_in=1)).seq_ids == [1]


def test_a_step_that_raises_is_complete_and_the_copies_after_it_fail(device):
    with pytest.raises(KeyError):
        device.step((8, 0, 1, 1))
    done = device.executor.copy_blocks(out(1, [0], [0], Fences(step=2)))
    assert (done.ok, done.reason) == (False, "RuntimeError: the executor is not usable, step 2 failed")


def test_after_close_copies_fail(device):
    device.executor.close()
    assert not device.executor.copy_blocks(out(1, [0], [0])).ok


# ---- on threads ---------------------------------------------------------------------------------------


def test_with_threads_operations_wait_for_each_other(drive):
    order = []
    device = drive(
        num_host_blocks=8,
        wait_for_fences=True,
        on_step=lambda step: order.append(f"step {step.step_id}"),
        on_copy=lambda copy: order.append(f"{copy.direction} {copy.copy_id}"),
    )
    executor = device.executor
    device.admit(1, PROMPT, [0, 1, 2])
    first = device.message((1, 0, 9, 1))
    device.release(1)
    device.admit(1, PROMPT, [6, 7, 8])
    second = device.message((1, 8, 1, 1), after=Fences(1, 0, 1))
    fetching = begin(lambda: executor.copy_blocks(back(1, [0, 1, 2], [6, 7, 8], Fences(copy_out=1))))
    saving = begin(lambda: executor.copy_blocks(out(1, [0, 1, 2], [0, 1, 2], Fences(step=1))))
    until(lambda: executor._timelines.num_waiting == 2)
    assert order == []
    expected = executor.run_step(first).token_ids
    done = executor.run_step(second)
    assert done.token_ids == expected
    assert order == ["step 1", "out 1", "in 1", "step 2"]
    assert saving.result(PATIENCE_S).ok and fetching.result(PATIENCE_S).waited_s > 0


def test_with_threads_a_step_and_both_lanes_run_side_by_side(drive):
    together = threading.Barrier(3)
    device = drive(
        num_host_blocks=8,
        wait_for_fences=True,
        on_step=lambda step: together.wait(PATIENCE_S),
        on_copy=lambda copy: together.wait(PATIENCE_S),
    )
    lanes = [begin(lambda copy=copy: device.executor.copy_blocks(copy)) for copy in (out(1, [0], [0]), back(1, [1], [1]))]
    device.step()
    assert all(lane.result(PATIENCE_S).ok for lane in lanes)


def test_with_threads_a_step_says_how_long_it_waited(drive):
    device = drive(num_host_blocks=8, wait_for_fences=True, step_seconds=lambda step: 0.5)
    step = begin(lambda: device.step(after=Fences(copy_in=1)))
    until(lambda: device.executor._timelines.num_waiting == 1)
    device.executor.copy_blocks(back(1, [0], [0]))
    done = step.result(PATIENCE_S)
    assert done.seconds == 0.5
    assert done.waited_s > 0


def test_with_threads_what_would_wait_for_itself_is_refused(drive):
    device = drive(num_host_blocks=8, wait_for_fences=True)
    with pytest.raises(ValueError, match="copy in 1 waits for number 1 of its lane"):
        device.executor.copy_blocks(back(1, [0], [0], Fences(copy_in=1)))
    with pytest.raises(ValueError, match="step 1 waits for step 1"):
        device.step(after=Fences(step=1))


def test_an_interrupt_ends_all_waiting(drive):
    device = drive(num_host_blocks=8, wait_for_fences=True)
    waiting = [
        begin(lambda: device.executor.copy_blocks(out(1, [0], [0], Fences(step=5)))),
        begin(lambda: device.executor.copy_blocks(back(1, [0], [0], Fences(step=5)))),
        begin(lambda: device.step(after=Fences(copy_out=5))),
    ]
    until(lambda: device.executor._timelines.num_waiting == 3)
    device.executor.interrupt()
    assert all(isinstance(waiter.exception(PATIENCE_S), FencesClosedError) for waiter in waiting)
