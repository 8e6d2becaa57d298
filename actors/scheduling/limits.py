"""What can never be served, said when it arrives."""

from __future__ import annotations

from ...gpu.executor import Capacity
from ...protocol.errors import NeverFitsError


def pool_tokens(capacity: Capacity) -> int:
    """Tokens the whole device pool holds."""
    return capacity.num_device_blocks * capacity.block_size


def longest_sequence(capacity: Capacity) -> int:
    """Prompt and output of one request together: the model's limit or the pool's, whichever is less."""
    return min(capacity.max_model_len, pool_tokens(capacity))


def check_fits(num_prompt_tokens: int, capacity: Capacity) -> None:
    """Raise `NeverFitsError`, with the numbers, unless the prompt and one more token fit an empty engine."""
    needed = num_prompt_tokens + 1
    if needed <= longest_sequence(capacity):
        return
    pool = pool_tokens(capacity)
    limit = (
        f"max_model_len is {capacity.max_model_len}" if capacity.max_model_len <= pool else f"the KV pool holds {pool} tokens"
    )
    raise NeverFitsError(
        f"the prompt has {num_prompt_tokens} tokens and needs room for one more ({needed}), but {limit}", field="prompt"
    )
