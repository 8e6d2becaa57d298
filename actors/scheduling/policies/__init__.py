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
    own = [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]
    return sorted({*own, *(point.name for point in entry_points(group="repertory.policies"))})


def load_policy(name: str) -> SchedulingPolicy:
    """The policy called `name`. Raises `ConfigError` with a suggestion when there is none."""
    names = installed_policies()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"scheduling_policy {name!r} is not installed (there are: {', '.join(names)}){hint}", key="scheduling_policy"
        )
    for point in entry_points(group="repertory.policies"):
        if point.name == name:
            policy: SchedulingPolicy = point.load()()
            return policy
    module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
    own: SchedulingPolicy = module.Policy()
    return own
