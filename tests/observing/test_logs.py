"""Logging: one pipe, set up once, that a host application keeps for itself and that nothing can break."""

import io
import json
import logging
import time
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
import structlog

from repertory.actors.observing.logs import configure_logging, logger


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def fresh():
    """structlog as a new process has it, before and after."""
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@contextmanager
def bare_root():
    """The root logger without pytest's handlers, which come back at the end of the test (no fixture can do that)."""
    root = logging.getLogger()
    saved, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = saved


@pytest.fixture
def stream():
    return io.StringIO()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_where_there_is_no_terminal_each_event_is_one_json_line(stream):
    configure_logging("auto", "info", stream)
    logger("Scheduler").info("request.finished", num_output_tokens=3, label="a\nb")
    (line,) = lines(stream)
    assert line["event"] == "request.finished"
    assert line["actor"] == "Scheduler"
    assert line["level"] == "info"
    assert line["num_output_tokens"] == 3
    assert line["label"] == "a\nb"


def test_on_a_terminal_events_are_for_people():
    stream = Terminal()
    configure_logging("auto", "info", stream)
    logger("Scheduler").info("engine.ready", seconds=1.5)
    assert "engine.ready" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_json_can_be_had_on_a_terminal_and_a_console_without_one(stream):
    terminal = Terminal()
    configure_logging("json", "info", terminal)
    logger("A").info("engine.ready")
    assert lines(terminal)[0]["event"] == "engine.ready"
    structlog.reset_defaults()
    configure_logging("console", "info", stream)
    logger("A").info("engine.ready")
    assert "engine.ready" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_times_are_utc_and_monotonic(stream):
    before, started = datetime.now(UTC), time.monotonic()
    configure_logging("json", "info", stream)
    logger("A").info("engine.ready")
    (line,) = lines(stream)
    stamp = datetime.fromisoformat(line["timestamp"])
    assert stamp.tzinfo is not None
    assert before <= stamp <= datetime.now(UTC)
    assert started - 1e-6 <= line["monotonic_s"] <= time.monotonic() + 1e-6


def test_events_below_the_level_are_not_written(stream):
    configure_logging("json", "warning", stream)
    log = logger("A")
    log.info("engine.ready")
    log.debug("scheduler.step")
    log.warning("loop.lag", lag_s=0.2)
    assert [line["event"] for line in lines(stream)] == ["loop.lag"]


def test_what_is_bound_once_is_on_every_line(stream):
    configure_logging("json", "info", stream)
    log = logger("Tokenizer").bind(request_id="1-1")
    with structlog.contextvars.bound_contextvars(tenant="t"):
        log.info("request.refused")
    log.info("request.refused")
    first, second = lines(stream)
    assert (first["actor"], first["request_id"], first["tenant"]) == ("Tokenizer", "1-1", "t")
    assert "tenant" not in second


def test_logs_go_to_stderr_and_leave_stdout_to_the_program(capsys):
    configure_logging("json", "info")
    logger("A").info("engine.ready")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "engine.ready"


@bare_root()
def test_a_second_set_up_changes_nothing(stream):
    assert configure_logging("json", "info", stream) is True
    assert configure_logging("console", "error", io.StringIO()) is False
    logger("A").info("engine.ready")
    assert len(lines(stream)) == 1
    assert len(logging.getLogger().handlers) == 1


@bare_root()
def test_an_application_that_configured_structlog_keeps_its_pipe_and_gets_our_events(stream):
    theirs = []

    def keep(_logger, _method, event):
        theirs.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    assert configure_logging("json", "info", stream) is False
    logger("A").info("engine.ready")
    assert stream.getvalue() == ""
    assert theirs == [{"event": "engine.ready", "actor": "A"}]
    assert logging.getLogger().handlers == []


@bare_root()
def test_an_application_that_configured_the_root_logger_keeps_its_handlers(stream):
    theirs = logging.NullHandler()
    logging.getLogger().addHandler(theirs)
    configure_logging("json", "info", stream)
    assert logging.getLogger().handlers == [theirs]


@bare_root()
def test_an_embedded_engine_does_not_touch_the_root_logger(stream):
    assert configure_logging("json", "info", stream, foreign=False) is True
    assert logging.getLogger().handlers == []


@bare_root()
def test_warnings_of_other_libraries_come_through_the_same_pipe(stream):
    configure_logging("json", "info", stream)
    theirs = logging.getLogger("somebody.else")
    theirs.info("chatter")
    theirs.warning("careful with %s", "that")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("careful with that", "warning", "somebody.else")
    assert {"timestamp", "monotonic_s"} <= line.keys()


@pytest.mark.parametrize("format", ["json", "console"])
@bare_root()
def test_a_traceback_shows_no_local_variables(format, stream):
    configure_logging(format, "info", stream)

    def fail():
        prompt = "".join(["hun", "ter2"])
        raise ValueError(len(prompt))

    try:
        fail()
    except ValueError:
        logger("A").exception("actor.failed", reason="x")
        logging.getLogger("somebody.else").exception("theirs")
    assert stream.getvalue().count("ValueError") >= 2
    assert "hunter2" not in stream.getvalue()


class Odd:
    def __repr__(self):
        return "<odd>"


@pytest.mark.parametrize(
    "value", ["\ud800", {(1, 2): 3}, {"x": {"\udfff": 1}}, Odd(), {Odd(): "\ud800"}, b"\xff", float("nan"), 10**400, {1, 2}]
)
def test_no_value_whatever_breaks_a_line(value, stream):
    configure_logging("json", "info", stream)
    logger("A").info("request.refused", label=value)
    (line,) = lines(stream)
    assert line["event"] == "request.refused"
    assert "label" in line
