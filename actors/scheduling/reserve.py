"""How much KV memory admission leaves free for the growth of what already runs.

Running requests may still generate many tokens, and usually stop early. The reserve is a share
(`ratio`) of what they could still need. It starts cautious and decays while all goes well; a
preemption shows that it was too small and raises it. The idea of a decaying new-token ratio is
SGLang's (Zheng et al., 2312.07104, and its scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import Sequence

INITIAL_RATIO = 0.4
LEAST_RATIO = 0.1
DECAY_STEPS = 600
MOST_TOKENS = 4096
"""Per sequence: what it may need beyond this is not planned for."""


class Reserve:
    """The optimism ratio, and the blocks it asks to leave free."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ratio = INITIAL_RATIO

    @staticmethod
    def growth(running: Iterable[Sequence]) -> int:
        """Tokens that `running` may still come to need; none when nothing runs."""
        return sum(min(seq.max_length - seq.length, MOST_TOKENS) for seq in running)

    def blocks(self, growth: int) -> int:
        """Blocks to leave free beside the promises when `growth` tokens may come."""
        return int(growth * self.ratio) // self.block_size

    def on_step(self) -> None:
        """A step was planned without a preemption."""
        self.ratio = max(LEAST_RATIO, self.ratio - (INITIAL_RATIO - LEAST_RATIO) / DECAY_STEPS)

    def on_preemption(self) -> None:
        """Memory ran out: be more careful with new requests for a while."""
        self.ratio = min(1.0, max(INITIAL_RATIO, self.ratio * 1.5))
