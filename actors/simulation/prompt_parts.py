"""What a device says of prompts, without saying it: how much of it there is, which is all that a decision depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...protocol.ids import SequenceId
from ...protocol.messages import PromptPart, RunStep, TokenLogprobs

_NOT_SAID = TokenLogprobs([], [], 0)


def prompt_parts(step: RunStep, num_asked: Callable[[SequenceId], int]) -> Iterator[PromptPart]:
    """The parts that `step` computes. `num_asked` tells the length of a sequence's prompt, 0 where nobody asks about it."""
    for seq_id, start, count in zip(step.seq_ids, step.starts, step.num_tokens, strict=True):
        num_entries = min(start + count, num_asked(seq_id) - 1) - start
        if num_entries > 0:
            yield PromptPart(seq_id, start + 1, [_NOT_SAID] * num_entries)
