"""A request's token log in a buffer that compares at memory speed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
"""Tokens are stored as little-endian 32-bit integers."""


class TokenLog:
    """Append-only list of token ids. `buffer` holds them as int32, four bytes each; larger ids raise `OverflowError`.

    The tree compares runs of it with its own by `bytearray.startswith`, one memcmp and no copy.
    """

    __slots__ = ("buffer",)

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.buffer = bytearray(array("i", token_ids).tobytes())

    def __len__(self) -> int:
        return len(self.buffer) // TOKEN_BYTES

    def append(self, token_id: int) -> None:
        """Add one token."""
        self.buffer += token_id.to_bytes(TOKEN_BYTES, "little", signed=True)

    def tolist(self, start: int = 0, end: int | None = None) -> list[int]:
        """Token ids [start, end) as plain integers."""
        stop = None if end is None else end * TOKEN_BYTES
        return array("i", bytes(self.buffer[start * TOKEN_BYTES : stop])).tolist()

    def block(self, index: int, block_size: int) -> bytes:
        """The bytes of block `index`; shorter where the log ends inside it."""
        width = block_size * TOKEN_BYTES
        return bytes(self.buffer[index * width : (index + 1) * width])


def common_tokens(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """Number of leading tokens that two buffers share."""
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0  # the usual answer, and the cheap one
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if difference == 0:
        return size // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
