"""What of a chat reaches the template: messages, tools, the choice among them, and variables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from repertory.tests.http.served import error_of

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}; {% endif %}"
    "{% if tool_choice is defined %}CHOICE {{ tool_choice | tojson }}; {% endif %}"
    "{% if mood is defined %}MOOD {{ mood }}; {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %} CALL {{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}; "
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def rendered(served: Any, tmp_path: Any) -> Any:
    """What the template makes of a chat, by way of `/tokenize` and `/detokenize`; an error's answer as it came."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    s = await served(chat_template=str(template))

    async def render(messages: Any, **fields: Any) -> Any:
        answer = await s.http.post("/tokenize", json={"messages": messages, **fields})
        chat = await s.chat(messages, max_tokens=1, return_token_ids=True, **fields)
        if answer.status_code != 200:
            assert chat.json() == answer.json()
            return answer
        tokens = answer.json()["tokens"]
        assert chat.json()["prompt_token_ids"] == tokens, "the two endpoints read a chat alike"
        assert chat.json()["usage"]["prompt_tokens"] == len(tokens)
        return (await s.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

    return render


async def test_plain_messages(rendered: Any) -> None:
    assert await rendered(HELLO) == "user: hello; assistant:"


async def test_tools_and_the_choice_among_them(rendered: Any) -> None:
    assert await rendered(HELLO, tools=[TOOL]) == f"TOOLS {json.dumps([TOOL])}; user: hello; assistant:"
    text = await rendered(HELLO, tools=[TOOL], tool_choice="required")
    assert text.startswith("TOOLS") and 'CHOICE "required"; ' in text
    named = {"type": "function", "function": {"name": "f"}}
    assert f"CHOICE {json.dumps(named)}; " in await rendered(HELLO, tools=[TOOL], tool_choice=named)
    assert await rendered(HELLO, tools=[TOOL], tool_choice="none") == "user: hello; assistant:"
    assert await rendered(HELLO, tools=[]) == await rendered(HELLO, tools=None) == "user: hello; assistant:"


async def test_arguments_of_calls_are_objects_to_the_template(rendered: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "8"}]
    assert await rendered(messages) == "user: hello; assistant:  CALL f(7); tool: 8; assistant:"


@pytest.mark.parametrize("arguments", ["no json", "[1]", "[" * 100_000, "", 5, None])
async def test_arguments_that_are_no_object_are_left_as_they_are(rendered: Any, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    found = await rendered([{"role": "assistant", "content": "x", "tool_calls": [call]}])
    assert found == "assistant: x CALL f(); assistant:" if isinstance(found, str) else found.status_code == 400


async def test_variables_of_the_template(rendered: Any) -> None:
    assert await rendered(HELLO, chat_template_kwargs={"mood": "grim"}) == "MOOD grim; user: hello; assistant:"
    assert await rendered(HELLO, add_generation_prompt=False) == "user: hello; "


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "conversations", "continue_final_message"])
async def test_variables_cannot_take_the_place_of_what_is_rendered(rendered: Any, name: str) -> None:
    answer = await rendered(HELLO, chat_template_kwargs={name: "x"})
    assert error_of(answer, 400)["param"] == "chat_template_kwargs"
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("place", ["description", "parameters"])
async def test_tools_larger_than_the_model_are_refused_before_they_are_written(rendered: Any, place: str) -> None:
    large = "x" * 100_000 if place == "description" else [{}] * 100_000
    tool = {"type": "function", "function": {"name": "f", place: large}}
    assert error_of(await rendered(HELLO, tools=[tool]), 400)["code"] == "context_length_exceeded"
    variables = {"documents_of_mine": large}
    assert error_of(await rendered(HELLO, chat_template_kwargs=variables), 400)["code"] == "context_length_exceeded"


async def test_a_model_without_a_template_refuses_chats_and_serves_completions(served: Any, tmp_path: Any) -> None:
    from repertory.tests.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", weights=False)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    s = await served(model=str(model))
    assert "no chat template" in error_of(await s.chat(HELLO), 400)["message"]
    assert (await s.complete("x")).status_code == 200
    assert (await s.http.get("/model_info")).json()["has_chat_template"] is False
