"""Structured outputs: grammars compiled by llguidance, and for each sequence the tokens that its grammar allows next.

A grammar is compiled twice. Where prompts are read it is compiled for its mistakes (`grammars.py`). On the device it
becomes a matcher over the model's vocabulary, kept in the sequence's slot; what goes wrong there fails that sequence alone.

All work of the device's matchers is done on one helper thread, in the order in which it is handed over:

    slot admitted                compile (or copy a compiled one), take in the output so far, fill the mask
    token n sampled              take in token n, fill the mask for n + 1
    step n + 1 has its logits    `SlotGrammar.mask` waits for that mask

So masks are filled beside the forward pass, and the compute thread waits only for what is left. A mask never lags behind
the log: steps run in order, and each waits for the mask after its own input token.
llguidance's calls let go of the GIL, but for loading the vocabulary, half a second with the first structured request.

Bounds of a step: items and lexer effort, llguidance's own defaults, some 20 ms at most. Those of a grammar: `grammars.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ..protocol.messages import NewRow
from ..protocol.sampling import SamplingParams
from ..protocol.structured import FIELD, StructuredOutputs
from .grammars import grammar_text, limits, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Int32Array = npt.NDArray[np.int32]
Uint32Array = npt.NDArray[np.uint32]
P = ParamSpec("P")
T = TypeVar("T")

_NUM_KEPT = 16
"""Compiled grammars that are kept: the same schema comes again and again, and for each of a request's sequences."""


class GrammarError(Exception):
    """A sequence's grammar cannot say what comes next; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{FIELD}: {message}")


class Grammars:
    """The grammars of one model on one device, and the thread that works on them. Costs nothing before the first one.

    `tokenizer_file` is the model's `tokenizer.json`. Ids from `vocab_size` on, and those without text, are never allowed.
    `eos_token_ids` end an answer.
    """

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.valid: Uint32Array = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
        """The bits of a mask that are tokens of the model."""
        if vocab_size % 32:
            self.valid[-1] = (1 << vocab_size % 32) - 1
        self.without_ends: Uint32Array = self.valid.copy()
        for token_id in self.eos_token_ids:
            self.without_ends[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        # Only the helper thread touches what follows.
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, row: NewRow) -> SlotGrammar | None:
        """The grammar of a sequence that comes to the device, None if it has none. Does not wait."""
        wanted = row.params.structured_outputs
        if wanted is None:
            return None
        return SlotGrammar(self, wanted, row.params, row.token_ids[row.num_prompt_tokens :])

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do `work` on the helper thread, behind what was submitted before."""
        return self._helper.submit(work, *args, **kwargs)

    def matcher(self, wanted: StructuredOutputs) -> LLMatcher:
        """A matcher at its beginning. On the helper thread only. Raises `GrammarError`."""
        from llguidance import LLMatcher

        grammar = grammar_text(wanted)
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self.vocabulary(), grammar, log_level=0, limits=limits())
            if compiled.is_error():
                raise GrammarError(shown(compiled.get_error()))
        self._compiled[grammar] = compiled
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def vocabulary(self) -> LLTokenizer:
        """llguidance's view of the vocabulary, loaded once. On the helper thread only."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            ends = sorted(self.eos_token_ids)
            try:
                self._tokenizer = LLTokenizer(str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=ends)
            except ValueError:
                # The tokenizer knows more tokens than the model has rows for; their bits are cut off.
                self._tokenizer = LLTokenizer(str(self._tokenizer_file), eos_token=ends)
        return self._tokenizer

    def close(self) -> None:
        """End the thread, after what it is doing now. May be called twice."""
        self._helper.shutdown(wait=True, cancel_futures=True)
        self._compiled.clear()
        self._tokenizer = None


class SlotGrammar:
    """What the grammar of one sequence allows next. Its owner tells it each token and asks for a mask before the next."""

    def __init__(
        self, grammars: Grammars, wanted: StructuredOutputs, params: SamplingParams, output_ids: Sequence[int]
    ) -> None:
        self._grammars = grammars
        self._params = params
        self._num_output_tokens = 0
        self._is_at_end = False
        self.words: Int32Array = np.zeros(len(grammars.valid), np.int32)
        """Where `mask` is filled: what it holds before that returns is nothing to go by."""
        self._next: Future[Int32Array] = grammars.submit(self._begin, wanted, list(output_ids))

    def mask(self) -> Int32Array:
        """The tokens that may come next: int32 [ceil(vocab_size / 32)], bit i of word j is token 32 j + i.

        Waits until it is filled. It is `words`, and valid until the next `accept`. Raises `GrammarError`, then and from
        then on, if the grammar does not compile, becomes too complex, or does not allow a token that came.
        """
        return self._next.result()

    def accept(self, token_id: int) -> None:
        """`token_id` has been sampled. Does not wait."""
        self._next = self._grammars.submit(self._accept, token_id, self._next)

    def _begin(self, wanted: StructuredOutputs, output_ids: list[int]) -> Int32Array:
        with _as_grammar_errors():
            self._matcher = self._grammars.matcher(wanted)
            self._filling: Uint32Array = np.zeros((self._grammars.vocabulary().vocab_size + 31) // 32, np.uint32)
            for token_id in output_ids:
                self._take(token_id)
            return self._filled()

    def _accept(self, token_id: int, before: Future[Int32Array]) -> Int32Array:
        before.result()  # a grammar that has failed stays so
        with _as_grammar_errors():
            self._take(token_id)
            return self._filled()

    def _take(self, token_id: int) -> None:
        self._num_output_tokens += 1
        if self._is_at_end:
            return  # sampled before the end was known upstream; it is dropped there
        if not self._matcher.consume_token(token_id):
            raise GrammarError(shown(self._matcher.get_error()))
        # Also where it is text of the grammar's own (a special token by name): an end token ends the request.
        self._is_at_end = token_id in self._grammars.eos_token_ids

    def _filled(self) -> Int32Array:
        self._matcher.unsafe_compute_mask_ptr(self._filling.ctypes.data, self._filling.nbytes)
        if self._matcher.is_error() and not self._is_at_end:
            raise GrammarError(shown(self._matcher.get_error()))
        grammars = self._grammars
        found = self._filling[: len(grammars.valid)] & grammars.valid
        if self._params.ignore_eos or self._num_output_tokens < self._params.min_tokens:
            others = found & grammars.without_ends
            found = others if others.any() else found
        self.words[:] = found.view(np.int32)
        return self.words


@contextmanager
def _as_grammar_errors() -> Iterator[None]:
    """Whatever goes wrong is this sequence's: a missing file, a panic of the Rust code, which is no `Exception`."""
    try:
        yield
    except GrammarError:
        raise
    except BaseException as error:
        raise GrammarError(f"{type(error).__name__}: {error}") from error
