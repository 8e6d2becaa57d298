"""Prompts to ids: text, ids and chats, with refusals that name the field and cost little."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from repertory.actors.text.prompts import PromptReader
from repertory.protocol.errors import ConfigError, ModelLoadError, NeverFitsError, UnsupportedError, ValidationError
from repertory.tests.text import small_tokenizers

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{{ m.role }}: {{ m.content | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
HELLO = [{"role": "user", "content": "The fox"}]


def write_model(directory: Path, *, template: Any = TEMPLATE, adds_start: bool = True) -> Path:
    tokenizer = small_tokenizers.byte_level()
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reader(model_dir: Path) -> PromptReader:
    return PromptReader(model_dir, max_model_len=64, vocab_size=400)


def refusal(reader: PromptReader, prompt: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        reader.read(prompt)
    return caught.value


def test_text_gets_the_special_tokens_that_the_tokenizer_adds(reader: PromptReader) -> None:
    text, ids = reader.read("The fox")
    assert text == "The fox"
    assert ids[0] == 0
    assert reader.tokenizer.decode(ids) == "The fox"


def test_ids_are_taken_as_they_are(reader: PromptReader) -> None:
    ids = [5, 0, 399]
    assert reader.read(ids) == (None, ids)
    assert reader.read(ids)[1] is not ids


def test_a_chat_is_rendered_up_to_the_assistants_turn_and_gets_no_second_start_token(reader: PromptReader) -> None:
    text, ids = reader.read(HELLO)
    assert text == "<s>user: The fox</s>\nassistant:"
    assert ids == reader.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.count(0) == 1


def test_a_chat_reads_as_transformers_reads_it(reader: PromptReader, model_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(model_dir)
    messages = [{"role": "system", "content": "你好 😀"}, *HELLO, {"role": "assistant", "content": " a  b\n"}, *HELLO]
    text, ids = reader.read(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert reader.read("The fox")[1] == theirs("The fox")["input_ids"]


def test_content_in_text_parts_reads_like_plain_content(reader: PromptReader) -> None:
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "fox"}]
    assert reader.read([{"role": "user", "content": parts}]) == reader.read([{"role": "user", "content": "The\nfox"}])


def test_null_fields_of_a_message_are_not_there(reader: PromptReader) -> None:
    assert reader.read([{**HELLO[0], "name": None, "tool_calls": None}]) == reader.read(HELLO)


def test_the_messages_given_are_not_changed(reader: PromptReader) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = json.dumps(messages)
    reader.read(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("prompt", [None, 7, True, b"bytes", {"role": "user"}, 1.5])
def test_what_is_no_prompt_is_refused_by_name(reader: PromptReader, prompt: Any) -> None:
    error = refusal(reader, prompt)
    assert error.field == "prompt"
    assert "text, a list of token ids or a list of messages" in str(error)


@pytest.mark.parametrize("bad", [400, 401, -1, 2**63, 1.5, True, "a", None, {"role": "user"}])
def test_an_id_out_of_range_is_refused_with_its_place(reader: PromptReader, bad: Any) -> None:
    error = refusal(reader, [1, 2, bad])
    assert error.field == "prompt"
    assert "prompt[2]" in str(error)


def test_text_whose_tokens_the_model_does_not_have_is_refused(model_dir: Path) -> None:
    reader = PromptReader(model_dir, max_model_len=64, vocab_size=300)
    error = refusal(reader, "<tool call>")
    assert error.field == "prompt"
    assert "0 to 299" in str(error)


def test_empty_prompts_are_refused(tmp_path: Path) -> None:
    reader = PromptReader(write_model(tmp_path, adds_start=False), max_model_len=64, vocab_size=400)
    for prompt in ("", []):
        assert refusal(reader, prompt).field == "prompt"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([*HELLO, "hello"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ],
)
def test_a_broken_message_is_refused_with_its_place(reader: PromptReader, messages: list[Any], place: str) -> None:
    error = refusal(reader, messages)
    assert error.field == "messages"
    assert str(error).startswith(f"{place} ")


def test_a_template_that_refuses_says_so_in_its_own_words(reader: PromptReader) -> None:
    error = refusal(reader, [*HELLO, {"role": "system", "content": "x"}])
    assert error.field == "messages"
    assert "system must come first" in str(error)


def test_a_template_whose_expressions_fail_on_the_messages_refuses_them(tmp_path: Path) -> None:
    template = "{{ messages[0].content + messages[0].missing.deeper }}"
    reader = PromptReader(write_model(tmp_path, template=template), max_model_len=64, vocab_size=400)
    assert refusal(reader, HELLO).field == "messages"


def test_an_assistant_message_with_tool_calls_needs_no_content(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }};{% endfor %}"
    reader = PromptReader(write_model(tmp_path, template=template), max_model_len=64, vocab_size=400)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look_up"}]}
    assert reader.read([*HELLO, call])[0] == "The fox;look_up;"


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "\udfff"}]])
def test_lone_surrogates_are_refused(reader: PromptReader, prompt: Any) -> None:
    assert "not valid Unicode" in str(refusal(reader, prompt))


def test_special_tokens_in_text_are_special(reader: PromptReader) -> None:
    assert reader.read("a<|im_end|>")[1][-1] == 2


# ---- length ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "fits"), [(62, True), (63, True), (64, False), (65, False)])
def test_a_prompt_must_leave_room_for_one_token(reader: PromptReader, length: int, fits: bool) -> None:
    if fits:
        assert len(reader.read([5] * length)[1]) == length
        return
    error = refusal(reader, [5] * length)
    assert isinstance(error, NeverFitsError)
    assert f"{length} tokens" in str(error)
    assert "64" in str(error)


def test_the_length_counts_special_tokens_and_template(reader: PromptReader) -> None:
    assert len(reader.read("\x01" * 62)[1]) == 63
    assert isinstance(refusal(reader, "\x01" * 63), NeverFitsError)
    assert isinstance(refusal(reader, [{"role": "user", "content": "\x01" * 60}]), NeverFitsError)


@pytest.mark.parametrize(
    "prompt",
    [
        "x " * 10_000_000,
        [{"role": "user", "content": "x" * 20_000_000}],
        [*HELLO, *[{"role": "user", "content": "x" * 1000}] * 5000],
    ],
    ids=["text", "message", "many messages"],
)
def test_a_huge_prompt_is_refused_before_it_is_tokenized(reader: PromptReader, prompt: Any) -> None:
    began = time.process_time()
    assert isinstance(refusal(reader, prompt), NeverFitsError)
    # Tokenizing 20 MB takes ten seconds and more.
    assert time.process_time() - began < 1


def test_a_million_ids_are_refused_by_their_number(reader: PromptReader) -> None:
    assert isinstance(refusal(reader, ["not an id"] * 1_000_000), NeverFitsError)


def test_a_template_that_multiplies_its_input_is_stopped_before_tokenizing(tmp_path: Path) -> None:
    template = "{% for i in range(10000) %}{{ messages[0].content }}{% endfor %}"
    reader = PromptReader(write_model(tmp_path, template=template), max_model_len=64, vocab_size=400)
    assert "characters" in str(refusal(reader, [{"role": "user", "content": "x" * 100}]))


# ---- where templates come from ------------------------------------------------------------------------


def test_a_model_without_a_template_does_not_chat_and_says_so(tmp_path: Path) -> None:
    reader = PromptReader(write_model(tmp_path, template=None), max_model_len=64, vocab_size=400)
    reader.warm()
    assert not reader.supports_chat
    error = refusal(reader, HELLO)
    assert isinstance(error, UnsupportedError)
    assert "chat template" in str(error)


def test_a_model_without_tokenizer_settings_reads_text(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").unlink()
    reader = PromptReader(tmp_path, max_model_len=64, vocab_size=400)
    assert not reader.supports_chat
    assert reader.read("a")[0] == "a"


def test_the_file_given_comes_before_the_models_file_and_that_before_its_settings(tmp_path: Path) -> None:
    def rendered(**options: Any) -> str | None:
        return PromptReader(tmp_path, max_model_len=64, vocab_size=400, **options).read(HELLO)[0]

    write_model(tmp_path, template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "settings"}])
    assert rendered() == "settings"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "mine.jinja").write_text("mine {{ bos_token }}")
    assert rendered(chat_template=str(tmp_path / "mine.jinja")) == "mine <s>"


def test_a_template_file_that_cannot_be_read_stops_the_start(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptReader(model_dir, chat_template="/nowhere/chat.jinja", max_model_len=64, vocab_size=400)
    assert caught.value.key == "chat_template"


def test_a_template_that_is_no_jinja_stops_the_start(tmp_path: Path) -> None:
    reader = PromptReader(write_model(tmp_path, template="{% for %}"), max_model_len=64, vocab_size=400)
    with pytest.raises(ConfigError) as caught:
        reader.warm()
    assert caught.value.key == "chat_template"


def test_a_template_that_dislikes_the_warming_message_does_not_stop_the_start(tmp_path: Path) -> None:
    template = "{{ raise_exception('I only serve machines') }}"
    reader = PromptReader(write_model(tmp_path, template=template), max_model_len=64, vocab_size=400)
    reader.warm()
    assert "I only serve machines" in str(refusal(reader, HELLO))


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_missing_or_broken_tokenizer_is_a_load_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        PromptReader(tmp_path, max_model_len=64, vocab_size=400)
    assert caught.value.key == "model"


def test_broken_tokenizer_settings_are_a_load_error(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError):
        PromptReader(tmp_path, max_model_len=64, vocab_size=400)


def test_truncation_and_padding_left_in_a_tokenizer_file_do_not_change_prompts(tmp_path: Path) -> None:
    file = str(write_model(tmp_path) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(file)
    reader = PromptReader(tmp_path, max_model_len=64, vocab_size=400)
    assert len(reader.read("\x01" * 10)[1]) == 11


# ---- threads --------------------------------------------------------------------------------------------


def test_prompts_read_in_several_threads_at_a_time_do_not_mix(reader: PromptReader) -> None:
    prompts: list[Any] = [f"fox {i}" for i in range(40)] + [[{"role": "user", "content": f"dog {i}"}] for i in range(40)]
    expected = [reader.read(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.read, prompts * 3)) == expected * 3


@pytest.mark.alone
def test_tokenizing_a_long_text_leaves_other_threads_running(model_dir: Path) -> None:
    reader = PromptReader(model_dir, max_model_len=10_000_000, vocab_size=400)
    done, beats = threading.Event(), []

    def beat() -> None:
        while not done.wait(0.001):
            beats.append(time.perf_counter())

    other = threading.Thread(target=beat)
    other.start()
    began = time.perf_counter()
    reader.read("The quick brown fox. " * 40_000)
    ended = time.perf_counter()
    done.set()
    other.join()
    assert sum(began < at < ended for at in beats) > 10
