"""From what a client sent to what the engine runs: one function, used by the actor and by `LLM`.

Everything that can be wrong with a request is found here, before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

import msgspec

from ..gpu.executor import Capacity
from ..protocol.errors import ValidationError, shorten
from ..protocol.messages import Admit, Submit, Tokenized
from ..protocol.sampling import SamplingParams, check
from .scheduling.limits import check_fits
from .text.prompts import PromptReader

MAX_LABEL_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 256


class Resolver:
    """Reads prompts and settles parameters for one model. Thread-safe: `resolve` changes nothing.

    `server_seed` makes requests without a seed repeatable, in the order they arrive.
    """

    def __init__(
        self, reader: PromptReader, capacity: Capacity, *, eos_token_ids: Iterable[int] = (), server_seed: int | None = None
    ) -> None:
        self.reader = reader
        self.capacity = capacity
        self.eos_token_ids = tuple(eos_token_ids)
        self.server_seed = server_seed

    def resolve(self, submit: Submit) -> tuple[Tokenized, Admit]:
        """The request as ids and settled parameters. Raises a `RequestError` naming the field at fault."""
        check(submit.params, vocab_size=self.capacity.vocab_size)
        _check_envelope(submit)
        text, token_ids = self.reader.read(submit.prompt)
        check_fits(len(token_ids), self.capacity)
        params = submit.params
        admit = Admit(
            request_id=submit.request_id,
            label=submit.label,
            token_ids=token_ids,
            params=msgspec.structs.replace(params, seed=self._seed(submit)),
            arrival_s=submit.arrival_s,
            stop_token_ids=self._stop_token_ids(params),
            priority=submit.priority,
            tenant=submit.tenant,
            cache_salt=submit.cache_salt,
            trace_context=submit.trace_context,
        )
        return Tokenized(submit.request_id, text, token_ids), admit

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        ends = () if params.ignore_eos else self.eos_token_ids
        return sorted({*ends, *(params.stop_token_ids or ())})

    def _seed(self, submit: Submit) -> int:
        if submit.params.seed is not None:
            return submit.params.seed
        if self.server_seed is None:
            return secrets.randbits(63)
        # The low half of the id counts the frontend's requests; the high half differs from run to run.
        text = f"{self.server_seed}/{submit.request_id & 0xFFFFFFFF}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _check_envelope(submit: Submit) -> None:
    if not isinstance(submit.label, str) or len(submit.label) > MAX_LABEL_CHARACTERS:
        raise ValidationError(
            f"request_id must be text of at most {MAX_LABEL_CHARACTERS} characters, got {shorten(submit.label)}",
            field="request_id",
        )
    salt = submit.cache_salt
    if salt is not None and (not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARACTERS):
        raise ValidationError(
            f"cache_salt must be text of 1 to {MAX_SALT_CHARACTERS} characters, got {shorten(salt)}", field="cache_salt"
        )
    if type(submit.priority) is not int or abs(submit.priority) >= 2**31:
        raise ValidationError(f"priority must be a 32-bit integer, got {shorten(submit.priority)}", field="priority")
    if submit.tenant is not None and not isinstance(submit.tenant, str):
        raise ValidationError(f"tenant must be text, got {shorten(submit.tenant)}", field="tenant")
