"""`repertory trace FILE ...`: what a person at a terminal gets, and what a program does."""

import json
import os
import subprocess
import sys

import pytest

from repertory.protocol.journey import STAGES
from repertory.tests.observability.written import WrittenTrace, pressed


def words_of(said):
    """What was printed, without the places where lines were broken."""
    return " ".join(said.out.split())


def test_a_request_is_shown_with_its_legs_who_is_to_blame_and_what_was_decided(trace_command, pressed_file):
    said = trace_command(pressed_file, "show", "job-1")
    assert said.status == 0
    words = words_of(said)
    assert "job-1 (4c8e288b-1): 390 ms, first token after 70.0 ms, ended by length" in words
    assert "arrived 2023-11-14 22:13:20.000 UTC; 64 prompt tokens, 16 of them cached; 9 output tokens, 1 preemption" in words
    assert "150 ms preempted Scheduler 40.0 ms 10.3%" in words
    assert "stalled 45.0 ms by the prefills of job-3 (30.0 ms), job-2 (15.0 ms)" in words
    assert (
        "at 150 ms: preempted by swap (cheaper): 5 blocks freed, 70 tokens; copying out and in would cost 3.00 ms, "
        "computing again 9.00 ms"
    ) in words


def test_the_actor_that_held_it_is_named(trace_command, tmp_path):
    legs = [("tokenise", 0.1), ("queue", 0.1), ("fetch", 0.1), ("decode", 0.1), ("detokenise", 0.1), ("send", 0.1)]
    shown = trace_command(WrittenTrace().travelled(1, 0.0, legs).write(tmp_path / "t"), "show", "1").out
    found = [words for words in map(str.split, shown.splitlines()) if set(words) & set(STAGES)]
    actors = [next(word for word in words if word[0].isupper()) for words in found[: len(legs)]]
    assert actors == ["Tokenizer", "Scheduler", "SwapManager", "Worker", "Detokenizer", "Dispatcher"]


def test_the_bars_of_a_waterfall_stand_where_their_legs_do(trace_command, tmp_path):
    legs = [("queue", 0.25), ("prefill", 0.25), ("decode", 0.5, 0.25)]
    file = WrittenTrace().arrived(1, 0.0).travelled(1, 0.0, legs).write(tmp_path / "t")
    bars = [line for line in trace_command(file, "show", "1").out.splitlines() if "█" in line]
    starts = [line.index("█") - bars[0].index("█") for line in bars]
    lengths = [line.count("█") + line.count("▒") for line in bars]
    whole = sum(lengths)
    assert starts == [0, lengths[0], lengths[0] + lengths[1]]
    assert lengths[2] == pytest.approx(whole / 2, abs=1)
    assert bars[2].count("▒") == pytest.approx(whole / 4, abs=1)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (2, "most of it: paused, 300 ms (61%): paused after 3 output tokens: its reader is behind"),
        (3, "most of it: restart, 200 ms (69%): the device was lost"),
        (4, "most of it: queue, 180 ms (100%): 2 running, 0 waiting when it began, requests held 30% of KV"),
        (5, "1.00 ms, refused"),
    ],
)
def test_however_a_request_ended_it_is_explained(trace_command, pressed_file, number, said):
    assert said in words_of(trace_command(pressed_file, "show", number))


def test_an_unknown_request_is_the_callers_fault_and_close_ones_are_named(trace_command, pressed_file):
    said = trace_command(pressed_file, "show", "job-12")
    assert (said.status, said.out) == (2, "")
    assert said.err == "error: no request 'job-12' among the 5; close to it: job-2, job-1, job-5, job-4, job-3\n"


def test_the_slowest_are_shown_when_nothing_else_is_asked_for(trace_command, pressed_file):
    said = trace_command(pressed_file)
    assert said.out == trace_command(pressed_file, "slowest").out
    assert "run.jsonl: 5 requests in 500 ms, 4 steps, 1 preemption" in words_of(said)
    names = [line.split()[0] for line in said.out.splitlines() if line.startswith("job")]
    assert names == ["job-2", "job-1", "job-3", "job-4", "job-5"]


@pytest.mark.parametrize(
    ("by", "names"),
    [("ttft", ["job-2", "job-1"]), ("stalled", ["job-1"]), ("preempted", ["job-1"]), ("queue", ["job-4", "job-2", "job-1"])],
)
def test_the_slowest_by_another_measure(trace_command, pressed_file, by, names):
    said = trace_command(pressed_file, "slowest", "--by", by, "--json")
    found = json.loads(said.out)
    assert [request["label"] for request in found] == names
    if by in STAGES:
        seconds = [request["stages"][by] for request in found]
        assert seconds == sorted(seconds, reverse=True)


def test_a_stage_that_no_request_was_in_is_said(trace_command, pressed_file):
    assert "no request has any fetch time" in trace_command(pressed_file, "slowest", "--by", "fetch").out


def test_as_many_are_shown_as_asked_for(trace_command, pressed_file):
    assert len(json.loads(trace_command(pressed_file, "slowest", "-n", 2, "--json").out)) == 2
    said = trace_command(pressed_file, "slowest", "-n", 0)
    assert (said.status, said.err) == (2, "error: -n must be at least 1, got 0\n")


def test_steps_are_shown_over_time(trace_command, pressed_file):
    said = trace_command(pressed_file, "steps", "--bins", 5)
    assert said.status == 0
    assert said.out.startswith("4 steps; the longest bars are ")
    bins = json.loads(trace_command(pressed_file, "steps", "--bins", 5, "--json").out)
    assert sum(one["num_steps"] for one in bins) == 4
    assert sum(one["num_prefill_tokens"] for one in bins) == 224


def test_logs_have_requests_and_no_steps(trace_command, log_lines_file):
    leg = ["queue", 0.0, 0.5]
    line = {
        "event": "request.finished",
        "request_id": "4c8e288b-1",
        "label": "one",
        "e2e_s": 0.5,
        "legs": [leg],
        "monotonic_s": 9.5,
    }
    file = log_lines_file("a line of somebody else", line)
    said = trace_command(file)
    assert "one" in said.out and "1 of 2 lines are not events of repertory" in said.err
    said = trace_command(file, "steps")
    assert said.status == 2
    assert "--trace-file" in said.err


def test_a_trace_and_logs_are_read_from_standard_input_too(trace_command):
    lines = b"".join(pressed().lines())
    assert "standard input: 5 requests" in trace_command("-", stdin=lines).out
    assert trace_command("-", stdin=b"").err == "error: standard input: there is nothing in it\n"


def test_a_file_that_is_neither_is_refused(trace_command, log_lines_file, tmp_path):
    said = trace_command(log_lines_file("hello", "world"))
    assert said.status == 2
    assert "neither a trace (--trace-file) nor JSON logs (--log-format json)" in said.err
    assert "No such file" in trace_command(tmp_path / "nowhere").err
    assert "Is a directory" in trace_command(tmp_path).err


def test_a_run_without_requests_is_shown_as_such(trace_command, tmp_path):
    file = WrittenTrace().finished(0.0).write(tmp_path / "empty.jsonl")
    assert "there are no requests in it" in trace_command(file).out
    assert "there are no requests in it" in trace_command(file, "show", "1").err
    assert trace_command(file, "steps").status == 2
    assert trace_command(file, "report", tmp_path / "empty.html").status == 0
    assert trace_command(file, "export", "--perfetto", tmp_path / "empty.json").status == 0


def test_a_label_cannot_write_to_the_terminal_what_a_terminal_obeys(trace_command, tmp_path):
    file = WrittenTrace().arrived(1, 0.0, label="\x1b[31mred\x07[bold]x[/bold]").write(tmp_path / "t")
    for view in (["slowest"], ["show", "1"]):
        said = trace_command(file, *view)
        assert "\x1b" not in said.out and "\x07" not in said.out
        assert "?[31mred?[bold]x[/bold]" in said.out


def test_a_label_without_end_leaves_room_for_the_rest(trace_command, tmp_path):
    written = WrittenTrace().travelled(1, 0.0, [("queue", 0.1)], label="x" * 500)
    file = written.travelled(2, 0.0, [("decode", 0.3, 0.1)], stalled_by=[(1, 0.1)], label="漢字" * 90).write(tmp_path / "t")
    out = trace_command(file).out
    assert "300 ms" in out and "100 ms" in out and max(map(len, out.splitlines())) <= 120
    assert f"stalled 100 ms by the prefill of {'x' * 27}... (100 ms)" in trace_command(file, "show", "2").out
    assert words_of(trace_command(file, "show", "1")).startswith("xxx")


def test_a_terminal_without_the_characters_gets_others(tmp_path):
    file = WrittenTrace().travelled(1, 0.0, [("decode", 0.3, 0.1)], label="漢字").write(tmp_path / "t")
    command = [sys.executable, "-m", "repertory", "trace", str(file), "show", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(b"?? (4c8e288b-1): 300 ms")
    assert b"==~~" in done.stdout


def test_several_requests_with_one_label_are_all_named(trace_command, tmp_path):
    written = WrittenTrace().travelled(1, 0.0, [("queue", 0.1)], label="same").travelled(2, 0.0, [("queue", 0.2)], label="same")
    said = trace_command(written.write(tmp_path / "t"), "show", "same")
    assert said.out.startswith("same (4c8e288b-2): 200 ms")
    assert "2 requests are called same; this is the slowest. Others: 4c8e288b-1" in said.out


def test_a_view_that_there_is_not_is_refused_with_those_that_there_are(trace_command, pressed_file):
    said = trace_command(pressed_file, "sho")
    assert said.status == 2
    assert 'Did you mean "show"?' in said.err
    assert "repertory trace FILE show job-1" in trace_command("show", "job-1").err
    assert trace_command(pressed_file, "slowest", "--by", "lunch").status == 2
    assert trace_command(pressed_file, "show").status == 2


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_said(trace_command, pressed_file, tmp_path):
    for view in (["report", tmp_path / "no" / "x.html"], ["export", "--perfetto", tmp_path / "no" / "x.json"]):
        said = trace_command(pressed_file, *view)
        assert (said.status, said.out) == (2, "")
        assert "No such file or directory" in said.err


def test_help_teaches_every_view(trace_command):
    for words in (["--help"], ["-h"], []):
        said = trace_command(*words)
        assert said.status == 0
        for view in ("show", "slowest", "steps", "export", "report"):
            assert f"repertory trace run.jsonl {view}" in said.out
    assert "time to the first token" in words_of(trace_command("x", "slowest", "--help")).replace("│ ", "")


def test_help_and_the_views_import_nothing_heavy(pressed_file):
    program = (
        "import sys; from repertory.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'anyio', 'structlog'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    for words in (["--help"], [str(pressed_file), "slowest"]):
        done = subprocess.run([sys.executable, "-c", program, "trace", *words], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
