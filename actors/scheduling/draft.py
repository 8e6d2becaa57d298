"""A step while it is being planned: rows as columns, and the deltas the device needs for them."""

from __future__ import annotations

import zlib

from ...protocol.ids import Epoch, SequenceId, StepId
from ...protocol.messages import BlockCopy, Fences, NewRow, RunStep, TableEdit
from .journeys import Stalls
from .sequence import Sequence
from .step_time import Load, StepTimeModel, attended


class Draft:
    """Collects a step's rows. `is_only`: no other step is in flight."""

    def __init__(self, epoch: Epoch, step_id: StepId, *, is_only: bool) -> None:
        self.is_only = is_only
        self.epoch = epoch
        self.step_id = step_id
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.num_tokens: list[int] = []
        self.samples: list[int] = []
        self.copies: list[BlockCopy] = []
        self.shared_groups: list[tuple[list[int], int]] = []
        self.num_decodes = 0
        self.num_prefills = 0
        self.num_preempted = 0
        self.num_ending = 0
        self.num_prefill_tokens = 0
        self.num_attended = 0
        self.num_attended_by_decodes = 0
        self.sent_s = 0.0
        self.predicted_s: float | None = None  # how long it should take, once it is sent
        self.was_cut = False  # for want of time, not of budget
        self.way_was_made_for: Sequence | None = None  # others were preempted so that this one can come in
        self.first_prefill: Sequence | None = None  # the first in order, where prefills are cut into chunks
        self.may_wait: list[Sequence] = []  # prefills that gain by waiting a step, and run only if budget is left

    def add_decode(self, seq: Sequence) -> None:
        """A row for the token sampled last."""
        self._add(seq, 1)
        self.num_decodes += 1
        self.num_attended_by_decodes = self.num_attended  # decodes come first

    def add_chunk(self, seq: Sequence, count: int) -> None:
        """A row for `count` tokens of a prompt or a resumption."""
        self._add(seq, count)
        self.num_prefills += 1
        self.num_prefill_tokens += count
        seq.num_chunks += 1

    def extend_chunk(self, seq: Sequence, count: int) -> None:
        """Lengthen a row that this step already has."""
        row = self.rows.index(seq)
        self.num_tokens[row] += count
        self.num_prefill_tokens += count
        self.num_attended += attended(seq.num_computed, count)
        seq.num_computed += count
        if seq.num_computed == seq.length:
            self.samples[row] = 1
            _expect_token(seq)

    def _add(self, seq: Sequence, count: int) -> None:
        self.rows.append(seq)
        self.starts.append(seq.num_computed)
        self.num_tokens.append(count)
        self.num_attended += attended(seq.num_computed, count)
        seq.num_computed += count
        if seq.num_computed == seq.length:
            self.samples.append(1)
            _expect_token(seq)
        else:
            self.samples.append(0)

    def computes(self, seq: Sequence, position: int) -> bool:
        """Whether a row of this step computes the token of `seq` at `position`, or one before it."""
        return seq in self.rows and self.starts[self.rows.index(seq)] <= position

    @property
    def load(self) -> Load:
        """What the step computes, for the model of how long it takes."""
        return Load(self.num_prefill_tokens, self.num_attended, len(self.rows))

    def charge(self, stalls: Stalls, model: StepTimeModel) -> None:
        """The step has ended: what its chunks have cost whoever else runs is theirs."""
        chunks = [
            (seq.traveller.own, seq.request_id, count)
            for seq, count in zip(self.rows[self.num_decodes :], self.num_tokens[self.num_decodes :], strict=True)
        ]
        without = Load(0, self.num_attended_by_decodes, self.num_decodes)
        stalls.on_step_done(self.sent_s, model.prefill_share(self.load, without) if chunks else 0.0, chunks)

    def message(self, released: list[SequenceId], after: Fences) -> RunStep:
        """The finished step, which waits for the copies in `after`. Sequences new to the device go whole, others as edits."""
        admitted: list[NewRow] = []
        edits: list[TableEdit] = []
        for seq in self.rows:
            holding = seq.holding
            if not seq.is_on_device:
                seq.is_on_device = True
                admitted.append(_new_row(seq))
                holding.mark_sent()
            elif holding.changed or holding.num_sent < len(holding.block_table):
                edits += [TableEdit(seq.seq_id, first, blocks) for first, blocks in holding.take_edits()]
        return RunStep(
            epoch=self.epoch,
            step_id=self.step_id,
            after=Fences(StepId(self.step_id - 1), after.copy_out, after.copy_in),
            seq_ids=[seq.seq_id for seq in self.rows],
            starts=self.starts,
            num_tokens=self.num_tokens,
            samples=self.samples,
            admitted=admitted,
            released=released,
            table_edits=edits,
            copies=self.copies,
            shared_groups=self.shared_groups,
        )


def _expect_token(seq: Sequence) -> None:
    seq.in_flight += 1
    seq.length += 1


def _new_row(seq: Sequence) -> NewRow:
    return NewRow(
        seq_id=seq.seq_id,
        token_ids=seq.log.tolist(),
        num_prompt_tokens=seq.num_prompt_tokens,
        params=seq.admit.params,
        block_table=list(seq.holding.block_table),
        index=seq.index,
        namespace=zlib.crc32(repr(seq.holding.namespace).encode()),
        barred=seq.admit.barred,
    )
