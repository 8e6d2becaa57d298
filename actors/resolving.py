"""From what a client sent to what the engine runs: one function, used by the actor and by `LLM`.

Everything that can be wrong with a request is found here, before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..gpu.executor import Capacity
from ..gpu.grammars import GrammarChecker
from ..gpu.models.config import ModelConfig
from ..protocol.config import EngineConfig
from ..protocol.errors import UnsupportedError, ValidationError, shorten
from ..protocol.messages import Admit, Barred, Submit, Tokenized
from ..protocol.sampling import SamplingParams, check, check_prompt_logprobs
from .scheduling.limits import check_fits
from .text.prompts import PromptReader

MAX_LABEL_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 256
MAX_TRACE_CHARACTERS = 4096


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
        check_prompt_logprobs(submit.params, len(token_ids))
        params = self._settled(submit.params)
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
            barred=self._barred(params),
        )
        return Tokenized(submit.request_id, text, token_ids), admit

    @cached_property
    def _checker(self) -> GrammarChecker:
        # Made by the first request that needs it: to read the added tokens takes a moment.
        return GrammarChecker(self.reader.tokenizer, vocab_size=self.capacity.vocab_size, eos_token_id=self.eos_token_ids[0])

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """`params` with its grammar compiled once, for its mistakes, and as the device compiles it again."""
        if params.structured_outputs is None:
            return params
        if not self.eos_token_ids:
            raise UnsupportedError("structured_outputs needs an end token, and the model has none", field="structured_outputs")
        return msgspec.structs.replace(params, structured_outputs=self._checker.settle(params.structured_outputs))

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        # A grammar's end is an end whatever is ignored: nothing else may follow it.
        ends = () if params.ignore_eos and params.structured_outputs is None else self.eos_token_ids
        return sorted({*ends, *(params.stop_token_ids or ())})

    def _barred(self, params: SamplingParams) -> Barred | None:
        # The ends too where they are ignored: a text is no longer for an end in its middle.
        # Of a grammar they are held back where its mask is made: they may be all that it has left.
        ends = sorted({*self.eos_token_ids, *(params.stop_token_ids or ())}) if params.min_tokens else []
        if params.structured_outputs is not None:
            ends = [token for token in ends if token not in self.eos_token_ids]
        phrases = self._phrases(params.bad_words) if params.bad_words else []
        return Barred(ends, phrases) if ends or phrases else None

    def _phrases(self, words: list[str]) -> list[list[int]]:
        """The words as ids, at the beginning of a text and behind a space, as vLLM has it (`SamplingParams.bad_words`)."""
        texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
        try:
            encodings = self.reader.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            raise ValidationError("bad_words is not valid Unicode text", field="bad_words") from None
        phrases = dict.fromkeys(tuple(encoding.ids) for encoding in encodings if encoding.ids)
        vocab_size = self.capacity.vocab_size
        if unknown := [token for phrase in phrases for token in phrase if token >= vocab_size]:
            raise ValidationError(
                f"bad_words has the token {unknown[0]}, which the model does not have (0 to {vocab_size - 1})",
                field="bad_words",
            )
        return [list(phrase) for phrase in phrases]

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
    _check_trace_context(submit.trace_context)
    tenant = submit.tenant
    if tenant is not None and (not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARACTERS):
        raise ValidationError(
            f"tenant must be text of at most {MAX_TENANT_CHARACTERS} characters, got {shorten(tenant)}", field="tenant"
        )


def _check_trace_context(context: Any) -> None:
    if context is None:
        return
    is_text = isinstance(context, dict) and all(isinstance(text, str) for item in context.items() for text in item)
    if not is_text or sum(len(key) + len(value) for key, value in context.items()) > MAX_TRACE_CHARACTERS:
        raise ValidationError(
            f"trace_context must be texts by text, at most {MAX_TRACE_CHARACTERS} characters, got {shorten(context)}",
            field="trace_context",
        )


def read_prompts_for(config: EngineConfig, model_dir: Path, model: ModelConfig) -> PromptReader:
    """A reader of prompts for this model, warm. Slow: call it in a thread. Raises `ConfigError` or `ModelLoadError`."""
    max_model_len = config.max_model_len or model.max_position_embeddings
    reader = PromptReader(
        model_dir, chat_template=config.chat_template, max_model_len=max_model_len, vocab_size=model.vocab_size
    )
    reader.warm()
    return reader


def resolver_for(reader: PromptReader, config: EngineConfig, capacity: Capacity, model: ModelConfig) -> Resolver:
    """What settles requests for this model on a device of this capacity."""
    reader = reader.within(max_model_len=capacity.max_model_len, vocab_size=capacity.vocab_size)
    return Resolver(reader, capacity, eos_token_ids=model.eos_token_ids, server_seed=config.seed)
