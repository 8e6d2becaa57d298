"""A trace on disk: what its records say, what a crash leaves, and what the recorder does when it cannot write."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from repertory.actors.observing import trace_file
from repertory.actors.observing.trace_file import TraceFile
from repertory.protocol import trace as records
from repertory.protocol.errors import ConfigError, ValidationError
from repertory.protocol.trace_reading import is_trace, read_trace
from repertory.tests.engine.stage import greedy, last_of, prompt_of, until
from repertory.tests.simulation.recording import Recording

pytestmark = pytest.mark.usefixtures("log_lines")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def test_every_line_is_an_object_with_a_type_and_the_first_says_under_what_it_ran(path):
    Recording(path, 2, scheduling_delay_s=0.001).run(60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["type"] for line in lines} <= {kind.__name__ for kind in records.AnyRecord.__args__}
    began = lines[0]
    assert (began["type"], began["version"], began["epoch"]) == ("Began", records.TRACE_VERSION, 1)
    assert began["config"]["scheduling_delay_s"] == 0.001
    assert "api_key" not in began["config"]
    assert began["capacity"]["num_device_blocks"] == 24
    assert is_trace(path.read_bytes().splitlines()[0])


def test_rows_of_a_plan_are_those_that_were_sent(path):
    """Decodes leave out where they start: it is where the sequence's last row ended."""
    recording = Recording(path, 4)
    sent = []
    send = recording._send
    recording.scheduler._device = lambda operation, predicted_s: (sent.append(operation), send(operation, predicted_s))
    recording.run(150)
    steps = [operation for operation in sent if hasattr(operation, "step_id")]
    planned = [record for record in read_trace(path).records if isinstance(record, records.Planned) and record.step_id]
    reached = {}
    for step, record in zip(steps, planned, strict=True):
        rows = [(seq_id, reached[seq_id], 1, 1) for seq_id in record.decodes] + record.chunks
        assert rows == list(zip(step.seq_ids, step.starts, step.num_tokens, step.samples, strict=True))
        reached.update({seq_id: start + count for seq_id, start, count, _ in rows})
    assert sum(len(record.decodes) for record in planned) > 50


async def test_the_times_of_a_requests_life_can_be_read_from_it(stage, path):
    s = await stage(
        trace_file=str(path), block_size=4, num_device_blocks=12, num_host_blocks=0, max_num_seqs=4, max_num_batched_tokens=16
    )
    s.admit_carelessly()
    outputs = await s.ask_all([(prompt_of(8, seed), greedy(24)) for seed in range(3)])
    await s.close()
    found = read_trace(path).records
    seen = {record.label: record for record in found if isinstance(record, records.Arrived)}
    for output in outputs:
        arrived, metrics = seen[output.request_id], output.metrics
        ended = next(one for one in found if isinstance(one, records.Ended) and one.request_id == arrived.request_id)
        runs = [one.at for one in found if isinstance(one, records.Planned) and arrived.seq_id in one.admitted]
        assert arrived.arrival_s == metrics.arrival
        assert arrived.at == metrics.queued
        assert runs[0] == metrics.first_scheduled
        assert ended.at == pytest.approx(metrics.finished, abs=0.05)
        assert (ended.reason, ended.num_output_tokens) == ("length", 24)
        preempted = [one.at for one in found if isinstance(one, records.Preempted) and one.request_id == arrived.request_id]
        assert len(preempted) == metrics.num_preemptions
        assert len(runs) == 1 + len(preempted)
        assert all(lost < resumed for lost, resumed in zip(preempted, runs[1:], strict=True))
    assert any(output.metrics.num_preemptions for output in outputs)


def test_a_torn_last_line_is_left_out_and_a_torn_line_before_it_is_an_error(path):
    Recording(path, 1).run(30)
    whole = path.read_bytes()
    num_records = len(read_trace(path).records)
    path.write_bytes(whole[:-20])
    assert (len(read_trace(path).records), read_trace(path).is_torn) == (num_records - 1, True)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"type":"Planned","at\n', *lines[5:]]))
    with pytest.raises(ValidationError, match=r"line 6: "):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the first line is not a trace's beginning"),
        (b'{"type":"Planned","at":1.0}\n', "the first line is not a trace's beginning"),
        (b"hello\n", "line 1: "),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(path, content, words):
    path.write_bytes(content)
    with pytest.raises(ValidationError, match=words):
        read_trace(path)


def test_another_version_is_refused_and_a_record_that_came_later_is_skipped(path):
    Recording(path, 1).run(10)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"type":"Weather","at":1.0}\n', *lines[1:]]))
    assert len(read_trace(path).records) == len(lines) - 1
    path.write_bytes(b"".join([lines[0].replace(b'"version":1', b'"version":99'), *lines[1:]]))
    with pytest.raises(ValidationError, match="a trace of version 99"):
        read_trace(path)


async def test_a_file_that_cannot_be_opened_stops_the_start_and_names_the_setting(stage, tmp_path):
    with pytest.raises(ConfigError, match=r"trace_file: cannot write .*: No such file or directory"):
        await stage(trace_file=str(tmp_path / "nowhere" / "trace.jsonl"))


async def test_a_disk_that_is_full_ends_the_trace_and_not_the_engine(stage, log_lines):
    s = await stage(trace_file="/dev/full")
    await until(lambda: any(line["event"] == "trace.stopped" for line in log_lines))
    assert (await s.ask(prompt_of(5), greedy(3))).finished
    assert "No space left" in next(line["reason"] for line in log_lines if line["event"] == "trace.stopped")


def test_a_disk_that_does_not_follow_ends_the_trace_with_a_line_that_says_so(path, monkeypatch):
    monkeypatch.setattr(trace_file, "FLUSH_S", 3600.0)
    failures = []
    file = TraceFile(
        str(path),
        lambda entry: [entry],
        lambda reason: records.Finished(at=0.0, reason=reason, digest=""),
        on_failure=failures.append,
        most_behind=10,
    )
    for number in range(30):
        file.put(records.Credited(at=float(number), request_id=1, num_tokens=1))
    file.close()
    file.put(records.Credited(at=99.0, request_id=1, num_tokens=1))
    lines = [msgspec.json.decode(line, type=records.AnyRecord) for line in path.read_bytes().splitlines()]
    assert [line.at for line in lines[:-1]] == list(range(10))
    assert lines[-1].reason == failures[0] == "the disk does not follow: 10 lines behind"


async def test_what_was_written_is_there_while_the_engine_still_runs(stage, path):
    s = await stage(trace_file=str(path))
    await last_of(s.engine.generate(prompt_of(5), greedy(3)))
    await asyncio.to_thread(_wait_for, path, b'"type":"Ended"')
    assert read_trace(path).records


def _wait_for(path, words):
    for _ in range(300):
        if words in path.read_bytes():
            return
        trace_file.threading.Event().wait(0.01)
    raise AssertionError(f"{words!r} was not written")
