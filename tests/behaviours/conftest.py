"""Models whose words a test writes, and small real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from repertory import Engine
from repertory.gpu.slots import Slot
from repertory.tests.engine.stage import Stage
from repertory.tests.served.conftest import nothing_left, open_core, sockets  # noqa: F401 - fixtures
from repertory.tests.tiny_model import make_tiny_model

OpenScripted = Callable[..., Awaitable[Stage]]


@pytest.fixture
def scripted(tmp_path: Path, stage: Callable[..., Awaitable[Stage]]) -> OpenScripted:
    """Opens an engine with a given tokenizer whose answers are written down: `scripted(tokenizer, {7: [1, 2]})` answers
    a prompt that begins with token 7 with the tokens 1 and 2, and with the end token 2 after them."""

    async def open_scripted(tokenizer: Tokenizer, scripts: dict[int, list[int]], **settings: Any) -> Stage:
        model = make_tiny_model(tmp_path / "scripted", weights=False, vocab_size=512)
        tokenizer.save(str(model / "tokenizer.json"))

        def next_token(tokens: Sequence[int], slot: Slot) -> int:
            script = scripts[tokens[0]]
            return script[slot.num_output_tokens] if slot.num_output_tokens < len(script) else 2

        return await stage(model=str(model), next_token=next_token, vocab_size=512, **settings)

    return open_scripted


@pytest.fixture
async def real(tiny_model: Path, log_lines: list[dict]) -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    """Opens engines with a tiny model on the CPU, float32."""
    async with AsyncExitStack() as stack:

        async def open_real(**settings: Any) -> Engine:
            sizes = {"worker": "inline", "dtype": "float32", "num_threads": 1, "block_size": 4, "num_device_blocks": 128}
            return await stack.enter_async_context(Engine(model=str(tiny_model), device="cpu", **{**sizes, **settings}))

        yield open_real


@pytest.fixture
def check_clean() -> Callable[[Engine], Awaitable[None]]:
    """AUDIT of an engine on any device."""

    async def check(engine: Engine) -> None:
        assert await engine.audit() == []
        await engine.reset_prefix_cache()
        blocks = (await engine.stats()).device_blocks
        assert blocks.free == blocks.total
        assert await engine.audit() == []

    return check
