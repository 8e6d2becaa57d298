"""24. Whoever stops listening stops the engine's work for it, on all of its sequences, within two steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from repertory.tests.engine.stage import last_of, prompt_of, seeded, until


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leave", ["close", "cancel", "drop"])
@pytest.mark.parametrize("kind", ["delta", "final_only"])
async def test_a_reader_that_goes_ends_all_its_sequences(
    stage: Any, log_lines: list[dict[str, Any]], kind: str, leave: str, n: int
) -> None:
    s = await stage(block_size=4)
    bystander = s.begin(prompt_of(9, 3), seeded(4, 60))
    stream = s.engine.generate(prompt_of(9), seeded(1, 2000, n=n, output_kind=kind), "gone")
    core = s.engine._company.scheduler.core
    await until(lambda: len([seq for seq in core.queues.running if seq.admit.label == "gone"]) == n)
    if leave == "close":
        await stream.aclose()
    elif leave == "cancel":
        reader = asyncio.ensure_future(last_of(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    del stream
    await until(lambda: not any(seq.admit.label == "gone" for seq in core.queues.running))
    num_steps = core.num_steps
    await until(lambda: bystander.done())
    rows = [seq_id for step_id, step in s.device.steps if step_id > num_steps + 2 for seq_id, _, _ in step]
    assert len(set(rows)) <= 1, "two steps later only the bystander has rows"
    assert (await bystander).outputs[0].token_ids == s.device.reference(prompt_of(9, 3), seeded(4, 60), 60)
    ends = [line for line in log_lines if line["event"] == "request.finished" and line["label"] == "gone"]
    assert [(line["finish_reason"], line["num_sequences"]) for line in ends] == [("abort", n)]
    assert ends[0]["request_id"]
    await s.check_clean()


@pytest.mark.parametrize("n", [1, 3])
async def test_one_that_waits_is_gone_too(stage: Any, n: int) -> None:
    s = await stage(block_size=4, max_num_seqs=1)
    s.gate.shut()
    held = s.begin(prompt_of(5), seeded(1, 3))
    await s.gate.arrival()
    stream = s.engine.generate(prompt_of(9), seeded(1, 2000, n=n))
    await until(lambda: len(s.engine._company.scheduler.core.queues.waiting) == n)
    await stream.aclose()
    await until(lambda: not s.engine._company.scheduler.core.queues.waiting)
    s.gate.open()
    await held
    await s.check_clean()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_normal_end_leaves_nothing_in_the_frontend(stage: Any, n: int) -> None:
    s = await stage(block_size=4)
    await s.ask(prompt_of(9), seeded(1, 5, n=n, output_kind="final_only"))
    assert len(s.engine._company.dispatcher) == 0
    await s.check_clean()
