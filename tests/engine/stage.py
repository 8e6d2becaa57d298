"""An engine on a simulated device, and what a test asks of both."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from repertory import Engine, RequestOutput, RequestStream, SamplingParams
from repertory.gpu.simulated import SimulatedExecutor
from repertory.protocol.config import FIELDS, EngineConfig
from repertory.protocol.ids import StepId
from repertory.protocol.messages import RunStep

PATIENCE_S = 60.0
"""After this a test that waits for something fails; nothing here takes a tenth of it."""

EOS = 2
LETTERS = range(3, 97)
"""Ids of the printable ASCII characters in the tiny model's vocabulary."""


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A random prompt of printable characters; other seeds give prompts that differ from the first token on."""
    draw = random.Random(f"{num_tokens} {seed}")
    return [LETTERS[seed % len(LETTERS)], *draw.choices(LETTERS, k=num_tokens - 1)] if num_tokens else []


def greedy(max_tokens: int | None = 5, **params: Any) -> SamplingParams:
    """Greedy parameters, by default for five tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def seeded(seed: int, max_tokens: int | None = 5, **params: Any) -> SamplingParams:
    """Parameters that draw at random, repeatably."""
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, **params)


class Answer(NamedTuple):
    """What counts of an answer."""

    token_ids: list[int]
    text: str
    finish_reason: str | None


def answer_of(output: RequestOutput) -> Answer:
    """The parts of a cumulative or final output that must equal those of the request run alone."""
    completion = output.outputs[0]
    return Answer(completion.token_ids, completion.text, completion.finish_reason)


class Stage:
    """`engine` on `device`. Tests read the device's record and set its hooks; requests go to the engine's public names."""

    def __init__(self, engine: Engine, device: SimulatedExecutor) -> None:
        self.engine = engine
        self.device = device
        self.gate = Gate(device)
        self.tokenizer = engine.tokenizer

    @classmethod
    async def open(cls, model: str, **settings: Any) -> Stage:
        """An `EngineConfig`'s settings and a `SimulatedExecutor`'s knobs, told apart by name. The device records its steps.

        A device that fails ends the engine, unless `max_restarts` is given. The hash never ends an answer: without
        `reserved_ids` the end token is not drawn.
        """
        config = {"max_restarts": 0} | {key: value for key, value in settings.items() if key in FIELDS}
        knobs = {key: value for key, value in settings.items() if key not in FIELDS}
        devices: list[SimulatedExecutor] = []
        engine = Engine(model=model, device="simulated", open_device=_opener(knobs, devices), **config)
        await engine.start()
        return cls(engine, devices[0])

    def admit_carelessly(self) -> None:
        """Admission leaves nothing free for the growth of what runs: memory runs out again and again."""
        self.engine._company.scheduler.core.planner.reserve.blocks = lambda growth: 0

    # ---- requests -------------------------------------------------------------------------------

    async def ask(self, prompt: Any, params: SamplingParams | None = None, **generate: Any) -> RequestOutput:
        """Run a request to its end and return the last output."""
        return await last_of(self.engine.generate(prompt, params or greedy(), **generate))

    def begin(self, prompt: Any, params: SamplingParams | None = None, **generate: Any) -> asyncio.Task[RequestOutput]:
        """Submit a request now; the task reads it to its end."""
        return asyncio.ensure_future(last_of(self.engine.generate(prompt, params or greedy(), **generate)))

    async def ask_all(self, requests: Sequence[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
        """Run requests side by side. They arrive in their order, and one plan finds them all waiting."""
        streams = await self.submit_together(requests)
        self.gate.open()
        return list(await asyncio.gather(*map(last_of, streams)))

    async def submit_together(self, requests: Sequence[tuple[Any, SamplingParams]]) -> list[RequestStream]:
        """Submit requests while the device is held in steps of another one's; they wait when this returns."""
        core = self.engine._company.scheduler.core  # how many wait is what must be known, and nobody else says it in time
        self.gate.shut()
        held = self.begin(prompt_of(1, 93), greedy(4))
        # As many steps as there may be, none of which ends: what swept the device before would, and make room for a plan.
        most = self.engine.config.max_steps_in_flight
        await until(lambda: core.num_in_flight == most and next(iter(core._steps)) == self.gate.holds)
        streams = [self.engine.generate(prompt, params) for prompt, params in requests]
        await until(lambda: len(core.queues.waiting) == len(requests))
        held.add_done_callback(lambda task: task.result())
        return streams

    def alone(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Answer:
        """The same request run alone: no cache, no chunks, no other, its ids decoded at once. `max_tokens` ends it."""
        params = params or greedy()
        assert params.max_tokens is not None
        token_ids = self.device.reference(prompt, params, params.max_tokens)
        return Answer(token_ids, self.decode(prompt, token_ids), "length")

    def decode(self, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of `token_ids` after `prompt`, in one go."""
        decode = self.tokenizer.decode
        return decode([*prompt, *token_ids]).removeprefix(decode(list(prompt)))

    # ---- what is left ---------------------------------------------------------------------------

    async def num_free(self) -> int:
        """Free blocks of the device."""
        return (await self.engine.stats()).device_blocks.free

    async def check_clean(self) -> None:
        """AUDIT: nothing is live, nothing is left behind, and without the cache every block is free."""
        assert await self.engine._company.settle(PATIENCE_S), "a request that held the device may still be ending"
        core = self.engine._company.scheduler.core
        await until(lambda: core.num_copies == 0)
        assert await self.engine.audit() == []
        await self.engine.reset_prefix_cache()
        stats = await self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
        assert stats.device_blocks.free == stats.device_blocks.total
        assert stats.host_blocks.free == stats.host_blocks.total
        assert self.device.num_sequences == 0
        assert await self.engine.audit() == []

    async def close(self) -> None:
        """Stop the engine, whatever the device waits for."""
        self.gate.open()
        await self.engine.aclose()


class Gate:
    """Holds the device before each step until the test lets it through. Open until `shut`."""

    def __init__(self, device: SimulatedExecutor) -> None:
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[RunStep] = asyncio.Queue()
        self._tickets = threading.Semaphore(0)
        self._is_open = True
        self._inner: Callable[[RunStep], None] | None = None
        self.holds: StepId | None = None
        """The step that waits here."""

    def shut(self) -> None:
        """From here on each step waits. Keeps a hook that the device has."""
        while self._is_open and self.holds is None and self._tickets.acquire(blocking=False):
            pass  # what opened the gate with nobody before it
        self._is_open = False
        if self._device.on_step != self._wait:
            self._inner, self._device.on_step = self._device.on_step, self._wait

    def open(self) -> None:
        """Let everything through from here on."""
        self._is_open = True
        self._tickets.release()

    async def arrival(self) -> RunStep:
        """The next step that has come to the gate."""
        return await asyncio.wait_for(self._arrived.get(), PATIENCE_S)

    async def step(self) -> RunStep:
        """Wait for a step and let it through."""
        step = await self.arrival()
        self.let_through()
        return step

    def let_through(self) -> None:
        """The step that waits, or the next to come, may run."""
        self._tickets.release()

    def _wait(self, step: RunStep) -> None:
        if not self._is_open and step.seq_ids:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, step)
            self.holds = step.step_id
            if not self._tickets.acquire(timeout=PATIENCE_S):
                raise TimeoutError(f"nobody let step {step.step_id} through")
            self.holds = None
        if self._inner is not None:
            self._inner(step)


async def last_of(stream: RequestStream) -> RequestOutput:
    """Read a stream to its end."""
    output = None
    async with asyncio.timeout(PATIENCE_S):
        async for one in stream:
            output = one
    assert output is not None, "a stream ended without an output"
    return output


async def read_all(stream: RequestStream) -> list[RequestOutput]:
    """Every output of a stream."""
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def until(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Turn the loop until `condition` holds: for facts that nothing announces."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)


def _opener(knobs: dict[str, Any], devices: list[SimulatedExecutor]) -> Callable[[EngineConfig, Path], SimulatedExecutor]:
    def open_device(config: EngineConfig, model_dir: Path) -> SimulatedExecutor:
        sizes = {
            "num_device_blocks": config.num_device_blocks or 256,
            "num_host_blocks": config.num_host_blocks or 0,
            "max_model_len": config.max_model_len or 4096,
        }
        defaults = {
            "block_size": config.block_size,
            "vocab_size": 320,
            "reserved_ids": {EOS},
            "record": True,
            "wait_for_fences": True,
        }
        devices.append(SimulatedExecutor(**{**sizes, **defaults, **knobs}))
        return devices[0]

    return open_device


def check_threads_have_ended(before: Collection[threading.Thread]) -> None:
    """Of the threads that were not there `before` none is left: ours at once, libraries' on their own; tqdm's monitor stays."""
    new = [thread for thread in threading.enumerate() if thread not in before and thread.name != "tqdm_monitor"]
    assert not [thread.name for thread in new if thread.name.startswith("repertory")]
    for thread in new:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
