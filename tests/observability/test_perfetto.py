"""The export keeps to the trace-event format, so that viewers draw what happened."""

import json
from collections import defaultdict

import pytest

from repertory.actors.observing.perfetto import ENGINE, LANE_IN, LANE_OUT, REQUESTS, STEPS, events, write
from repertory.actors.observing.runs.of_trace import read_run
from repertory.tests.observability.written import WrittenTrace, pressed

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s", "args"},
}


@pytest.fixture
def exported(tmp_path):
    path = tmp_path / "out.json"
    with path.open("w", encoding="utf-8") as file:
        count = write(read_run(pressed().lines(), "here"), file)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["traceEvents"]) == count
    return content


def by_track(found, kind="X"):
    tracks = defaultdict(list)
    for event in found:
        if event["ph"] == kind:
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def assert_well_formed(found):
    """Keys, times that only grow, and slices that lie within one another or apart."""
    for event in found:
        assert event.keys() == NEEDED[event["ph"]] | {"ph"}
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    assert all(at >= 0.0 for at in times)
    for slices in by_track(found).values():
        ends = []
        for event in slices:
            assert event["dur"] >= 0
            end = round(event["ts"] + event["dur"], 3)
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1], f"{event['name']} reaches out of what it is within"
            ends.append(end)


def test_the_export_is_well_formed(exported):
    assert exported.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert_well_formed(exported["traceEvents"])


def test_every_track_has_a_name_and_requests_have_theirs(exported):
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in exported["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert names[ENGINE, STEPS] == "steps"
    assert [names[REQUESTS, number] for number in range(1, 6)] == ["job-1", "job-2", "job-3", "job-4", "job-5"]
    assert by_track(exported["traceEvents"]).keys() <= names.keys()


def test_steps_and_lanes_are_tracks_of_their_own(exported):
    tracks = by_track(exported["traceEvents"])
    assert [event["name"] for event in tracks[ENGINE, STEPS]] == ["prefill", "prefill + decode", "decode", "decode"]
    assert tracks[ENGINE, STEPS][1]["ts"] == pytest.approx(80_000)
    assert tracks[ENGINE, STEPS][1]["dur"] == pytest.approx(40_000)
    assert [event["args"]["bytes"] for event in tracks[ENGINE, LANE_OUT]] == [5000]
    assert [event["name"] for event in tracks[ENGINE, LANE_IN]] == ["copy in failed"]


def test_a_request_is_its_legs_within_the_whole(exported):
    whole, *legs = by_track(exported["traceEvents"])[REQUESTS, 1]
    assert (whole["cat"], whole["name"], whole["args"]["stalled_by"]) == (
        "request",
        "job-1",
        "job-3 (30.0 ms), job-2 (15.0 ms)",
    )
    assert [leg["name"] for leg in legs] == ["tokenise", "queue", "prefill", "decode", "preempted", "decode"]
    assert sum(leg["dur"] for leg in legs) == pytest.approx(whole["dur"], abs=0.01)
    marks = [event for event in exported["traceEvents"] if event["ph"] == "i" and event["pid"] == REQUESTS]
    assert [mark["name"] for mark in marks if mark["tid"] == 1] == ["preempted", "host hit"]


def test_counters_tell_of_both_tiers_and_the_queues_where_they_change(exported):
    counters = defaultdict(list)
    for event in exported["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert [one["used"] for one in counters["KV blocks on the host"]] == [0, 10, 15]
    assert counters["KV blocks on the device"] == [
        {"held": 30, "cached": 30},
        {"held": 90, "cached": 8},
        {"held": 30, "cached": 30},
    ]
    assert [one["preempted"] for one in counters["requests"]] == [0, 0, 0, 1]


def test_times_that_do_not_divide_evenly_still_nest():
    written = WrittenTrace()
    for number in range(1, 60):
        parts = [(stage, number / 7e3 + index / 3e3) for index, stage in enumerate(("tokenise", "queue", "prefill", "decode"))]
        written.travelled(number, number / 11, parts)
        written.step(number / 13 + number, 1 / 3e3, load=(1, 1, 1))
    assert_well_formed(events(read_run(written.lines(), "here")))


def test_an_empty_run_is_an_empty_picture(tmp_path):
    path = tmp_path / "out.json"
    with path.open("w", encoding="utf-8") as file:
        write(read_run(WrittenTrace().finished(0.0).lines(), "here"), file)
    assert {event["ph"] for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]} == {"M"}
