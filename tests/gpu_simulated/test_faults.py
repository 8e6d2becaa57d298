"""Every mistake a scheduler can make with memory is caught, and the message names both owners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.gpu.simulated import MemoryFault, SimulatedExecutor
from repertory.protocol.messages import Fences, NewRow, RunStep, TableEdit
from repertory.protocol.sampling import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def device(drive):
    """Sequence 1 has `PROMPT` in blocks 0, 1, 2, and its first token."""
    device = drive()
    device.admit(1, PROMPT, [0, 1, 2])
    device.step((1, 0, 9, 1))
    return device


def test_a_wrong_table_entry_is_caught(device):
    device.admit(2, [50, 51, 52, 53, 54], [4, 5])
    device.step((2, 0, 5, 1))
    device.edit(1, 1, 4)
    with pytest.raises(MemoryFault) as caught:
        device.step((1, 9, 1, 1))
    fault = caught.value
    assert (fault.sequence, fault.owner, fault.block, fault.offset) == (1, 2, 4, 0)
    assert str(fault) == (
        "sequence 1 reads position 4 in block 4, offset 0: expected token 9 at position 4 of namespace 0; "
        "there is token 50 at position 0 of namespace 0, written by sequence 2"
    )


def test_a_block_reused_while_another_still_reads_it_is_caught_in_the_same_step(device):
    device.admit(2, [50, 51, 52, 53], [1])
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 4 in block 1.*written by sequence 2"):
        device.step((2, 0, 4, 1), (1, 9, 1, 1))


def test_a_block_reused_while_another_still_reads_it_is_caught_later(device):
    device.admit(2, [50], [1])
    device.step((2, 0, 1, 1))
    device.step()
    with pytest.raises(MemoryFault) as caught:
        device.step((1, 9, 1, 1))
    assert (caught.value.sequence, caught.value.owner) == (1, 2)


def test_an_append_into_a_shared_block_is_caught_when_the_other_reads(device):
    other = [*PROMPT[:6], 70]
    device.admit(2, other, [0, 1])
    device.step((2, 6, 1, 1))
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 6 in block 1, offset 2.*sequence 2"):
        device.step((1, 9, 1, 1))


def test_a_missing_copy_is_caught(device):
    device.admit(2, [*PROMPT[:6], 70], [0, 5])
    with pytest.raises(MemoryFault) as caught:
        device.step((2, 6, 1, 1))
    assert "sequence 2 reads position 4 in block 5, offset 0" in str(caught.value)
    assert "nothing was ever written there" in str(caught.value)
    assert caught.value.owner is None


def test_a_copy_of_too_few_tokens_is_caught(device):
    device.admit(2, [*PROMPT[:6], 70], [0, 5])
    device.copy(1, 5, 1)
    with pytest.raises(MemoryFault, match="sequence 2 reads position 5 in block 5, offset 1: expected token 10"):
        device.step((2, 6, 1, 1))


def test_copies_in_the_wrong_order_are_caught(device):
    device.admit(2, PROMPT[:5], [7, 8])
    device.copy(6, 7, 4)
    device.copy(0, 6, 4)
    with pytest.raises(MemoryFault, match="block 7, offset 0"):
        device.step((2, 4, 1, 1))


def test_a_copy_of_a_block_that_its_own_step_writes_is_caught(device):
    device.admit(2, [40, 41, 42, 43], [6])
    device.admit(3, [40, 41, 42, 43, 44], [7, 8])
    device.copy(6, 7, 4)
    with pytest.raises(MemoryFault, match="sequence 3 reads position 0 in block 7"):
        device.step((2, 0, 4, 1), (3, 4, 1, 1))


@pytest.mark.parametrize("num_tokens", [0, -1, 5])
def test_a_copy_of_an_impossible_size_is_refused(device, num_tokens):
    device.copy(0, 6, num_tokens)
    with pytest.raises(ValueError, match="copy of block 0 to 6"):
        device.step()


def test_a_foreign_namespace_is_caught(device):
    device.admit(2, PROMPT, [0, 1, 6], namespace=3)
    with pytest.raises(
        MemoryFault, match="of namespace 3; there is token 5 at position 0 of namespace 0, written by sequence 1"
    ):
        device.step((2, 8, 1, 1))


def test_an_unwritten_slot_is_caught(device):
    device.admit(2, [1, 2, 3], [9])
    with pytest.raises(MemoryFault, match=r"sequence 2 reads position 0 in block 9.*nothing was ever written there"):
        device.step((2, 2, 1, 1))


def test_a_chunk_that_leaves_a_gap_is_caught(device):
    device.admit(2, [1, 2, 3, 4, 5, 6], [9, 10])
    device.step((2, 0, 2, 0))
    with pytest.raises(MemoryFault, match="reads position 2 in block 9, offset 2"):
        device.step((2, 3, 3, 1))


def test_the_right_token_at_another_position_is_caught(drive):
    device = drive()
    device.admit(1, [8] * 8, [0, 1])
    device.step((1, 0, 8, 0))
    device.admit(2, [8] * 9, [1, 0, 2])
    with pytest.raises(MemoryFault, match=r"expected token 8 at position 0 .*there is token 8 at position 4"):
        device.step((2, 8, 1, 1))


def test_the_right_tokens_after_another_prefix_are_caught(device):
    device.admit(2, [1, 2, 3, 4, *PROMPT[4:]], [5, 1, 6])
    device.step((2, 0, 4, 0))
    with pytest.raises(MemoryFault, match=r"position 4 in block 1.*by sequence 1, after other tokens than the reader's"):
        device.step((2, 8, 1, 1))


def test_one_block_twice_in_a_table_is_caught(drive):
    device = drive()
    device.admit(1, [1, 2, 3, 4, 5], [3, 3])
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 0 in block 3.*token 5 at position 4.*by sequence 1"):
        device.step((1, 0, 5, 1))


def test_two_rows_that_write_a_slot_differently_are_caught_though_nobody_would_read_it(drive):
    device = drive()
    device.admit(1, [1, 2, 3], [3])
    device.admit(2, [1, 2, 4], [3])
    with pytest.raises(MemoryFault) as caught:
        device.step((1, 0, 3, 0), (2, 0, 3, 0))
    fault = caught.value
    assert (fault.sequence, fault.owner, fault.block, fault.offset) == (2, 1, 3, 2)
    assert "sequences 1 and 2 both write block 3, offset 2 in one step" in str(fault)
    assert "token 3 at position 2" in str(fault)
    assert "token 4 at position 2" in str(fault)


def test_a_slot_rewritten_in_a_later_step_is_no_conflict(device):
    device.release(1)
    device.admit(2, [50, 51], [1])
    assert device.step((2, 0, 2, 1)).token_ids == device.executor.reference([50, 51], GREEDY, 1)


def test_junk_is_caught_and_says_who_left_it(device):
    device.executor.memory.spoil(1, 77)
    with pytest.raises(MemoryFault, match=r"sequence 1 reads position 4 in block 1.*junk is there, left by 77"):
        device.step((1, 9, 1, 1))


def test_junk_travels_with_a_copy(device):
    device.executor.memory.spoil(1, 77)
    device.admit(2, [*PROMPT[:6], 70], [0, 5])
    device.copy(1, 5, 2)
    with pytest.raises(MemoryFault, match=r"block 5, offset 0.*left by 77"):
        device.step((2, 6, 1, 1))


def test_an_edit_that_leaves_a_hole_is_refused(device):
    device.edit(1, 4, 9)
    with pytest.raises(ValueError, match="edit at block 4 of a table of 3"):
        device.step((1, 9, 1, 1))


def test_a_table_too_short_for_its_row_is_caught(device):
    device.admit(2, PROMPT, [5, 6])
    with pytest.raises(MemoryFault, match="sequence 2 has no block for position 8"):
        device.step((2, 0, 9, 1))


@pytest.mark.parametrize("block", [-1, 16, 1 << 40])
def test_a_block_outside_the_pool_is_caught(device, block):
    device.admit(2, PROMPT, [5, block, 6])
    with pytest.raises(MemoryFault, match=f"sequence 2 names block {block} of a pool of 16"):
        device.step((2, 0, 9, 1))


@pytest.mark.parametrize(("source", "target"), [(-1, 3), (3, 16)])
def test_a_copy_outside_the_pool_is_caught(device, source, target):
    device.copy(source, target, 1)
    with pytest.raises(MemoryFault, match="a copy names block"):
        device.step()


def test_a_row_past_its_log_is_refused(device):
    with pytest.raises(ValueError, match=r"row \[9, 11\) of a log of 10"):
        device.step((1, 9, 2, 1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1, 8, 1, 1), "samples after 9 tokens of a log of 10"),
        ((1, 9, 1, 2), "2 samples of one row"),
        ((1, -1, 2, 0), r"row \[-1, 1\)"),
        ((1, 9, 0, 1), r"row \[9, 9\)"),
    ],
)
def test_a_row_at_odds_with_its_log_is_refused(device, row, message):
    with pytest.raises(ValueError, match=message):
        device.step(row)


def test_a_row_past_the_model_length_is_refused(drive):
    device = drive(max_model_len=8)
    device.admit(1, PROMPT, [0, 1, 2])
    with pytest.raises(ValueError, match="of a model of 8 positions"):
        device.step((1, 0, 9, 1))


def test_two_rows_of_one_sequence_are_refused(device):
    device.admit(2, PROMPT, [5, 6, 7])
    with pytest.raises(ValueError, match="two rows of one sequence"):
        device.step((2, 0, 4, 0), (2, 4, 5, 1))


def test_a_sequence_that_was_released_is_unknown(device):
    device.release(1)
    with pytest.raises(KeyError):
        device.step((1, 9, 1, 1))


@pytest.mark.parametrize("token", [-1, 1000])
def test_a_token_outside_the_vocabulary_is_refused(device, token):
    device.admit(2, [1, token], [5])
    with pytest.raises(ValueError, match=f"sequence 2: token {token} is outside"):
        device.step((2, 0, 2, 1))


def test_a_group_that_does_not_share_its_blocks_is_refused(device):
    device.admit(2, [*PROMPT[:8], 70], [0, 5, 6])
    device.copy(1, 5, 4)
    with pytest.raises(ValueError, match="sequence 2 does not share 2 blocks"):
        device.step((1, 9, 1, 1), (2, 8, 1, 1), shared_groups=[([0, 1], 2)])


def test_a_group_that_shares_blocks_past_its_context_is_refused(device):
    with pytest.raises(ValueError, match="sequence 1 does not share 3 blocks"):
        device.step((1, 9, 1, 1), shared_groups=[([0], 3)])


@pytest.mark.parametrize("step_id", [1, 3, 0])
def test_a_step_out_of_order_is_refused(device, step_id):
    with pytest.raises(ValueError, match=f"step {step_id} follows step 1"):
        device.step(step_id=step_id)


def test_the_first_step_has_number_one(drive):
    with pytest.raises(ValueError, match="step 2 follows step 0"):
        drive().step(step_id=2)


def test_a_step_of_another_epoch_is_refused(device, drive):
    with pytest.raises(ValueError, match="of epoch 2, this device's is 1"):
        device.step(epoch=2)
    with pytest.raises(ValueError, match="of epoch 1, this device's is 4"):
        drive(epoch=4).step(epoch=1)


@pytest.mark.parametrize("fence", [2, 3])
def test_a_step_that_waits_for_itself_or_a_later_one_is_refused(device, fence):
    with pytest.raises(ValueError, match=f"step 2 waits for step {fence}"):
        device.step(after=Fences(step=fence))


def test_after_an_exception_nothing_runs_any_more(device):
    with pytest.raises(ValueError, match="follows step 1"):
        device.step(step_id=5)
    with pytest.raises(RuntimeError, match="not usable, step 5 failed"):
        device.step((1, 9, 1, 1), step_id=2)


def test_after_close_nothing_runs_any_more(device):
    device.executor.close()
    device.executor.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        device.step()
    assert device.executor.num_sequences == 0


def test_an_observer_may_fail_a_step_before_anything_of_it_is_applied(drive):
    seen = []

    def observe(step):
        seen.append(step.step_id)
        if step.step_id == 2:
            raise OSError("the device fell off the bus")

    device = drive(on_step=observe)
    device.step()
    device.admit(1, PROMPT, [0, 1, 2])
    with pytest.raises(OSError, match="fell off the bus"):
        device.step((1, 0, 9, 1))
    assert seen == [1, 2]
    assert device.executor.num_sequences == 0


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_single_wrong_entry_in_the_part_of_a_table_that_is_read_is_caught(data):
    size = data.draw(st.sampled_from([1, 2, 4]))
    lengths = data.draw(st.lists(st.integers(2, 12), min_size=2, max_size=3))
    blocks = data.draw(st.permutations(range(40)))
    logs = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in lengths]
    tables = [[blocks.pop() for _ in range(-(-(n + 1) // size))] for n in lengths]
    executor = SimulatedExecutor(num_device_blocks=40, block_size=size, vocab_size=4)
    admitted = [NewRow(i, log, len(log), GREEDY, table) for i, (log, table) in enumerate(zip(logs, tables, strict=True))]
    count = len(logs)
    executor.run_step(RunStep(1, 1, Fences(), list(range(count)), [0] * count, lengths, [1] * count, admitted=admitted))

    victim = data.draw(st.integers(0, count - 1))
    # Any entry before the one that the next token is written to.
    entry = data.draw(st.integers(0, lengths[victim] // size - 1 if lengths[victim] >= size else 0))
    wrong = data.draw(st.integers(0, 39).filter(lambda block: block != tables[victim][entry]))
    edit = TableEdit(victim, entry, [wrong])
    step = RunStep(1, 2, Fences(), [victim], [lengths[victim]], [1], [1], table_edits=[edit])
    if _holds_the_same(executor, tables[victim][entry], wrong, min(size, lengths[victim] - entry * size)):
        assert executor.run_step(step).seq_ids == [victim]
    else:
        with pytest.raises(MemoryFault, match=f"sequence {victim} "):
            executor.run_step(step)


def _holds_the_same(executor, block, other, num_tokens):
    """Two sequences that begin alike have equal KV there: reading either's block is right."""
    kv = executor.memory._kv
    return bool((kv[block, :num_tokens] == kv[other, :num_tokens]).all())
