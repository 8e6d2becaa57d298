"""Mistakes, faults and interruptions of a command: one line, the right exit status, everything closed."""

import signal

import anyio
import pytest

from repertory.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temprature", "1"], "did you mean --temperature"),
        (["--blocksize", "1"], "did you mean --block-size"),
        (["--block-size", "x"], "--block-size"),
        (["--block-size", "0"], "--block-size: 0 is not allowed; expected an integer, at least 1"),
        (["--preemption-mode", "swop"], "--preemption-mode"),
        (["--temperature", "-1"], "temperature must be"),
        (["--temperature", "nan"], "temperature must be"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--stop", ""], "stop must be"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--port", "80"], "--port"),
        (["--block-size"], "--block-size"),
        (["--seed", "1", "--seed", "2"], "--seed"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_any_engine_is_opened(repertory, flags, expected, fake_engine):
    engine = fake_engine()
    status, out, err = repertory(engine, "hi", *flags)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected.lower() in err.lower()
    assert engine.config is None


def test_a_malformed_variable_is_status_2(repertory, monkeypatch, fake_engine):
    monkeypatch.setenv("REPERTORY_BLOCK_SIZE", "many")
    status, _, err = repertory(fake_engine(), "hi")
    assert status == 2
    assert err.startswith("error: REPERTORY_BLOCK_SIZE: 'many' is not allowed")


def test_a_model_that_does_not_load_is_status_2(repertory, fake_engine):
    class Missing(fake_engine):
        def open(self, config):
            raise ConfigError(f"model {config.model} is not there", key="model")

    assert repertory(Missing(), "hi") == (2, "", "error: model demo is not there\n")


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
def test_an_interrupt_closes_every_stream_and_the_engine_and_exits_130(repertory, prompts, fake_engine):
    async def act(_prompt, number):
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            await anyio.Event().wait()

    engine = fake_engine(act=act)
    status, _, err = repertory(engine, *prompts)
    assert (status, err) == (130, "")
    assert all(stream.closed for stream in engine.streams)
    assert not any(stream.finished for stream in engine.streams)
    assert not engine.is_open


def test_a_fault_of_no_known_kind_is_not_hidden(repertory, fake_engine):
    class Broken(fake_engine):
        def generate(self, prompt, sampling_params):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        repertory(Broken(), "hi")
