"""From what a step drew to what is said of it: logs grow, grammars move on, and what failed stays failed."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.ids import SequenceId
from ..protocol.messages import FailedRow, RunStep, StepDone, TokenLogprobs
from .sampling import Sampled, SamplingRow
from .sampling_edits import NO_TOKEN_LEFT, NOT_FINITE
from .slots import Row, Slot
from .structured import GrammarError

STAND_IN = 0
"""Token that a failed row leaves in its log: the step behind it may already count on there being one."""


class Answers:
    """Turns draws into `StepDone`, in the order of the steps. Remembers the sequences that failed, while they are known.

    A sequence that failed once stays failed: its KV is not to be trusted.
    """

    def __init__(self) -> None:
        self._failed: dict[SequenceId, str] = {}

    def forget(self, step: RunStep) -> None:
        """Sequences that a step releases, or begins anew, have not failed."""
        if self._failed:
            for seq_id in (*step.released, *(new.seq_id for new in step.admitted)):
                self._failed.pop(seq_id, None)

    def wait_for_masks(self, slots: Sequence[Slot]) -> None:
        """Until the masks of all their grammars are filled. A grammar that fails, fails its sequence."""
        for slot in slots:
            try:
                if slot.grammar is not None:
                    slot.grammar.mask()
            except GrammarError as error:
                self._failed.setdefault(slot.seq_id, str(error))

    def answer(self, step: RunStep, sampling: Sequence[Row], found: Sampled, *, seconds: float) -> StepDone:
        """What step `step` says: `found` was drawn for its rows `sampling`, in order.

        Puts the tokens at the ends of their logs, where they replace what holds their place, and takes grammars on.
        """
        self._note(sampling, found)
        seq_ids: list[SequenceId] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        failed: list[FailedRow] = []
        for i, (row, token) in enumerate(zip(sampling, found.token_ids, strict=True)):
            slot = row.slot
            reason = self._failed.get(slot.seq_id)
            slot.token_ids[row.end : row.end + 1] = [token if reason is None else STAND_IN]
            if reason is not None:
                failed.append(FailedRow(slot.seq_id, reason, is_sound=reason != NOT_FINITE))
                continue
            seq_ids.append(slot.seq_id)
            token_ids.append(token)
            logprobs.append(found.logprobs.get(i))
            if slot.grammar is not None:
                slot.grammar.accept(token)
        return StepDone(
            step.epoch,
            step.step_id,
            seq_ids,
            token_ids,
            seconds,
            failed,
            logprobs=logprobs if any(logprobs) else [],
            prompts=[part for part in found.prompts if part.seq_id not in self._failed],
        )

    def _note(self, sampling: Sequence[Row], found: Sampled) -> None:
        self._failed.update(dict.fromkeys(found.failed_prompts, NOT_FINITE))
        for i in found.failed:
            self._failed.setdefault(sampling[i].slot.seq_id, NO_TOKEN_LEFT if i in found.exhausted else NOT_FINITE)


def draws_of(sampling: Sequence[Row]) -> list[SamplingRow]:
    """The draws that follow on rows, with what their logs change of them.

    Raises `ValueError` for a row that samples before the end of its log.
    """
    for row in sampling:
        if row.end != len(row.slot.token_ids):
            raise ValueError(f"sequence {row.slot.seq_id} samples after token {row.end} of a log of {len(row.slot.token_ids)}")
    return [
        SamplingRow(slot.params, slot.index, slot.num_output_tokens, slot.edits(), slot.grammar.words if slot.grammar else None)
        for slot in (row.slot for row in sampling)
    ]
