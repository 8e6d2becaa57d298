"""A request: the sequences that were admitted for it in one transaction, and how each has ended.

It has one arrival, one opening and one terminal, however many sequences it has. They are neighbours in the
policy's order, each with its own random stream, credit and end; they share their prompt as any two requests
would, through the tree, and the part of it that fills no block through `Planner` (see there).
"""

from __future__ import annotations

from collections.abc import Iterator

from ...protocol.messages import PROMPT_TAIL, Admit, Open, PromptLogprobs, SequenceEnd
from .sequence import Sequence, State


class Request:
    """`sequences` by their index. Those that have ended stay until the last has: all can be said again until then."""

    __slots__ = ("admit", "ends", "num_live", "opening", "sequences")

    def __init__(self, admit: Admit) -> None:
        self.admit = admit
        self.sequences: list[Sequence] = []
        self.num_live = 0
        self.ends: list[SequenceEnd] = []
        self.opening: Open | None = None  # what the detokenizer was told before the first token

    def add(self, seq: Sequence) -> None:
        """One more sequence, the next by its index."""
        self.sequences.append(seq)
        self.num_live += 1

    def live(self) -> Iterator[Sequence]:
        """Sequences that have not ended."""
        return (seq for seq in self.sequences if seq.state is not State.FINISHED)

    @property
    def num_preemptions(self) -> int:
        """Of all its sequences."""
        return sum(seq.num_preemptions for seq in self.sequences)

    def prompts(self) -> list[PromptLogprobs]:
        """How likely its prompt was, where it asks for that and its first sequence has its first token: then all is known."""
        first = self.sequences[0]
        if first.prompt_logprobs is None or first.first_token_s is None:
            return []
        return [PromptLogprobs(self.admit.request_id, first.prompt_logprobs)]

    def open(self, first: Sequence) -> Open:
        """What precedes the first token, which is `first`'s. The prompt is counted once, as its first sequence found it."""
        assert first.first_scheduled_s is not None
        self.opening = Open(
            request_id=self.admit.request_id,
            prompt_tail=self.admit.token_ids[-PROMPT_TAIL:],
            params=self.admit.params,
            num_prompt_tokens=len(self.admit.token_ids),
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            queued_s=first.queued_s,
            first_scheduled_s=first.first_scheduled_s,
        )
        return self.opening
