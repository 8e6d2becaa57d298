"""One request's text: streaming equals not streaming, and ids are counted to the one that completes a stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from repertory.actors.text.decode import Vocabulary
from repertory.actors.text.machine import Piece, TextMachine
from repertory.protocol.ids import RequestId
from repertory.protocol.messages import Open
from repertory.protocol.sampling import SamplingParams
from repertory.tests.text import small_tokenizers
from repertory.tests.text.small_tokenizers import byte_ids

BR, OWN_F, OX_JUMPS, OVER, OWN_FOX, NEW_LINE, A, B, END = range(9)
BYTE_LEVEL = Vocabulary(small_tokenizers.byte_level())


def machine(tokenizer: Tokenizer | Vocabulary, *, tail: list[int] | None = None, **params: object) -> TextMachine:
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    opening = Open(RequestId(1), tail or [], SamplingParams(**params), 1, 0, 0.0, 0.0)  # type: ignore[arg-type]
    return TextMachine(vocabulary, opening)


@pytest.mark.parametrize(("include", "text"), [(False, "The quick br"), (True, "The quick brown fox")])
def test_a_stop_string_across_pieces_gives_the_same_text_streaming_and_not(
    quick_brown: Tokenizer, include: bool, text: str
) -> None:
    ids = [BR, OWN_F, OX_JUMPS]
    streamed = machine(quick_brown, stop=["own fox"], include_stop_str_in_output=include)
    pieces = [streamed.push([token_id]) for token_id in ids]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.stop for piece in pieces] == [None, None, "own fox"]
    at_once = machine(quick_brown, stop=["own fox"], include_stop_str_in_output=include)
    assert at_once.push([*ids, OVER]) == Piece(text, 3, "own fox")


def test_no_character_of_a_stop_string_is_given_before_it_is_sure(quick_brown: Tokenizer) -> None:
    text = machine(quick_brown, stop=["own fox"])
    assert [text.push([i]).text for i in (BR, OWN_F)] == ["The quick br", ""]
    assert text.finish() == Piece("own f", 0, None)


def test_ids_after_the_one_that_completes_a_stop_are_surplus(quick_brown: Tokenizer) -> None:
    assert machine(quick_brown, stop=["own fox"]).push([BR, OWN_FOX, OVER, OVER]).num_tokens == 2


def test_text_of_the_prompt_never_completes_a_stop(quick_brown: Tokenizer) -> None:
    text = machine(quick_brown, stop=["own fox"], tail=[BR, OWN_F])
    assert text.push([OX_JUMPS]) == Piece("ox jumps", 1, None)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab</s>")])
def test_a_stop_tokens_text_stays_out_unless_stops_are_included(quick_brown: Tokenizer, include: bool, text: str) -> None:
    end = machine(quick_brown, include_stop_str_in_output=include, skip_special_tokens=False)
    piece = end.push([A, B, END], ends_with_stop_token=True)
    assert piece == Piece(text, 3, None)
    assert end.finish().text == ""


def test_a_stop_string_wins_over_a_stop_token_that_comes_with_it(quick_brown: Tokenizer) -> None:
    piece = machine(quick_brown, stop="b").push([A, B, END], ends_with_stop_token=True)
    assert piece == Piece("a", 2, "b")


def test_a_stop_tokens_own_text_completes_no_stop_string(quick_brown: Tokenizer) -> None:
    ended = machine(quick_brown, stop="own fox")
    assert ended.push([BR, OWN_FOX], ends_with_stop_token=True) == Piece("The quick br", 2, None)


def test_incomplete_bytes_and_a_held_tail_come_out_together_at_the_end() -> None:
    ids = byte_ids(BYTE_LEVEL.tokenizer, b"ab\xf0\x9f")
    text = machine(BYTE_LEVEL, stop=["abc"])
    assert text.push(ids) == Piece("", 4, None)
    assert text.finish() == Piece("ab\ufffd", 0, None)


def test_a_stop_string_can_complete_with_the_flushed_end() -> None:
    text = machine(BYTE_LEVEL, stop=["b\ufffd"])
    assert text.push(byte_ids(BYTE_LEVEL.tokenizer, b"ab\xf0\x9f")).text == "a"
    assert text.finish() == Piece("", 0, "b\ufffd")


def test_a_stop_string_that_begins_and_ends_inside_tokens_and_characters_apart() -> None:
    ids = byte_ids(BYTE_LEVEL.tokenizer, "x😀你y".encode())
    text = machine(BYTE_LEVEL, stop=["😀你"])
    pieces = [text.push([token_id]) for token_id in ids[:8]]
    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == ("x", "😀你")


def test_text_of_the_first_min_tokens_is_no_part_of_a_stop(quick_brown: Tokenizer) -> None:
    text = machine(quick_brown, stop=["\n", "ab"], min_tokens=3)
    pieces = [text.push([i]) for i in (A, NEW_LINE, A, B, A, NEW_LINE)]
    assert "".join(piece.text for piece in pieces) == "a\naba"
    assert pieces[-1] == Piece("a", 1, "\n")


@given(
    data=st.binary(max_size=24),
    sizes=st.lists(st.integers(1, 4), min_size=24, max_size=24),
    stops=st.lists(st.one_of(st.text("ab ", min_size=1, max_size=3), st.sampled_from(["😀", "\ufffd", "é"])), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_output_in_any_portions_gives_one_text_and_one_count(
    data: bytes, sizes: list[int], stops: list[str], include: bool
) -> None:
    data = b"a \xf0\x9f\x98\x80b" + data
    ids, tail = byte_ids(BYTE_LEVEL.tokenizer, data), byte_ids(BYTE_LEVEL.tokenizer, b"ab")
    at_once = machine(BYTE_LEVEL, tail=tail, stop=stops, include_stop_str_in_output=include)
    whole = at_once.push(ids)
    if whole.stop is None:
        end = at_once.finish()
        whole = Piece(whole.text + end.text, whole.num_tokens, end.stop)

    streamed = machine(BYTE_LEVEL, tail=tail, stop=stops, include_stop_str_in_output=include)
    text, count, stop, first = "", 0, None, 0
    for size in sizes:
        piece = streamed.push(ids[first : first + size])
        first += size
        text, count, stop = text + piece.text, count + piece.num_tokens, piece.stop
        assert whole.text.startswith(text)
        if stop is not None:
            break
    if stop is None:
        piece = streamed.push(ids[first:])
        text, count, stop = text + piece.text, count + piece.num_tokens, piece.stop
    if stop is None:
        last = streamed.finish()
        text, stop = text + last.text, last.stop
    assert Piece(text, count, stop) == whole
    if stop is None:
        assert text == data.decode("utf-8", "replace")
