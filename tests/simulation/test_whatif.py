"""Simulated runs without a device: outputs as long as asked, what is shared found, policies told apart, repeatable."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from repertory.actors.simulation.generators import Shape, chats, poisson, shared_prefix
from repertory.actors.simulation.latency import LatencyModel
from repertory.actors.simulation.recorded import read_recorded
from repertory.actors.simulation.whatif import WhatIfRun
from repertory.actors.simulation.workload import Job, Output
from repertory.protocol.capacity import Capacity
from repertory.protocol.config import EngineConfig
from repertory.protocol.trace_reading import read_trace
from repertory.tests.engine.stage import greedy, prompt_of
from repertory.tests.simulation.recording import Recording

LATENCY = LatencyModel(step_s=5e-3, token_s=40e-6, attended_s=5e-9, row_s=20e-6)
CAPACITY = Capacity("simulated", 4000, 0, 16, 1 << 20, 2**31 - 1, 100_000)


def run(jobs, capacity=CAPACITY, **settings):
    config = EngineConfig(model="simulated", max_num_queued=10_000, **{"max_num_seqs": 32, **settings})
    simulated = WhatIfRun(config, capacity, LATENCY, jobs)
    outcome = simulated.serve("run")
    assert simulated.core.audit() == []
    assert simulated.core.num_live == 0
    return outcome


def job(at, prompt, *outputs, max_tokens=None):
    return Job(
        arrival_s=at, num_prompt_tokens=len(prompt), prompt=partial(list, prompt), outputs=outputs, max_tokens=max_tokens
    )


def test_outputs_are_as_long_as_they_are_to_be_whether_foreseen_or_not():
    prompt = list(range(40))
    jobs = [
        job(0.0, prompt, Output(7), max_tokens=7),
        job(0.0, prompt, Output(5), max_tokens=100),
        job(0.1, prompt, Output(3), Output(9), Output(1), max_tokens=9),
        job(0.2, prompt, Output(6)),
    ]
    outcome = run(jobs)
    assert sorted((one.job, len(one.at_s)) for one in outcome.seen) == [(0, 7), (1, 5), (2, 1), (2, 3), (2, 9), (3, 6)]


def test_a_run_is_repeatable():
    jobs = chats(Shape(count=80, rate=8.0, input_len=300, output_len=40))
    assert msgspec.json.encode(run(jobs)) == msgspec.json.encode(run(jobs))


def test_shared_prefixes_are_hits_and_answers_are_part_of_the_next_turns_prefix():
    shape = Shape(count=100, rate=3.0, input_len=100, output_len=60, prefix_len=512, groups=2, turns=6)
    alone, grouped, turns = (run(make(shape)) for make in (poisson, shared_prefix, chats))
    assert alone.num_hit_tokens == 0
    assert grouped.num_hit_tokens / grouped.num_queried_tokens == pytest.approx(512 / 612, abs=0.06)
    heard = sum(one.num_prompt_tokens for one in turns.seen)
    assert turns.num_hit_tokens > 0.85 * heard
    assert run(chats(shape), enable_prefix_caching=False).num_hit_tokens == 0


def test_static_batches_cost_time_that_continuous_batching_does_not():
    jobs = poisson(Shape(count=120, rate=20.0, input_len=64, output_len=60))
    continuous, static = run(jobs), run(jobs, scheduling_policy="static")
    first = [sum(one.at_s[0] - one.arrival_s for one in outcome.seen) for outcome in (continuous, static)]
    assert first[1] > 2 * first[0]
    assert static.duration_s > continuous.duration_s


def test_memory_pressure_is_seen_in_preemptions_and_moments():
    jobs = poisson(Shape(count=40, rate=50.0, input_len=64, output_len=400))
    outcome = run(jobs, msgspec.structs.replace(CAPACITY, num_device_blocks=150))
    assert sum(outcome.num_preemptions.values()) > 0
    assert 0.9 < max(moment.kv_share for moment in outcome.moments) <= 1.0
    assert max(moment.num_waiting for moment in outcome.moments) > 5
    swapped = run(jobs, msgspec.structs.replace(CAPACITY, num_device_blocks=150, num_host_blocks=500), preemption_mode="swap")
    assert swapped.num_preemptions["swap"] > 0
    assert swapped.swap_bytes > 0


def test_a_prompt_that_never_fits_is_refused_and_the_others_are_served():
    jobs = [job(0.0, range(1000), Output(5)), job(0.0, range(50), Output(5))]
    outcome = run(jobs, msgspec.structs.replace(CAPACITY, num_device_blocks=20))
    assert (outcome.num_refused, [one.job for one in outcome.seen]) == (1, [1])


def test_every_end_is_told_once():
    ends = []
    jobs = [*[job(0.0, range(30), Output(3), Output(4))] * 3, job(0.0, range(10**5), Output(1))]
    WhatIfRun(EngineConfig(model="simulated"), CAPACITY, LATENCY, jobs, on_end=lambda: ends.append(1)).serve("run")
    assert len(ends) == 4


@pytest.mark.usefixtures("log_lines")
@pytest.mark.parametrize("content", [False, True])
def test_a_recorded_run_becomes_a_workload_with_its_lengths_and_what_was_shared(tmp_path, content):
    recording = Recording(tmp_path / "trace.jsonl", 8, content=content)
    recording.run(200)
    trace = read_trace(tmp_path / "trace.jsonl")
    recorded = read_recorded(trace)
    ended = {end.request_id: end for end in trace.records if type(end).__name__ == "Ended" and end.index == 0}
    assert len(recorded.jobs) > 10
    assert recorded.jobs[0].arrival_s == 0.0
    for one in recorded.jobs:
        assert len(one.prompt()) == one.num_prompt_tokens
    served = [found for found in recorded.jobs if len(found.outputs) == 1]
    lengths = {end.num_output_tokens for end in ended.values()}
    assert {found.outputs[0].length for found in served} <= lengths
    measured = sum(len(one.at_s) for one in recorded.measured.seen)
    assert measured >= sum(output.length for found in recorded.jobs for output in found.outputs)


async def test_the_simulation_of_a_recorded_run_shares_what_it_shared(stage, tmp_path):
    path = tmp_path / "trace.jsonl"
    s = await stage(trace_file=str(path), block_size=4, num_device_blocks=200)
    shared = prompt_of(40, 1)
    for seed in range(5):
        await s.ask(shared + prompt_of(6, seed + 2), greedy(8))
    await s.close()
    trace = read_trace(path)
    recorded = read_recorded(trace)
    outcome = WhatIfRun(EngineConfig(model="simulated", block_size=4), trace.began.capacity, LATENCY, recorded.jobs).serve("x")
    assert outcome.num_hit_tokens == recorded.measured.num_hit_tokens > 0
    assert [len(one.at_s) for one in outcome.seen] == [8] * 5
