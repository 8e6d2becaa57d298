"""What of structured outputs needs no engine: the check of the field, compiling, and the masks of one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from repertory import SamplingParams, ValidationError
from repertory.gpu.grammars import GrammarChecker
from repertory.gpu.structured import GrammarError, Grammars, SlotGrammar
from repertory.protocol.ids import SequenceId
from repertory.protocol.messages import NewRow
from repertory.protocol.sampling import check
from repertory.protocol.structured import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, MAX_REGEX_CHARACTERS, StructuredOutputs
from repertory.tests.tiny_model import make_tiny_model

EOS = 2
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> GrammarChecker:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), weights=False)
    return GrammarChecker(Tokenizer.from_file(str(model / "tokenizer.json")), vocab_size=320, eos_token_id=EOS)


# ---- the field ----------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def endless() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


BAD = {
    "no struct": ({"json": {}}, "must be StructuredOutputs, not dict"),
    "nothing set": (StructuredOutputs(), "exactly one of"),
    "json_object off": (StructuredOutputs(json_object=False), "exactly one of"),
    "two set": (StructuredOutputs(regex="a", choice=["a"]), "got regex, choice"),
    "a number for a schema": (StructuredOutputs(json=5), "json must be text"),  # type: ignore[arg-type]
    "an empty schema text": (StructuredOutputs(json=""), "json must be text of 1 to"),
    "a long schema text": (StructuredOutputs(json="x" * (MAX_GRAMMAR_CHARACTERS + 1)), "json must be text of 1 to 65536"),
    "a large schema": (StructuredOutputs(json={"enum": ["x" * 50] * 2_000}), "json must be of at most"),
    "a schema of a huge list": (StructuredOutputs(json={"enum": [0] * 5_000_000}), "json must be of at most"),
    "a deep schema": (StructuredOutputs(json=nested(101)), "json must be at most 100 levels deep"),
    "a schema within itself": (StructuredOutputs(json=endless()), "json must be at most 100 levels deep"),
    "json_object no bool": (StructuredOutputs(json_object=1), "json_object must be true or false"),  # type: ignore[arg-type]
    "a long regex": (StructuredOutputs(regex="x" * (MAX_REGEX_CHARACTERS + 1)), "regex must be text"),
    "a regex that is no text": (StructuredOutputs(regex="\ud800"), "regex is not valid Unicode"),
    "a long grammar": (StructuredOutputs(grammar="x" * (MAX_GRAMMAR_CHARACTERS + 1)), "grammar must be text"),
    "one text for choices": (StructuredOutputs(choice="yes"), "choice must be a list"),  # type: ignore[arg-type]
    "no choices": (StructuredOutputs(choice=[]), "choice must be a list"),
    "many choices": (StructuredOutputs(choice=["x"] * (MAX_CHOICES + 1)), "choice must be a list of 1 to 2048"),
    "an empty choice": (StructuredOutputs(choice=["a", ""]), "choice must hold strings that are not empty"),
    "a choice that is none": (StructuredOutputs(choice=["a", 7]), "got 7"),  # type: ignore[list-item]
    "long choices": (StructuredOutputs(choice=["x" * 40_000] * 2), "choice must be of at most"),
    "a choice that is no text": (StructuredOutputs(choice=["\ud800"]), "choice is not valid Unicode"),
}


@pytest.mark.parametrize(("wanted", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_constraint_or_too_large_is_refused_cheaply(wanted: Any, message: str) -> None:
    params = SamplingParams(structured_outputs=wanted)
    started = time.thread_time()
    with pytest.raises(ValidationError, match=message) as caught:
        check(params, vocab_size=320)
    assert time.thread_time() - started < 0.2
    assert caught.value.field == "structured_outputs"
    assert len(str(caught.value)) < 300


def test_a_schema_is_settled_as_text_that_any_process_can_read(checker: GrammarChecker) -> None:
    settle = checker.settle
    settled = settle(StructuredOutputs(json={"const": 2**70, "title": "é"}))
    assert settled == StructuredOutputs(json='{"const": 1180591620717411303424, "title": "é"}')
    settled = settle(StructuredOutputs(grammar='root ::= "a" | "b"'))
    assert settled.grammar is not None and "start:" in settled.grammar
    for same in (StructuredOutputs(regex="a+"), StructuredOutputs(grammar='start: "::="'), StructuredOutputs(choice=["a"])):
        assert settle(same) == same


@pytest.mark.parametrize("value", [float("inf"), object(), 10**5_000, b"x"], ids=["infinity", "object", "huge", "bytes"])
def test_a_schema_of_what_json_has_no_word_for_is_refused(checker: GrammarChecker, value: Any) -> None:
    with pytest.raises(ValidationError, match=r"structured_outputs\.json"):
        checker.settle(StructuredOutputs(json={"const": value}))


HANGING = [
    StructuredOutputs(json={"allOf": [{"type": "string", "pattern": f"(.*a){{{3 + i}}}"} for i in range(30)]}),
    StructuredOutputs(grammar="start: A\nA: " + " & ".join(f"/.*x{i}.*/" for i in range(100))),
    StructuredOutputs(grammar="start: A0\n" + "\n".join(f'A{i}: ("y" A{i + 1} "x")?' for i in range(2_500)) + '\nA2500: "a"'),
]


@pytest.mark.parametrize("wanted", HANGING, ids=["patterns", "intersections", "a chain of terminals"])
def test_what_would_hang_or_crash_the_compiler_is_refused(checker: GrammarChecker, wanted: StructuredOutputs) -> None:
    with pytest.raises(ValidationError, match="too complex"):
        checker.settle(wanted)
    assert checker.settle(StructuredOutputs(regex="a")) == StructuredOutputs(regex="a")


def test_what_lies_in_the_current_directory_is_not_run_and_no_answer_is_none(
    checker: GrammarChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llguidance", "msgspec", "json"):
        (tmp_path / f"{name}.py").write_text("import sys\nopen('it_ran', 'w').close()\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError, match=r"structured_outputs\.regex"):
        checker.settle(StructuredOutputs(regex="[not closed"))
    checker.settle(StructuredOutputs(regex="[a-z]+ in here"))
    assert not (tmp_path / "it_ran").exists()


def test_a_grammar_whose_first_mask_fails_is_refused(checker: GrammarChecker) -> None:
    terms = " & ".join(f"/.*x{number}.*/" for number in range(13))
    with pytest.raises(ValidationError, match=r"structured_outputs\.grammar"):
        checker.settle(StructuredOutputs(grammar=f"start: A\nA: {terms}\n"))


def test_tokens_by_number_are_those_of_the_model(checker: GrammarChecker) -> None:
    assert checker.settle(StructuredOutputs(grammar="start: <[319]>")).grammar
    with pytest.raises(ValidationError, match="320"):
        checker.settle(StructuredOutputs(grammar="start: <[320]>"))


# ---- masks --------------------------------------------------------------------------------------

OpenGrammars = Callable[..., "Opened"]


class Opened:
    """The grammars of a tiny model, and sequences that follow one."""

    def __init__(self, model: Path, *, vocab_size: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.checker = GrammarChecker(self.tokenizer, vocab_size=vocab_size, eos_token_id=EOS)
        self.grammars = Grammars(model / "tokenizer.json", vocab_size=vocab_size, eos_token_ids=[EOS])

    def begin(self, wanted: StructuredOutputs, output: str = "", **params: Any) -> SlotGrammar:
        return self.begin_unchecked(self.checker.settle(wanted), output, **params)

    def begin_unchecked(self, wanted: StructuredOutputs, output: str = "", **params: Any) -> SlotGrammar:
        settings = SamplingParams(structured_outputs=wanted, **params)
        slot = self.grammars.begin(NewRow(SequenceId(1), [*PROMPT, *self.ids(output)], len(PROMPT), settings, []))
        assert slot is not None
        return slot

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def write(self, slot: SlotGrammar, text: str) -> None:
        for token in self.ids(text):
            slot.accept(token)


def allowed(slot: SlotGrammar) -> set[int]:
    """The tokens of a mask, whatever bits it has."""
    bits = np.unpackbits(slot.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    def model(vocab_size: int) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=vocab_size, weights=False)

    return model


@pytest.fixture
def opened(models: Callable[[int], Path]) -> Iterator[OpenGrammars]:
    with ExitStack() as stack:

        def open_grammars(vocab_size: int = 320, tokenizer_size: int = 320) -> Opened:
            found = Opened(models(tokenizer_size), vocab_size=vocab_size)
            stack.callback(found.grammars.close)
            return found

        yield open_grammars


def test_only_what_the_grammar_allows_is_allowed_and_the_end_when_it_is_complete(opened: OpenGrammars) -> None:
    o = opened()
    slot = o.begin(StructuredOutputs(regex=r"[ab]c?"))
    assert slot.mask().dtype == np.int32 and slot.mask().shape == (10,)
    assert allowed(slot) == {*o.ids("a"), *o.ids("b"), *o.ids("ac"), *o.ids("bc")} - {EOS}
    o.write(slot, "a")
    assert allowed(slot) == {*o.ids("c"), EOS}
    o.write(slot, "c")
    assert allowed(slot) == {EOS}, "forced: nothing else may follow"
    slot.accept(EOS)
    slot.accept(77)
    assert allowed(slot) == {EOS}, "what is sampled after the end, before it is known upstream, is harmless"


@pytest.mark.parametrize(("vocab_size", "tokenizer_size"), [(320, 320), (383, 320), (1200, 320), (1200, 1200)])
def test_ids_without_text_are_never_allowed(opened: OpenGrammars, vocab_size: int, tokenizer_size: int) -> None:
    o = opened(vocab_size, tokenizer_size)
    slot = o.begin(StructuredOutputs(regex=r"(.|\n)*"))
    known = {token for token in range(vocab_size) if o.tokenizer.id_to_token(token) is not None}
    special = {0, 1, tokenizer_size - 2, tokenizer_size - 1}
    found = allowed(slot)
    assert len(slot.mask()) == (vocab_size + 31) // 32
    assert found <= known - special and EOS in found and len(found) > 100


@pytest.mark.parametrize("vocab_size", [290, 288, 300])
def test_a_tokenizer_larger_than_the_model_gives_no_id_that_the_model_lacks(opened: OpenGrammars, vocab_size: int) -> None:
    o = opened(vocab_size, 320)
    slot = o.begin(StructuredOutputs(regex=r"(.|\n)*"))
    assert len(slot.mask()) == (vocab_size + 31) // 32
    assert max(allowed(slot)) < vocab_size


def test_a_grammar_built_from_a_log_goes_on_where_that_ended(opened: OpenGrammars) -> None:
    o = opened()
    wanted = StructuredOutputs(json={"type": "object", "properties": {"an": {"enum": ["the", "hello"]}}, "required": ["an"]})
    text = '{"an": "hello"}'
    stepwise = o.begin(wanted)
    for i in range(len(o.ids(text))):
        rebuilt = o.begin(wanted, o.tokenizer.decode(o.ids(text)[:i], skip_special_tokens=False))
        assert allowed(rebuilt) == allowed(stepwise)
        stepwise.accept(o.ids(text)[i])
    assert allowed(stepwise) == {EOS}
    assert allowed(o.begin(wanted, text)) == {EOS}


def test_sequences_with_one_grammar_do_not_meet(opened: OpenGrammars) -> None:
    o = opened()
    one, other = (o.begin(StructuredOutputs(choice=["ab", "cd"])) for _ in range(2))
    o.write(one, "a")
    assert o.ids("c")[0] in allowed(other) and allowed(one) == set(o.ids("b"))
    o.write(other, "c")
    assert allowed(one) == set(o.ids("b"))


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_the_end_is_held_back_only_while_something_else_may_follow(opened: OpenGrammars, params: dict[str, Any]) -> None:
    o = opened()
    slot = o.begin(StructuredOutputs(regex=r"(z?z?z?z?)|qj"), max_tokens=9, **params)
    assert allowed(slot) and EOS not in allowed(slot)
    for _ in range(3):
        o.write(slot, "z")
    assert (EOS in allowed(slot)) == ("min_tokens" in params)
    o.write(slot, "z")
    assert allowed(slot) == {EOS}


def test_a_token_that_is_not_allowed_fails_the_grammar_for_good(opened: OpenGrammars) -> None:
    o = opened()
    slot, other = (o.begin(StructuredOutputs(choice=["ab"])) for _ in range(2))
    o.write(slot, "x")
    for _ in range(2):
        with pytest.raises(GrammarError, match="structured_outputs: "):
            slot.mask()
        slot.accept(5)
    assert EOS not in allowed(other)


def test_one_that_becomes_too_complex_fails_alone(opened: OpenGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    o = opened()
    other = o.begin(StructuredOutputs(choice=["ab"]))
    assert EOS not in allowed(other)
    monkeypatch.setattr("repertory.gpu.grammars._MAX_ITEMS_IN_ROW", 20)
    slot = o.begin(StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {} for i in range(400)}}), '{"p')
    with pytest.raises(GrammarError, match="items"):
        slot.mask()
    o.write(other, "a")
    assert allowed(other) == set(o.ids("b"))


def test_a_schema_of_a_thousand_properties_is_no_problem(opened: OpenGrammars) -> None:
    o = opened()
    slot = o.begin(StructuredOutputs(json={"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}), '{"p')
    assert set(o.ids("7")) <= allowed(slot)


def test_a_special_token_that_the_model_lacks_fails_it_alone(opened: OpenGrammars) -> None:
    o = opened()
    with pytest.raises(GrammarError, match="nobody"):
        o.begin_unchecked(StructuredOutputs(grammar='start: "a" <|nobody|>')).mask()
    with pytest.raises(ValidationError, match="nobody"):
        o.begin(StructuredOutputs(grammar='start: "a" <|nobody|>'))
    known = o.begin(StructuredOutputs(grammar="start: <|im_start|> /[a-z]/"))
    assert allowed(known) == {318}


def test_a_missing_tokenizer_fails_every_sequence_that_needs_it_and_nobody_else(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path / "tokenizer.json", vocab_size=320, eos_token_ids=[EOS])
    row = NewRow(SequenceId(1), PROMPT, 3, SamplingParams(structured_outputs=StructuredOutputs(choice=["a"])), [])
    slot = grammars.begin(row)
    assert slot is not None
    with pytest.raises(GrammarError):
        slot.mask()
    assert grammars.begin(NewRow(SequenceId(2), PROMPT, 3, SamplingParams(), [])) is None
    grammars.close()
    grammars.close()
