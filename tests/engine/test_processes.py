"""Programs that use the engine end when they should: forgotten engines, interrupts, exits in the middle."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from repertory.tests.tiny_model import make_tiny_model

LIMIT_S = 60

BEGIN = """
import asyncio, sys, threading
from repertory import LLM, Engine, EngineDeadError, SamplingParams
from repertory.gpu.simulated import SimulatedExecutor
endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind="delta")
short = SamplingParams(temperature=0, max_tokens=3)
def slow_device(config, model_dir):
    return SimulatedExecutor(vocab_size=320, max_model_len=100_000, num_device_blocks=10_000,
                             step_seconds=lambda step: 0.002, real_time=True, on_step=on_step)
def on_step(step):
    if step.step_id == 9 and "announce" in globals():
        print("begun", flush=True)
settings = dict(model=sys.argv[1], device="simulated", open_device=slow_device, log_level="error")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that does not chat: reading its template would take most of a program's time."""
    directory = make_tiny_model(tmp_path_factory.mktemp("mute"), weights=False)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def start(model: Path, program: str) -> subprocess.Popen[str]:
    source = BEGIN + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", source, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=model,
    )


def run(model: Path, program: str) -> tuple[int, str, str]:
    """Run a program to its end: exit status, output, errors."""
    with start(model, program) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, out.strip(), err.strip()


def interrupt(model: Path, program: str) -> tuple[int, str, str]:
    """Run a program, send it Ctrl-C once it has printed a line, and wait for its end."""
    with start(model, program) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
        return process.returncode, (first + out).strip(), err.strip()


FORGOTTEN = {
    "an engine and its stream": """
        async def main():
            global engine, stream
            engine = Engine(**settings)
            await engine.start()
            stream = engine.generate("hello", endless)
            await anext(stream)
            print("served")
        asyncio.run(main())
        """,
    "an engine that goes before the loop does": """
        async def main():
            engine = Engine(**settings)
            await engine.start()
            async for output in engine.generate("hello", endless):
                break
            del engine
            print("served")
        asyncio.run(main())
        """,
    "a loop that is never closed": """
        import warnings; warnings.simplefilter("ignore")
        loop = asyncio.new_event_loop()
        engine = Engine(**settings)
        loop.run_until_complete(engine.start())
        print("served")
        """,
    "an LLM": """
        llm = LLM(**settings)
        print("served", len(llm.generate(["a", "b"], short)))
        """,
    "an LLM in a cycle": """
        llm = LLM(**settings)
        llm.me = llm
        print("served", len(llm.generate(["a", "b"], short)))
        """,
    "an exit in the middle": """
        llm = LLM(**settings)
        def use():
            try:
                llm.generate("a", endless)
            except EngineDeadError:
                pass
        threading.Thread(target=use, daemon=True).start()
        print("served")
        sys.exit()
        """,
}


@pytest.mark.parametrize("program", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_program_that_forgets_to_close_still_ends(model, program):
    status, out, err = run(model, program)
    assert (status, out.split()[0]) == (0, "served"), err
    assert "Traceback" not in err
    assert "Warning" not in err


def test_an_interrupt_ends_an_asynchronous_program_in_order(model):
    status, out, err = interrupt(
        model,
        """
        async def main():
            async with Engine(**settings) as engine:
                try:
                    async for output in engine.generate("hello", endless):
                        print("token", flush=True)
                finally:
                    print("left", await engine.audit(), flush=True)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", "repertory-compute" in [thread.name for thread in threading.enumerate()])
        """,
    )
    assert status == 0, err
    assert out.splitlines()[0] == "token"
    assert out.splitlines()[-2:] == ["left []", "interrupted False"]
    assert err == ""


def test_an_interrupted_llm_drops_what_it_was_doing_and_can_go_on(model):
    status, out, err = interrupt(
        model,
        """
        announce = True
        llm = LLM(**settings)
        try:
            llm.generate(["a", "b"], endless)
        except KeyboardInterrupt:
            print(len(llm.generate("c", short)[0].outputs[0].token_ids))
            print(llm._portal.call(llm.engine.audit), llm._portal.call(llm.engine.stats).num_running)
        llm.close()
        """,
    )
    assert (status, out.splitlines()) == (0, ["begun", "3", "[] 0"]), err
    assert err == ""


def test_an_interrupt_that_nobody_catches_ends_the_program(model):
    program = """
        announce = True
        llm = LLM(**settings)
        llm.generate(["a", "b"], endless)
        """
    status, out, err = interrupt(model, program)
    assert (status, out) == (-signal.SIGINT, "begun")
    assert err.splitlines()[-1] == "KeyboardInterrupt"
