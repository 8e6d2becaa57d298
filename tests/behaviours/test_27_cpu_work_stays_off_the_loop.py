"""27. Whatever large or long a client posts, the loop goes on: `/health` answers, and streams keep their pace."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from repertory.actors.text.prompts import PromptReader
from repertory.tests.conformance.server_process import server_process
from repertory.tests.engine.stage import until
from repertory.tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.alone

BOUND_S = 0.1
TRIES = 5
LONG_TRIES = 3
"""Each takes many seconds of tokenizing."""
SIZE = 20_000_000

BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a text that is too long": ("/v1/completions", lambda: {"prompt": "the hen and " * (SIZE // 12)}),
    "a text with escapes": ("/v1/completions", lambda: {"prompt": '"\n\u00e9' * (SIZE // 10)}),
    "ids that are too many": ("/v1/completions", lambda: {"prompt": [17, 235, 4] * (SIZE // 15)}),
    "empty lists": ("/v1/completions", lambda: {"prompt": [[]] * (SIZE // 4)}),
    "a field nobody knows": ("/v1/completions", lambda: {"prompt": "x", "unknown": [{}] * (SIZE // 4)}),
    "one long message": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "user", "content": "the hen, " * (SIZE // 9)}]},
    ),
    "5,000 messages": ("/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": "the hen " * 9}] * 5000}),
    "a text to tokenize": ("/tokenize", lambda: {"prompt": "the hen and " * (SIZE // 12)}),
    "ids to decode": ("/detokenize", lambda: {"tokens": [17, 235, 4] * 80_000}),
}


@pytest.fixture(scope="module")
def url(paper_model: Path) -> Iterator[str]:
    """A server on a simulated device, in a process of its own: this one is the clients'."""
    with server_process(model=str(paper_model), device="simulated", log_level="error") as found:
        yield found


@pytest.fixture(scope="module")
def url_of_a_long_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, for prompts of 20 MB that have to be tokenized before anybody knows that they do not fit."""
    model = make_tiny_model(tmp_path_factory.mktemp("long"), weights=False, max_position_embeddings=4_000_000)
    with server_process(model=str(model), device="simulated", log_level="error") as found:
        yield found


class Watch:
    """Asks a server for its health, and reads a stream of it, until told to stop."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._over = threading.Event()
        self.slowest_health_s = 0.0
        self.longest_gap_s = 0.0
        self._threads = [threading.Thread(target=self._ask_health), threading.Thread(target=self._read_stream)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_health(self) -> None:
        connection = HTTPConnection(self._address, timeout=60)
        while not self._over.wait(0.002):
            started = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            self.slowest_health_s = max(self.slowest_health_s, time.perf_counter() - started)
        connection.close()

    def _read_stream(self) -> None:
        connection = HTTPConnection(self._address, timeout=60)
        asked = {"prompt": [7] * 9, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        answer = connection.getresponse()
        answer.readline()
        last = time.perf_counter()
        while not self._over.is_set() and answer.readline():
            self.longest_gap_s = max(self.longest_gap_s, (now := time.perf_counter()) - last)
            last = now
        connection.close()


def post(url: str, path: str, body: bytes) -> tuple[int, float]:
    """Status and seconds."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    started = time.perf_counter()
    connection.request("POST", path, body, {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status, time.perf_counter() - started


@pytest.mark.parametrize("kind", BODIES)
def test_health_answers_and_streams_go_on_whatever_is_posted(url: str, kind: str) -> None:
    path, make = BODIES[kind]
    body = json.dumps(make()).encode()
    statuses, seconds, healths, gaps = set(), [], [], []
    for _ in range(TRIES):
        with Watch(url) as watch:
            status, took_s = post(url, path, body)
        statuses.add(status)
        seconds.append(took_s)
        healths.append(watch.slowest_health_s)
        gaps.append(watch.longest_gap_s)
    assert statuses <= {400, 200}
    assert statistics.median(healths) < BOUND_S
    assert statistics.median(gaps) < BOUND_S
    assert statistics.median(seconds) < 1, "what cannot fit is refused cheaply"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_long_prompt_that_has_to_be_tokenized_holds_nobody_up(url_of_a_long_model: str, path: str) -> None:
    body = json.dumps({"prompt": " the" * (SIZE // 4)}).encode()  # tokens as long as those of a real tokenizer
    healths, gaps = [], []
    for _ in range(LONG_TRIES):
        with Watch(url_of_a_long_model) as watch:
            assert post(url_of_a_long_model, path, body)[0] == 400
        healths.append(watch.slowest_health_s)
        gaps.append(watch.longest_gap_s)
    assert statistics.median(healths) < BOUND_S
    assert statistics.median(gaps) < BOUND_S


async def test_what_stands_in_line_for_a_client_that_has_gone_is_not_done(served: Any, monkeypatch: Any) -> None:
    s = await served(max_model_len=100_000, num_device_blocks=8000)
    texts: list[str] = []
    go_on = threading.Event()
    read = PromptReader.read

    def slowly(reader: PromptReader, prompt: Any) -> Any:
        texts.append(prompt[:2])
        assert go_on.wait(10)
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", slowly)
    async with s.connection() as first, s.connection() as second:
        first.post("/v1/completions", {"prompt": "a " * 30_000, "max_tokens": 1})
        await until(lambda: texts == ["a "])
        second.post("/v1/completions", {"prompt": "b " * 30_000, "max_tokens": 1})
        await until(lambda: s.engine._company.tokenizer.num_reading == 2)
        second.hang_up()
        await until(lambda: s.engine._company.tokenizer.num_reading == 1)
        go_on.set()
        assert await first.line() == "HTTP/1.1 200 OK"
    assert texts == ["a "]
    await s.check_clean()
