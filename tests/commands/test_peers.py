"""`scripts/bench peers`: what is read off the replies, who takes part, and what a driver is asked."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file

from repertory.scripts.benches.peers import weights
from repertory.scripts.benches.peers.driving import job_of
from repertory.scripts.benches.peers.installing import (
    DRIVERS,
    InstallError,
    Launch,
    cpu_options,
    engine_environ,
    needed,
    transformers,
)
from repertory.scripts.benches.peers.reckoning import (
    AIMS,
    METRICS,
    comparison_rows,
    decode_rate,
    first_token,
    floor_rows,
    floors,
    gaps_before,
    gaps_during,
    output_rate,
    prefill_rate,
    ratios,
    shown,
    spread,
    table,
    verdict,
)
from repertory.scripts.benches.peers.running import WARM_UP, Driver, EngineLost, Rounds
from repertory.tests.tiny_model import make_tiny_model


def reply(*streams, seconds=1.0, prompt_tokens=16, **more):
    return {"seconds": seconds, "prompt_tokens": prompt_tokens, "arrivals": [list(stream) for stream in streams], **more}


# ---- one reply ----------------------------------------------------------------------------------


def test_the_output_rate_counts_all_tokens_of_all_requests_over_the_whole_time():
    assert output_rate(reply([(1.0, 1), (2.0, 3)], [(4.0, 4)], seconds=4.0)) == 2.0


def test_the_decode_rate_leaves_out_the_prompt_and_its_token():
    assert decode_rate(reply([(9.0, 1), (9.5, 1), (10.0, 1)])) == 2.0


def test_the_decode_rate_counts_the_tokens_of_a_late_reader():
    assert decode_rate(reply([(0.0, 1), (0.5, 1), (1.5, 2)])) == 2.0


def test_the_prefill_rate_is_of_one_prompt_up_to_its_first_token():
    one = reply([(0.5, 1), (9.0, 1)], prompt_tokens=512)
    assert first_token(one) == 0.5
    assert prefill_rate(one) == 1024.0


def test_gaps_are_told_apart_by_when_the_long_prompt_came_and_was_answered():
    stream = [(t, 1) for t in (0.0, 1.0, 2.0, 4.0, 7.0, 8.0, 9.0)]
    one = reply(stream, arrived_s=2.5, answered_s=7.5)
    assert gaps_before(one) == [1.0, 1.0]
    assert gaps_during(one) == [2.0, 3.0, 1.0]  # the first and the last reach out of the window


def test_gaps_while_other_streams_are_still_being_prefilled_are_none():
    first = [(t, 1) for t in (0.0, 5.0, 6.0)]
    second = [(t, 1) for t in (5.0, 6.0, 7.0)]
    assert gaps_before(reply(first, second, arrived_s=7.0, answered_s=8.0)) == [1.0, 1.0, 1.0]


# ---- comparing ----------------------------------------------------------------------------------


def test_a_ratio_is_of_the_same_repetition_and_those_that_are_missing_are_left_out():
    rate = METRICS[0]
    ours = [reply([(1.0, 30)]), reply([(1.0, 10)]), reply([(1.0, 99)])]
    theirs = [reply([(1.0, 10)]), reply([(1.0, 20)])]
    assert ratios(rate, ours, theirs) == [3.0, 0.5]


@pytest.mark.parametrize(
    ("value", "more_is_better", "end"),
    [
        (1.25, True, "at least 1.25 (stretch 1.35): met"),
        (1.249, True, "at least 1.25 (stretch 1.35): missed"),
        (1.35, True, "at least 1.25 (stretch 1.35): met, stretch too"),
    ],
)
def test_an_aim_is_met_at_its_bound(value, more_is_better, end):
    assert verdict(value, 1.25, more_is_better=more_is_better, stretch=1.35) == end


def test_of_times_less_is_better():
    assert verdict(0.75, 0.75, more_is_better=False) == "at most 0.75: met"
    assert verdict(0.76, 0.75, more_is_better=False) == "at most 0.75: missed"


def test_every_aim_is_of_a_metric_that_exists():
    metrics = {(metric.workload, metric.name) for metric in METRICS}
    assert {(aim.workload, aim.metric) for aim in AIMS} <= metrics


def test_ours_comes_first_and_is_compared_with_each_other_engine():
    results = {
        "transformers": {"A": [reply([(1.0, 100)])]},
        "vllm": {"A": [reply([(1.0, 150)]), reply([(1.0, 200)])]},
        "repertory": {"A": [reply([(1.0, 300)]), reply([(1.0, 200)])]},
    }
    rows = comparison_rows(results)
    assert [row[2:] for row in rows] == [
        ["repertory", "250.0 [200.0..300.0]", "", ""],
        ["transformers", "100.0 [100.0..100.0]", "3.00 [3.00..3.00] x", ""],
        ["vllm", "175.0 [150.0..200.0]", "1.50 [1.00..2.00] x", "at least 1.25 (stretch 1.35): met, stretch too"],
    ]


def test_peers_are_shown_even_when_ours_was_lost():
    assert comparison_rows({"vllm": {"A": [reply([(1.0, 5)])]}}) == [
        ["A", "output tok/s (more is better)", "vllm", "5.0 [5.0..5.0]", "", ""]
    ]


def test_the_step_is_held_against_reading_the_weights_once():
    results = {
        "memory": {"memory": [{"gb_per_s": 10.0}]},
        "repertory": {
            "B": [reply([(0.0, 1), (0.3, 10)])],
            "D": [reply([(1.0, 1)], prompt_tokens=2048)],
        },
    }
    rows = floor_rows(floors(results, 200_000_000))
    assert rows == [
        ["memory read GB/s", "10.00 [10.00..10.00]", ""],
        ["weight bytes / read ms", "20.0 [20.0..20.0]", ""],
        ["B=1 step ms", "30.0 [30.0..30.0]", ""],
        ["B=1 step / (weight bytes / read)", "1.50 [1.50..1.50]", "at most 1.4: missed"],
        ["prefill tok/s at 2048", "2048 [2048..2048]", "at least 2700: missed"],
    ]


def test_nothing_measured_is_no_floor():
    assert floors({}, 1) == []


def test_a_table_is_aligned_and_ends_in_no_blanks():
    assert table([["a", "b"], ["xxx", "1"], ["y", ""]]) == "a    b\n------\nxxx  1\ny"


def test_a_spread_shows_its_ends():
    assert shown(spread([3.0, 1.0, 2.0]), 1) == "2.0 [1.0..3.0]"


# ---- jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letter", "requests", "length", "max_tokens"),
    [("A", 64, 256, 64), ("B", 1, 128, 128), ("C", 32, 1056, 32), ("D", 1, 2048, 1), ("E", 8, 64, 400), ("P", 1, 512, 1)],
)
def test_a_job_is_the_workload(letter, requests, length, max_tokens):
    job = job_of({"workload": letter, "repetition": 0})
    assert [len(prompt) for prompt in job.prompts] == [length] * requests
    assert job.max_tokens == max_tokens
    assert len(job.long_prompt) == (4096 if letter == "E" else 0)


@pytest.mark.parametrize("letter", "ABCDEP")
def test_a_prefix_cache_never_knows_a_prompt_from_another_repetition(letter):
    seen = [tuple(prompt[:16]) for r in (0, 1, 2, WARM_UP) for prompt in job_of({"workload": letter, "repetition": r}).prompts]
    assert len(set(seen)) == (4 if letter == "C" else len(seen))


@pytest.mark.parametrize("letter", "ABCDEP")
def test_a_small_job_takes_no_time_and_is_of_the_same_kind(letter):
    job = job_of({"workload": letter, "repetition": 0, "small": True})
    assert len(job.prompts) <= 2 and job.max_tokens <= 40
    assert (job.tokens_before < job.max_tokens and job.long_prompt) or letter != "E"
    if letter == "C":
        assert job.prompts[0][:1024] == job.prompts[1][:1024]


# ---- installing ---------------------------------------------------------------------------------


def test_extras_and_media_packages_are_not_installed():
    wanted = ["regex", 'torch==2.13.0+cpu; platform_machine == "x86_64"', "requests>=2", 'six; python_version > "3.11"']
    unwanted = ["torchaudio; x", "torchvision", "torchcodec>=0.14", 'pandas; extra == "bench"', 'a[b]>=1; extra=="c"']
    assert needed([*unwanted, *wanted]) == wanted


def test_a_build_gets_what_the_cpu_has_and_no_amx():
    options = cpu_options(["fpu", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"])
    assert options == ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("AVX2", "AVX512", "AVX512_BF16", "FMA"))]
    assert cpu_options([]) == ["-DGGML_NATIVE=OFF"]


def test_engines_have_one_thread_and_no_slow_kernels(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    environ = engine_environ({"LD_PRELOAD": "x"})
    assert "OPENBLAS_CORETYPE" not in environ
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["LD_PRELOAD"] == "x"


def test_what_is_not_installed_is_an_error_without_installing(tmp_path):
    with pytest.raises(InstallError, match="not installed in"):
        transformers(tmp_path, core=0, install=False)
    assert list(tmp_path.iterdir()) == []


def test_the_bf16_copy_has_every_weight_rounded_and_is_made_once(tmp_path):
    source = make_tiny_model(tmp_path / "source")
    copy = weights.bf16_directory(source, tmp_path / "copy")
    before, after = load_file(source / "model.safetensors"), load_file(copy / "model.safetensors")
    assert {name: tensor.to(torch.bfloat16).tolist() for name, tensor in before.items()} == {
        name: tensor.tolist() for name, tensor in after.items()
    }
    assert json.loads((copy / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert weights.weight_bytes(copy) * 2 == weights.weight_bytes(source)
    assert {file.name for file in copy.iterdir()} == {file.name for file in source.iterdir()}
    assert weights.bf16_directory(tmp_path / "gone", tmp_path / "copy") == copy


# ---- running ------------------------------------------------------------------------------------

ECHO = """
import sys
from driving import Channel
channel = Channel()
print("noise on stdout")
channel.say(ready="echo 1")
while (request := channel.next_request()) is not None:
    if request["workload"] == "die":
        sys.exit("the last words")
    channel.say(request=request)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A driver process that answers what it was asked."""
    monkeypatch.setenv("PYTHONPATH", str(DRIVERS))
    core = min(os.sched_getaffinity(0))
    with Driver("echo", Launch([sys.executable, "-c", ECHO], {}), [], core=core, log=tmp_path / "log") as driver:
        yield driver


def test_a_driver_answers_line_by_line_and_its_noise_goes_to_the_log(echo, tmp_path):
    assert echo.ready() == "echo 1"
    for repetition in (0, 1):
        request = {"workload": "A", "repetition": repetition, "small": True}
        assert echo.ask("A", repetition, small=True) == {"request": request}
    echo.close()
    assert (tmp_path / "log").read_text() == "noise on stdout\n"


def test_the_last_words_of_a_driver_are_the_error(echo):
    echo.ready()
    with pytest.raises(EngineLost, match="the last words"):
        echo.ask("die", 0, small=False)
    with pytest.raises(EngineLost, match="the last words"):
        echo.ask("A", 0, small=False)


class FakeDriver:
    """Answers at once and tells `asked`; is lost at what `dies_at` names."""

    def __init__(self, name, asked, dies_at=None):
        self.name, self.asked, self.dies_at = name, asked, dies_at
        self.closed = False

    def ready(self):
        if self.dies_at == "start":
            raise EngineLost("no room")
        return f"{self.name} 1"

    def ask(self, workload, repetition, *, small):
        self.asked.append((self.name, workload, repetition))
        if self.dies_at == (workload, repetition):
            raise EngineLost("fell over")
        return {"of": (workload, repetition)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


def run_rounds(drivers, workloads):
    rounds = Rounds(repetitions=2, small=False, say=lambda text: None)
    rounds.run({driver.name: (lambda driver=driver: driver) for driver in drivers}, workloads)
    return rounds


def test_engines_have_their_turns_and_the_first_of_them_changes():
    asked = []
    rounds = run_rounds([FakeDriver("x", asked), FakeDriver("y", asked)], {"A": ["x", "y"], "B": ["y"]})
    turns = [(WARM_UP, "xy"), (0, "xy"), (1, "yx")]
    assert asked[:6] == [(engine, "A", repetition) for repetition, order in turns for engine in order]
    assert rounds.results["x"] == {"A": [{"of": ("A", 0)}, {"of": ("A", 1)}]}
    assert rounds.results["y"].keys() == {"A", "B"}


def test_an_engine_that_is_lost_is_named_and_the_others_go_on():
    asked = []
    fallen, other = FakeDriver("fallen", asked, dies_at=("A", 1)), FakeDriver("other", asked)
    rounds = run_rounds([fallen, other], {"A": ["fallen", "other"], "B": ["fallen", "other"]})
    assert rounds.lost == {"fallen": "fell over"}
    assert rounds.results["fallen"] == {"A": [{"of": ("A", 0)}]}
    assert len(rounds.results["other"]["B"]) == 2
    assert ("fallen", "B", 0) not in asked
    assert fallen.closed and other.closed


def test_an_engine_that_does_not_start_is_named_and_not_tried_again():
    asked = []
    rounds = run_rounds([FakeDriver("x", asked, dies_at="start")], {"A": ["x"]})
    rounds.run({"x": lambda: pytest.fail("started again")}, {"E": ["x"]})
    assert rounds.lost == {"x": "no room"}
    assert asked == []
