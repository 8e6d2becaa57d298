"""The same rules under a policy with classes: a higher one may take slots and blocks of lower ones, and nobody else's."""

from __future__ import annotations

import pytest

from repertory.actors.simulation.drawing import draw
from repertory.actors.simulation.world import World
from repertory.protocol.messages import Admit


class ByPriority:
    """Class = the request's priority: lower numbers first."""

    def priority_class(self, admit: Admit) -> int:
        return admit.priority

    def admits_beside(self, num_running: int) -> bool:
        return True


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_nothing_is_broken_where_classes_take_from_each_other(first: int) -> None:
    for seed in range(first, first + 20):
        scenario = draw(seed)
        if len({visitor.priority for visitor in scenario.visitors}) == 1:
            continue
        world = World(scenario)
        world.core.policy = world.core.gate.policy = ByPriority()
        try:
            world.live()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
