"""All that a scheduler has decided, as one number: two runs with the same one decided alike, down to each block.

It covers steps (rows, tables, copies on the device, fences, order), copies between the tiers, and reports (preemptions
and their costs, ends). What a row computes from - token ids, parameters, the name of its namespace - is no decision.
"""

from __future__ import annotations

import hashlib

import msgspec

from ...protocol.messages import CopyBlocks, RunStep
from .reports import Finished, Report

DIGITS = 16
"""Of the number that stands beside each step in a trace."""

_encode = msgspec.msgpack.Encoder().encode


class DecisionDigest:
    """SHA-256 over decisions, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def step(self, step: RunStep) -> None:
        """A step was sent."""
        rows = (step.seq_ids, step.starts, step.num_tokens, step.samples)
        admitted = [(row.seq_id, row.num_prompt_tokens, row.block_table, row.index) for row in step.admitted]
        deltas = (admitted, step.released, step.table_edits, step.copies, step.shared_groups)
        self._hash.update(_encode(("step", step.epoch, step.step_id, step.after, rows, deltas)))

    def copy(self, copy: CopyBlocks) -> None:
        """A copy was sent."""
        self._hash.update(_encode(copy))

    def report(self, report: Report) -> None:
        """Something happened. Of an end only what was decided counts, not how long it took or what it was called."""
        told: object = report
        if isinstance(report, Finished):
            told = (report.request_id, report.finish_reason, report.num_output_tokens, report.num_cached_tokens)
            told = (*told, report.num_chunks, report.num_preemptions, report.num_sequences)
        self._hash.update(_encode((type(report).__name__, told)))

    def hexdigest(self, digits: int = 64) -> str:
        """The number so far, in hexadecimal."""
        return self._hash.hexdigest()[:digits]
