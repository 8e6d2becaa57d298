"""What a row whose logits were not finite has computed: nobody may build on it once the scheduler has been told.

Each device block has a content: who wrote it, in which step, and whether a token was drawn from finite logits by a row
that read it since. When a row fails, the contents it wrote itself and nobody has drawn from are tainted, wherever they
have been copied to. A step that is sent later and reads one breaks the rule.
"""

from __future__ import annotations

from ...protocol.ids import BlockId, SequenceId, StepId
from ...protocol.messages import CopyBlocks, RunStep, StepDone
from .fence_ledger import RowBlocks
from .violation import Violation

RULE = "failed rows"


class _Content:
    __slots__ = ("is_proven", "is_tainted", "step", "writers")

    def __init__(self, step: StepId) -> None:
        self.writers: set[SequenceId] = set()
        self.step = step
        self.is_proven = False
        self.is_tainted = False


class Taint:
    """One life of a device."""

    def __init__(self) -> None:
        self._device: dict[BlockId, _Content] = {}
        self._host: dict[BlockId, _Content] = {}
        self._rows: dict[StepId, list[tuple[SequenceId, list[_Content]]]] = {}

    def sent_copy(self, copy: CopyBlocks) -> None:
        """Whole blocks have the same content on both tiers."""
        source, target = (self._device, self._host) if copy.direction == "out" else (self._host, self._device)
        for old, new in zip(copy.sources, copy.targets, strict=True):
            if old in source:
                target[new] = source[old]

    def sent_step(self, step: RunStep, rows: list[RowBlocks]) -> None:
        """Note who writes what, and see that no row reads what it must not."""
        device = self._device
        for copy in step.copies:
            before = device.get(copy.source)
            content = device[copy.target] = _Content(step.step_id)
            if before is not None:
                content.writers, content.step = set(before.writers), before.step
                content.is_proven, content.is_tainted = before.is_proven, before.is_tainted
        for row in rows:
            self._write(row, step.step_id)
        noted = []
        for row in rows:
            contents = [device[block] for block in row.blocks if block in device]
            if any(content.is_tainted for content in contents):
                raise Violation(RULE, f"step {step.step_id}: sequence {row.seq_id} reads what a failed row computed")
            noted.append((row.seq_id, contents))
        self._rows[step.step_id] = noted

    def _write(self, row: RowBlocks, step_id: StepId) -> None:
        for place, block in enumerate(row.blocks[row.first_written :]):
            content = self._device.get(block)
            goes_on = content is not None and place == 0 and row.starts_inside
            # Behind what is proven begins what answers for itself alone.
            if content is None or not goes_on or content.is_proven:
                is_tainted = content is not None and goes_on and content.is_tainted
                content = self._device[block] = _Content(step_id)
                content.is_tainted = is_tainted
            content.writers.add(row.seq_id)
            content.step = step_id

    def told(self, done: StepDone) -> None:
        """The scheduler is told how a step went."""
        rows = self._rows.pop(done.step_id, [])
        failed = {row.seq_id for row in done.failed if not row.is_sound}
        sampled = set(done.seq_ids)
        for seq_id, contents in rows:
            if seq_id in failed:
                for content in contents:
                    content.is_tainted |= not content.is_proven and seq_id in content.writers
        for seq_id, contents in rows:
            if seq_id in sampled:
                for content in contents:
                    content.is_proven |= content.step <= done.step_id and not content.is_tainted
