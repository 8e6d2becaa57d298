"""Orders in which requests are served: one small file each, found by name.

A policy ranks requests once, when they arrive, and may hold new ones back. To add one, put a
module here (or name a class under the entry point group `repertory.policies`) that defines
`Policy`; nothing else changes.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Protocol

from ....protocol.errors import ConfigError
from ....protocol.messages import Admit

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
