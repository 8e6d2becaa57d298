"""Joined pieces equal the one-shot decode after the same prompt; nothing is given that must be taken back."""

from __future__ import annotations

import itertools
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from repertory.actors.text.decode import HELD_LIMIT, TextDecoder, Vocabulary
from repertory.protocol.messages import PROMPT_TAIL
from repertory.tests.text import small_tokenizers
from repertory.tests.text.small_tokenizers import SENTENCES, byte_ids

BYTE_LEVEL = Vocabulary(small_tokenizers.byte_level())
BYTE_FALLBACK = Vocabulary(small_tokenizers.byte_fallback())
UNIGRAM = Vocabulary(small_tokenizers.unigram())


def stream(vocabulary: Vocabulary, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    """The pieces of `output`, the last one flushed."""
    decoder = TextDecoder(vocabulary, prompt[-PROMPT_TAIL:], skip_special_tokens=skip)
    return [decoder.step(token_id) for token_id in output] + [decoder.flush()]


def one_shot(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """The text that `output` adds to the prompt's, decoded all at once."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("text", SENTENCES)
def test_streamed_text_is_the_text_for_every_kind_of_tokenizer(vocabulary: Vocabulary, text: str) -> None:
    prompt, output = encode(vocabulary, "a b."), encode(vocabulary, text)
    pieces = stream(vocabulary, prompt, output)
    assert "".join(pieces) == one_shot(vocabulary.tokenizer, prompt, output)
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_split_of_a_prompt_at_a_character_gives_the_same_whole(vocabulary: Vocabulary) -> None:
    ids = encode(vocabulary, " ".join(SENTENCES))
    whole = vocabulary.tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        before = vocabulary.tokenizer.decode(ids[:cut])
        if not before.endswith("\ufffd"):
            assert before + "".join(stream(vocabulary, ids[:cut], ids[cut:])) == whole


def test_no_piece_of_a_split_emoji_is_a_replacement_character(vocabulary: Vocabulary) -> None:
    output = byte_ids(vocabulary.tokenizer, "😀👩‍👧".encode())
    pieces = stream(vocabulary, encode(vocabulary, "a"), output)
    assert [piece for piece in pieces if piece] == ["😀", "👩", "\u200d", "👧"]


def test_combining_marks_are_given_as_they_come_and_not_composed(vocabulary: Vocabulary) -> None:
    text = unicodedata.normalize("NFD", "éǖ")
    output = byte_ids(vocabulary.tokenizer, text.encode())
    assert "".join(stream(vocabulary, encode(vocabulary, "a"), output)) == text


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_incomplete_end_is_exactly_one_replacement_in_the_last_piece(vocabulary: Vocabulary, cut: int) -> None:
    output = [*encode(vocabulary, "fox"), *byte_ids(vocabulary.tokenizer, "你😀".encode()[: 3 + cut])]
    pieces = stream(vocabulary, encode(vocabulary, "a"), output)
    assert pieces[-1] == "\ufffd"
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces).endswith("fox你\ufffd")


def test_leading_and_repeated_spaces_after_the_prompt_are_kept() -> None:
    the, gap = BYTE_FALLBACK.tokenizer.token_to_id("▁the"), BYTE_FALLBACK.tokenizer.token_to_id("▁▁")
    assert stream(BYTE_FALLBACK, [the], [the, gap, the, gap]) == [" the", "  ", " the", "  ", ""]


def test_a_space_alone_is_kept_when_it_is_the_first_output() -> None:
    space = BYTE_FALLBACK.tokenizer.token_to_id("▁")
    the = BYTE_FALLBACK.tokenizer.token_to_id("▁the")
    assert stream(BYTE_FALLBACK, [the], [space, space, the])[:3] == [" ", " ", " the"]
    assert stream(UNIGRAM, [UNIGRAM.tokenizer.token_to_id("a")], [UNIGRAM.tokenizer.token_to_id("▁")] * 3) == [" "] * 3 + [""]


def test_the_first_word_after_a_bare_start_token_loses_its_space_as_in_one_shot() -> None:
    start, the = 0, BYTE_FALLBACK.tokenizer.token_to_id("▁the")
    assert stream(BYTE_FALLBACK, [start], [the, the]) == ["the", " the", ""]


def test_a_prompt_that_ends_in_special_tokens_still_gives_context_to_the_first_word() -> None:
    the = BYTE_FALLBACK.tokenizer.token_to_id("▁the")
    prompt = [the, *[0] * (PROMPT_TAIL - 1)]
    assert stream(BYTE_FALLBACK, prompt, [the])[0] == " the"


def test_special_tokens_between_words_are_skipped_or_shown(vocabulary: Vocabulary) -> None:
    prompt = encode(vocabulary, "a")
    output = [*encode(vocabulary, "the fox"), 2, *encode(vocabulary, "the"), 0, 1, *encode(vocabulary, "fox")]
    for skip in (True, False):
        joined = "".join(stream(vocabulary, prompt, output, skip=skip))
        assert joined == one_shot(vocabulary.tokenizer, prompt, output, skip=skip)
        assert ("<|im_end|>" in joined) is not skip


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    lead, *rest = byte_ids(BYTE_LEVEL.tokenizer, "😀".encode())
    output = [lead, *[2, BYTE_LEVEL.size] * HELD_LIMIT, *rest]
    assert "".join(stream(BYTE_LEVEL, encode(BYTE_LEVEL, "a"), output)) == "😀"


def test_an_added_token_with_a_space_is_text() -> None:
    tool = BYTE_LEVEL.tokenizer.token_to_id("<tool call>")
    assert stream(BYTE_LEVEL, [], [tool, tool]) == ["<tool call>", "<tool call>", ""]


def test_ids_the_tokenizer_does_not_know_are_silent(vocabulary: Vocabulary) -> None:
    unknown = vocabulary.size + 7
    fox = encode(vocabulary, "fox")
    joined = "".join(stream(vocabulary, [*encode(vocabulary, "a"), unknown], [unknown, *fox, unknown]))
    assert joined == one_shot(vocabulary.tokenizer, encode(vocabulary, "a"), fox)


def test_an_id_that_is_no_id_raises_and_is_not_swallowed() -> None:
    decoder = TextDecoder(BYTE_LEVEL, [], skip_special_tokens=True)
    with pytest.raises(TypeError):
        decoder.step(-1)


# ---- prompts that end inside a character ----------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_given_whole_and_nothing_else_of_the_prompt(
    vocabulary: Vocabulary, cut: int
) -> None:
    ids = byte_ids(vocabulary.tokenizer, "😀".encode())
    prompt = [*encode(vocabulary, "the fox"), *ids[:cut]]
    pieces = stream(vocabulary, prompt, [*ids[cut:], *encode(vocabulary, "fox")])
    assert "".join(pieces) in ("😀fox", "😀 fox")
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_cut_at_any_byte_goes_on_from_the_character_that_was_cut(vocabulary: Vocabulary) -> None:
    text = "a你好😀 é́b👩‍👩‍👧 c"
    ids = byte_ids(vocabulary.tokenizer, text.encode())
    starts = list(itertools.accumulate((len(character.encode()) for character in text), initial=0))
    for cut in range(1, len(ids)):
        first = next(i for i, start in reversed(list(enumerate(starts))) if start <= cut)
        assert "".join(stream(vocabulary, ids[:cut], ids[cut:])) == text[first:]


def test_a_prompt_cut_inside_a_character_that_the_output_does_not_go_on_with_leaves_no_trace() -> None:
    prompt = [*encode(BYTE_LEVEL, "fox"), *byte_ids(BYTE_LEVEL.tokenizer, b"\xf0\x9f")]
    output = encode(BYTE_LEVEL, " the 😀 dog")
    assert "".join(stream(BYTE_LEVEL, prompt, output)) == one_shot(BYTE_LEVEL.tokenizer, prompt, output) == " the 😀 dog"


def test_a_prompt_tail_that_begins_inside_a_run_of_bytes_does_not_spoil_the_output() -> None:
    prompt = byte_ids(BYTE_FALLBACK.tokenizer, ("你好吗" * 20).encode())
    output = byte_ids(BYTE_FALLBACK.tokenizer, "很好😀".encode())
    for extra in range(3):
        begun = [*encode(BYTE_FALLBACK, "a"), *prompt, *byte_ids(BYTE_FALLBACK.tokenizer, b"ab"[:extra])]
        assert "".join(stream(BYTE_FALLBACK, begun, output)) == "很好😀"


def test_an_empty_prompt_tail_works(vocabulary: Vocabulary) -> None:
    output = encode(vocabulary, "the fox 😀")
    assert "".join(stream(vocabulary, [], output)) == vocabulary.tokenizer.decode(output)


# ---- bytes that are no text ------------------------------------------------------------------------


def test_a_byte_run_that_turns_invalid_keeps_the_characters_it_gave() -> None:
    bad = byte_ids(BYTE_FALLBACK.tokenizer, "你".encode() + b"\xff")
    fox = encode(BYTE_FALLBACK, "the fox")
    pieces = stream(BYTE_FALLBACK, encode(BYTE_FALLBACK, "a"), [*bad, *fox, *byte_ids(BYTE_FALLBACK.tokenizer, "好".encode())])
    assert "".join(pieces) == "你\ufffd the fox好"


def test_a_long_run_of_invalid_bytes_is_given_as_it_comes(vocabulary: Vocabulary) -> None:
    prompt = encode(vocabulary, "a")
    output = byte_ids(vocabulary.tokenizer, b"\x80" * 200) + encode(vocabulary, "fox")
    pieces = stream(vocabulary, prompt, output)
    assert "".join(pieces) == one_shot(vocabulary.tokenizer, prompt, output)
    given = list(itertools.accumulate(len(piece) for piece in pieces))
    assert all(read - given[read - 1] <= HELD_LIMIT for read in range(1, 201))


def test_a_real_replacement_character_in_the_output_is_kept(vocabulary: Vocabulary) -> None:
    prompt = encode(vocabulary, "a")
    output = byte_ids(vocabulary.tokenizer, ("\ufffd" * 30).encode()) + encode(vocabulary, "fox")
    assert "".join(stream(vocabulary, prompt, output)) == one_shot(vocabulary.tokenizer, prompt, output)


def test_a_step_costs_no_more_after_thousands_of_ids_without_text() -> None:
    decoder = TextDecoder(BYTE_LEVEL, encode(BYTE_LEVEL, "a"), skip_special_tokens=True)
    bad, end, unknown = byte_ids(BYTE_LEVEL.tokenizer, b"\x80")[0], 2, BYTE_LEVEL.size + 1
    began = time.process_time()
    for _ in range(10_000):
        decoder.step(end)
        decoder.step(unknown)
        decoder.step(bad)
    # The stream alone takes 25 s for these; a linear one well under one.
    assert time.process_time() - began < 5


BYTES_AND_TEXT = st.lists(
    st.one_of(st.binary(min_size=1, max_size=6), st.sampled_from([s.encode() for s in ["é", "你", "😀", "a", " ", "\ufffd"]])),
    max_size=20,
).map(b"".join)


@given(data=BYTES_AND_TEXT, prompt=st.sampled_from(["", "a", "fox 你", "😀 "]))
@example(data=b"\xe4\xf0\x9f\x80" * 12, prompt="a")
@settings(deadline=None, max_examples=300)
def test_any_bytes_stream_to_the_one_shot_text_in_a_byte_level_tokenizer(data: bytes, prompt: str) -> None:
    before, output = encode(BYTE_LEVEL, prompt), byte_ids(BYTE_LEVEL.tokenizer, data)
    assert "".join(stream(BYTE_LEVEL, before, output)) == one_shot(BYTE_LEVEL.tokenizer, before, output)


@given(output=st.lists(st.integers(0, BYTE_LEVEL.size + 3), max_size=80), skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_ids_stream_to_the_one_shot_text_in_a_byte_level_tokenizer(output: list[int], skip: bool) -> None:
    prompt = encode(BYTE_LEVEL, "The fox")
    assert "".join(stream(BYTE_LEVEL, prompt, output, skip=skip)) == one_shot(BYTE_LEVEL.tokenizer, prompt, output, skip=skip)


@given(data=BYTES_AND_TEXT, cut=BYTES_AND_TEXT)
@settings(deadline=None, max_examples=300)
def test_whatever_bytes_a_prompt_ends_with_its_text_is_not_given(cut: bytes, data: bytes) -> None:
    prompt, output = byte_ids(BYTE_LEVEL.tokenizer, b"a" + cut), byte_ids(BYTE_LEVEL.tokenizer, data)
    joined = "".join(stream(BYTE_LEVEL, prompt, output))
    before = BYTE_LEVEL.tokenizer.decode(prompt)
    whole = BYTE_LEVEL.tokenizer.decode(prompt + output)
    assert whole.endswith(joined)
    assert before.startswith(whole[: len(whole) - len(joined)])
    if whole.startswith(before):
        assert before + joined == whole


SENTENCE_PIECE_IDS = st.lists(
    st.one_of(
        st.sampled_from(["▁", "▁the", "▁▁", "fox", "a", "b", "."]).map(lambda text: [text]),
        st.sampled_from(["é", "你", "😀", "\n", "\ufffd", "好好"]).map(lambda text: [f"<0x{b:02X}>" for b in text.encode()]),
        st.just(["</s>"]),
    ),
    max_size=30,
).map(lambda runs: [text for run in runs for text in run])


@given(tokens=SENTENCE_PIECE_IDS, prompt=SENTENCE_PIECE_IDS, skip=st.booleans())
@settings(deadline=None, max_examples=400)
@pytest.mark.parametrize("tokenizer", [BYTE_FALLBACK, UNIGRAM], ids=["bpe", "unigram"])
def test_any_text_streams_to_the_one_shot_text_in_sentence_piece_tokenizers(
    tokenizer: Vocabulary, tokens: list[str], prompt: list[str], skip: bool
) -> None:
    before = [tokenizer.tokenizer.token_to_id(text) for text in ["a", *prompt, "b"]]
    output = [tokenizer.tokenizer.token_to_id(text) for text in tokens]
    assert "".join(stream(tokenizer, before, output, skip=skip)) == one_shot(tokenizer.tokenizer, before, output, skip=skip)


def without_replacements(text: str) -> str:
    return text.replace("\ufffd", "")


@given(output=st.lists(st.integers(0, BYTE_FALLBACK.size - 1), max_size=60))
@settings(deadline=None, max_examples=400)
@pytest.mark.parametrize("tokenizer", [BYTE_FALLBACK, UNIGRAM], ids=["bpe", "unigram"])
def test_any_ids_at_all_lose_no_character_that_one_shot_decoding_has(tokenizer: Vocabulary, output: list[int]) -> None:
    prompt = [tokenizer.tokenizer.token_to_id("a")]
    joined = "".join(stream(tokenizer, prompt, output))
    expected = one_shot(tokenizer.tokenizer, prompt, output) if output else ""
    assert ("\ufffd" in joined) <= ("\ufffd" in expected)
    remaining = iter(without_replacements(joined))
    assert all(character in remaining for character in without_replacements(expected))
