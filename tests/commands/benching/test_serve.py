"""`repertory bench serve` against a server of real sockets: what it sends, what it counts, and what goes wrong."""

import json
import sys
import threading

import anyio
import msgspec
import pytest

from repertory.__main__ import main
from repertory.actors.commands.benching import server_load
from repertory.actors.commands.benching.metrics import Timeline
from repertory.actors.commands.benching.openai_client import open_client
from repertory.protocol.errors import ConfigError


@pytest.fixture
def serve(server, capsys):
    """Runs `repertory bench serve` with small prompts; returns (status, stdout, stderr)."""

    def run(*arguments):
        sizes = ["--num-prompts", "6", "--input-len", "5", "--output-len", "4"]
        status = main(["bench", "serve", "--base-url", server.url, *sizes, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def complete(server):
    """One answer of `server` as its client sees it."""

    async def run(**options):
        async with open_client(server.url, model="m", **options) as client:
            return await client.complete([1, 2, 3], 4)

    return lambda **options: anyio.run(lambda: run(**options))


def test_the_report_has_the_lines_of_vllm_bench_serve(serve):
    status, out, err = serve("--goodput", "ttft:60000", "e2el:60000")
    assert (status, err) == (0, "")
    lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in out.splitlines())}
    assert lines["Successful requests"] == "6"
    assert lines["Failed requests"] == "0"
    assert lines["Total input tokens"] == "30"
    assert lines["Total generated tokens"] == "24"
    assert lines["Cached input tokens"] == "18"
    assert float(lines["Request goodput (req/s)"]) == float(lines["Request throughput (req/s)"]) > 0
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert {f"{kind} {name} (ms)" for kind in ("Mean", "Median", "Std", "P99")} <= lines.keys()
    assert out.startswith("============ Serving Benchmark Result ============\n")
    assert "---------------Time to First Token----------------\n" in out


def test_json_has_its_keys_and_adds_up(serve):
    status, out, _ = serve("--json")
    found = json.loads(out)
    assert status == 0
    assert (found["completed"], found["failed"], found["errors"]) == (6, 0, [])
    assert found["request_goodput"] is None
    assert found["request_rate"] == "inf"
    assert found["output_throughput"] == pytest.approx(24 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(54 / found["duration"])
    assert found["mean_e2el_ms"] >= found["mean_ttft_ms"] > 0


def test_a_first_request_is_sent_that_does_not_count_and_warms_no_prompt(serve, server):
    serve()
    paths, bodies = zip(*server.bodies, strict=True)
    assert set(paths) == {"/v1/completions"}
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(prompts) == 7
    assert prompts[0] not in prompts[1:]
    assert all(len(prompt) == 5 for prompt in prompts)
    assert bodies[0] | {"prompt": []} == {
        "model": "the-model", "prompt": [], "max_tokens": 4, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


def test_the_name_the_key_and_strict_servers_are_heeded(serve, server):
    serve("--model", "mine", "--api-key", "secret", "--no-ignore-eos")
    assert {body["model"] for _, body in server.bodies} == {"mine"}
    assert not any("ignore_eos" in body for _, body in server.bodies)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


def test_the_address_may_end_in_v1(server, capsys):
    assert main(["bench", "serve", "--base-url", f"{server.url}/v1/", "--num-prompts", "1", "--output-len", "1"]) == 0
    assert {path for path, _ in server.bodies} == {"/v1/completions"}


def test_groups_share_their_beginning(serve, server):
    assert serve("--dataset", "shared-prefix", "--num-groups", "2", "--shared-len", "8")[0] == 0
    prompts = [body["prompt"] for _, body in server.bodies[1:]]
    assert {len(prompt) for prompt in prompts} == {13}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2


def test_no_more_are_under_way_than_allowed(serve, server):
    status, out, _ = serve("--max-concurrency", "2", "--json")
    assert status == 0
    assert server.most_running <= 2
    assert json.loads(out)["max_concurrent_requests"] <= 2


def test_without_a_bound_all_are_under_way_together(serve, server):
    barrier = threading.Barrier(6)

    def answer(body):
        if len(server.bodies) > 1:
            barrier.wait(60)
        return server.tokens(body)

    server.answer = answer
    status, out, _ = serve("--json")
    assert status == 0
    assert json.loads(out)["max_concurrent_requests"] == 6


def test_a_rate_spreads_requests_over_time(serve):
    _, out, _ = serve("--request-rate", "100", "--json")
    found = json.loads(out)
    assert found["request_rate"] == 100.0
    assert found["duration"] > 0.01


# ---- what goes wrong -------------------------------------------------------------------------------


def test_requests_that_fail_are_counted_shown_and_make_the_status_1(serve, server):
    def answer(body):
        if len(server.bodies) in (3, 5):
            return 429, [b'{"error": {"message": "too many", "type": "x"}}']
        return server.tokens(body)

    server.answer = answer
    status, out, err = serve()
    assert status == 1
    assert err == "error: status 429: too many\n"
    assert "Successful requests:                     4" in out
    assert "Failed requests:                         2" in out
    assert "Total generated tokens:                  16" in out


def test_a_first_request_that_fails_ends_it_with_the_servers_words(serve, server):
    server.answer = lambda _: (400, [b'{"error": {"message": "no such model"}}'])
    assert serve() == (1, "", "error: the test request failed: status 400: no such model\n")
    assert len(server.bodies) == 1


def test_no_server_is_one_line_and_status_1(capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: http://127.0.0.1:1/v1/: ConnectError")
    assert err.count("\n") == 1


@pytest.mark.parametrize("models", [(200, b"{}"), (200, b"not json"), (200, b'{"data": []}'), (200, b"[1]")])
def test_a_server_that_names_no_model_is_told(serve, server, models):
    server.models = models
    status, _, err = serve()
    assert status == 1
    assert "give --model" in err


def test_a_server_that_refuses_to_name_its_models_is_quoted(serve, server):
    server.models = (401, b'{"error": "a key is needed"}')
    status, _, err = serve()
    assert (status, err) == (1, f"error: {server.url}/v1/models: status 401: a key is needed\n")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--base-url", "http://"], "--base-url"),
        (["--base-url", "ftp://x"], "--base-url"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--input-len", "-1"], "--input-len"),
        (["--output-len", "0"], "--output-len"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--num-groups", "0"], "--num-groups"),
        (["--vocab-size", "0"], "--vocab-size"),
        (["--goodput", "itl:5"], "--goodput"),
        (["--dataset", "shared"], "--dataset"),
        (["--plot", "picture.svg"], "--plot"),
        (["--plot", "/no/such/folder/x.png"], "--plot"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_anything_is_sent(flags, field, capsys):
    assert main(["bench", "serve", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert field in err


def test_a_missing_client_library_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)

    async def run():
        async with open_client(server.url):
            pass

    with pytest.raises(ConfigError, match="pip install httpx2"):
        anyio.run(run)


# ---- what a stream may look like -------------------------------------------------------------------


def answered(server, *chunks, done=True):
    pieces = server.events(*chunks)
    server.answer = lambda _: (200, pieces if done else pieces[:-1])


def test_tokens_are_counted_by_the_usage_and_gaps_by_the_events(complete, server):
    answered(server, server.token("two words"), server.token("more", "length"), server.usage(3, 5, 2))
    found = complete()
    assert (found.error, found.num_output, found.num_cached, len(found.at_s)) == (None, 5, 2, 2)


def test_without_a_usage_events_are_tokens(complete, server):
    answered(server, server.token(), server.token(), server.token("", "stop"))
    found = complete()
    assert (found.error, found.num_output, len(found.at_s)) == (None, 2, 2)


def test_a_token_without_text_is_a_token_unless_it_only_ends_the_answer(complete, server):
    answered(server, server.token(""), server.token("x"), server.token("", "length"), server.usage(3, 2, 0))
    assert len(complete().at_s) == 2


def test_events_may_be_cut_anywhere_and_have_other_fields(complete, server):
    text = server.token("a\u2028b\x85c\x0bd", "length")
    raw = b": a comment\r\nevent: x\r\ndata:" + msgspec.json.encode(text) + b"\r\n\r\ndata: [DONE]"
    server.answer = lambda _: (200, [raw[index : index + 1] for index in range(len(raw))])
    found = complete()
    assert (found.error, len(found.at_s)) == (None, 1)


def test_an_end_may_be_only_a_reason_or_only_a_done(complete, server):
    answered(server, server.token(), server.token("x", "stop"), done=False)
    assert complete().error is None
    answered(server, server.token())
    assert complete().error is None


def test_an_answer_that_breaks_off_has_failed(complete, server):
    answered(server, server.token(), server.token(), done=False)
    assert complete().error == "the stream ended without an end"
    server.answer = lambda _: (200, [*server.events(server.token())[:1], ConnectionResetError()])
    assert "RemoteProtocolError" in complete().error


def test_an_error_in_the_middle_is_the_servers_message(complete, server):
    answered(server, server.token(), {"error": {"message": "out of memory"}})
    assert complete().error == "out of memory"


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n"])
def test_what_is_no_completion_is_a_failure_and_no_crash(complete, server, data):
    server.answer = lambda _: (200, [data])
    assert complete().error.startswith("not a completion")


def test_an_empty_answer_is_a_failure(complete, server):
    answered(server, server.usage(3, 0, 0))
    assert complete().error == "the answer was empty"


def test_an_error_that_is_no_json_is_quoted_in_part(complete, server):
    server.answer = lambda _: (502, [b"<html>\n" + b"x" * 1000])
    error = complete().error
    assert error.startswith("status 502: <html> xxx")
    assert len(error) < 400


# ---- sums ------------------------------------------------------------------------------------------


def test_the_most_at_once_counts_what_overlaps():
    spans = [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (2.5, 4.0)]
    timelines = [Timeline(sent_s=sent, num_prompt=1, at_s=[end]) for sent, end in spans]
    assert server_load.most_at_once(timelines) == 2
    assert server_load.most_at_once([]) == 0


def test_a_run_without_a_success_has_figures_that_are_none():
    load = server_load.Load([[1]], 1, 5.0, 3, 0)
    found = server_load.results(load, [Timeline(sent_s=0.0, num_prompt=1, error="no")], 2.0, {"ttft": 1.0})
    assert (found["completed"], found["failed"], found["request_goodput"]) == (0, 1, 0.0)
    text = server_load.layout(found)
    assert "Mean TTFT (ms):                          nan" in text
    assert "Maximum request concurrency:             3" in text
    assert "Request rate configured (RPS):           5.00" in text
    assert json.loads(msgspec.json.encode(found))["mean_ttft_ms"] is None
