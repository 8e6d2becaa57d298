"""How large a JSON value is, for no more than it is worth knowing."""

from __future__ import annotations

from typing import Any


def weight_of(value: Any, *, most: int) -> int:
    """Characters of its texts and keys, and one for each value; stops counting soon after `most`."""
    found = 0
    left = [value]
    while left and found <= most:
        one = left.pop()
        found += 1
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, dict):
            found += sum(len(key) for key in one if isinstance(key, str))
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
    return found
