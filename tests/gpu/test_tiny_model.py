"""The model other tests stand on: small, lively, repeatable, and readable by the usual libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from repertory.tests.tiny_model import MIN_VOCAB_SIZE, make_tiny_model

TEXT = "Hello the world, naïve 你好 🙂\n\n  x=1<|im_end|>"


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 320, 600, 2000])
def test_any_text_survives_the_tokenizer(tmp_path: Path, vocab_size: int) -> None:
    make_tiny_model(tmp_path, vocab_size=vocab_size, weights=False)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert max(ids) == vocab_size - 1 == tokenizer.token_to_id("<|im_end|>")
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<bos>", "<eos>")] == [0, 1, 2]
    if vocab_size <= 600:
        assert all(tokenizer.id_to_token(token_id) is not None for token_id in range(vocab_size))


def test_a_vocabulary_too_small_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(MIN_VOCAB_SIZE)):
        make_tiny_model(tmp_path, vocab_size=MIN_VOCAB_SIZE - 1)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, second, third = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (third / "model.safetensors").read_bytes()


def test_transformers_reads_the_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, weights=False))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, len(tokenizer)) == (2, 320)
