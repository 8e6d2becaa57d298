"""The process in which a grammar is compiled for the first time: `python -m repertory.gpu.grammar_process`.

Some grammars of a few hundred characters take the compiler minutes, or its stack (intersections of expressions, chains of
terminals), whatever limits it is given. Here that costs a process, which the system ends: after `CPU_LIMIT_S` of processor
time, or at `MEMORY_LIMIT_BYTES`. Reads a `Question` as JSON, writes the compiler's message, empty where all is well.
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


class Question(msgspec.Struct, array_like=True):
    """A grammar, and what of the vocabulary may matter to it: `names` and `special` are those of the added tokens."""

    grammar: str
    vocab_size: int
    eos_token_id: int
    names: dict[int, str]
    special: list[int]


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
    LLMatcher(vocabulary, question.grammar, log_level=0, limits=limits()).compute_bitmask()
    return ""


def main() -> None:
    """Answer one question."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.write(message_of(question))


if __name__ == "__main__":
    main()
