"""The process in which a grammar is compiled for the first time: `python -m repertory.gpu.grammar_process`.

Some grammars of a few hundred characters take the compiler minutes, or its stack (intersections of expressions, chains of
terminals), whatever limits it is given. Here that costs a process, which the system ends: after `CPU_LIMIT_S` of processor
time, or at `MEMORY_LIMIT_BYTES`. Reads a `Question` as JSON, writes an `Answer`.
"""

from __future__ import annotations

import resource
import sys
from itertools import islice
from typing import TYPE_CHECKING, cast

import msgspec

if TYPE_CHECKING:
    from llguidance import TokenizerWrapper

CPU_LIMIT_S = 2
"""Its start takes a tenth of it."""
MEMORY_LIMIT_BYTES = 2 << 30
NOTHING_ALLOWED = "NoExtensionBias"
"""What llguidance calls an empty mask."""
OUT_OF_ROOM = 3
"""Its status where Python itself ran out of memory or stack."""


class Question(msgspec.Struct, array_like=True):
    """A grammar, and what of the vocabulary may matter to it: `names` and `special` are those of the added tokens."""

    grammar: str
    vocab_size: int
    eos_token_id: int
    names: dict[int, str]
    special: list[int]


class Answer(msgspec.Struct):
    """The compiler's message, empty where all is well. Whatever else is written is no answer."""

    message: str


class Names:
    """What llguidance asks of a tokenizer (`llguidance.TokenizerWrapper`): added tokens by name, bytes for the others."""

    is_tokenizer_wrapper = True

    def __init__(self, question: Question) -> None:
        self.eos_token_id = question.eos_token_id
        self.bos_token_id = None
        self.special_token_ids = question.special
        self.tokens = [b""] * question.vocab_size
        for i, name in question.names.items():
            self.tokens[i] = name.encode()
        for byte, i in enumerate(islice((i for i in range(question.vocab_size) if i not in question.names), 256)):
            self.tokens[i] = bytes([byte])

    def __call__(self, text: str | bytes) -> list[int]:
        """Text as tokens: only ever tried out, never used to compile."""
        return []


def message_of(question: Question) -> str:
    """What is wrong with the grammar; empty: nothing."""
    from llguidance import LLMatcher, LLTokenizer

    from .grammars import limits

    # It asks for a class of its own and looks at the attributes only.
    vocabulary = LLTokenizer(cast("TokenizerWrapper", Names(question)), slices=[])
    is_error, messages = LLMatcher.validate_grammar_with_warnings(question.grammar, vocabulary, limits=limits())
    if is_error:
        return messages[0]
    # For its cost: this goes further than validating does. Whether a mask allows anything is not for this vocabulary to say.
    matcher = LLMatcher(vocabulary, question.grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()
    error = matcher.get_error() if matcher.is_error() else ""
    return "" if error.startswith(NOTHING_ALLOWED) else error


def main() -> None:
    """Answer one question."""
    _limit(resource.RLIMIT_CPU, CPU_LIMIT_S)
    _limit(resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    try:
        message = message_of(question)
    except (MemoryError, RecursionError):
        sys.exit(OUT_OF_ROOM)
    sys.stdout.buffer.write(msgspec.json.encode(Answer(message)))


def _limit(what: int, least: int) -> None:
    """Not more than `least`, nor than what this process was given."""
    inherited = resource.getrlimit(what)[1]
    limit = least if inherited == resource.RLIM_INFINITY else min(least, inherited)
    resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
