"""A failing scenario made small: visitors and faults are cut for as long as it still breaks the same rule.

Delta debugging (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002) without its second half:
halves are cut, then quarters, down to single ones. Deterministic, since a run is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .scenario import Fault, Scenario, Visitor
from .violation import Violation
from .world import World

Part = Visitor | Fault

MOST_RUNS = 400
MOST_LINES = 30
LONGEST_LINE = 240


@dataclass(frozen=True)
class Failure:
    """How a scenario failed: the rule (or what a device raised), after how many steps, and what it said."""

    scenario: Scenario
    rule: str
    num_steps: int
    message: str
    story: tuple[str, ...] = ()

    def report(self) -> str:
        """The seed, what is left of the scenario, and the end of its story."""
        lines = [f"seed {self.scenario.seed}, step {self.num_steps}: {self.message}", f"{self.scenario.config}"]
        lines += [f"  {visitor}" for visitor in self.scenario.visitors]
        lines += [f"  {fault}" for fault in self.scenario.faults]
        lines += [f"  {line[:LONGEST_LINE]}" for line in self.story[-MOST_LINES:]]
        return "\n".join(lines)


def failure_of(scenario: Scenario, *, record: bool = False) -> Failure | None:
    """Run `scenario`; None: nothing was broken."""
    world = World(scenario, record=record)
    try:
        world.live()
    except Exception as error:
        # Whatever it is - a broken rule, an assertion of the engine, a device that read what it must not - is a finding.
        rule = error.rule if isinstance(error, Violation) else type(error).__name__
        return Failure(scenario, rule, world.checker.num_steps, str(error), tuple(world.story or ()))
    return None


def shrunk(failure: Failure) -> Failure:
    """The smallest scenario found that breaks the same rule, with its story."""
    parts: tuple[Part, ...] = (*failure.scenario.visitors, *failure.scenario.faults)
    trial = _Trial(failure)
    size = max(1, len(parts) // 2)
    while True:
        cut = _cut_once(parts, size, trial)
        if cut is not None:
            parts = cut
            size = min(size, max(1, len(parts) // 2))
        elif size > 1:
            size = -(-size // 2)
        else:
            break
    found = failure_of(trial.scenario(parts), record=True)
    assert found is not None and found.rule == failure.rule, "a run did not repeat"
    return found


def _cut_once(parts: tuple[Part, ...], size: int, fails: Callable[[tuple[Part, ...]], bool]) -> tuple[Part, ...] | None:
    for first in range(0, len(parts), size):
        left = parts[:first] + parts[first + size :]
        if fails(left):
            return left
    return None


class _Trial:
    """Whether what is left of a scenario still fails alike; nothing does once `MOST_RUNS` have been made."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._num_runs = 0

    def scenario(self, parts: tuple[Part, ...]) -> Scenario:
        visitors = tuple(part for part in parts if isinstance(part, Visitor))
        faults = tuple(part for part in parts if isinstance(part, Fault))
        return self._failure.scenario.kept(visitors, faults)

    def __call__(self, parts: tuple[Part, ...]) -> bool:
        self._num_runs += 1
        if self._num_runs > MOST_RUNS:
            return False
        found = failure_of(self.scenario(parts))
        return found is not None and found.rule == self._failure.rule
