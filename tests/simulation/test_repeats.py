"""A run repeats to the last decision, in this process and in any other: nothing depends on where an object lies in memory."""

from __future__ import annotations

import pytest

from repertory.actors.scheduling.sequence import Sequence
from repertory.actors.simulation.drawing import draw
from repertory.actors.simulation.world import World
from repertory.radix.copies import CopyJob
from repertory.radix.holding import Holding
from repertory.radix.node import Node


class Hashes:
    """Numbers in the order in which objects are first hashed, or backwards: sets of few are walked forwards or backwards."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._known: dict[int, tuple[int, object]] = {}  # with the object, or its address would be another's soon

    def __call__(self, thing: object) -> int:
        number, _ = self._known.setdefault(id(thing), (len(self._known), thing))
        return self._sign * number


def story(seed: int, sign: int) -> list[str]:
    """What happens in a run whose objects have these hashes; in another process they would have others too."""
    hashes = Hashes(sign)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Node, CopyJob, Holding, Sequence):
            patch.setattr(kind, "__hash__", lambda self: hashes(self))
        world = World(draw(seed), record=True)
        world.live()
    assert world.story
    return world.story


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_a_run_does_not_depend_on_hashes(first: int) -> None:
    for seed in range(first, first + 10):
        assert story(seed, 1) == story(seed, -1), f"seed {seed}"
