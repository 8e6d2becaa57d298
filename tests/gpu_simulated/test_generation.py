"""What a correct scheduler gets from the simulated device: the answers of each request run alone."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.messages import Fences, NewRow, RunStep
from repertory.protocol.sampling import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
GREEDY = SamplingParams(temperature=0.0)


def test_a_request_run_alone_equals_the_reference(drive):
    device = drive()
    device.admit(1, PROMPT, [3, 1, 4, 15, 9])
    log = PROMPT + device.step((1, 0, 9, 1)).token_ids
    device.decode(1, log, 10)
    assert log[9:] == device.executor.reference(PROMPT, GREEDY, 11)
    assert device.executor.num_computed_tokens == 19


def test_greedy_answers_depend_on_the_tokens_alone(drive):
    reference = drive().executor.reference
    warm = [SamplingParams(temperature=0.0, seed=seed) for seed in (1, 2)]
    assert reference(PROMPT, warm[0], 5) == reference(PROMPT, warm[1], 5, index=3)
    assert reference(PROMPT, GREEDY, 5) == reference(PROMPT, GREEDY, 9)[:5]
    assert reference(PROMPT[:-1], GREEDY, 5) != reference(PROMPT, GREEDY, 5)


def test_a_draw_depends_on_seed_index_and_output_position(drive):
    reference = drive().executor.reference
    seeded = SamplingParams(temperature=0.7, seed=11)
    first = reference(PROMPT, seeded, 6)
    assert first == reference(PROMPT, SamplingParams(temperature=1.5, seed=11), 6)
    assert first != reference(PROMPT, SamplingParams(temperature=0.7, seed=12), 6)
    assert first != reference(PROMPT, seeded, 6, index=1)
    assert first[1:] != reference(PROMPT + first[:1], seeded, 5), "the same log with another prompt length draws anew"


def test_a_draw_without_a_seed_is_refused(drive):
    device = drive()
    device.admit(1, PROMPT, [0, 1, 2], SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="without a resolved seed"):
        device.step((1, 0, 9, 1))


@given(cuts=st.sets(st.integers(1, 8)))
@settings(max_examples=50, deadline=None)
def test_a_prompt_may_be_cut_into_any_chunks(cuts):
    executor = SimulatedExecutor(num_device_blocks=8, block_size=4, vocab_size=1000, record=True)
    edges = [0, *sorted(cuts), 9]
    new = [NewRow(1, list(PROMPT), 9, GREEDY, [2, 0, 5])]
    for number, (start, end) in enumerate(itertools.pairwise(edges), 1):
        row = {"seq_ids": [1], "starts": [start], "num_tokens": [end - start], "samples": [int(end == 9)]}
        done = executor.run_step(RunStep(1, number, Fences(step=number - 1), **row, admitted=new if number == 1 else []))
    assert done.token_ids == executor.reference(PROMPT, GREEDY, 1)
    assert executor.num_computed_tokens == 9
    assert [(start, start + count) for _, [(_, start, count)] in executor.steps] == list(itertools.pairwise(edges))


def test_two_sequences_may_share_the_blocks_of_a_common_prefix(drive):
    device = drive()
    other = [*PROMPT[:8], 99, 98]
    device.admit(1, PROMPT, [0, 1, 2])
    log_1 = PROMPT + device.step((1, 0, 9, 1)).token_ids
    device.admit(2, other, [0, 1, 3])
    done = device.step((1, 9, 1, 1), (2, 8, 2, 1), shared_groups=[([0, 1], 2)])
    log_1, log_2 = log_1 + done.token_ids[:1], other + done.token_ids[1:]
    device.release(1)
    device.decode(2, log_2, 2)
    assert log_1[9:] == device.executor.reference(PROMPT, GREEDY, 2)
    assert log_2[10:] == device.executor.reference(other, GREEDY, 3)


def test_a_block_written_in_a_step_may_be_read_by_another_row_of_it(drive):
    device = drive()
    other = [*PROMPT[:8], 42]
    device.admit(2, other, [0, 1, 3])
    device.admit(1, PROMPT, [0, 1, 2])
    done = device.step((2, 8, 1, 1), (1, 0, 9, 1))
    assert done.token_ids == device.executor.reference(other, GREEDY, 1) + device.executor.reference(PROMPT, GREEDY, 1)


def test_duplicates_that_write_the_same_block_alike_agree(drive):
    device = drive()
    device.admit(1, PROMPT, [0, 1, 2])
    device.admit(2, PROMPT, [0, 1, 3])
    tokens = device.step((1, 0, 9, 1), (2, 0, 9, 1)).token_ids
    assert tokens == device.executor.reference(PROMPT, GREEDY, 1) * 2


def test_a_copied_partial_block_serves_a_sequence_that_diverges_in_it(drive):
    device = drive()
    other = [*PROMPT[:6], 77, 78]
    device.admit(1, PROMPT, [0, 1, 2])
    log = PROMPT + device.step((1, 0, 9, 1)).token_ids
    device.admit(2, other, [0, 5])
    device.copy(1, 5, 2)
    done = device.step((1, 9, 1, 1), (2, 6, 2, 1))
    assert done.token_ids[1:] == device.executor.reference(other, GREEDY, 1)
    log += done.token_ids[:1]
    device.decode(1, log, 1)
    assert log[9:] == device.executor.reference(PROMPT, GREEDY, 3)


def test_copies_run_in_the_order_they_are_listed(drive):
    device = drive()
    device.admit(1, PROMPT[:4], [0])
    device.step((1, 0, 4, 0))
    device.admit(2, PROMPT[:5], [7, 8])
    device.copy(0, 6, 4)
    device.copy(6, 7, 4)
    assert device.step((2, 4, 1, 1)).token_ids == device.executor.reference(PROMPT[:5], GREEDY, 1)


def test_a_table_edit_may_switch_a_duplicate_for_the_shared_block(drive):
    device = drive()
    device.admit(1, PROMPT, [0, 1, 2])
    device.admit(2, PROMPT, [3, 4, 5])
    log = PROMPT + device.step((1, 0, 9, 1), (2, 0, 9, 1)).token_ids[:1]
    device.edit(2, 0, 0, 1)
    device.admit(3, [1, 2, 3, 4], [3])
    device.step((3, 0, 4, 0))
    device.decode(2, log, 2)
    assert log[9:] == device.executor.reference(PROMPT, GREEDY, 3)


def test_a_preempted_sequence_goes_on_where_it_was(drive):
    device = drive()
    seeded = SamplingParams(temperature=1.0, seed=5)
    device.admit(1, PROMPT, [0, 1, 2], seeded)
    log = PROMPT + device.step((1, 0, 9, 1)).token_ids
    device.decode(1, log, 2)
    device.release(1)
    device.admit(2, [1, 2, 3, 4], [2])
    device.step((2, 0, 4, 1))
    device.admit(1, log, [0, 1, 9], seeded, num_prompt_tokens=9)
    log += device.step((1, 8, 4, 1)).token_ids
    assert log[9:] == device.executor.reference(PROMPT, seeded, 4)


def test_reserved_tokens_are_never_drawn(drive):
    device = drive(vocab_size=4, reserved_ids={1, 2})
    answers = device.executor.reference([0, 1, 2, 3], GREEDY, 60)
    assert set(answers) == {0, 3}
    with pytest.raises(ValueError, match="leaves no token"):
        drive(vocab_size=2, reserved_ids=[0, 1])


def test_the_whole_vocabulary_is_drawn_from(drive):
    assert set(drive(vocab_size=5).executor.reference([1], GREEDY, 100)) == set(range(5))


def test_a_scripted_model_answers_from_what_was_read(drive):
    device = drive(next_token=lambda tokens, slot: (sum(tokens) + slot.num_output_tokens) % 1000)
    device.admit(1, [1, 2, 3], [0, 1])
    log = [1, 2, 3, *device.step((1, 0, 3, 1)).token_ids]
    device.decode(1, log, 2)
    assert log == [1, 2, 3, 6, 13, 27]
    assert device.executor.reference([1, 2, 3], GREEDY, 3) == [6, 13, 27]


def test_a_scripted_token_outside_the_vocabulary_is_refused(drive):
    device = drive(next_token=lambda tokens, slot: 1000)
    device.admit(1, [1], [0])
    with pytest.raises(ValueError, match="token 1000 is outside the vocabulary"):
        device.step((1, 0, 1, 1))


def test_a_failed_row_samples_nothing_and_its_neighbours_do_not_notice(drive):
    device = drive(fail_rows=lambda step: {1} if step.step_id == 2 else ())
    device.admit(1, PROMPT, [0, 1, 2])
    device.admit(2, [4, 5], [3, 4])
    log = [4, 5, *device.step((1, 0, 9, 1), (2, 0, 2, 1)).token_ids[1:]]
    done = device.step((1, 9, 1, 1), (2, 2, 1, 1))
    assert done.seq_ids == [2]
    assert [row.seq_id for row in done.failed] == [1]
    log += done.token_ids
    # A step planned before the failure was known still has a row for it.
    done = device.step((1, 10, 1, 1), (2, 3, 1, 1))
    assert [row.seq_id for row in done.failed] == [1]
    assert log[2:] + done.token_ids == device.executor.reference([4, 5], GREEDY, 3)


def test_a_chunk_that_fails_is_reported_by_the_row_that_samples(drive):
    device = drive(fail_rows=lambda step: {1} if step.step_id == 1 else ())
    device.admit(1, PROMPT, [0, 1, 2])
    assert device.step((1, 0, 4, 0)).failed == []
    done = device.step((1, 4, 5, 1))
    assert (done.seq_ids, [row.seq_id for row in done.failed]) == ([], [1])


@pytest.mark.parametrize("released", [True, False])
def test_a_failed_sequence_is_well_again_once_it_is_admitted_anew(drive, released):
    device = drive(fail_rows=lambda step: {1} if step.step_id == 1 else ())
    device.admit(1, PROMPT, [0, 1, 2])
    assert device.step((1, 0, 9, 1)).token_ids == []
    if released:
        device.release(1)
    device.admit(1, PROMPT, [0, 1, 2])
    assert device.step((1, 0, 9, 1)).token_ids == device.executor.reference(PROMPT, GREEDY, 1)


def test_only_rows_of_the_step_can_fail_in_it(drive):
    device = drive(fail_rows=lambda step: {1} if step.step_id == 1 else ())
    device.admit(1, PROMPT, [0, 1, 2])
    assert device.step().failed == []
    assert device.step((1, 0, 9, 1)).seq_ids == [1]


def test_reported_seconds_are_those_of_the_knob(drive):
    device = drive(step_seconds=lambda step: 0.25 * sum(step.num_tokens))
    device.admit(1, PROMPT, [0, 1, 2])
    assert device.step((1, 0, 9, 1)).seconds == 2.25
    device = drive()
    assert 0 <= device.step().seconds < 60
    with pytest.raises(ValueError, match="real_time needs step_seconds"):
        drive(real_time=True)


def test_real_time_takes_the_reported_seconds(drive):
    device = drive(step_seconds=lambda step: 0.002, real_time=True)
    started = time.perf_counter()
    assert device.step().seconds == 0.002
    assert time.perf_counter() - started >= 0.002


def test_a_log_may_outgrow_its_first_arrays(drive):
    device = drive(block_size=1, num_device_blocks=256)
    device.admit(1, [1], list(range(255, -1, -1)))
    log = [1, *device.step((1, 0, 1, 1)).token_ids]
    device.decode(1, log, 200)
    assert log[1:] == device.executor.reference([1], GREEDY, 201)


def test_released_sequences_leave_nothing_behind(drive):
    device = drive(fail_rows=lambda step: {2})
    for seq_id in range(3):
        device.admit(seq_id, [1, 2], [seq_id])
    device.step((0, 0, 2, 1), (1, 0, 2, 1), (2, 0, 2, 1))
    assert device.executor.num_sequences == 3
    device.release(0, 1, 2, 7)
    device.step()
    assert device.executor.num_sequences == 0
    assert not device.executor._contents
    assert not device.executor._failed


def test_capacity_repeats_the_sizes(drive):
    capacity = drive(num_host_blocks=6).executor.capacity
    sizes = (capacity.num_device_blocks, capacity.num_host_blocks, capacity.block_size, capacity.vocab_size)
    assert sizes == (16, 6, 4, 1000)
    assert (capacity.max_model_len, capacity.device) == (256, "simulated")
    assert capacity.block_bytes > 0


def test_the_simulated_device_imports_no_torch_and_no_event_loop():
    code = "import sys, repertory.gpu.simulated; print([m for m in ('torch', 'asyncio', 'anyio') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_mix_of_sharing_chunks_and_order_answers_as_each_request_alone(data):
    """A small random scheduler: prompts that share prefixes, random chunks, random rows in each step."""
    size = data.draw(st.sampled_from([1, 2, 4]))
    stem = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=3 * size))
    tails = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=2, max_size=4))
    prompts = [stem + tail for tail in tails]
    executor = SimulatedExecutor(num_device_blocks=256, block_size=size, vocab_size=50)
    free = data.draw(st.permutations(range(64)))
    common = [free.pop() for _ in range(len(stem) // size)]
    num_shared = len(common) * size
    logs = [list(prompt) for prompt in prompts]
    tables = [common + [free.pop() for _ in range(math.ceil(12 / size))] for _ in prompts]
    done_to = [0] + [num_shared] * (len(prompts) - 1)
    admitted = [NewRow(i, log, len(log), GREEDY, table) for i, (log, table) in enumerate(zip(logs, tables, strict=True))]
    number = 0
    while any(len(log) - len(prompt) < 3 for log, prompt in zip(logs, prompts, strict=True)):
        number += 1
        open_ = [i for i in range(len(prompts)) if len(logs[i]) - len(prompts[i]) < 3]
        # The others' rows read what the first one writes: not before all of the common part is there.
        ready = [i for i in open_ if i == 0 or done_to[0] >= num_shared]
        chosen = data.draw(st.permutations(ready)) if number % 2 else ready
        ends = [data.draw(st.integers(done_to[i] + 1, len(logs[i]))) for i in chosen]
        step = RunStep(
            1,
            number,
            Fences(),
            seq_ids=list(chosen),
            starts=[done_to[i] for i in chosen],
            num_tokens=[end - done_to[i] for i, end in zip(chosen, ends, strict=True)],
            samples=[int(end == len(logs[i])) for i, end in zip(chosen, ends, strict=True)],
            admitted=admitted if number == 1 else [],
        )
        done = executor.run_step(step)
        for i, end in zip(chosen, ends, strict=True):
            done_to[i] = end
        for i, token in zip(done.seq_ids, done.token_ids, strict=True):
            logs[i].append(token)
    for log, prompt in zip(logs, prompts, strict=True):
        assert log[len(prompt) :] == executor.reference(prompt, GREEDY, 3)
