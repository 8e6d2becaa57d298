"""How contexts are split between programs, and when a shared prefix is worth a launch of its own: counts in, counts out.

Everything here is decided on the host from sizes, never from what lies on the device, so that a captured graph can keep
it. The numbers are reasoned from an H100's and H200's (132 multiprocessors, 3.4 and 4.8 TB/s of memory, about 5.5 TB/s
of second-level cache); none has been measured yet.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SPLIT_KEYS = 256
"""Keys below which a context is not split further.

A split of 256 keys of head_dim 128 reads 128 KB in 16 bits. Its state, for 4 query heads, is 2 KB that are written and
read again: 3%.
"""

MAX_SPLITS = 128

_PROGRAMS_PER_SM = 4
"""As many as run at the same time on one: see `decode_tile`."""

_TAIL_KEYS = 16384
_TAIL_SPLITS = 8
_TAIL_STATES = 2048

_SHARED_ROWS = 64
"""Queries that a program of the shared kernel has at once: see `shared_tile`."""

_SHARED_ROUNDS = 2
"""Runs of one step for which scratch has room to fill the device each on its own."""

SHARING_COSTS_BYTES = 48 << 20
"""What the launches that sharing adds take, about 10 us, in bytes that the second-level cache delivers in that time."""


def num_splits(num_rows: int, *, num_kv_heads: int, max_context_len: int, num_sms: int) -> int:
    """Splits of each of `num_rows` decode rows, of which none has more than `max_context_len` keys. At least 1.

    Enough that four programs come on each multiprocessor. Where rows alone are that many, one of them may still be far
    longer than the others, and would be computed long after they are: so contexts over 16K keys are split up to 8
    times whatever the number of rows is, which costs programs that do nothing for the short ones (16K of them at most,
    some 10 us). Never so many that a split of the longest context has under 256 keys.
    """
    fill = _ceil(_PROGRAMS_PER_SM * num_sms, num_rows * num_kv_heads)
    tail = min(_ceil(max_context_len, _TAIL_KEYS), _TAIL_SPLITS, max(1, _TAIL_STATES // num_rows))
    return max(1, min(max(fill, tail), max_context_len // MIN_SPLIT_KEYS, MAX_SPLITS))


def max_states(max_rows: int, *, num_kv_heads: int, num_sms: int) -> int:
    """The most states that the splits of up to `max_rows` decode rows have: rows times splits."""
    endless = MAX_SPLITS * max(_TAIL_KEYS, MIN_SPLIT_KEYS)
    return max(
        rows * num_splits(rows, num_kv_heads=num_kv_heads, max_context_len=endless, num_sms=num_sms)
        for rows in range(1, max_rows + 1)
    )


def max_shared_states(max_rows: int, *, num_heads: int, num_sms: int) -> int:
    """Room for the states of shared runs: one for each row, and what two runs need to fill the device each."""
    return max_rows + _SHARED_ROUNDS * _ceil(2 * num_sms * _SHARED_ROWS, num_heads)


def shared_splits(runs: Sequence[tuple[int, int]], *, group: int, num_kv_heads: int, num_sms: int, room: int) -> list[int]:
    """Splits of each run of (members, keys), of which all states, members times splits, fit into `room`.

    Enough for two programs on each multiprocessor, for each run as if alone: runs are launched one behind the other.
    The first runs get what they want while there is room; one split each is left for the others. `room` is not below
    the number of all members.
    """
    spare = room - sum(members for members, _ in runs)
    splits = []
    for members, keys in runs:
        programs = num_kv_heads * _ceil(members * group, _SHARED_ROWS)
        wanted = max(1, min(_ceil(2 * num_sms, programs), keys // MIN_SPLIT_KEYS, MAX_SPLITS))
        taken = min(wanted, 1 + spare // members)
        spare -= (taken - 1) * members
        splits.append(taken)
    return splits


def worth_sharing(
    num_members: int, num_keys: int, *, group: int, key_bytes: int, costs_bytes: int = SHARING_COSTS_BYTES
) -> bool:
    """Whether attending to `num_keys` keys once for `num_members` decode rows beats doing so for each of them.

    `key_bytes` are those of a key and its value in all KV heads of a layer, `group` the query heads to a KV head.

    Without sharing every member reads the keys; the members run at about the same time, so all but the first find them
    in the second-level cache (50 MB: 12K keys of an 8B model's layer). With sharing they are read once for each 64
    queries. What sharing costs is the launch of its own kernel, which has to fill and drain the device, that of the
    merge and the reset of a table: 10 us together, or 48 MB at the cache's 5.5 TB/s. A state for each member and split,
    written and read, is under 3% of the keys saved and not counted. So 32 rows of such a model share from 410 keys on,
    8 rows from 1,756, 2 rows from 12,289.
    """
    reads_saved = num_members - _ceil(num_members * group, _SHARED_ROWS)
    return reads_saved > 0 and reads_saved * num_keys * key_bytes > costs_bytes


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
