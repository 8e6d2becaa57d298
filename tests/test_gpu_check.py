"""`scripts/gpu-check`: rehearsed on the CPU, and what it does with parts that fail, die, hang or come too late."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from repertory.scripts.gpu_check import wheels
from repertory.scripts.gpu_check.catalogue import PARTS, Part, UnknownPartError, chosen
from repertory.scripts.gpu_check.plain import PlainLlama
from repertory.scripts.gpu_check.report import Report
from repertory.scripts.gpu_check.results import Finding, PartResult, Results, number, table
from repertory.scripts.gpu_check.running import Plan, run_all
from repertory.tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu-check"
ENDED = "report.right('all', True)"


def gpu_check(*arguments: str, out: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    variables |= {"OUT": str(out)} if out else {}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment(**variables), timeout=250)


def environment(**variables: str) -> dict[str, str]:
    """This process's, but kernels are not interpreted, and the script runs on the interpreter of the tests."""
    ours = {key: value for key, value in os.environ.items() if key not in ("OUT", "TRITON_INTERPRET")}
    return ours | {"PYTHON": sys.executable} | variables


def found(out: Path) -> Any:
    return json.loads((out / "gpu-check.json").read_text())


# ---- the whole script ---------------------------------------------------------------------------


def test_a_rehearsal_runs_its_parts_and_says_what_it_was(tmp_path: Path) -> None:
    done = gpu_check("--rehearse", "--parts", "attention,swap", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = found(tmp_path)
    assert results["is_right"] and results["is_rehearsal"] and results["machine"]["device"] == "the CPU"
    parts = {part["name"]: part for part in results["parts"]}
    assert list(parts) == ["attention", "swap"] and {part["state"] for part in parts.values()} == {"done"}
    swap = {finding["what"]: finding for finding in parts["swap"]["findings"]}
    assert swap["blocks to the device and back"]["verdict"] == "right"
    assert swap["copying hidden behind steps"]["verdict"] == ""  # an aim, measured and not judged
    torchs = [finding for finding in parts["attention"]["findings"] if finding["what"].startswith("torch, ")]
    assert torchs and all(finding["verdict"] == "right" and finding["value"] < 0.015 for finding in torchs)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["part", "what", "value", "against"]
    assert lines[-2:] == [
        "REHEARSED ON A CPU: timings mean nothing, and no aim was judged",
        "right: all 2 parts that ran",
    ]
    assert (tmp_path / "gpu-check.txt").read_text() == done.stdout
    assert "swap: done after" in done.stderr  # progress, beside the table


@pytest.mark.slow
@pytest.mark.alone  # it has a budget of seconds
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    done = gpu_check("--rehearse", "--budget-s", "240", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [part["name"] for part in found(tmp_path)["parts"]] == [part.name for part in PARTS]


def test_help_teaches_the_way_to_a_gpu_and_names_the_parts() -> None:
    done = gpu_check("--help")
    assert done.returncode == 0
    assert "--prepare" in done.stdout and ".gpu-check/" in done.stdout and "TRITON_INTERPRET=1" in done.stdout
    for part in PARTS:
        assert f"  {part.name:<12} {part.about}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--parts", "swap,nonsense"], "there is no part 'nonsense'; there are conformance, attention"),
        (["--budget-s", "0"], "--budget-s must be above 0"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(arguments: list[str], says: str) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == 2 and says in done.stderr and done.stdout == ""


def test_without_a_gpu_it_says_why_and_checks_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = gpu_check("--parts", "swap", out=tmp_path / "out")
    assert done.returncode == 2 and "gpu-check: no GPU to check: " in done.stderr and "--rehearse" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_stopped_and_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    command, variables = [SCRIPT, "--rehearse", "--parts", "swap"], environment(OUT=str(tmp_path), TMPDIR=str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "swap: copies between the tiers" in process.stderr.readline()
        while not (parts := psutil.Process(process.pid).children(recursive=True)):
            time.sleep(0.01)  # what it has said it begins only now
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert all(is_gone(part.pid) for part in parts)
    assert found(tmp_path)["parts"][0]["name"] == "swap"
    assert not list(tmp_path.glob("gpu-check-*"))


def test_parts_are_run_in_the_order_of_the_list() -> None:
    assert [part.name for part in chosen("table, attention")] == ["attention", "table"]
    assert chosen(None) == list(PARTS)
    with pytest.raises(UnknownPartError):
        chosen("")


# ---- parts that do not do as they should --------------------------------------------------------


def run_fakes(tmp_path: Path, programs: dict[str, str], *, budget_s: float = 60, **more: Any) -> Results:
    """Parts that run these programs, in which `report` is their report."""
    begin = "import sys; from pathlib import Path; from repertory.scripts.gpu_check.report import Report; "
    begin += "report = Report(Path(sys.argv[1]), is_rehearsal=False)\n"
    settings = {"limit_s": 30.0, "least_s": 0.0, **more}
    parts = [Part(name, "a fake", **settings) for name in programs]
    results = Results(False, "now", budget_s)
    plan = Plan(lambda part, path: [sys.executable, "-c", begin + programs[part.name], str(path)], 2, lambda _: None)
    run_all(parts, plan, results, tmp_path / "gpu-check.json")
    return results


def test_a_part_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    raising = (
        "try: report.figure('before', 1.5, 's'); 1 / 0\nexcept ZeroDivisionError as error: report.failed(error); sys.exit(1)"
    )
    results = run_fakes(tmp_path, {"raises": raising, "works": ENDED})
    failed, done = results.parts
    assert (failed.state, failed.error) == ("failed", "ZeroDivisionError: division by zero")
    assert "Traceback" in failed.traceback and failed.findings == [Finding("before", 1.5, "s")]
    assert done.state == "done" and done.is_right and not results.is_right
    shown = table(results).splitlines()
    assert any(line.split()[:3] == ["raises", "failed", "FAILED"] and "division by zero" in line for line in shown)
    assert shown[-1] == "WRONG: raises"
    assert found(tmp_path)["parts"][0]["traceback"] == failed.traceback


def test_a_part_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    dying = "import os, signal; print('out of luck', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    results = run_fakes(tmp_path, {"dies": dying, "works": ENDED})
    assert [part.state for part in results.parts] == ["failed", "done"]
    assert results.parts[0].error == "killed by SIGSEGV: out of luck"


def test_a_part_that_hangs_is_cut_off_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hanging = f"""
import faulthandler, signal, subprocess, time
faulthandler.register(signal.SIGUSR1)
report.figure("before", 2, "")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({str(pid_file)!r}).write_text(str(child.pid))
def wait_for_ever(): time.sleep(600)
wait_for_ever()
"""
    began = time.monotonic()
    results = run_fakes(tmp_path, {"hangs": hanging, "works": ENDED}, limit_s=6.0)
    assert time.monotonic() - began < 60
    cut, done = results.parts
    assert (cut.state, cut.error) == ("cut off", "it took more than 6 s")
    assert cut.findings == [Finding("before", 2, "")] and "wait_for_ever" in cut.traceback
    assert done.state == "done" and not results.is_right
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it not yet buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_part_for_which_no_time_is_left_is_not_begun_and_does_not_count(tmp_path: Path) -> None:
    results = run_fakes(tmp_path, {"first": ENDED, "late": "1 / 0"}, budget_s=40.01, least_s=40.0)
    assert [part.state for part in results.parts] == ["done", "dropped"]
    assert results.is_right and results.parts[1].error.endswith("s were left, and it needs 40")
    assert table(results).splitlines()[-1] == "right: all 1 parts that ran"


def test_what_is_wrong_decides_and_an_aim_that_was_missed_does_not(tmp_path: Path) -> None:
    missing = "report.at_most('time', 3.0, 's', 2.0); report.at_least('rate', 3.0, 'GB/s', 2.0)"
    results = run_fakes(tmp_path, {"missing": missing})
    assert [finding.verdict for finding in results.parts[0].findings] == ["MISSED", "met"] and results.is_right
    assert "aims met: 1 of 2" in table(results)
    assert not run_fakes(tmp_path, {"wrong": "report.right('result', float('nan') < 1)"}).is_right


def test_parts_that_measure_no_time_run_side_by_side(tmp_path: Path) -> None:
    meeting = """
import time
mine, other = (Path(%r) / name for name in (%r, %r))
mine.touch()
while not other.exists(): time.sleep(0.01)
report.right('met', True)
"""
    programs = {a: meeting % (str(tmp_path), a, b) for a, b in (("one", "other"), ("other", "one"))}
    results = run_fakes(tmp_path, programs, is_timed=False)
    assert [(part.name, part.state) for part in results.parts] == [("one", "done"), ("other", "done")]


def test_what_a_part_cut_short_wrote_last_is_left_out(tmp_path: Path) -> None:
    results = run_fakes(tmp_path, {"cut": "report.figure('whole', 1.0, ''); report._file.write('{\"finding\": {\"wh')"})
    assert [finding.what for finding in results.parts[0].findings] == ["whole"]


# ---- its parts ----------------------------------------------------------------------------------


def test_the_table_lines_up_and_notes_that_are_long_are_cut() -> None:
    findings = [Finding("a", 1234.5, "ms", "right", "x" * 200), Finding("longer", 0.5, "", "skipped", "why")]
    lines = table(Results(False, "now", 60, parts=[PartResult("part", "done", findings=findings)])).splitlines()
    assert lines[1].index("right") == lines[2].index("-")
    assert lines[1].endswith("x...") and len(lines[1]) < 140


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3.0, "3"), (1234567.5, "1,234,568"), (0.12345, "0.123"), (2e-7, "2.0e-07"), (float("nan"), "nan"), (0.0, "0")],
)
def test_numbers_are_as_a_person_reads_them(value: float, shown: str) -> None:
    assert number(value) == shown


def test_results_that_are_not_finite_are_words_in_the_json(tmp_path: Path) -> None:
    report = Report(tmp_path / "records", is_rehearsal=False)
    report.right("error", False, value=float("nan"))
    report.close()
    Results(False, "now", 1, machine={"x": [float("inf")]}).write(tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["machine"] == {"x": ["inf"]}


def test_the_plain_model_is_transformers(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, layers=2, tie_word_embeddings=False)
    prompts = [random.Random(number).choices(range(3, 320), k=30) for number in (3, 5, 6)]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts)).logits
    plain = PlainLlama(directory, device=torch.device("cpu"))
    torch.testing.assert_close(plain.logits(prompts), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain.logits(prompts, last=2), expected[:, -2:], rtol=1e-4, atol=1e-4)
    continued = plain.continued(prompts, 4)
    generated = theirs.generate(torch.tensor(prompts), max_new_tokens=4, min_new_tokens=4, do_sample=False, eos_token_id=None)
    assert continued.token_ids == generated[:, 30:].tolist()
    assert min(continued.least_gaps) > 1e-3


# ---- wheels -------------------------------------------------------------------------------------

OWN = f"cp{sys.version_info[0]}{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("anyio-4.16.0-py3-none-any.whl", True),
        ("old-1.0-py2.py3-none-any.whl", True),
        (f"msgspec-0.23.0-{OWN}-{OWN}-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("pyzmq-27.3.0-cp310-abi3-manylinux_2_26_x86_64.manylinux_2_28_x86_64.whl", True),
        ("future-1.0-cp399-abi3-manylinux_2_28_x86_64.whl", False),
        ("msgspec-0.23.0-cp39-cp39-manylinux2014_x86_64.whl", False),
        ("pyzmq-27.3.0-cp310-abi3-manylinux_2_26_aarch64.whl", False),
        ("msgspec-0.23.0-cp312-cp312-win_amd64.whl", False),
    ],
)
def test_a_wheel_for_another_machine_is_left_alone(name: str, fits: bool) -> None:
    assert wheels.fits(name) is fits


def test_a_wheel_can_be_imported_from_where_it_is_unpacked(tmp_path: Path) -> None:
    for name, text in (("mine-1-py3-none-any.whl", "x = 1"), ("not_mine-1-cp39-cp39-any.whl", "x = 2")):
        with zipfile.ZipFile(tmp_path / name, "w") as packed:
            packed.writestr(f"{name.partition('-')[0]}.py", text)
    wheels.unpack(tmp_path, tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["mine.py"]


def test_wheels_are_of_the_pinned_versions() -> None:
    versions = wheels._versions(ROOT / "constraints.txt")
    assert all(wheels._normal(name) in versions for name in wheels.PACKAGES)


def test_the_checkout_is_small_enough_to_travel() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    assert 1 << 20 < wheels.tree_bytes(ROOT) < wheels.MOST_BYTES // 2


def test_the_engine_runs_with_what_travels_and_nothing_else(tmp_path: Path) -> None:
    """On a GPU machine there is torch, with what it needs, and the wheels."""
    program = f"""
import os, sys
from importlib.metadata import packages_distributions, requires
from repertory.scripts.gpu_check import part, wheels

def needs(name, known):
    if name not in known:
        known.add(name)
        for line in requires(name) or ():
            if ";" not in line: needs(wheels._normal(line.split()[0].split(">")[0].split("<")[0].split("=")[0]), known)
    return known

travels = {{wheels._normal(name) for name in (*wheels.PACKAGES, "numpy", "triton", "repertory")}} | needs("torch", set())

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        owners = {{wheels._normal(owner) for owner in OWNERS.get(top, ())}}
        if owners and not owners & travels:
            raise ModuleNotFoundError(f"No module named {{name!r}} on the GPU machine", name=name)

OWNERS = packages_distributions()
sys.meta_path.insert(0, Refuse())
os._exit(part.main(["table", {str(tmp_path / "records")!r}, "rehearse"]))
"""
    parents, held_open = os.pipe()  # at whose end it would end
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=parents, capture_output=True, text=True, env=environment(), timeout=200
        )
    finally:
        os.close(parents)
        os.close(held_open)
    assert done.returncode == 0, (tmp_path / "records").read_text() + done.stderr
