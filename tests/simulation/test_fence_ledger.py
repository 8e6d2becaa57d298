"""The ledger of fences: what is certain to come after what, and nothing else."""

from __future__ import annotations

import pytest

from repertory.actors.simulation.fence_ledger import FenceLedger
from repertory.actors.simulation.violation import Violation
from repertory.protocol.ids import BlockId, CopyId, Epoch, SequenceId, StepId
from repertory.protocol.messages import BlockCopy, CopyBlocks, CopyDirection, CopyDone, Fences, NewRow, RunStep
from repertory.protocol.sampling import SamplingParams

SIZE = 4
NOTHING = Fences()


def step(number: int, table: list[int], *, start: int = 0, copy_out: int = 0, copy_in: int = 0) -> RunStep:
    """One row that computes from `start` to the end of its table, which comes with it."""
    seq_id, end = SequenceId(number), len(table) * SIZE
    row = NewRow(seq_id, list(range(end)), end, SamplingParams(), [BlockId(block) for block in table])
    after = Fences(StepId(number - 1), CopyId(copy_out), CopyId(copy_in))
    return RunStep(Epoch(1), StepId(number), after, [seq_id], [start], [end - start], [0], admitted=[row])


def copy(direction: CopyDirection, number: int, device: int, host: int, after: Fences = NOTHING) -> CopyBlocks:
    source, target = (device, host) if direction == "out" else (host, device)
    return CopyBlocks(Epoch(1), CopyId(number), direction, after, [BlockId(source)], [BlockId(target)])


def test_a_copy_out_waits_for_the_step_that_writes_its_source() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0, 1]))
    with pytest.raises(Violation, match="copy out 1 reads device block 1 and does not wait for step 1"):
        ledger.sent(copy("out", 1, 1, 0))


def test_a_lane_keeps_its_order() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0, 1]))
    ledger.sent(copy("out", 1, 0, 0, Fences(step=StepId(1))))
    ledger.sent(copy("out", 2, 1, 1))


def test_two_readers_need_not_wait_for_each_other() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0, 1]))
    ledger.sent(copy("out", 1, 0, 0, Fences(step=StepId(1))))
    ledger.sent(step(2, [0, 2], start=SIZE))


def test_a_writer_waits_for_readers() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0]))
    ledger.sent(copy("out", 1, 0, 0, Fences(step=StepId(1))))
    with pytest.raises(Violation, match="step 2 writes device block 0 and does not wait for copy out 1"):
        ledger.sent(step(2, [0]))


def test_who_waits_for_one_that_waits_is_as_late() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0]))
    ledger.sent(copy("out", 1, 0, 7, Fences(step=StepId(1))))
    ledger.sent(copy("in", 1, 3, 7, Fences(copy_out=CopyId(1))))
    ledger.sent(step(2, [0], copy_in=1))  # the copy in came after the copy out, which read block 0


def test_what_the_scheduler_knows_to_have_ended_need_not_be_waited_for() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(step(1, [0]))
    ledger.sent(copy("out", 1, 0, 0, Fences(step=StepId(1))))
    ledger.told(CopyDone(Epoch(1), CopyId(1), "out", 1, 0.0))
    ledger.sent(step(2, [0]))


def test_a_copy_within_a_step_reads_and_writes_as_a_row_does() -> None:
    ledger = FenceLedger(SIZE)
    ledger.sent(copy("in", 1, 5, 0))
    plain = step(1, [0])
    with_copy = RunStep(
        *(getattr(plain, name) for name in plain.__struct_fields__[:8]), copies=[BlockCopy(BlockId(5), BlockId(6), 2)]
    )
    with pytest.raises(Violation, match="step 1 reads device block 5 and does not wait for copy in 1"):
        ledger.sent(with_copy)


def test_what_was_never_sent_cannot_be_waited_for() -> None:
    with pytest.raises(Violation, match="copy in 1 waits for step 1, which was not sent"):
        FenceLedger(SIZE).sent(copy("in", 1, 0, 0, Fences(step=StepId(1))))
