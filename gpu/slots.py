"""The device host's memory of each sequence: token log, block table, parameters, and what sampling derives from the log.

A step carries deltas; a slot is what they add up to. Every executor keeps one `SlotTable` and
applies each step to it before it computes anything, so that a row can be read as "these tokens,
at these positions, through this block table" without asking the scheduler. The log grows here by
what is sampled here, so a next step may be sent before its input token is known upstream.
No torch: the simulated device uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..protocol.ids import BlockId, SequenceId
from ..protocol.messages import NewRow, RunStep
from ..protocol.sampling import SamplingParams
from .sampling_edits import Int32Array, LogitEdits
from .structured import Grammars, SlotGrammar


class Slot:
    """State of one sequence on the device. `token_ids` is the log, `block_table` its blocks in order."""

    __slots__ = (
        "_edits", "_table", "_table_until", "block_table", "grammar", "index", "namespace", "num_prompt_tokens", "params",
        "seq_id", "token_ids",
    )  # fmt: skip

    def __init__(self, row: NewRow, grammar: SlotGrammar | None = None) -> None:
        self.grammar = grammar
        """What its grammar allows next, where it has one and the device knows grammars."""
        self.seq_id = row.seq_id
        self.token_ids: list[int] = list(row.token_ids)
        self.block_table: list[BlockId] = list(row.block_table)
        self.num_prompt_tokens = row.num_prompt_tokens
        self.params: SamplingParams = row.params
        self.index = row.index
        self.namespace = row.namespace
        self._edits = LogitEdits.of(row)
        self._table = np.empty(len(self.block_table) + 8, np.int32)
        self._table_until = 0

    def edit_table(self, first: int, block_ids: Sequence[BlockId]) -> None:
        """Put `block_ids` into the table from entry `first` on, which is not behind its end."""
        self.block_table[first : first + len(block_ids)] = block_ids
        self._table_until = min(self._table_until, first)

    def table(self, count: int) -> Int32Array:
        """The first `count` entries of the table as an array, to be read before the next edit.

        Kept beside the list: steps need it anew each time, and a long list takes long to become an array.
        """
        if self._table_until < count:
            if len(self._table) < count:
                self._table = np.concatenate([self._table[: self._table_until], np.empty(2 * count, np.int32)])
            self._table[self._table_until : count] = self.block_table[self._table_until : count]
            self._table_until = count
        return self._table[:count]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far: the position of the next draw in the sequence's random stream."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_edits(self) -> bool:
        """Whether its parameters may change logits: then the log must be known before a draw."""
        return self._edits is not None

    def edits(self) -> LogitEdits | None:
        """What changes the logits of the next token, None if nothing does."""
        if self._edits is None:
            return None
        self._edits.catch_up(self.token_ids)
        return None if self._edits.is_idle else self._edits


class Row(NamedTuple):
    """One row of a step: compute tokens [start, end) of `slot`, and sample after the last if `samples`."""

    slot: Slot
    start: int
    end: int
    samples: int


class SlotTable:
    """All sequences the device knows. `grammars` makes the grammars of those that have one."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._slots: dict[SequenceId, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, step: RunStep) -> list[Row]:
        """Take in a step's releases, newcomers and table edits; return its rows.

        Raises `KeyError` for a sequence it does not know and `ValueError` for an edit that would
        leave a hole or a row that reaches past its sequence's log: both are faults of the sender.
        """
        for seq_id in step.released:
            self._slots.pop(seq_id, None)
        for new in step.admitted:
            self._slots[new.seq_id] = Slot(new, self._grammars.begin(new) if self._grammars is not None else None)
        for edit in step.table_edits:
            slot = self._slots[edit.seq_id]
            if edit.first > len(slot.block_table):
                raise ValueError(f"sequence {edit.seq_id}: edit at block {edit.first} of a table of {len(slot.block_table)}")
            slot.edit_table(edit.first, edit.block_ids)
        rows = []
        for seq_id, start, count, samples in zip(step.seq_ids, step.starts, step.num_tokens, step.samples, strict=True):
            slot = self._slots[seq_id]
            end = start + count
            if count < 1 or end > len(slot.token_ids):
                raise ValueError(f"sequence {seq_id}: row [{start}, {end}) of a log of {len(slot.token_ids)} tokens")
            rows.append(Row(slot, start, end, samples))
        return rows
