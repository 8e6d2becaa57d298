"""17. The joined stream is what decoding all ids at once gives, whatever characters the tokens cut."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from repertory import SamplingParams
from repertory.tests.engine.stage import read_all
from repertory.tests.text import small_tokenizers
from repertory.tests.text.small_tokenizers import byte_ids

TEXTS = [
    "😀 and 👩‍👩‍👧 and 🇩🇪",
    "cre\u0300me bru\u0302le\u0301e, e\u0301",
    "日本語とEnglishを混ぜる mixed 你好 text",
    "  several   spaces    and\ttabs\n\n end  ",
    " a leading space",
    "plain",
    "\ufffd itself \ufffd\ufffd",
]
REPLACEMENT = "\ufffd"
PROMPT_START = 400
"""Prompts begin with this id plus the number of their script: the vocabulary's ids there have no text."""


@pytest.fixture(params=["byte_level", "byte_fallback", "unigram"])
def tokenizer(request):
    return getattr(small_tokenizers, request.param)()


@pytest.fixture
def answering(scripted, tokenizer):
    """Opens an engine; `answers[n]` are the ids it says to the prompt `prompt(n)`."""

    async def open_answering(answers):
        return await scripted(tokenizer, {PROMPT_START + 2 + number: ids for number, ids in enumerate(answers)})

    return open_answering


def prompt(number, tokenizer, text="the fox"):
    return [PROMPT_START + 2 + number, *tokenizer.encode(text, add_special_tokens=False).ids]


def expected_text(tokenizer, asked, ids, *, skip=True):
    """All ids at once after the prompt. An incomplete end is one U+FFFD, where some decoders give one a byte."""
    before = tokenizer.decode(asked, skip_special_tokens=skip)
    text = tokenizer.decode(asked + ids, skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


async def joined(s, asked, ids, **params):
    """Stream a whole answer in each kind of output; check what holds for every stream; return the joined text."""
    limits = {"temperature": 0.0, "max_tokens": len(ids), "ignore_eos": True, **params}
    kinds = [SamplingParams(**limits, output_kind=kind) for kind in ("delta", "cumulative", "final_only")]
    delta, cumulative, final = await asyncio.gather(*(read_all(s.engine.generate(asked, kind)) for kind in kinds))
    assert [token for output in delta for token in output.outputs[0].token_ids] == ids, "ids are never withheld"
    text = "".join(output.outputs[0].text for output in delta)
    assert [output.outputs[0].text for output in final] == [text]
    grown = [output.outputs[0].text for output in cumulative]
    assert grown[-1] == text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(grown))
    return text


async def joined_all(s, asked, answers):
    """The same for several, side by side."""
    return await asyncio.gather(*(joined(s, one, ids) for one, ids in zip(asked, answers, strict=True)))


async def test_every_byte_a_token_of_its_own(answering, tokenizer):
    answers = [byte_ids(tokenizer, text.encode()) for text in TEXTS]
    s = await answering(answers)
    asked = [prompt(number, tokenizer) for number in range(len(answers))]
    found = await joined_all(s, asked, answers)
    assert found == [expected_text(tokenizer, *pair) for pair in zip(asked, answers, strict=True)]
    assert found == TEXTS, "no character is lost, repeated or spoilt"
    await s.check_clean()


async def test_as_the_tokenizer_cuts_it(answering, tokenizer):
    answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    s = await answering(answers)
    asked = [prompt(number, tokenizer) for number in range(len(answers))]
    assert await joined_all(s, asked, answers) == [expected_text(tokenizer, *pair) for pair in zip(asked, answers, strict=True)]
    await s.check_clean()


async def test_special_tokens_between_words(answering, tokenizer):
    words = [tokenizer.encode(word, add_special_tokens=False).ids for word in (" a", "the", " fox")]
    answer = [0, *words[0], 1, 0, *words[1], 2, *words[2], 1]
    s = await answering([answer])
    for skip in (True, False):
        asked = prompt(0, tokenizer)
        found = await joined(s, asked, answer, skip_special_tokens=skip)
        assert found == expected_text(tokenizer, asked, answer, skip=skip)
        assert ("<s>" in found) == (not skip)
    await s.check_clean()


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_a_cut_in_the_middle_of_a_character_is_one_replacement_in_the_last_delta(answering, tokenizer, kept):
    answer = [*byte_ids(tokenizer, b"ab"), *byte_ids(tokenizer, "😀".encode()[:kept])]
    s = await answering([answer])
    limits = SamplingParams(temperature=0.0, max_tokens=len(answer), output_kind="delta")
    deltas = await read_all(s.engine.generate(prompt(0, tokenizer), limits))
    texts = [delta.outputs[0].text for delta in deltas]
    assert "".join(texts) == "ab" + REPLACEMENT
    assert texts[-1].endswith(REPLACEMENT)
    assert not any(REPLACEMENT in text for text in texts[:-1])
    assert deltas[-1].outputs[0].finish_reason == "length"
    assert sum(len(delta.outputs[0].token_ids) for delta in deltas) == len(answer)
    await s.check_clean()


@pytest.mark.parametrize("seed", range(2))
async def test_any_mixture_after_any_prompt(answering, tokenizer, seed):
    draw = random.Random(seed)
    answers = [cut(tokenizer, " ".join(draw.sample(TEXTS, 2)), draw) for _ in range(16)]
    s = await answering(answers)
    asked = [prompt(number, tokenizer, draw.choice(["the fox", "日本", " ", "a  ", "😀"])) for number in range(16)]
    assert await joined_all(s, asked, answers) == [expected_text(tokenizer, *pair) for pair in zip(asked, answers, strict=True)]
    await s.check_clean()


def cut(tokenizer, text, draw):
    """The text as ids: whole tokens here, bytes there."""
    ids = []
    for word in text.split(" "):
        pieces = tokenizer.encode(" " + word, add_special_tokens=False).ids
        ids += pieces if draw.random() < 0.5 else byte_ids(tokenizer, (" " + word).encode())
    return ids
