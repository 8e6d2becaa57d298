"""`repertory simulate` as a command: replays, comparisons, made-up requests, and every way it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from repertory.__main__ import main
from repertory.tests.engine.stage import greedy, prompt_of

SHIPPED = Path(__file__).parent.parent / "data" / "mooncake_like.jsonl"


@pytest.fixture
def run(capsys):
    """Runs `repertory simulate ...`; returns (status, stdout, stderr)."""

    def command(*arguments):
        status = main(["simulate", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
async def recorded(stage, tmp_path):
    """A trace of a dozen requests on an engine that runs out of memory."""
    path = tmp_path / "run.jsonl"
    s = await stage(trace_file=str(path), block_size=4, num_device_blocks=30, max_num_seqs=4, max_num_batched_tokens=16)
    await s.ask_all([(prompt_of(9 + seed, seed % 3), greedy(6 + seed)) for seed in range(12)])
    await s.close()
    return path


def test_help_teaches_and_imports_nothing_heavy(tmp_path):
    program = (
        "import sys; from repertory.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'gguf', 'matplotlib', 'httpx2'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, "simulate", "--help"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    assert "repertory simulate run.jsonl --policy fcfs --policy static" in shown
    assert all(flag in shown for flag in ("--generate", "--goodput", "--also", "--step-ms", "--num-device-blocks", "--plot"))


def test_a_trace_alone_is_replayed_and_every_decision_is_the_same_twice(run, recorded):
    status, out, err = run(recorded)
    assert (status, err) == (0, "")
    assert "the same decisions in all" in out
    assert "of 13 requests" in out
    found = [json.loads(run(recorded, "--json")[1]) for _ in range(2)]
    assert found[0]["digest"] == found[1]["digest"] == found[0]["recorded_digest"]
    assert found[0]["same"] is True


def test_a_trace_that_was_tampered_with_shows_the_first_difference_and_fails(run, recorded):
    lines = recorded.read_text().splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if '"step_id":9,' in line and '"Planned"' in line)
    step = json.loads(lines[place])
    step["num_waiting"] = 99
    lines[place] = json.dumps(step) + "\n"
    recorded.write_text("".join(lines))
    status, out, _ = run(recorded)
    assert status == 1
    assert "the first different decision: step 9 at" in out
    assert "num_waiting: recorded 99, replayed" in out


def test_a_trace_that_was_cut_off_says_so(run, recorded):
    recorded.write_bytes(recorded.read_bytes()[:-30])
    status, out, _ = run(recorded)
    assert status == 0
    assert "the trace has no end: the run was cut off" in out


def test_a_trace_under_other_policies_stands_beside_what_was_recorded(run, recorded):
    status, out, err = run(recorded, "--policy", "fcfs", "--policy", "static", "--also", "num-device-blocks=60,max-num-seqs=16")
    assert (status, err) == (0, "")
    header = out.splitlines()[1].split()
    assert header == ["recorded", "fcfs", "static", "num-device-blocks=60,max-num-seqs=16"]
    assert "fitted from" in out
    found = json.loads(run(recorded, "--policy", "fcfs", "--json")[1])
    recorded_run, simulated = found["runs"]
    assert recorded_run["num_completed"] == simulated["num_completed"] == 13
    assert found["fit"]["num_steps"] > 20


def test_another_setting_is_a_comparison_too(run, recorded):
    found = json.loads(run(recorded, "--enable-prefix-caching", "--num-device-blocks", "200", "--json")[1])
    assert found["settings"]["num_device_blocks"] == 200
    assert found["runs"][1]["peak_kv_share"] < 0.5 < found["runs"][0]["peak_kv_share"]


def test_a_file_of_settings_changes_a_trace_and_flags_win_over_it(run, recorded, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("kv:\n  num_device_blocks: 77\n  max_num_seqs: 2\n")
    found = json.loads(run(recorded, "--config", file, "--max-num-seqs", "3", "--json")[1])
    assert (found["settings"]["num_device_blocks"], found["settings"]["max_num_seqs"]) == (77, 3)
    assert found["runs"][1]["mean_running"] < found["runs"][0]["mean_running"]


@pytest.mark.slow
def test_the_shipped_trace_is_served_by_two_policies_and_drawn(run, tmp_path):
    picture = tmp_path / "run.png"
    pytest.importorskip("matplotlib")
    status, out, err = run(
        SHIPPED, "--policy", "fcfs", "--policy", "static", "--goodput", "ttft:2000", "itl:100", "--plot", picture
    )
    assert (status, err) == (0, "")
    assert "1,000 / 0" in out
    assert "goodput (1/s), share" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_public_trace_is_served_on_a_device_of_the_flags_and_repeats_itself(run, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(SHIPPED.read_text().splitlines(keepends=True)[:60]))
    found = [json.loads(run(few, "--step-ms", "10", "--prefill-us", "20", "--json")[1]) for _ in range(2)]
    assert found[0]["runs"] == found[1]["runs"]
    assert found[0]["latency"]["step_s"] == pytest.approx(0.01)
    assert found[0]["runs"][0]["num_completed"] == 60
    assert found[0]["runs"][0]["p50_itl_ms"] > 10
    faster = json.loads(run(few, "--load", "2", "--json")[1])["runs"][0]
    assert faster["duration_s"] < found[0]["runs"][0]["duration_s"]


def test_requests_are_made_up_served_and_written(run, tmp_path):
    arguments = ("--generate", "shared-prefix", "--requests", "50", "--rate", "20", "--groups", "2", "--input-len", "100")
    found = json.loads(run(*arguments, "--also", "enable-prefix-caching=false", "--json")[1])
    shared, alone = found["runs"]
    assert shared["hit_rate"] > 0.5
    assert alone["hit_rate"] == 0.0
    assert shared["p50_ttft_ms"] < alone["p50_ttft_ms"]
    path = tmp_path / "written.jsonl"
    assert run(*arguments, "--write", path)[1].startswith(f"{path}: 50 requests")
    assert json.loads(run(path, "--json")[1])["runs"][0]["num_completed"] == 50


def test_a_picture_is_drawn_beside_the_table(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    status, out, _ = run(
        "--generate", "bursts", "--requests", "40", "--policy", "fcfs", "--policy", "static", "--plot", picture
    )
    assert (status, out.splitlines()[1].split()) == (0, ["fcfs", "static"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_goodput_counts_requests_within_every_objective(run):
    arguments = ("--generate", "poisson", "--requests", "40", "--rate", "5", "--json", "--goodput")
    loose = json.loads(run(*arguments, "ttft:100000", "itl:100000")[1])["runs"][0]
    tight = json.loads(run(*arguments, "ttft:0.001")[1])["runs"][0]
    assert (loose["good_share"], tight["good_share"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a trace, or --generate"),
        ([SHIPPED, "--generate", "poisson"], "give a trace, or --generate"),
        (["--generate", "chaos"], "'chaos' is not one of poisson, bursts"),
        (["--generate", "poisson", "--rate", "0"], "--rate must be above 0"),
        (["--generate", "poisson", "--requests", "0"], "--requests must be at least 1"),
        ([SHIPPED, "--format", "sharegpt"], "--format: 'sharegpt' is not one of repertory, mooncake, burstgpt, azure"),
        ([SHIPPED, "--format", "azure"], "there is no column 'timestamp'"),
        ([SHIPPED, "--policy", "fcsf"], "did you mean 'fcfs'?"),
        ([SHIPPED, "--also", "num-blocks=3"], "is not SETTING=VALUE; settings are block_size"),
        ([SHIPPED, "--also", "log-level=debug"], "is not SETTING=VALUE; settings are block_size"),
        ([SHIPPED, "--also", "enable-prefix-caching=perhaps"], "--also enable-prefix-caching: 'perhaps' is not allowed"),
        ([SHIPPED, "--also", "max-num-seqs="], "--also max-num-seqs is empty"),
        ([SHIPPED, "--also", "max-num-seqs=0"], "--also max-num-seqs: '0' is not allowed"),
        ([SHIPPED, "--goodput", "ttft"], "expected NAME:MILLISECONDS, once each of ttft, tpot, itl, e2el"),
        ([SHIPPED, "--copy-gb-s", "0"], "--copy-gb-s must be above 0, got 0"),
        ([SHIPPED, "--step-ms", "-1"], "--step-ms must not be below 0"),
        ([SHIPPED, "--load", "0"], "--load must be above 0"),
        ([SHIPPED, "--plot", "run.pdf"], "does not end in .png"),
        (["nowhere.jsonl"], "No such file"),
    ],
)
def test_what_is_wrong_is_refused_before_the_work(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_a_trace_without_requests_is_refused(run, tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    status, _, err = run(path)
    assert status == 2
    assert "there are no requests in it" in err
