"""What is installed is what is there, and the scripts a person runs can be run."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("protocol", "radix", "gpu", "actors")
SCRIPTS = ("setup", "test", "check", "demo", "bench", "gpu-check")


def packages_in_folders():
    yield "repertory"
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            yield ".".join(["repertory", *init.parent.relative_to(ROOT).parts])


def test_the_list_of_packages_is_the_folders():
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages_in_folders())


def test_every_folder_with_code_is_a_package():
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_executable_and_well_formed(name):
    path = ROOT / "scripts" / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True, timeout=60)


def test_continuous_integration_runs_the_check_and_the_tests():
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    text = path.read_text(encoding="utf-8")
    assert text.index("./scripts/check") < text.index("./scripts/test")


def test_constraints_are_exact_and_name_no_place_to_download_from():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert match, f"{line!r} is no exact version"
        pins[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in pins, f"{name} is not pinned"
