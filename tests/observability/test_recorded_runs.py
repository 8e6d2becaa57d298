"""Traces that a scheduler has really written, under everything that can happen to it: all of them can be read and shown."""

from itertools import pairwise

import pytest

from repertory.actors.observing.perfetto import events
from repertory.actors.observing.report.build import build
from repertory.actors.observing.runs.of_trace import read_run
from repertory.tests.observability.test_perfetto import assert_well_formed
from repertory.tests.simulation.recording import Recording

TURNS = 250


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happened_is_read_and_shown(tmp_path, seed):
    path = tmp_path / "run.jsonl"
    recording = Recording(path, seed)
    recording.run(TURNS)
    lines = path.read_bytes().splitlines(keepends=True)
    run = read_run(lines, "here")
    assert [request.request_id for request in run.requests] == recording.requests
    for request in run.requests:
        legs = request.journey.legs
        assert all(sooner.end_s == later.start_s for sooner, later in pairwise(legs))
        assert all(leg.end_s > leg.start_s for leg in legs)
        assert (request.ttft_s or 0.0) <= request.e2e_s
        if request.ttft_s is not None and request.ttft_s < request.e2e_s - 1e-9:
            reached = next(leg for leg in legs if leg.end_s > request.ttft_s + 1e-9)
            assert reached.stage in ("decode", "preempted", "restart", "paused")  # a step in flight may end in any of these
    assert len({request.reason for request in run.requests}) >= 4
    assert sum(request.num_output_tokens for request in run.requests) > 100
    assert all(step.num_held <= run.num_device_blocks for step in run.steps)
    assert_well_formed(events(run))
    assert build(run).endswith("</html>\n")


def test_a_run_that_was_cut_off_anywhere_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "run.jsonl"
    Recording(path, 1).run(60)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    num_requests = 0
    for end in range(first, len(whole), 997):
        run = read_run(whole[:end].splitlines(keepends=True), "here")
        assert len(run.requests) >= num_requests
        assert run.notes
        num_requests = len(run.requests)
        assert_well_formed(events(run))
    assert num_requests > 5
