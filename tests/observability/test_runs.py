"""Reading a run: from its trace, also a torn one, and from logs that others write into as well."""

from itertools import pairwise

import pytest

from repertory.actors.observing.runs import words
from repertory.actors.observing.runs.binning import binned
from repertory.actors.observing.runs.finding import find
from repertory.actors.observing.runs.of_logs import read_run as read_logs
from repertory.actors.observing.runs.of_trace import read_run
from repertory.protocol import trace
from repertory.protocol.errors import ValidationError
from repertory.protocol.ids import RequestId
from repertory.protocol.journey import Journey
from repertory.tests.observability.written import WrittenTrace, pressed, request_id


def run_of(written, *, without_last_bytes=0):
    lines = written.lines()
    if without_last_bytes:
        lines[-1] = lines[-1][:-without_last_bytes]
    return read_run(lines, "here")


def legs_of(run, number):
    request = next(request for request in run.requests if request.request_id == request_id(number))
    return [(leg.stage, round(leg.start_s, 6), round(leg.end_s, 6)) for leg in request.journey.legs]


def test_a_journey_is_the_requests_own_where_the_trace_has_it():
    run = run_of(pressed())
    first = find(run, "job-1")[0]
    assert not first.is_derived
    assert first.journey.seconds() == pytest.approx(
        {"tokenise": 0.001, "queue": 0.049, "prefill": 0.02, "decode": 0.235, "preempted": 0.04, "stalled": 0.045}
    )
    assert first.ttft_s == pytest.approx(0.07)
    assert words.blame(first, run.names()) == "job-3 (30.0 ms), job-2 (15.0 ms)"
    assert first.dominating == "decode"


def test_a_journey_without_an_account_follows_from_what_happened():
    written = WrittenTrace().arrived(1, 0.0)
    written.step(0.05, 0.02, chunks=[(1, 0, 64, 1)], load=(64, 1, 1), admitted=[1])
    written.step(0.08, 0.01, decodes=[1], load=(0, 1, 1))
    fields = {"num_tokens": 66, "num_freed_blocks": 5, "swap_s": 0.1, "recompute_s": 0.2}
    written.add(trace.Preempted, 0.1, request_id=request_id(1), mode="recompute", reason="configured", **fields)
    written.step(0.2, 0.01, chunks=[(1, 0, 65, 0)], load=(65, 1, 1), admitted=[1])
    written.step(0.21, 0.02, chunks=[(1, 65, 1, 1)], load=(1, 1, 1))
    written.ended(1, 0.5, tokens=3).finished(0.6)
    run = run_of(written)
    assert legs_of(run, 1) == [
        ("tokenise", 0.0, 0.001),
        ("queue", 0.001, 0.05),
        ("prefill", 0.05, 0.07),
        ("decode", 0.07, 0.1),
        ("preempted", 0.1, 0.2),
        ("prefill", 0.2, 0.23),
        ("decode", 0.23, 0.5),
    ]
    assert run.requests[0].is_derived and run.requests[0].num_output_tokens == 3 and run.requests[0].reason == "length"
    assert "no journey of their own" in run.notes[0]


def test_a_derived_journey_knows_fetches_pauses_and_a_lost_device():
    written = WrittenTrace().arrived(1, 0.0)
    written.add(trace.Fetched, 0.01, request_id=request_id(1), fetched=True, num_tokens=32, fetch_s=0.1, recompute_s=0.2)
    written.step(0.03, 0.01, chunks=[(1, 32, 32, 1)], load=(32, 1, 1), admitted=[1])
    written.add(trace.DeviceEvent, 0.05, what="lost", epoch=1).add(trace.DeviceEvent, 0.06, what="ready", epoch=2)
    written.step(0.07, 0.01, chunks=[(1, 0, 66, 1)], load=(66, 1, 1), admitted=[1])
    written.add(trace.Paused, 0.1, request_id=request_id(1), num_output_tokens=4)
    written.add(trace.Credited, 0.2, request_id=request_id(1), num_tokens=4)
    run = run_of(written)
    assert [stage for stage, _, _ in legs_of(run, 1)] == [
        "tokenise", "queue", "fetch", "prefill", "decode", "restart", "prefill", "decode", "paused",
    ]  # fmt: skip
    assert [mark.what for mark in run.requests[0].marks] == ["host hit", "paused"]


def test_a_derived_journey_has_no_gap_and_no_overlap_whatever_the_order_of_clocks():
    written = WrittenTrace().arrived(1, 0.5)
    written.step(0.4, 0.01, chunks=[(1, 0, 64, 1)], load=(64, 1, 1), admitted=[1])  # a clock read earlier
    written.ended(1, 0.6)
    legs = run_of(written).requests[0].journey.legs
    assert legs[0].start_s == 0.0
    assert all(sooner.end_s == later.start_s for sooner, later in pairwise(legs))
    assert all(leg.end_s > leg.start_s for leg in legs)


def test_a_request_preempted_a_hundred_times_has_a_journey_that_can_be_read():
    written = WrittenTrace().arrived(1, 0.0)
    fields = {"num_tokens": 66, "num_freed_blocks": 5, "swap_s": 0.1, "recompute_s": 0.2, "mode": "swap", "reason": "cheaper"}
    for turn in range(100):
        written.step(0.1 + turn, 0.02, chunks=[(1, 0, 64, 1)], load=(64, 1, 1), admitted=[1])
        written.add(trace.Preempted, 0.5 + turn, request_id=request_id(1), **fields)
    request = run_of(written.ended(1, 200.0)).requests[0]
    assert len(request.journey.legs) == 32
    assert request.e2e_s == pytest.approx(200.0)
    assert request.num_preemptions == len(request.marks) == 100


def test_a_torn_trace_is_read_as_far_as_it_goes_and_says_so():
    written = WrittenTrace().arrived(1, 0.0).step(0.05, 0.02, chunks=[(1, 0, 64, 1)], load=(64, 1, 1), admitted=[1])
    written.step(0.1, 0.02, decodes=[1], load=(0, 1, 1))
    run = run_of(written, without_last_bytes=9)
    assert "cut off" in run.notes[0]
    assert "no last record" in run.notes[1]
    assert run.requests[0].reason == "unknown"
    assert [step.start_s is None for step in run.steps] == [False, True]
    assert run.requests[0].journey.legs[-1].stage == "decode"


def test_a_line_that_is_not_whole_in_the_middle_is_an_error_with_its_number():
    lines = pressed().lines()
    lines[4] = b'{"type":"Planned","at":\n'
    with pytest.raises(ValidationError, match="here, line 5"):
        read_run(lines, "here")


def test_records_that_came_after_this_version_are_skipped():
    lines = pressed().lines()
    lines.insert(3, b'{"type":"Painted","at":5000.1,"colour":"red"}\n')
    assert len(read_run(lines, "here").requests) == 5


def test_a_trace_without_requests_is_no_error():
    run = run_of(WrittenTrace().finished(0.0))
    assert (run.requests, run.steps, run.notes, run.duration_s) == ([], [], [], 0.0)


def test_a_request_of_several_sequences_ends_with_its_last_one():
    written = WrittenTrace().arrived(1, 0.0, seq_id=7, n=2)
    written.step(0.05, 0.02, chunks=[(7, 0, 64, 1), (8, 0, 64, 1)], load=(64, 1, 2), admitted=[7, 8])
    written.ended(1, 0.2, index=1, tokens=3, reason="stop").ended(1, 0.4, index=0, tokens=5)
    request = run_of(written).requests[0]
    assert (request.e2e_s, request.num_output_tokens, request.reason) == (pytest.approx(0.4), 8, "length")


def test_an_account_of_a_request_that_the_trace_never_saw_arrive_is_taken():
    run = run_of(WrittenTrace().travelled(9, 0.1, [("tokenise", 0.4)], reason="abort", label=""))
    assert (list(run.names().values()), run.requests[0].reason) == (["r9"], "abort")


def test_steps_on_the_device_never_overlap_though_clocks_are_read_on_both_sides():
    written = WrittenTrace()
    written.step(0.0, 0.02, took=0.015).step(0.021, 0.009, took=0.05)
    steps = run_of(written).steps
    assert steps[0].end_s <= steps[1].start_s <= steps[1].end_s


def test_bins_share_a_step_that_reaches_over_their_border():
    written = WrittenTrace().step(0.0, 0.3, load=(10, 1, 1)).step(0.3, 0.1, load=(20, 1, 1)).step(0.9, 0.1, decodes=[1, 2])
    bins = binned(run_of(written), 4)
    assert [round(one.busy_s, 6) for one in bins] == [0.25, 0.15, 0.0, 0.1]
    assert [one.num_steps for one in bins] == [1, 1, 0, 1]
    assert [one.num_prefill_tokens for one in bins] == [10, 20, 0, 0]
    assert bins[2].mean_step_s is None and bins[2].idle_share == 1.0
    assert bins[3].num_decodes == 2
    assert binned(run_of(WrittenTrace()), 4) == []


def test_names_that_repeat_are_told_apart_by_ids():
    written = WrittenTrace().arrived(1, 0.0, label="same").arrived(2, 0.1, label="same").arrived(3, 0.2, label="")
    assert list(run_of(written).names().values()) == ["same (4c8e288b-1)", "same (4c8e288b-2)", "r3"]


def test_without_labels_requests_of_one_frontend_have_short_names():
    written = (
        WrittenTrace().travelled(1, 0.0, [("queue", 0.1)], label="4c8e288b-1").travelled(2, 0.0, [("queue", 0.1)], label="")
    )
    assert list(run_of(written).names().values()) == ["r1", "r2"]
    other = RequestId(7 << 32 | 5)
    written.add(trace.Travelled, 1, request_id=other, label="", arrival_s=5000.0, reason="stop", journey=Journey([]))
    assert set(run_of(written).names().values()) == {"4c8e288b-1", "4c8e288b-2", "00000007-5"}


def test_a_label_that_looks_like_a_short_name_is_told_apart():
    written = WrittenTrace().travelled(1, 0.0, [("queue", 0.1)], label="").travelled(2, 0.0, [("queue", 0.1)], label="r1")
    assert list(run_of(written).names().values()) == ["r1 (4c8e288b-1)", "r1 (4c8e288b-2)"]


@pytest.mark.parametrize("wanted", ["job-3", "4c8e288b-3", str(request_id(3)), "3", "r3"])
def test_a_request_is_found_by_label_id_and_number(wanted):
    assert [request.label for request in find(run_of(pressed()), wanted)] == ["job-3"]


def test_several_requests_with_one_label_are_found_slowest_first():
    written = WrittenTrace()
    written.travelled(1, 0.0, [("queue", 0.1)], label="same").travelled(2, 0.0, [("queue", 0.2)], label="same")
    assert [request.shown_id for request in find(run_of(written), "same")] == ["4c8e288b-2", "4c8e288b-1"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("job-33", "close to it: job-3"), ("jb1", "close to it: job-1"), ("", "the slowest are job-2, job-1"), ("ü", "job-2")],
)
def test_an_unknown_request_is_answered_with_what_is_close(wanted, said):
    with pytest.raises(ValidationError, match=r"no request .* among the 5") as caught:
        find(run_of(pressed()), wanted)
    assert said in str(caught.value)


# ---- logs -----------------------------------------------------------------------------------------

FINISHED = (
    b'{"actor":"scheduler","request_id":"4c8e288b-1","label":"job-1","finish_reason":"stop","queue_s":0.1,"prefill_s":0.2,'
    b'"decode_s":0.3,"ttft_s":0.3,"e2e_s":0.6,"num_prompt_tokens":40,"num_cached_tokens":16,"num_output_tokens":9,'
    b'"num_preemptions":1,"event":"request.finished","level":"info","timestamp":"2026-11-30T05:16:34.808377Z",'
    b'"monotonic_s":100.6'
)
LEGS = b',"legs":[["queue",0,0.1],["decode",0.1,0.6,0.2]],"stalled_by":[["4c8e288b-2",0.15],[5516391171041001475,0.05]]'
PREEMPTED = (
    b'{"request_id":"4c8e288b-1","mode":"swap","num_tokens":50,"num_freed_blocks":3,"num_preemptions":1,"swap_s":0.001,'
    b'"recompute_s":0.004,"reason":"cheaper","event":"scheduler.preempted","level":"info","monotonic_s":100.25}\n'
)


def test_logs_tell_of_a_request_all_that_its_line_has():
    run = read_logs([PREEMPTED, FINISHED + LEGS + b"}\n"], "here")
    request = run.requests[0]
    assert request.journey.seconds() == pytest.approx({"queue": 0.1, "decode": 0.3, "stalled": 0.2})
    assert request.journey.stalled_by == [(request_id(2), 0.15), (request_id(3), 0.05)]
    assert (request.num_cached_tokens, request.ttft_s, request.is_derived) == (16, 0.3, False)
    assert request.marks[0].at_s == pytest.approx(0.25)
    assert "preempted by swap (cheaper)" in request.marks[0].words
    assert run.wall_s == pytest.approx(1796015794.208377)


def test_lines_without_legs_tell_three_stages():
    run = read_logs([FINISHED + b"}\n"], "here")
    assert run.requests[0].journey.seconds() == pytest.approx({"queue": 0.1, "prefill": 0.2, "decode": 0.3})
    assert "three stages only" in run.notes[0]


def test_foreign_lines_are_left_out_and_counted():
    others = [b"Started\n", b'{"msg":"hi"}\n', b"[1, 2]\n", b"{broken\n", b'\xff\xfe{"event":1}\n', b"\n", b"{}\n"]
    behind_a_stamp = b"2026-11-30T05:16:34Z stdout F " + FINISHED + LEGS + b"}\n"
    run = read_logs([*others, behind_a_stamp], "here")
    assert [request.label for request in run.requests] == ["job-1"]
    assert "6 of 7 lines are not events" in run.notes[0]


@pytest.mark.parametrize("broken", [b'"request_id":"what"', b'"request_id":[]', b'"e2e_s":"long"', b'"legs":[["lunch",0,1]]'])
def test_a_line_of_ours_that_makes_no_sense_is_foreign(broken):
    run = read_logs([PREEMPTED, FINISHED + b"," + broken + b"}\n"], "here")
    assert run.requests == []
    assert "1 of 2 lines" in run.notes[0]


def test_logs_for_people_are_refused_with_what_to_do():
    with pytest.raises(ValidationError, match="--log-format json"):
        read_logs([b"2026-11-30 [info] request.finished label=job-1\n"], "here")


def test_refused_requests_and_lost_devices_are_in_the_logs_too():
    refused = b'{"request_id":"4c8e288b-7","label":"x","reason":"too long","event":"request.refused","monotonic_s":99.0}\n'
    lost = b'{"epoch":1,"reason":"silent","restart_in_s":0.1,"event":"device.lost","level":"error","monotonic_s":100.1}\n'
    run = read_logs([refused, lost, FINISHED + LEGS + b"}\n"], "here")
    assert [(request.label, request.reason) for request in run.requests] == [("x", "refused"), ("job-1", "stop")]
    assert (run.incidents[0].at_s, run.incidents[0].words) == (pytest.approx(1.1), "the device was lost: silent")
    assert words.cause(run, run.requests[1], "stalled", run.names()).startswith("prefills of 4c8e288b-2 (150 ms)")


def test_durations_have_three_digits_and_a_unit():
    values = {
        0.0: "0",
        4.2e-7: "0.42 us",
        0.000_999_99: "1.00 ms",
        0.0123: "12.3 ms",
        0.9999: "1.00 s",
        123.4: "123 s",
        900: "15.0 min",
        9000: "150 min",
    }
    assert {seconds: words.duration(seconds) for seconds in values} == values
