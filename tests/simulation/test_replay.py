"""A recorded run replays to the same decisions, with token ids and without; what differs is found and shown."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from repertory.actors.simulation.replay import Replay
from repertory.protocol import trace as records
from repertory.protocol.trace_reading import read_trace
from repertory.tests.engine.stage import greedy, last_of, prompt_of
from repertory.tests.simulation.recording import Recording

SEEDS = range(25)

pytestmark = pytest.mark.usefixtures("log_lines")


def rewritten(path, change):
    """The trace with each record replaced by what `change` makes of it."""
    found = read_trace(path)
    return found._replace(records=[change(record) for record in found.records])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("content", [False, True], ids=["named", "content"])
def test_whatever_happened_is_decided_again(tmp_path, seed, content):
    recording = Recording(tmp_path / "trace.jsonl", seed, content=content)
    recording.run(150)
    replayed = Replay(read_trace(tmp_path / "trace.jsonl")).run()
    assert replayed.difference is None
    assert replayed.digest == replayed.recorded_digest
    assert replayed.num_steps == recording.core.num_steps or replayed.num_steps > 20


@pytest.mark.parametrize(
    "settings", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": False}, {"max_steps_in_flight": 1}]
)
def test_under_other_settings_too(tmp_path, settings):
    for seed in range(5):
        Recording(tmp_path / "trace.jsonl", seed, **settings).run(100)
        assert Replay(read_trace(tmp_path / "trace.jsonl")).run().is_same


def test_random_runs_meet_what_makes_replaying_hard(tmp_path):
    """Otherwise the test above would show little."""
    met = set()
    for seed in SEEDS:
        Recording(tmp_path / "trace.jsonl", seed).run(150)
        for record in read_trace(tmp_path / "trace.jsonl").records:
            match record:
                case records.Preempted():
                    met.add(record.mode)
                case records.Planned(copies=[_, *_]):
                    met.add("part of a block copied")
                case records.Ended(by_token=True):
                    met.add("stop token")
                case records.CopyEnded():
                    met.add(f"copy {record.direction} {'ended' if record.ok else 'failed'}")
                case records.DeviceEvent():
                    met.add(f"device {record.what}")
                case records.Arrived(seq_id=0):
                    met.add("refused")
                case records.StepEnded(failed=[_, *_]):
                    met.add("row failed")
                case records.Named(num_left=left, num_right=right) if left or right:
                    met.add("parted inside a block")
                case records.Fetched() | records.Paused():
                    met.add(type(record).__name__)
    assert met >= {
        "recompute", "swap", "part of a block copied", "stop token", "copy in ended", "copy in failed", "copy out failed",
        "device lost", "device ready", "device shared", "refused", "row failed", "parted inside a block", "Fetched", "Paused",
    }  # fmt: skip


def test_a_trace_without_content_tells_no_token(tmp_path):
    Recording(tmp_path / "named.jsonl", 3).run(80)
    Recording(tmp_path / "content.jsonl", 3, content=True).run(80)
    assert b"token_ids" not in (tmp_path / "named.jsonl").read_bytes()
    assert b"65536" not in (tmp_path / "named.jsonl").read_bytes()
    assert b"65536" in (tmp_path / "content.jsonl").read_bytes()
    for name in ("named", "content"):
        assert b"secret" not in (tmp_path / f"{name}.jsonl").read_bytes()


def test_the_first_other_decision_is_shown_with_its_step(tmp_path):
    Recording(tmp_path / "trace.jsonl", 5).run(120)
    steps = [record.step_id for record in read_trace(tmp_path / "trace.jsonl").records if isinstance(record, records.Planned)]
    victim = sorted(filter(None, steps))[10]

    def change(record):
        if isinstance(record, records.Planned) and record.step_id == victim:
            return msgspec.structs.replace(record, num_running=record.num_running + 1)
        return record

    found = Replay(rewritten(tmp_path / "trace.jsonl", change)).run().difference
    assert (found.step_id, [name for name, _, _ in found.fields]) == (victim, ["num_running"])


def test_a_measured_time_that_was_another_is_noticed(tmp_path):
    Recording(tmp_path / "trace.jsonl", 6).run(150)

    def change(record):
        return msgspec.structs.replace(record, seconds=record.seconds * 3) if isinstance(record, records.StepEnded) else record

    assert not Replay(rewritten(tmp_path / "trace.jsonl", change)).run().is_same


def test_a_trace_that_was_cut_off_replays_as_far_as_it_goes(tmp_path):
    path = tmp_path / "trace.jsonl"
    Recording(path, 1, content=True).run(100)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    torn = read_trace(path)
    replayed = Replay(torn).run()
    assert torn.is_torn
    assert replayed.is_same
    assert replayed.recorded_digest is None
    assert replayed.num_steps > 5


def test_without_the_names_of_what_never_ended_a_cut_off_trace_still_can_be_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    Recording(path, 1).run(100)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert Replay(read_trace(path)).run().num_steps > 5


async def test_an_engine_records_what_replays(stage, tmp_path):
    path = tmp_path / "trace.jsonl"
    s = await stage(
        trace_file=str(path), block_size=4, num_device_blocks=24, num_host_blocks=16, max_num_batched_tokens=32,
        reserved_ids=set(), max_num_seqs=8, preemption_mode="swap",
    )  # fmt: skip
    shared = prompt_of(21, 1)
    asked = [(shared[: 5 + index] + prompt_of(3, index), greedy(20 + index, n=1 + index % 2)) for index in range(12)]
    await asyncio.gather(*(last_of(s.engine.generate(prompt, params)) for prompt, params in asked))
    stream = s.engine.generate(prompt_of(6, 2), greedy(200))
    await anext(stream)
    await stream.aclose()
    await s.engine.reset_prefix_cache()
    await s.engine.drain(timeout_s=3)
    await s.close()
    found = read_trace(path)
    replayed = Replay(found).run()
    assert replayed.difference is None
    assert replayed.digest == replayed.recorded_digest
    assert replayed.num_requests == 13
    assert isinstance(found.records[-1], records.Finished)


async def test_a_device_that_dies_is_replayed_too(stage, tmp_path):
    path, deaths = tmp_path / "trace.jsonl", [3, 9]

    def die(step):
        if deaths and step.step_id == deaths[0]:
            del deaths[0]
            raise RuntimeError("a short circuit")

    s = await stage(trace_file=str(path), max_restarts=5, on_step=die, block_size=4, num_device_blocks=64)
    await asyncio.gather(*(last_of(s.engine.generate(prompt_of(9, seed), greedy(12))) for seed in range(3)))
    await s.close()
    found = read_trace(path)
    assert {"lost", "ready"} <= {record.what for record in found.records if isinstance(record, records.DeviceEvent)}
    assert Replay(found).run().is_same
