"""What a device offers."""

from __future__ import annotations

import msgspec


class Capacity(msgspec.Struct, frozen=True):
    """Known once the device is open, and constant while it is."""

    device: str
    """Device and dtype in words, for the start line."""
    num_device_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int
    """Bytes of one KV block over all layers."""
    vocab_size: int
    """Rows of the embedding: ids below it are valid, added and special ones too."""
    max_model_len: int
    weights_bytes: int = 0
    copy_out_rate: float = 0.0
    """Bytes/s from the device to the host, measured when the device was opened; 0: it was not."""
    copy_in_rate: float = 0.0
    """The same from the host to the device."""
