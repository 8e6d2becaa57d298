"""Which tokens of prompts a step's rows have something to say about, for requests that ask how likely their prompt was.

No torch: the simulated device uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .slots import Row


class PromptRow(NamedTuple):
    """A row whose prompt is asked about: the tokens at `targets`, from position `first` on, follow on those it computes.

    What comes before the first of them is the step's `token`-th token.
    """

    row: Row
    token: int
    first: int
    targets: list[int]

    @property
    def num_likeliest(self) -> int:
        """How many of the likeliest are asked for beside each."""
        return self.row.slot.params.prompt_logprobs or 0


def prompt_rows(rows: Sequence[Row]) -> list[PromptRow]:
    """The rows whose requests ask for `prompt_logprobs`, where they compute what a prompt token follows on.

    Of a request's sequences the first one speaks for all: they have the same prompt.
    """
    found: list[PromptRow] = []
    token = 0
    for row in rows:
        slot, first = row.slot, row.start + 1
        if slot.params.prompt_logprobs is not None and slot.index == 0:
            targets = slot.token_ids[first : min(row.end + 1, slot.num_prompt_tokens)]
            if targets:
                found.append(PromptRow(row, token, first, targets))
        token += row.end - row.start
    return found
