"""Whether a frontend's message makes sense: the core takes nothing on trust that comes from another process.

A frontend has checked its requests already (`resolving.py`); here it is made sure that one that has gone mad, or is none
of ours, cannot harm the others: it speaks for its own requests only, and brings nothing the scheduler or the device would
stumble over.
"""

from __future__ import annotations

import math

import msgspec

from ...protocol.capacity import Capacity
from ...protocol.errors import RequestError, ValidationError
from ...protocol.ids import RequestId, incarnation_of
from ...protocol.messages import Abort, Admit, Barred, Closed, Credit, Resend
from ...protocol.sampling import check, check_prompt_logprobs, check_token_ids

MAX_INDEX = 1 << 16
MAX_CHARACTERS = 16_384
"""Of all a request says about itself besides its prompt and parameters."""
MAX_ALTERNATIVES = 4096
"""Tokens that a beam may look at."""


def check_message(message: Admit | Abort | Credit | Resend | Closed, incarnation: int, capacity: Capacity) -> None:
    """Raise `RequestError` unless the frontend of this incarnation may say this to a scheduler of this capacity."""
    if isinstance(message, Closed):
        for request_id in message.request_ids:
            _check_owner(request_id, incarnation)
        if not all(map(math.isfinite, (moment for moments in message.handed for moment in moments))):
            raise ValidationError(f"closed at {message.handed}", field="handed")
        return
    _check_owner(message.request_id, incarnation)
    if isinstance(message, Admit):
        _check_admit(message, incarnation, capacity)
    elif isinstance(message, Credit) and not (0 <= message.index < MAX_INDEX and message.num_tokens >= 0):
        raise ValidationError(f"a credit of {message.num_tokens} tokens for sequence {message.index}", field="num_tokens")
    elif isinstance(message, Abort) and message.index is not None and not 0 <= message.index < MAX_INDEX:
        raise ValidationError(f"an abort of sequence {message.index}", field="index")


def _check_admit(admit: Admit, incarnation: int, capacity: Capacity) -> None:
    vocab_size = capacity.vocab_size
    params = admit.params
    if admit.holds:  # a beam looks at more alternatives than a request may ask for, and draws nothing
        if not 0 <= (params.logprobs or 0) <= MAX_ALTERNATIVES:
            raise ValidationError(f"a beam that looks at {params.logprobs} tokens", field="logprobs")
        params = msgspec.structs.replace(params, logprobs=None)
    elif params.seed is None:
        raise ValidationError("a request without a seed", field="seed")
    check(params, vocab_size=vocab_size)
    check_prompt_logprobs(params, len(admit.token_ids))
    if not admit.token_ids or min(admit.token_ids) < 0 or max(admit.token_ids) >= vocab_size:
        check_token_ids(admit.token_ids, field="prompt", vocab_size=vocab_size)
        raise ValidationError("the prompt is empty", field="prompt")
    check_token_ids(admit.stop_token_ids, field="stop_token_ids", vocab_size=vocab_size)
    barred = admit.barred or Barred()
    for token_ids in (barred.ends, *barred.bad_words):
        check_token_ids(token_ids, field="bad_words", vocab_size=vocab_size)
    context = admit.trace_context or {}
    if sum(map(len, [admit.label, admit.tenant or "", admit.cache_salt or "", *context, *context.values()])) > MAX_CHARACTERS:
        raise ValidationError(
            f"label, tenant, salt and trace context have more than {MAX_CHARACTERS} characters", field="label"
        )
    if not math.isfinite(admit.arrival_s):
        raise ValidationError(f"an arrival at {admit.arrival_s}", field="arrival_s")
    if abs(admit.priority) >= 2**31:
        raise ValidationError(f"a priority of {admit.priority}", field="priority")
    if admit.follows is not None:
        _check_owner(admit.follows, incarnation)


def _check_owner(request_id: RequestId, incarnation: int) -> None:
    if incarnation_of(request_id) != incarnation:
        raise RequestError(f"request {request_id} is not this frontend's")
