"""What tests of the whole engine share: model directories, and engines that are closed and looked through at the end."""

from __future__ import annotations

import gc
import hashlib
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict, Processor

from repertory.actors.observing.events import COMMON_FIELDS, EVENTS
from repertory.gpu.models import gguf
from repertory.gpu.models.source import resolve_model
from repertory.tests.engine.stage import Stage
from repertory.tests.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from repertory.tests.http.served import Served

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell ignores interrupts for what it runs in the background, and so would every program that a test starts."""

gc.disable()
"""Until all tests are collected: on CPython 3.11 a collection in the middle of `ast.parse` can fail it (gh-106905)."""

OpenStage = Callable[..., Awaitable[Stage]]
OpenServed = Callable[..., Awaitable["Served"]]


def pytest_collection_finish() -> None:
    """Every test file has been parsed. What that leaves is there to the end: no collection looks at it again.

    One would take half a second, and fall into a test that has a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def paper_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's configuration and tokenizer, without weights: for devices that compute nothing."""
    return make_tiny_model(tmp_path_factory.mktemp("paper"), weights=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """The demo model, converted. Kept between sessions for as long as the converter's source is the same."""
    version = hashlib.sha256(Path(gguf.__file__).read_bytes()).hexdigest()[:8]
    return resolve_model("demo", cache_dir=request.config.cache.mkdir(f"converted-{version}"))


@pytest.fixture
def log_lines() -> Iterator[list[dict]]:
    """Every line logged in the test, as its fields. Each must be an event of the list, with fields that the list knows."""
    capture = LogCapture()
    strangers: list[str] = []
    structlog.reset_defaults()
    structlog.configure(processors=[_check_against_list(strangers), capture])
    yield capture.entries
    structlog.reset_defaults()
    assert not strangers


def _check_against_list(strangers: list[str]) -> Processor:
    """Notes what is logged and not as `EVENTS` has it; on the fly, since a test may forget lines that it has read."""

    def check(_logger: object, method: str, line: EventDict) -> EventDict:
        event = EVENTS.get(line["event"])
        if event is None:
            strangers.append(f"{line['event']} is not in the list of events")
            return line
        if unknown := set(line) - set(event.fields) - COMMON_FIELDS - {"event", "log_level"}:
            strangers.append(f"{line['event']} has fields that its list does not know: {sorted(unknown)}")
        if method != event.level:
            strangers.append(f"{line['event']} is logged as {method}, and listed as {event.level}")
        return line

    return check


@pytest.fixture
async def stage(paper_model: Path, log_lines: list[dict]) -> AsyncIterator[OpenStage]:
    """Opens engines on simulated devices: `stage(block_size=4, num_device_blocks=16, ...)`; see `Stage.open`."""
    before = threading.active_count()
    async with AsyncExitStack() as stack:

        async def open_stage(**settings: object) -> Stage:
            found = await Stage.open(**{"model": str(paper_model), **settings})
            stack.push_async_callback(found.close)
            return found

        yield open_stage
    computing = [thread for thread in threading.enumerate() if thread.name == "repertory-compute"]
    assert not computing, f"{len(computing)} device threads left of {threading.active_count()} threads, {before} at first"


@pytest.fixture
async def served(stage: OpenStage) -> AsyncIterator[OpenServed]:
    """Opens stages behind servers: `served(block_size=4, api_key="x", ...)`."""
    from repertory.tests.http.served import Served  # late: most tests need no server and none of its imports

    async with AsyncExitStack() as stack:

        async def open_served(**settings: object) -> Served:
            found = await Served(await stage(**settings)).opened()
            stack.push_async_callback(found.close)
            return found

        yield open_served
