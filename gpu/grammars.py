"""Grammars: what of a `StructuredOutputs` llguidance compiles, within which bounds, and whether it can be compiled.

Bounds: the text's length (`protocol/structured.py`), the grammar's size and the lexer's effort (`limits`), which end a
compilation after a second or so, and the time and memory of the process in which a grammar is compiled first.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from ..protocol.errors import ValidationError
from ..protocol.structured import FIELD, StructuredOutputs
from .grammar_process import OUT_OF_ROOM, Answer, Question

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from tokenizers import Tokenizer

PATIENCE_S = 20.0
"""For the process that compiles a grammar, whose limit is in processor time: on a machine that is very busy."""
MAX_GBNF_CHARACTERS = 16_384
"""GBNF is converted to Lark in Python, whose cost grows with more than the text's length."""

_MAX_SYMBOLS = 20_000
_MAX_ITEMS_IN_ROW = 10_000
"""A thousand optional properties take four thousand; llguidance's default is half of that."""
_MAX_LEXER_FUEL = 500_000
_MAX_LEXER_STATES = 20_000
"""One or two kilobytes each."""
_MAX_MESSAGE = 1_000
_ENDED_BY_LIMITS = (signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""How the system ends a process for its time, its memory or its stack."""
_NUM_REMEMBERED = 64
_TOO_COMPLEX = "it is too complex: compiling it takes too much time or memory"
_WHITE_SPACE = r"[ \t]{1,32}|\r?\n[ \t]{0,32}"
_LARK = re.compile(r"%llguidance\b|start\s*:(?!:=)")


class GrammarChecker:
    """Compiles grammars for their mistakes, each once, in a process of its own (`grammar_process.py`). Thread-safe.

    That process knows the model's special tokens and, in the place of all others, single bytes: what may be wrong with a
    grammar hardly depends on them, and loading them all would take half a second.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i < vocab_size}
        names = {i: token.content for i, token in added.items()}
        self._question = Question("", vocab_size, eos_token_id, names, [i for i, token in added.items() if token.special])
        self._good: dict[str, None] = {}  # used as an ordered set
        self._lock = threading.Lock()

    def settle(self, wanted: StructuredOutputs) -> StructuredOutputs:
        """`wanted`, which has passed `check_structured_outputs`, as text that the device compiles: a schema's JSON, or Lark.

        Slow. Raises `ValidationError` with the compiler's own message, or for a grammar that costs too much.
        """
        name = next(name for name in wanted.__struct_fields__ if getattr(wanted, name))
        try:
            settled = _as_text(wanted)
            text = grammar_text(settled)
        except Exception as error:
            # Of many kinds: what the JSON encoder, the converter (RecursionError) or the bindings raise for bad input.
            raise ValidationError(f"{FIELD}.{name}: {shown(str(error) or type(error).__name__)}", field=FIELD) from None
        if text not in self._good:
            if message := self._compiled(text):
                raise ValidationError(f"{FIELD}.{name}: {shown(message)}", field=FIELD)
            with self._lock:
                self._good[text] = None
                if len(self._good) > _NUM_REMEMBERED:
                    del self._good[next(iter(self._good))]
        return settled

    def _compiled(self, text: str) -> str:
        """The compiler's message; empty: all is well."""
        # -P and the path: what lies in the current directory is nothing that is to run here.
        command = [sys.executable, "-P", "-m", f"{__package__}.grammar_process"]
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path))}
        question = msgspec.json.encode(msgspec.structs.replace(self._question, grammar=text))
        try:
            run = subprocess.run(
                command,
                input=question,
                capture_output=True,
                timeout=PATIENCE_S,
                check=False,
                env=environment,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except subprocess.TimeoutExpired:
            return _TOO_COMPLEX
        if run.returncode == OUT_OF_ROOM or -run.returncode in _ENDED_BY_LIMITS:
            return _TOO_COMPLEX
        try:
            return msgspec.json.decode(run.stdout, type=Answer).message
        except msgspec.DecodeError:
            words = run.stderr.decode(errors="replace")[-500:]
            raise RuntimeError(f"the process that compiles grammars ended with {run.returncode}: {words}") from None


def _as_text(wanted: StructuredOutputs) -> StructuredOutputs:
    if isinstance(wanted.json, dict):
        return StructuredOutputs(json=json.dumps(wanted.json, allow_nan=False, ensure_ascii=False))
    if wanted.grammar is not None and not _is_lark(wanted.grammar):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if len(wanted.grammar) > MAX_GBNF_CHARACTERS:
            raise ValueError(f"GBNF may have at most {MAX_GBNF_CHARACTERS} characters, got {len(wanted.grammar)}")
        return StructuredOutputs(grammar=gbnf_to_lark(wanted.grammar))
    return wanted


def _is_lark(text: str) -> bool:
    return any(_LARK.match(line.lstrip()) for line in text.splitlines())


def grammar_text(settled: StructuredOutputs) -> str:
    """What llguidance compiles."""
    from llguidance import LLMatcher

    if settled.json is not None or settled.json_object:
        schema = settled.json if settled.json is not None else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE})
    if settled.regex is not None:
        return LLMatcher.grammar_from_regex(settled.regex)
    if settled.choice is not None:
        # A string of Lark is one of JSON.
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in settled.choice)
        )
    return LLMatcher.grammar_from_lark(settled.grammar or "")


def limits() -> LLParserLimits:
    """What compiling and matching may cost."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=_MAX_LEXER_FUEL,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )


def shown(message: str) -> str:
    """The compiler's message, of bounded length, without what it says of its own state."""
    message = message.partition("<state>")[0].partition("<non-verbose/>")[0].strip()
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
