"""An OpenAI-shaped server of real sockets, and an engine that answers without a device."""

import json
import sys
import threading
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest

from repertory.protocol.capacity import Capacity
from repertory.protocol.outputs import BlockCounts, CompletionOutput, RequestOutput

CAPACITY = Capacity(
    device="fake", num_device_blocks=100, num_host_blocks=0, block_size=16, block_bytes=0, vocab_size=1000, max_model_len=8192
)


class QuickEngine:
    """Answers every request with as many tokens as it asks for, one a turn of the loop. Keeps what it was asked."""

    def __init__(self, *, fail=None, capacity=CAPACITY):
        self.capacity = capacity
        self.fail = fail
        self.asked = []
        self.num_open = 0
        self.num_streams = 0
        self.configs = []

    @asynccontextmanager
    async def open(self, config):
        self.configs.append(config)
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    def generate(self, prompt, sampling_params):
        assert self.num_open
        self.asked.append((prompt, sampling_params))
        return self._outputs(prompt, sampling_params)

    async def _outputs(self, prompt, params):
        self.num_streams += 1
        try:
            for number in range(1, params.max_tokens + 1):
                await anyio.lowlevel.checkpoint()
                last = number == params.max_tokens
                reason, stop = ("error", self.fail) if self.fail and last else ("length" if last else None, None)
                if params.output_kind == "delta":
                    yield output(prompt, [7], reason, stop)
                elif last:
                    yield output(prompt, [7] * number, reason, stop)
        finally:
            self.num_streams -= 1

    async def stats(self):
        return SimpleNamespace(device_blocks=BlockCounts(100, 60, 15, 25), num_running=self.num_streams)


def output(prompt, ids, reason, stop):
    completion = CompletionOutput(0, "", ids, finish_reason=reason, stop_reason=stop)
    return RequestOutput("1", None, prompt, [completion], finished=reason is not None, num_cached_tokens=len(prompt) // 2)


@pytest.fixture
def quick_engine():
    """The class, since test modules cannot import this one."""
    return QuickEngine


def events(*chunks):
    """Chunks as server-sent events, with the end that OpenAI's have."""
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + [b"data: [DONE]\n\n"]


def token(text="x", reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def usage(prompt, completion, cached):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion,
                                     "prompt_tokens_details": {"cached_tokens": cached}}}  # fmt: skip


class Server:
    """`answer(body)` gives (status, pieces); an exception among the pieces breaks the connection off."""

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.models = (200, json.dumps({"data": [{"id": "the-model"}, {"id": "another"}]}).encode())
        self.answer = self.tokens
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def tokens(self, body):
        count = body["max_tokens"]
        chunks = [token(reason="length" if number == count - 1 else None) for number in range(count)]
        return 200, events(*chunks, usage(len(body["prompt"]), count, 3))

    def running(self, change):
        with self._lock:
            self.num_running += change
            self.most_running = max(self.most_running, self.num_running)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else the pieces of an answer wait for the client's acknowledgements.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        status, body = self.server.owner.models
        self.answer_with(status, [body])

    def do_POST(self):
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner.bodies.append((self.path, body))
        owner.headers.append(dict(self.headers))
        owner.running(+1)
        try:
            self.answer_with(*owner.answer(body))
        finally:
            owner.running(-1)

    def answer_with(self, status, pieces):
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if isinstance(piece, Exception):
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


class HttpServer(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave in the middle
            raise


@pytest.fixture
def server(monkeypatch):
    """A `Server` that listens, at `server.url`."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    owner = Server()
    with HttpServer(("127.0.0.1", 0), Handler) as http:
        http.owner = owner
        owner.url = f"http://127.0.0.1:{http.server_address[1]}"
        owner.events, owner.token, owner.usage = events, token, usage
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield owner
        http.shutdown()
        thread.join()
