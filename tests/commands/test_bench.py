"""`repertory bench` as a command: its verbs, their flags, what they print, and every way they end."""

import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from repertory.__main__ import main
from repertory.actors.commands import bench
from repertory.actors.commands.benching import show
from repertory.protocol.errors import EngineDeadError
from repertory.tests.engine.stage import check_threads_have_ended

FIXED = ["offline", "latency", "prefix", "ttft", "itl"]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def run(monkeypatch, capsys, paper_model, log_lines):
    """Runs `repertory bench ...` on a simulated device; returns (status, stdout, stderr)."""
    monkeypatch.setattr(bench, "configure_logging", lambda *_: None)

    def command(verb, *arguments):
        status = main(["bench", verb, "--model", str(paper_model), "--device", "simulated", "--worker", "inline", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_help_lists_every_benchmark_and_imports_nothing_heavy(tmp_path):
    program = (
        "import sys; from repertory.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'gguf', 'matplotlib', 'httpx2'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, "bench", "--help"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    assert all(f"│ {verb} " in shown for verb in (*FIXED, "table", "serve"))


@pytest.mark.parametrize("verb", FIXED)
def test_a_fixed_workload_runs_on_an_engine_and_adds_up(run, verb):
    status, out, err = run(verb, "--repetitions", "1", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert (found["benchmark"], found["device"]) == (verb, "simulated")
    assert found["settings"]["worker"] == "inline"
    for figure in found["figures"].values():
        assert figure["values"] == [figure["median"]]
        assert figure["values"][0] >= 0


def test_shared_prefixes_are_found_in_the_cache(run):
    found = json.loads(run("prefix", "--repetitions", "1", "--json")[1])
    assert found["figures"]["cached_share"]["median"] > 90
    found = json.loads(run("prefix", "--repetitions", "1", "--json", "--no-enable-prefix-caching")[1])
    assert found["figures"]["cached_share"]["median"] == 0


def test_a_table_has_medians_and_every_repetition(run):
    status, out, _ = run("latency", "--repetitions", "3")
    assert status == 0
    title, header, *lines = out.splitlines()
    assert title.startswith("B, latency: ")
    assert header.split() == ["unit", "median", "min", "max", "by", "repetition"]
    assert [line.split("  ")[0] for line in lines] == ["rate after the first token", "TTFT", "E2EL", "ITL P99"]
    values = lines[1].split()[2:]
    assert len(values) == 6
    assert float(values[1]) <= float(values[0]) <= float(values[2])


def test_the_table_of_three_schedulers_has_the_seeds_lines_and_its_ratios(run):
    status, out, err = run("table", "--quick", "--num-requests", "12", "--rate", "300")
    assert (status, err) == (0, "")
    for line in (
        "throughput (tok/s)",
        "TTFT P50 (ms)",
        "TTFT P99 (ms)",
        "TBT P50 (ms)",
        "TBT P99 (ms)",
        "KV memory",
        "concurrency",
    ):
        assert f"\n{line}" in out
    assert "continuous / static " in out


def test_the_table_as_json_measures_its_rate(run):
    found = json.loads(run("table", "--quick", "--num-requests", "6", "--json")[1])
    assert found["rate"] > 0
    assert [outcome["name"] for outcome in found["outcomes"]] == ["static", "continuous", "continuous + chunked"]
    assert len(found["ratios"]) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["offline", "--repetitions", "0"], "--repetitions must be at least 1"),
        (["offline", "--block-size", "0"], "--block-size"),
        (["offline", "--port", "80"], "--port"),
        (["offline", "--plot", "x.gif"], "--plot"),
        (["offlin"], "offline"),
        (["table", "--rate", "0"], "--rate must be above 0"),
        (["table", "--rate", "nan"], "--rate must be above 0"),
        (["table", "--num-requests", "0"], "--num-requests must be at least 1"),
        (["table", "--num-requests", "-5"], "--num-requests must be at least 1"),
        (["table", "--static-batch", "0"], "--static-batch must be at least 1"),
        (["table", "--scheduling-policy", "fcfs"], "--scheduling-policy"),
        (["table", "--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_any_engine_is_opened(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(bench, "configure_logging", lambda *_: None)
    monkeypatch.setattr(bench, "open_engine", None)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_a_prompt_that_does_not_fit_into_memory_is_the_callers_fault(run):
    status, out, err = run("ttft", "--num-device-blocks", "20")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_dead_engine_is_status_1(monkeypatch, capsys):
    class Dead:
        async def __aenter__(self):
            raise EngineDeadError("it is gone")

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(bench, "configure_logging", lambda *_: None)
    monkeypatch.setattr(bench, "open_engine", lambda _: Dead())
    assert main(["bench", "offline"]) == 1
    assert capsys.readouterr().err == "error: it is gone\n"


def test_an_interrupt_closes_the_engine_and_exits_130(run, monkeypatch, capsys):
    before = threading.enumerate()
    original = bench.fixed.repeat

    async def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return await original(*arguments)

    monkeypatch.setattr(bench.fixed, "repeat", interrupted)
    assert run("offline") == (130, "", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "repertory-compute"]
    check_threads_have_ended(before)


def test_a_bar_is_shown_on_a_terminal_only_and_clears_its_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for err in (io.StringIO(), Terminal()):
        with show.progress("requests", 2, err) as advance:
            advance()
            advance()
        assert bool(err.getvalue()) == err.isatty()


def test_a_plot_is_drawn_of_what_was_measured(run, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(bench.plot, "check_can_plot", lambda path: None)
    monkeypatch.setattr("repertory.actors.commands.benching.flags.check_can_plot", lambda path: None)
    monkeypatch.setattr(bench.plot, "draw", lambda path, title, panels: drawn.append((path, panels)))
    run("latency", "--repetitions", "2", "--plot", str(tmp_path / "b.png"))
    run("table", "--quick", "--num-requests", "6", "--rate", "300", "--plot", str(tmp_path / "t.png"))
    (first, bars), (second, curves) = drawn
    assert (first.name, second.name) == ("b.png", "t.png")
    assert all(panel.as_bars and len(next(iter(panel.series.values()))) == 2 for panel in bars)
    assert [panel.title for panel in curves] == ["TTFT", "TBT", "E2EL"]
    assert all(len(panel.series) == 3 for panel in curves)


def test_scripts_bench_reaches_the_same_code():
    script = (ROOT / "scripts" / "bench").read_text(encoding="utf-8")
    assert "-m repertory bench" in script
