"""The demonstration of memory pressure, on the real model: what it says of itself must be true."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import repertory
from repertory.protocol.outputs import BlockCounts
from repertory.scripts.demos.pressure import BAR_WIDTH, Stage, widths

pytestmark = pytest.mark.alone

DEMO = [sys.executable, str(Path(repertory.__file__).parent / "scripts" / "demo.py")]
LIMIT_S = 120
"""Far more than it takes, since the machine may have other things to do."""

COSTS = re.compile(
    r"story \d+ +(out:  swap|back: fetch) (\d+\.?\d*) ms, recompute (\d+\.?\d*) ms -> (swap|recompute|fetch)( \([a-z ]+\))?$"
)


@pytest.fixture
def said() -> list[str]:
    """What a stage has said, line by line."""
    return []


@pytest.fixture
def stage(said: list[str]) -> Stage:
    """Two stories, whose requests are "a" and "b"."""
    stage = Stage(2, said.append)
    stage.by_id.update(zip("ab", stage.stories, strict=True))
    return stage


def preempted(request_id: str, num_tokens: int, mode: str = "swap") -> dict[str, object]:
    costs = {"swap_s": 0.0005, "recompute_s": 0.25}
    fields = {"request_id": request_id, "mode": mode, "num_tokens": num_tokens, "reason": "cheaper"}
    return {"event": "scheduler.preempted", **fields, **costs}


def host_hit(request_id: str, *, fetched: bool) -> dict[str, object]:
    return {"event": "scheduler.host_hit", "request_id": request_id, "fetched": fetched, "fetch_s": 0.001, "recompute_s": 0.03}


def test_a_token_that_was_on_its_way_does_not_make_a_preempted_story_run(stage: Stage) -> None:
    story = stage.stories[0]
    story.on_tokens([1, 2, 3], 10)
    assert story.state == "running"
    stage.on_event(preempted("a", 13))
    assert (story.state, story.num_preemptions) == ("swapped out", 1)
    story.on_tokens([1, 2, 3, 4, 5], 10)
    assert story.state == "swapped out", "two steps were in flight"
    stage.on_event(host_hit("a", fetched=True))
    assert story.state == "fetching"
    story.on_tokens([1, 2, 3, 4, 5, 6], 10)
    assert story.state == "running"


def test_what_is_recomputed_is_not_said_to_be_on_the_host(stage: Stage) -> None:
    story = stage.stories[1]
    stage.on_event(preempted("b", 20, mode="recompute"))
    stage.on_event(host_hit("b", fetched=False))
    assert story.state == "dropped"


def test_each_decision_is_a_line_with_both_costs(stage: Stage, said: list[str]) -> None:
    stage.on_event(preempted("a", 13))
    stage.on_event(host_hit("b", fetched=True))
    assert [line.split("  ", 2)[-1] for line in said] == [
        "story 1  out:  swap 0.5 ms, recompute 250 ms -> swap (cheaper)",
        "story 2  back: fetch 1.0 ms, recompute 30.0 ms -> fetch",
    ]
    assert all(COSTS.search(line) for line in said)


def test_events_of_strangers_and_other_events_say_nothing(stage: Stage, said: list[str]) -> None:
    stage.on_event(preempted("c", 13))
    stage.on_event({"event": "request.finished", "request_id": "a"})
    stage.on_event({"event": "engine.ready"})
    assert said == []
    assert {story.state for story in stage.stories} == {"waiting"}


@pytest.mark.parametrize("counts", [(10, 3, 3, 4), (7, 7, 0, 0), (3, 1, 1, 1), (0, 0, 0, 0)])
def test_a_bar_is_as_wide_as_its_tier_is_full(counts: tuple[int, int, int, int]) -> None:
    total, free, cached, referenced = counts
    bar = widths(BlockCounts(total, free, cached, referenced), BAR_WIDTH)
    assert sum(width for _, width in bar) == (BAR_WIDTH if total else 0)
    assert all(width >= 0 for _, width in bar)


def test_the_help_names_both_demos() -> None:
    shown = subprocess.run([*DEMO, "--help"], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    assert "a dozen chats at once" in shown
    assert re.search(r"^ +pressure +\w", shown, re.MULTILINE)


@pytest.mark.parametrize("wrong", [["--stories", "1"], ["--max-tokens", "0"], ["--stories", "many"]])
def test_a_size_that_shows_nothing_is_refused(wrong: list[str]) -> None:
    done = subprocess.run([*DEMO, "pressure", *wrong], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert wrong[0] in done.stderr


def test_the_pressure_demo_preempts_shows_both_costs_and_changes_no_output(tmp_path: Path) -> None:
    sizes = ["--stories", "4", "--max-tokens", "32"]
    done = subprocess.run([*DEMO, "pressure", *sizes], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr

    decisions = [line for line in done.stdout.splitlines() if " s  story " in line]
    assert decisions
    assert not [line for line in decisions if not COSTS.search(line)]
    assert re.search(r"device \[[#+.]{10}\] host \[[#+.]{10}\] \d+ run, \d+ out, \d+ fetching, \d+ wait", done.stdout)

    counts = re.search(r"^Preemptions: (\d+) by swap, (\d+) by recompute", done.stdout, re.MULTILINE)
    assert counts
    num_out = sum(" out: " in line for line in decisions)
    assert int(counts[1]) + int(counts[2]) == num_out > 0, "every preemption is a line"
    moved = re.search(r"^Moved: ([\d.]+) MB to the host", done.stdout, re.MULTILINE)
    assert moved
    assert (float(moved[1]) > 0) or counts[1] == "0"
    assert "All 4 outputs are equal, 128 tokens" in done.stdout
    assert "The audit is empty" in done.stdout


def test_ctrl_c_ends_the_pressure_demo_without_a_word() -> None:
    with subprocess.Popen([*DEMO, "pressure"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while " 0.0 s " not in (line := process.stdout.readline()):
                assert line, "it ended before it began"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
    assert (process.returncode, err) == (130, "")
