from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from repertory.actors.text.decode import Vocabulary
from repertory.tests.text import small_tokenizers


@pytest.fixture(scope="session")
def byte_level() -> Vocabulary:
    return Vocabulary(small_tokenizers.byte_level())


@pytest.fixture(scope="session")
def byte_fallback() -> Vocabulary:
    return Vocabulary(small_tokenizers.byte_fallback())


@pytest.fixture(scope="session")
def unigram() -> Vocabulary:
    return Vocabulary(small_tokenizers.unigram())


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "unigram"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found: Vocabulary = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def quick_brown() -> Tokenizer:
    return small_tokenizers.whole_pieces("The quick br", "own f", "ox jumps", " over", "own fox", "\n", "a", "b")
