"""The list of events is complete: whatever the actors log is in it, with these fields and no others."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

import repertory
from repertory.actors.accounts import line_of
from repertory.actors.observing.events import COMMON_FIELDS, EVENTS
from repertory.actors.scheduling.reports import Finished, HostHit, Paused, Preempted
from repertory.protocol.ids import RequestId
from repertory.protocol.journey import STAGES, Journey, Leg

ROOT = Path(repertory.__file__).parent
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
REPORTED = {
    event: {field.name for field in msgspec.structs.fields(report)}
    for event, report in {
        "scheduler.preempted": Preempted,
        "scheduler.host_hit": HostHit,
        "scheduler.paused": Paused,
    }.items()
}


def canonical_line():
    """The fields of `request.finished` of a request that every stage has held."""
    stages = [stage for stage in STAGES if stage != "stalled"]
    legs = [Leg(stage, float(place), place + 1.0, 0.5 * (stage == "decode")) for place, stage in enumerate(stages)]
    journey = Journey(legs, [(RequestId(5), 0.5)])
    account = Finished(RequestId(1), "a", "stop", 0.0, 0.0, 0.0, 0.0, 1.0, 1, 1, 1, 1, 1, journey=journey)
    return set(line_of(account))


REPORTED["request.finished"] = canonical_line()
NAME = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def logged(source):
    """(line, event name, method, field names) of every call that logs a name of the form noun.verb."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            continue
        name = node.args[0] if node.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and NAME.fullmatch(name.value):
            yield node.lineno, name.value, node.func.attr, {word.arg for word in node.keywords if word.arg}


def faults(source):
    for line, name, _method, fields in logged(source):
        if name not in EVENTS:
            yield f"line {line}: {name} is not listed"
        elif unknown := fields - EVENTS[name].fields.keys() - COMMON_FIELDS:
            yield f"line {line}: {name} has unlisted fields {sorted(unknown)}"


def test_every_event_that_is_logged_is_listed_with_its_fields():
    found = {
        f"{path.relative_to(ROOT)}: {fault}"
        for folder in ("actors", "gpu")
        for path in (ROOT / folder).rglob("*.py")
        for fault in faults(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_every_event_of_the_list_is_logged_somewhere_with_its_level_and_all_its_fields():
    called = {}
    for folder in ("actors", "gpu"):
        for path in (ROOT / folder).rglob("*.py"):
            for _line, name, method, fields in logged(path.read_text(encoding="utf-8")):
                called.setdefault(name, []).append((method, fields))
    assert set(EVENTS) == set(called), "an event that nobody logs, or one that is not listed"
    for name, calls in called.items():
        assert {method for method, _ in calls} == {EVENTS[name].level}
        # `**fields` of a report says no names: there the report's own fields are what is logged.
        said = {field for _, fields in calls for field in fields} | REPORTED.get(name, set())
        assert EVENTS[name].fields.keys() <= said | COMMON_FIELDS, name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("log.info('engine.ready', seconds=1, actor='A')", []),
        ("self._log.bind(request_id=1).info('engine.ready')", []),
        ("log.info('engine.reddy')", ["line 1: engine.reddy is not listed"]),
        ("log.error('engine.dead', because=1)", ["line 1: engine.dead has unlisted fields ['because']"]),
        ("parser.error('usage')", []),
    ],
)
def test_the_search_for_unlisted_events_finds_them(source, expected):
    assert list(faults(source)) == expected


def test_names_are_noun_and_verb_and_every_field_is_explained():
    for name, event in EVENTS.items():
        assert NAME.fullmatch(name)
        assert event.meaning
        assert all(event.fields.values())
        assert not event.fields.keys() & {"event", "level", "timestamp", "monotonic_s", "exception"}


def test_durations_are_in_seconds_and_counts_say_so():
    for event in EVENTS.values():
        for field, words in event.fields.items():
            if field.endswith("_s"):
                assert ", s" in words
            if field.startswith("num_"):
                assert "count" in words
