"""6. Wherever an abort finds a request: one terminal, nothing after it, nothing left behind, nobody else disturbed."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from repertory import RequestOutput, RequestStream
from repertory.actors.text.prompts import PromptReader
from repertory.tests.engine.copy_gate import CopyGate
from repertory.tests.engine.stage import PATIENCE_S, answer_of, greedy, last_of, prompt_of, read_all, seeded, until

VICTIM = prompt_of(20, 1)
OTHER = prompt_of(9, 2)
LONG = greedy(12)


@pytest.fixture(params=[1, 2], ids=["one step in flight", "two steps in flight"])
def open_small(stage, request):
    """An engine with little of everything: chunks of 8 tokens, blocks of 4."""

    def open_stage(**settings):
        sizes = {"block_size": 4, "num_device_blocks": 24, "max_num_batched_tokens": 8}
        return stage(**{**sizes, "max_steps_in_flight": request.param, **settings})

    return open_stage


def check_aborted(outputs: list[RequestOutput], expected: list[int]) -> None:
    """One terminal, the last; the tokens before it are the first of those of the request run alone."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    token_ids = outputs[-1].outputs[0].token_ids
    assert token_ids == expected[: len(token_ids)]


async def check_rest(s, bystander: asyncio.Task[RequestOutput]) -> None:
    """The bystander, and whoever gets the blocks that came back, answer as if alone."""
    newcomers = asyncio.gather(*(s.ask(prompt_of(13, seed)) for seed in (5, 6)))
    s.gate.open()
    assert answer_of(await bystander) == s.alone(OTHER, LONG)
    assert [answer_of(output) for output in await newcomers] == [s.alone(prompt_of(13, seed)) for seed in (5, 6)]
    await s.engine.abort("victim")  # late, and of nobody
    await s.check_clean()


async def test_a_request_that_was_accepted_but_not_tokenized(open_small):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    stream = s.engine.generate(VICTIM, LONG, "victim")
    await s.engine.abort("victim")  # in the same turn of the loop: both lie in the tokenizer's box
    check_aborted(await read_all(stream), [])
    assert (await s.engine.stats()).num_waiting == 0
    await check_rest(s, bystander)


async def test_a_request_whose_prompt_is_being_read(open_small, monkeypatch):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    await until(lambda: bool(s.device.steps))
    reading, go_on = threading.Event(), threading.Event()
    read = PromptReader.read

    def slow_read(reader, prompt):
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return read(reader, prompt)

    monkeypatch.setattr(PromptReader, "read", slow_read)
    stream = s.engine.generate("to be aborted", LONG, "victim")
    await until(reading.is_set)
    await s.engine.abort("victim")
    check_aborted(await read_all(stream), [])
    monkeypatch.setattr(PromptReader, "read", read)
    go_on.set()
    await check_rest(s, bystander)


async def test_a_queued_request(open_small):
    s = await open_small(max_num_seqs=1)
    s.gate.shut()
    bystander = s.begin(OTHER, LONG)
    await s.gate.arrival()
    stream = s.engine.generate(VICTIM, LONG, "victim")
    await until(lambda: bool(s.engine._company.scheduler.core.queues.waiting))
    await s.engine.abort("victim")
    check_aborted(await read_all(stream), [])
    s.gate.let_through()
    await check_rest(s, bystander)


async def hold_at_chunk(s, wanted: str) -> RequestStream:
    """Submit the victim and let steps through until one waits at the gate that has the wanted chunk of its prompt."""
    s.gate.shut()
    stream = s.engine.generate(VICTIM, LONG, "victim")
    victim = None
    while True:
        step = await s.gate.arrival()
        victim = next((new.seq_id for new in step.admitted if new.num_prompt_tokens == len(VICTIM)), victim)
        if victim in step.seq_ids:
            row = step.seq_ids.index(victim)
            chunk = "last" if step.samples[row] else "middle" if step.starts[row] else "first"
            if chunk == wanted:
                return stream
        s.gate.let_through()


@pytest.mark.parametrize("chunk", ["first", "middle", "last"])
async def test_a_request_between_its_chunks_while_a_step_with_it_runs(open_small, chunk):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    stream = await hold_at_chunk(s, chunk)
    await s.engine.abort("victim")
    check_aborted(await read_all(stream), [])
    s.gate.let_through()
    await check_rest(s, bystander)


async def test_a_request_whose_first_token_is_sampled_but_not_delivered(open_small):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    stream = await hold_at_chunk(s, "last")
    s.gate.let_through()
    # The step's answer may lie in the scheduler's box already, behind the abort or before it.
    await s.engine.abort("victim")
    outputs = await read_all(stream)
    check_aborted(outputs, s.alone(VICTIM, LONG).token_ids)
    assert len(outputs[-1].outputs[0].token_ids) <= 2
    s.gate.let_through()
    await check_rest(s, bystander)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
async def test_a_decoding_request(open_small, num_tokens):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    stream = s.engine.generate(VICTIM, greedy(200), "victim")
    while len((await anext(stream)).outputs[0].token_ids) < num_tokens:
        pass
    for _ in range(3):
        await s.engine.abort("victim")  # idempotent
    outputs = await read_all(stream)
    check_aborted(outputs, s.alone(VICTIM, greedy(60)).token_ids)
    assert len(outputs[-1].outputs[0].token_ids) < 60
    await check_rest(s, bystander)


async def test_a_request_that_was_preempted_for_recompute(open_small):
    s = await open_small(num_device_blocks=10, max_num_batched_tokens=64)
    older = s.begin(OTHER, greedy(31))
    stream = s.engine.generate(prompt_of(9, 1), greedy(31), "victim")
    core = s.engine._company.scheduler.core
    reader = asyncio.ensure_future(read_all(stream))
    await until(lambda: bool(core.queues.recovery) or older.done())
    assert [seq.admit.label for seq in core.queues.recovery] == ["victim"]
    await s.engine.abort("victim")
    outputs = await reader
    check_aborted(outputs, s.alone(prompt_of(9, 1), greedy(31)).token_ids)
    assert outputs[-1].outputs[0].token_ids, "it had begun"
    assert answer_of(await older) == s.alone(OTHER, greedy(31))
    await s.check_clean()


class Swapped:
    """An older request that needs the whole pool, and a victim that gives way to it by swap."""

    def __init__(self, s):
        self.s = s
        self.core = s.engine._company.scheduler.core
        self.out, self.into = CopyGate(s.device, "out"), CopyGate(s.device, "in")

    async def begin(self):
        """Both arrive before the first of their steps ends."""
        self.s.gate.shut()
        self.older = self.s.begin(OTHER, greedy(31))
        self.reader = asyncio.ensure_future(read_all(self.s.engine.generate(prompt_of(9, 1), greedy(31), "victim")))
        await until(lambda: self.core.num_live == 2)
        self.s.gate.open()

    def is_on_host(self):
        """Whether all that the victim keeps has been copied out."""
        [node] = self.core.cache.host.pinned().values()
        while node is not None and node.job_out is None:
            node = node.parent
        return node is None

    async def abort_and_check(self):
        """The victim ends as it should; what comes later for it is of nobody; others answer as if alone."""
        newcomer = self.s.begin(prompt_of(9, 1), greedy(20))  # it wants the very blocks that are moving
        await self.s.engine.abort("victim")
        outputs = await self.reader
        check_aborted(outputs, self.s.alone(prompt_of(9, 1), greedy(31)).token_ids)
        assert outputs[-1].outputs[0].token_ids, "it had begun"
        for gate in (self.s.gate, self.out, self.into):
            gate.open()
        assert answer_of(await self.older) == self.s.alone(OTHER, greedy(31))
        assert answer_of(await newcomer) == self.s.alone(prompt_of(9, 1), greedy(20))
        await self.s.check_clean()


@pytest.fixture(params=["swap", "heuristic", "swap, no prefix cache"])
async def swapped(open_small, request):
    mode, _, is_alone = request.param.partition(", ")
    sizes = {"num_device_blocks": 10, "num_host_blocks": 40, "max_num_batched_tokens": 64}
    return Swapped(await open_small(**sizes, preemption_mode=mode, enable_prefix_caching=not is_alone))


async def test_a_request_that_is_being_swapped_out(swapped):
    swapped.out.shut()
    await swapped.begin()
    await until(lambda: bool(swapped.core.queues.recovery) and swapped.out.num_held > 0)
    assert swapped.core.stats().num_preemptions["swap"] == 1
    await swapped.abort_and_check()


async def test_a_request_that_is_swapped_out(swapped):
    swapped.out.shut()
    await swapped.begin()
    # Its last row has been answered: no copy waits for a step that will not end.
    await until(lambda: swapped.out.num_held > 0 and any(not seq.in_flight for seq in swapped.core.queues.recovery))
    swapped.s.gate.shut()  # no step ends from here on, so nobody comes back
    swapped.out.open()
    await until(swapped.is_on_host)
    assert swapped.core.queues.recovery
    await swapped.abort_and_check()


async def test_a_request_that_is_being_swapped_in(swapped):
    swapped.into.shut()
    await swapped.begin()
    await until(lambda: bool(swapped.core.queues.fetching) and swapped.into.num_held > 0)
    await swapped.abort_and_check()


async def test_a_request_whose_copy_in_fails_after_it_was_aborted(swapped):
    swapped.s.device.fail_copies = lambda copy: copy.direction == "in"
    swapped.into.shut()
    await swapped.begin()
    await until(lambda: bool(swapped.core.queues.fetching) and swapped.into.num_held > 0)
    await swapped.abort_and_check()
    assert swapped.core.stats().num_failed_copies


async def test_a_request_that_has_just_finished_keeps_its_own_end(open_small):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    stream = s.engine.generate(VICTIM, greedy(3), "victim")
    outputs = [output async for output in stream]
    await s.engine.abort("victim")
    assert answer_of(outputs[-1]) == s.alone(VICTIM, greedy(3))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await check_rest(s, bystander)


async def test_an_abort_beside_the_last_step_leaves_one_terminal_of_either_kind(open_small):
    s = await open_small()
    s.gate.shut()
    stream = s.engine.generate(prompt_of(5), greedy(1), "victim")
    await s.gate.arrival()
    s.gate.let_through()
    await s.engine.abort("victim")
    outputs = await read_all(stream)
    assert [output.finished for output in outputs] == [True]
    assert outputs[0].outputs[0].finish_reason in ("abort", "length")
    await check_rest(s, s.begin(OTHER, LONG))


async def test_an_unknown_id_is_a_harmless_no_op(open_small):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    for label in ("nobody", "", "\ud800", "0"):
        await s.engine.abort(label)
    await check_rest(s, bystander)


@pytest.mark.parametrize("host", [0, 4, 40])
@pytest.mark.parametrize("seed", range(6))
async def test_aborts_at_any_moment_leave_the_others_as_they_were(open_small, seed, host):
    draw = random.Random(seed)
    sizes = {"num_device_blocks": 12, "num_host_blocks": host, "max_num_seqs": draw.choice([2, 4, 16])}
    s = await open_small(**sizes, preemption_mode="swap" if host else "auto")
    stems = [prompt_of(8, seed) for seed in range(3)]
    requests = [(draw.choice(stems) + prompt_of(draw.randint(1, 12), n), greedy(draw.randint(1, 14))) for n in range(30)]

    async def live(number: int) -> RequestOutput:
        for _ in range(draw.randint(0, 60)):
            await asyncio.sleep(0)
        stream = s.engine.generate(*requests[number], f"{number}")
        if number % 3 == 0:
            patience = draw.randint(0, 120)
            reader = asyncio.ensure_future(last_of(stream))
            for _ in range(patience):
                await asyncio.sleep(0)
            await s.engine.abort(f"{number}")
            return await reader
        return await last_of(stream)

    outputs = await asyncio.gather(*(live(number) for number in range(30)))
    for number, output in enumerate(outputs):
        expected = s.alone(*requests[number])
        if output.outputs[0].finish_reason == "abort":
            assert number % 3 == 0
            check_aborted([output], expected.token_ids)
        else:
            assert answer_of(output) == expected
    await s.check_clean()


@pytest.mark.parametrize("num_outputs", [0, 1, 4])
async def test_a_request_of_several_sequences(open_small, num_outputs):
    s = await open_small()
    bystander = s.begin(OTHER, LONG)
    params = seeded(3, 200, n=3)
    stream = s.engine.generate(prompt_of(10, 1), params, "victim")
    outputs = [await anext(stream) for _ in range(num_outputs)]
    for _ in range(2):
        await s.engine.abort("victim")
    outputs += await read_all(stream)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, completion in enumerate(outputs[-1].outputs):
        expected = s.device.reference(prompt_of(10, 1), params, 60, index=index)
        assert completion.finish_reason == "abort"
        assert completion.token_ids == expected[: len(completion.token_ids)]
    await check_rest(s, bystander)
