"""29, over HTTP. A fault at any stage costs its own request: 400 where its input is at fault, else 500; three others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from repertory.actors.text.decode import TextDecoder
from repertory.actors.text.prompts import PromptReader
from repertory.gpu.grammars import GrammarChecker
from repertory.tests.engine.stage import answer_of, greedy, prompt_of
from repertory.tests.http.served import error_of

GOOD = [(prompt_of(9, seed), greedy(12)) for seed in range(3)]
STREAMS = pytest.mark.parametrize("stream", [False, True])


async def beside_good_ones(s: Any, path: str, body: dict[str, Any]) -> Any:
    """The answer to a bad request while three good ones are in flight, two in process and one over HTTP."""
    s.stage.gate.shut()
    first, *others = GOOD
    over_http = asyncio.ensure_future(s.complete(first[0], 12))
    good = [s.stage.begin(*request) for request in others]
    await s.stage.gate.arrival()
    doing = asyncio.ensure_future(s.http.post(path, json=body))
    for _ in range(50):
        await asyncio.sleep(0)
    s.stage.gate.open()
    answer = await doing
    assert [answer_of(await task) for task in good] == [s.stage.alone(*request) for request in others]
    assert (await over_http).json()["choices"][0]["token_ids"] == s.stage.alone(*first).token_ids
    await s.check_clean()
    return answer


@STREAMS
async def test_a_template_that_refuses_says_so_in_its_own_words(served: Any, tmp_path: Any, stream: bool) -> None:
    template = tmp_path / "picky.jinja"
    template.write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('a system message must come first') }}{% endif %}x"
    )
    s = await served(block_size=4, chat_template=str(template))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    error = error_of(await beside_good_ones(s, "/v1/chat/completions", body), 400)
    assert error["param"] == "messages"
    assert "a system message must come first" in error["message"]


@STREAMS
@pytest.mark.parametrize(
    "wanted",
    [
        {"guided_regex": "(a"},
        {"guided_regex": "(?=a)b"},
        {"guided_grammar": "start: nothing"},
        {"structured_outputs": {"json": "{"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
    ],
    ids=str,
)
async def test_what_does_not_compile_is_refused_with_the_compilers_message(
    served: Any, wanted: dict[str, Any], stream: bool
) -> None:
    s = await served(block_size=4)
    error = error_of(await beside_good_ones(s, "/v1/completions", {"prompt": "x", "stream": stream, **wanted}), 400)
    assert error["param"] == next(iter(wanted))


@STREAMS
@pytest.mark.parametrize("stage_of", ["tokenizing", "compiling"])
async def test_a_bug_before_the_first_token_is_a_500_as_json(
    served: Any, monkeypatch: Any, stage_of: str, stream: bool
) -> None:
    s = await served(block_size=4)
    read = PromptReader.read
    body: dict[str, Any] = {"prompt": "boom", "stream": stream}

    def fail(*arguments: Any, **_: Any) -> Any:
        raise LookupError("there is a bug")

    if stage_of == "tokenizing":
        monkeypatch.setattr(PromptReader, "read", lambda reader, prompt: fail() if prompt == "boom" else read(reader, prompt))
    else:
        monkeypatch.setattr(GrammarChecker, "settle", fail)
        body["guided_regex"] = "a"
    error = error_of(await beside_good_ones(s, "/v1/completions", body), 500)
    assert "there is a bug" in error["message"]


@STREAMS
@pytest.mark.parametrize("at", [1, 3])
async def test_a_detokenizer_that_raises_ends_its_own_request(served: Any, monkeypatch: Any, at: int, stream: bool) -> None:
    s = await served(block_size=4)
    bad = prompt_of(7, 9)
    token = s.stage.alone(bad, greedy(20)).token_ids[at - 1]
    step = TextDecoder.step

    def step_or_raise(decoder: Any, token_id: int) -> Any:
        if token_id == token:
            raise LookupError("the detokenizer has a bug")
        return step(decoder, token_id)

    monkeypatch.setattr(TextDecoder, "step", step_or_raise)
    answer = await beside_good_ones(s, "/v1/completions", {"prompt": bad, "max_tokens": 20, "temperature": 0, "stream": stream})
    if stream and answer.status_code == 200:
        last = answer.text.rstrip("\n").split("\n")[-1]
        assert last.startswith('data: {"error":') and "the detokenizer has a bug" in last
        assert at > 1, "what fails before its first token has no stream"
    else:
        assert "the detokenizer has a bug" in error_of(answer, 500)["message"]


@STREAMS
@pytest.mark.parametrize("when", ["first", "later"])
async def test_logits_that_are_not_finite_end_their_own_request(served: Any, when: str, stream: bool) -> None:
    s = await served(block_size=4)
    bad = prompt_of(7, 9)
    ids: dict[Any, int] = {}

    def rows_that_fail(message: Any) -> list[Any]:
        ids.update({new.seq_id: new.num_prompt_tokens for new in message.admitted})
        starts = zip(message.seq_ids, message.starts, strict=True)
        return [seq_id for seq_id, start in starts if ids[seq_id] == len(bad) and (when == "first" or start > 9)]

    s.stage.device.fail_rows = rows_that_fail
    body = {"prompt": bad, "max_tokens": 20, "temperature": 0, "stream": stream}
    answer = await beside_good_ones(s, "/v1/completions", body)
    if stream and when == "later":
        assert answer.status_code == 200
        assert '"code":500' in answer.text.rstrip("\n").split("\n")[-1]
    else:
        assert error_of(answer, 500)["message"] == "the model's logits are not finite"


async def test_a_bug_in_the_frontend_is_a_500_and_logged(
    served: Any, monkeypatch: Any, log_lines: list[dict[str, Any]]
) -> None:
    s = await served(block_size=4)
    monkeypatch.setattr("repertory.actors.frontends.http.generating.prompts_of", lambda prompt: prompt.nothing)
    error = error_of(await s.complete("x"), 500)
    assert "nothing" in error["message"]
    [line] = [line for line in log_lines if line["event"] == "http.failed"]
    assert line["path"] == "/v1/completions"
    assert (await s.chat([{"role": "user", "content": "hi"}])).status_code == 200
    await s.check_clean()


@STREAMS
async def test_masks_that_leave_no_token_are_the_requests_own_fault(served: Any, stream: bool) -> None:
    s = await served(block_size=4)
    nothing = {"allowed_token_ids": [2], "min_tokens": 2, "max_tokens": 4}  # 2 is the model's end
    answer = await beside_good_ones(s, "/v1/completions", {"prompt": prompt_of(13, 9), "stream": stream, **nothing})
    assert "no token is left" in error_of(answer, 400)["message"]
