"""Small tokenizers of each kind, built in milliseconds: byte-level, sentence-piece style, whole pieces."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading and   repeated    spaces, then\ttabs and\nnew lines\n\n",
    "你好、世界。今天天气很好、我们去公园散步吧。",
    "naïve café, cre\u0300me bru\u0302le\u0301e, Ångström",
    "emoji: 😀 👍🏽 👩‍👩‍👧 🇩🇪 and more 🎉🎉",
    "日本語とEnglishを混ぜる。 mixed 你好 text",
    "def f(x):\n    return x ** 2  # square",
]
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """GPT-2 style: all 256 bytes are tokens, merges trained on `SENTENCES`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2 style: spaces as U+2581, bytes as <0xNN>, the first space of a decoded text stripped."""
    words = ["▁", "▁▁", "▁▁▁▁", "▁the", "▁fox", "▁a", "the", "fox", "ox", "a", "b", ".", ",", "\n", "é", "你", "好", "▁你", "<"]
    vocab = {text: i for i, text in enumerate([*SPECIALS, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def unigram() -> Tokenizer:
    """T5 and Gemma style: a Unigram model with byte fallback and the Metaspace decoder."""
    pieces = ["▁", "▁the", "▁fox", "▁a", "the", "fox", "a", "b", "f", "o", "x", "▁▁", ".", "好", "▁你", "你"]
    vocab = [(text, 0.0) for text in [*SPECIALS, "<unk>"]]
    vocab += [(f"<0x{b:02X}>", -20.0) for b in range(256)] + [(text, -float(i + 1)) for i, text in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=3, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def whole_pieces(*pieces: str) -> Tokenizer:
    """Token i is exactly the text `pieces[i]`; the last token is the special "</s>"."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate([*pieces, "</s>"])}, unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The single-byte tokens of `data`, in a byte-level or a byte-fallback tokenizer."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [tokenizer.token_to_id(_BYTE_CHARACTERS[byte]) for byte in data]


def _byte_characters() -> dict[int, str]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()
