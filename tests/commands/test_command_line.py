"""The command as a process: it answers at once, imports nothing heavy, and ends as a command should."""

import inspect
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module, metadata

import pytest

from repertory.__main__ import main
from repertory.actors.commands.app import VERBS, build_app
from repertory.actors.commands.engine_flags import GROUPS, OTHERS, engine_flags
from repertory.actors.commands.generate import SamplingFlags
from repertory.protocol.config import FIELDS, description
from repertory.protocol.sampling import SamplingParams

pytestmark = pytest.mark.alone

COMMAND = [sys.executable, "-m", "repertory"]
HELP_BOUND_S = 1.0
"""Twice what is promised, since the machine may have other things to do."""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_answers_at_once(arguments, tmp_path):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, check=True, timeout=60)
        times.append(time.perf_counter() - start)
        assert b"Usage: repertory" in done.stdout
    median = statistics.median(times)
    print(f"repertory {' '.join(arguments)}: {median:.2f} s")  # noqa: T201 - the number is what a reader wants
    assert median < HELP_BOUND_S


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "--no-such-flag"]])
def test_nothing_heavy_is_imported_before_an_engine_is_wanted(arguments, tmp_path):
    program = (
        "import sys; from repertory.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'gguf'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_a_reader_that_leaves_early_gets_no_complaint(tmp_path):
    process = subprocess.Popen([*COMMAND, "--help"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert complaint == b""


def test_an_exit_status_reaches_the_shell(tmp_path):
    done = subprocess.run([*COMMAND, "generte"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == b""


def test_an_unknown_verb_is_refused_with_a_suggestion(capsys):
    assert main(["generte"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert 'Did you mean "generate"?' in err


def test_the_version_is_the_distributions(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == metadata.version("repertory")


def test_a_bare_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_every_verb_of_the_list_can_be_called_and_explains_itself():
    for verb, (place, line) in VERBS.items():
        module, function = place.split(":")
        command = getattr(import_module(f"repertory.actors.commands.{module}"), function)
        assert inspect.getdoc(command) or command.help
        assert line.endswith(".")
        assert verb in build_app()


def test_every_setting_is_a_flag_under_a_heading_with_the_structs_help(capsys):
    assert sorted(key for keys in GROUPS.values() for key in keys) == sorted(FIELDS)
    flags = engine_flags()
    assert flags.__annotations__.keys() == FIELDS.keys()
    assert flags.__total__ is False
    main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert OTHERS not in shown
    for key in FIELDS.keys() - set(GROUPS["Serving"]):
        assert f"--{key.replace('_', '-')}" in shown
    assert "[default: 16]" in shown
    assert description("max_num_queued") in shown


def test_a_verb_may_leave_settings_out_and_show_other_defaults(capsys):
    assert "port" not in engine_flags(without=["port"]).__annotations__
    main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "logged [default: warning]" in shown
    assert "--port" not in shown


def test_sampling_flags_are_the_parameters_of_a_request_with_their_defaults():
    theirs = {field.name: field.default for field in fields(SamplingFlags)}
    ours = {name: getattr(SamplingParams(), name) for name in theirs}
    assert theirs.pop("max_tokens") == 64
    ours.pop("max_tokens")
    assert theirs == ours
