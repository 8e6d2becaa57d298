"""Orders in which requests are served: one small file each, found by name.

A policy ranks requests once, when they arrive, and may hold new ones back. To add one, put a
module here (or name a class under the entry point group `repertory.policies`) that defines
`Policy`; nothing else changes.

That is all that a policy has to do (`SchedulingPolicy`). It may do more, and is told what it needs for it if it has the
methods: say who of those that wait is next (`ChoosesNext`), follow what is cached (`WatchesTree`), account for what was
computed (`CountsWork`). What a policy does not ask for costs nothing.

    policy           class      next, within a class           bound
    -------------    --------   ----------------------------   -----------------------------------------------------
    fcfs             one        arrival                        -
    static           one        arrival, in batches            -
    priority         priority   arrival                        16 admissions pass the oldest, then it is next (ageing.py)
    longest-prefix   one        most cached tokens first       the same
    fair-share       one        tenant with the least service  of two tenants that wait, neither gets more than
                                                               2 x max(prompt, 2 x tokens that run) ahead (see there)

Within a class the preempted come before the waiting in all of them.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Sequence as Items
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from ....protocol.errors import ConfigError
from ....protocol.messages import Admit
from ....radix.tree import PrefixTree
from ..sequence import Sequence

GROUP = "repertory.policies"
"""The entry point group of other packages' policies."""


class SchedulingPolicy(Protocol):
    """What the scheduler asks. Pure: the same answers for the same arguments."""

    def priority_class(self, admit: Admit) -> int:
        """The request's class; lower classes are served first, and within one the earlier arrival."""
        ...

    def admits_beside(self, num_running: int) -> bool:
        """Whether waiting requests may join `num_running` running ones."""
        ...


@runtime_checkable
class ChoosesNext(Protocol):
    """A policy that says who comes in next, where that is not simply the first by rank."""

    def on_queued(self, seq: Sequence) -> None:
        """It waits: new or preempted, as its `state` says."""
        ...

    def on_left(self, seq: Sequence) -> None:
        """It leaves whatever its `state` says, running included: it was preempted or paused, or has ended."""
        ...

    def on_admitted(self, seq: Sequence) -> None:
        """It waits no more, and is about to run. Its `rank` may still be changed."""
        ...

    def next_of(self, waiting: Items[Sequence], recovery: Items[Sequence]) -> Sequence | None:
        """Whom to admit next: of `waiting` or `recovery`, both by rank. None: nobody for now, although somebody runs."""
        ...


@runtime_checkable
class WatchesTree(Protocol):
    """A policy that follows what is cached."""

    def watch(self, tree: PrefixTree) -> None:
        """This is the tree from here on: it is new, and whatever was cached before is gone."""
        ...


@runtime_checkable
class CountsWork(Protocol):
    """A policy that accounts for what is computed."""

    def on_computed(self, rows: Items[Sequence], num_tokens: Items[int], num_decodes: int) -> None:
        """A step has ended: so many tokens of each row. The first `num_decodes` rows were decodes."""
        ...


def installed_policies() -> list[str]:
    """Names `scheduling_policy` accepts."""
    return sorted({*_own_policies(), *(point.name for point in entry_points(group=GROUP))})


def load_policy(name: str) -> SchedulingPolicy:
    """The policy called `name`. Raises `ConfigError` with a suggestion when there is none."""
    if name in _own_policies():
        own: SchedulingPolicy = importlib.import_module(f".{name.replace('-', '_')}", __name__).Policy()
        return own
    for point in entry_points(group=GROUP):
        if point.name == name:
            policy: SchedulingPolicy = point.load()()
            return policy
    names = installed_policies()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"scheduling_policy {name!r} is not installed (there are: {', '.join(names)}){hint}", key="scheduling_policy"
    )


def _own_policies() -> list[str]:
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]
