"""5, over HTTP. The usage says what was cached under the request's salt, and nothing of another's."""

from __future__ import annotations

from typing import Any

import pytest

from repertory.tests.engine.stage import prompt_of
from repertory.tests.http.served import error_of, events_of

PROMPT = prompt_of(12)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_reports_hits_within_a_salt_and_none_across(served: Any, stream: bool) -> None:
    s = await served(block_size=4)
    found = []
    for salt in ("s1", "s2", None, "s1", "s2", None):
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await s.complete(PROMPT, cache_salt=salt, **fields)
        usage = answer.json()["usage"] if not stream else _last_event(answer)["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 0, 0, 11, 11, 11]
    await s.check_clean()


async def test_the_answers_are_equal_under_every_salt(served: Any) -> None:
    s = await served(block_size=4)
    for salt in ("s1", "s2", None, "s1"):
        answer = await s.complete(PROMPT, cache_salt=salt)
        assert answer.json()["choices"][0]["token_ids"] == s.stage.alone(PROMPT).token_ids
    await s.check_clean()


@pytest.mark.parametrize("salt", ["", 5, ["s1"], True, {}, "x" * 10_000])
async def test_a_salt_that_is_no_short_text_is_refused(served: Any, salt: Any) -> None:
    s = await served()
    assert error_of(await s.complete(PROMPT, cache_salt=salt), 400)["param"] == "cache_salt"
    assert error_of(await s.chat([{"role": "user", "content": "x"}], cache_salt=salt), 400)["param"] == "cache_salt"
    await s.check_clean()


def _last_event(answer: Any) -> Any:
    return events_of(answer)[-2]
