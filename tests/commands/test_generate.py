"""`repertory generate` on a fake engine: what is asked of it, what is printed, and every way it can end."""

import io
import json
from functools import partial

import anyio
import pytest

from repertory.actors.commands import generate
from repertory.protocol.errors import EngineDeadError, ValidationError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def refuse(bad):
    """An answer that refuses the prompts in `bad` and echoes the others."""

    def answer(prompt):
        return ValidationError(f"{prompt} is bad", field="prompt") if prompt in bad else ([prompt, "!"], ("length", None))

    return answer


def run_job(engine, job, **streams):
    """`generate.run` on `engine` without a command line round it; returns the status."""
    config = generate.load_config(flags={"model": "demo"}, environ={})
    return anyio.run(partial(generate.run, job, config, factory=engine.open, **streams))


# ---- one prompt ----------------------------------------------------------------------------------


def test_one_prompt_is_written_as_it_comes_and_ends_with_a_newline(fake_engine):
    out, seen = io.StringIO(), []

    async def act(_prompt, _number):
        seen.append(out.getvalue())

    engine = fake_engine(act=act)
    assert run_job(engine, generate.Job(prompts=["hi"]), out=out) == 0
    assert seen == ["", "Hello"]
    assert out.getvalue() == "Hello world\n"
    assert engine.streams[0].closed
    assert not engine.is_open


def test_text_that_ends_with_a_newline_gets_no_second_one(repertory, fake_engine):
    assert repertory(fake_engine(lambda _: (["a\n", ""], ("stop", None))), "hi")[1] == "a\n"


def test_the_flags_reach_the_engine_and_the_request(repertory, fake_engine):
    engine = fake_engine()
    flags = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --seed -7 --ignore-eos --stop a --stop=-b"
    repertory(engine, *flags.split(), "--block-size", "32", "--no-enable-prefix-caching", "hi")
    params = engine.streams[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0.0, 0.5, 3, 0.1)
    assert (params.seed, params.ignore_eos, params.stop_strings) == (-7, True, ["a", "-b"])
    assert (engine.config.model, engine.config.block_size, engine.config.enable_prefix_caching) == ("demo", 32, False)
    assert engine.config.seed is None
    assert engine.streams[0].prompt == "hi"


def test_several_completions_come_under_headings(repertory, fake_engine):
    engine = fake_engine(lambda prompt: (["a", "\n"], ("stop", None)))
    assert repertory(engine, "--n", "3", "hi") == (0, "### 1 of 3\na\n\n### 2 of 3\na\na\n\n### 3 of 3\na\na\na\n", "")
    assert engine.streams[0].params.n == 3
    out = repertory(engine, "--n", "2", "hi", "ho")[1]
    assert out == "".join(
        f"{gap}## {number}. {prompt}\n### 1 of 2\na\n\n### 2 of 2\na\na\n"
        for gap, number, prompt in (("", 1, "hi"), ("\n", 2, "ho"))
    )


def test_a_json_line_has_all_completions_where_there_are_several(repertory, fake_engine):
    line = json.loads(repertory(fake_engine(), "--n", "2", "--json", "hi")[1])
    assert (line["text"], line["finish_reason"]) == ("Hello world", "stop")
    assert line["completions"] == [
        {"index": 0, "text": "Hello world", "finish_reason": "stop"},
        {"index": 1, "text": "Hello worldHello world", "finish_reason": "stop"},
    ]
    assert line["usage"]["completion_tokens"] == 4
    assert "completions" not in json.loads(repertory(fake_engine(), "--json", "hi")[1])


@pytest.mark.parametrize("n", ["0", "129", "1000000"])
def test_a_number_of_completions_out_of_range_is_refused_before_the_engine_starts(repertory, fake_engine, n):
    engine = fake_engine()
    status, _, err = repertory(engine, "--n", n, "hi")
    assert status == 2 and "n must be 1 to 128" in err
    assert engine.config is None


def test_a_stop_may_look_like_a_flag_and_takes_nothing_else_along(repertory, fake_engine):
    engine = fake_engine()
    repertory(engine, "--stop", "--seed", "--seed", "1", "hi")
    assert engine.streams[0].params.stop_strings == ["--seed"]
    assert (engine.streams[0].params.seed, engine.streams[0].prompt) == (1, "hi")


def test_without_flags_sixty_four_tokens_are_asked_for(repertory, fake_engine):
    engine = fake_engine()
    repertory(engine, "hi")
    assert engine.streams[0].params.max_tokens == 64


def test_a_prompt_that_looks_like_a_flag_comes_after_two_dashes(repertory, fake_engine):
    engine = fake_engine()
    assert repertory(engine, "--", "--help")[0] == 0
    assert engine.streams[0].prompt == "--help"


def test_the_run_is_quiet_unless_a_log_level_is_asked_for(repertory, fake_engine):
    engine = fake_engine()
    repertory(engine, "hi")
    assert engine.config.log_level == "warning"
    repertory(engine, "hi", "--log-level", "debug")
    assert engine.config.log_level == "debug"


def test_a_request_that_fails_after_its_first_words_keeps_them_and_exits_1(repertory, fake_engine):
    engine = fake_engine(lambda _: (["Hel", ""], ("error", "logits are not finite")))
    status, out, err = repertory(engine, "hi")
    assert status == 1
    assert out.startswith("Hel")
    assert err == "error: logits are not finite\n"


def test_a_refused_prompt_exits_2_with_one_line(repertory, fake_engine):
    engine = fake_engine(lambda _: ValidationError("prompt has 9 tokens,\n the limit is 8", field="prompt"))
    assert repertory(engine, "hi") == (2, "", "error: prompt has 9 tokens, the limit is 8\n")
    assert not engine.is_open


def test_a_dead_engine_exits_1(repertory, fake_engine):
    status, _, err = repertory(fake_engine(lambda _: EngineDeadError("the device host died")), "hi")
    assert (status, err) == (1, "error: the device host died\n")


# ---- chat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "flags", "as_chat"),
    [(True, [], True), (False, [], False), (True, ["--raw"], False), (False, ["--chat"], True), (True, ["--chat"], True)],
)
def test_prompts_are_chat_where_the_model_can_unless_told_otherwise(repertory, template, flags, as_chat, fake_engine):
    engine = fake_engine(has_chat_template=template)
    repertory(engine, *flags, "hi")
    assert engine.streams[0].prompt == ([{"role": "user", "content": "hi"}] if as_chat else "hi")


def test_a_system_message_comes_first(repertory, fake_engine):
    engine = fake_engine(has_chat_template=True)
    repertory(engine, "--system", "Be brief.", "hi")
    assert engine.streams[0].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_a_system_message_without_chat_is_refused_and_not_dropped(repertory, fake_engine):
    assert repertory(fake_engine(has_chat_template=True), "--raw", "--system", "x", "hi")[0] == 2
    assert repertory(fake_engine(has_chat_template=False), "--system", "x", "hi")[0] == 2


# ---- several prompts -----------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(repertory, fake_engine):
    gates = {"a": anyio.Event(), "b": anyio.Event()}

    async def act(prompt, number):
        if number == 1 and prompt in gates:
            await gates[prompt].wait()
        elif number == 2:
            {"c": gates["b"], "b": gates["a"]}.get(prompt, anyio.Event()).set()

    status, out, err = repertory(fake_engine(refuse([]), act=act), "a", "b", "c")
    assert (status, err) == (0, "")
    assert out == "## 1. a\na!\n\n## 2. b\nb!\n\n## 3. c\nc!\n"


def test_no_more_prompts_are_sent_at_once_than_may_wait(repertory, fake_engine):
    engine = fake_engine(refuse([]))
    prompts = [f"p{number}" for number in range(40)]
    status, out, _ = repertory(engine, "--max-num-queued", "3", *prompts)
    assert status == 0
    assert engine.most_at_once == 3
    assert out.count("##") == 40


def test_one_refused_prompt_among_many_is_named_and_the_others_are_served(repertory, fake_engine):
    status, out, err = repertory(fake_engine(refuse(["b"])), "a", "b", "c")
    assert status == 2
    assert err == "error: prompt 2: b is bad\n"
    assert "a!" in out
    assert "c!" in out


def test_a_failure_inside_weighs_more_than_a_refusal(repertory, fake_engine):
    def answer(prompt):
        return refuse(["b"])(prompt) if prompt != "c" else (["x"], ("error", "broken"))

    status, _, err = repertory(fake_engine(answer), "a", "b", "c")
    assert status == 1
    assert "error: prompt 3: broken\n" in err


def test_an_engine_that_dies_under_many_prompts_is_one_error_without_a_traceback(repertory, fake_engine):
    engine = fake_engine(lambda _: EngineDeadError("the device host died"))
    assert repertory(engine, "a", "b") == (1, "", "error: the device host died\n")


def test_long_prompts_make_short_headings(repertory, fake_engine):
    out = repertory(fake_engine(), "x" * 500, "two\nlines")[1]
    assert max(map(len, out.splitlines())) < 80
    assert "## 2. two lines\n" in out


@pytest.mark.parametrize(("err", "expected"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_progress_bar_is_on_a_terminal_only(fake_engine, err, expected):
    out = io.StringIO()
    assert run_job(fake_engine(), generate.Job(prompts=["a", "b"]), out=out, err=err) == 0
    assert ("2/2" in err.getvalue()) is expected
    assert out.getvalue() == "## 1. a\nHello world\n\n## 2. b\nHello world\n"


# ---- JSON ----------------------------------------------------------------------------------------


def test_json_has_a_line_for_each_prompt(repertory, fake_engine):
    engine = fake_engine(lambda prompt: ([prompt, "\n\u2028é"], ("length", None)))
    _, out, _ = repertory(engine, "--json", "a", "b")
    first, second = (json.loads(line) for line in out.split("\n")[:-1])
    assert first == {
        "prompt": "a",
        "text": "a\n\u2028é",
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4},
        },
    }  # fmt: skip
    assert second["prompt"] == "b"
    assert all(stream.params.output_kind == "final_only" for stream in engine.streams)


def test_json_of_a_prompt_that_was_refused_says_so_in_its_place(repertory, fake_engine):
    status, out, _ = repertory(fake_engine(refuse(["b"])), "--json", "a", "b", "c")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 2
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert lines[1]["error"] == "b is bad"
    assert "error" not in lines[0]


# ---- where prompts come from ---------------------------------------------------------------------


def test_a_file_holds_a_prompt_a_line(repertory, tmp_path, fake_engine):
    file = tmp_path / "prompts"
    file.write_bytes("\ufeffone\r\n\n   \ntwo\u2028half\n".encode())
    engine = fake_engine()
    repertory(engine, "--file", str(file), "zero")
    assert [stream.prompt for stream in engine.streams] == ["zero", "one", "two\u2028half"]


def test_standard_input_is_one_prompt_and_a_dash_reads_it_by_lines(repertory, fake_engine):
    engine = fake_engine()
    repertory(engine, stdin="one\ntwo\n")
    assert [stream.prompt for stream in engine.streams] == ["one\ntwo"]
    engine = fake_engine()
    repertory(engine, "--file", "-", stdin="one\ntwo\n")
    assert [stream.prompt for stream in engine.streams] == ["one", "two"]


def test_standard_input_is_left_alone_where_there_are_arguments(repertory, fake_engine):
    engine = fake_engine()
    repertory(engine, "one", stdin="two")
    assert [stream.prompt for stream in engine.streams] == ["one"]


@pytest.mark.parametrize("stdin", [None, ""])
def test_no_prompt_at_all_is_an_error_and_no_engine_is_opened(repertory, stdin, fake_engine):
    engine = fake_engine()
    status, _, err = repertory(engine, stdin=stdin)
    assert status == 2
    assert err.startswith("error: no prompt")
    assert engine.config is None


@pytest.mark.parametrize(("content", "expected"), [(b"\xff\xfe", "UTF-8"), (None, "No such file")])
def test_a_file_that_cannot_be_read_is_named(repertory, tmp_path, content, expected, fake_engine):
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    status, _, err = repertory(fake_engine(), "--file", str(file))
    assert status == 2
    assert str(file) in err
    assert expected in err


def test_an_argument_that_is_no_text_is_refused(repertory, fake_engine):
    status, _, err = repertory(fake_engine(), "caf\udce9")
    assert status == 2
    assert "prompt 1 is not UTF-8" in err
