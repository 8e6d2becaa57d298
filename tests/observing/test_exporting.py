"""When a process of the server sends traces: only where a collector is named, and never at the cost of serving."""

from types import SimpleNamespace

import pytest
from opentelemetry import trace

from repertory.actors.observing import exporting
from repertory.actors.observing.exporting import ENDPOINTS, traces_exported


class Sdk:
    """Stands in for the four modules of the SDK and its exporter."""

    def __init__(self):
        self.processors = []
        self.attributes = {}
        self.num_flushes = 0

    def load(self, _module):
        return SimpleNamespace(
            TracerProvider=self._provider,
            BatchSpanProcessor=lambda exporter: f"batches for {exporter}",
            OTLPSpanExporter=lambda: "a collector",
            Resource=SimpleNamespace(create=self._resource),
        )

    def _resource(self, attributes):
        self.attributes = attributes
        return attributes

    def _provider(self, *, resource):
        def flush():
            self.num_flushes += 1

        return SimpleNamespace(add_span_processor=self.processors.append, force_flush=flush)


@pytest.fixture
def chosen(monkeypatch):
    """The provider that the process gets, in a list."""
    for variable in (*ENDPOINTS, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(variable, raising=False)
    providers = []
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    return providers


@pytest.fixture
def sdk(monkeypatch):
    sdk = Sdk()
    monkeypatch.setattr(exporting, "import_module", sdk.load)
    return sdk


def test_nothing_is_set_up_where_no_collector_is_named(chosen, sdk):
    with traces_exported() as is_on:
        assert not is_on
    assert chosen == []


@pytest.mark.parametrize("variable", ENDPOINTS)
def test_a_collector_in_the_environment_switches_traces_on_and_the_last_ones_leave(chosen, sdk, monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:4318")
    with traces_exported() as is_on:
        assert is_on
        assert sdk.num_flushes == 0
    assert len(chosen) == 1
    assert sdk.processors == ["batches for a collector"]
    assert sdk.attributes == {"service.name": "repertory"}
    assert sdk.num_flushes == 1


def test_a_name_from_the_environment_is_kept(chosen, sdk, monkeypatch):
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    with traces_exported():
        assert sdk.attributes == {}


def test_an_sdk_that_is_set_up_already_is_left_alone(chosen, sdk, monkeypatch):
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4318")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: SimpleNamespace())
    with traces_exported() as is_on:
        assert not is_on
    assert chosen == []


def test_without_the_extra_a_warning_says_so_and_the_server_serves(chosen, monkeypatch, log_lines):
    def missing(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(exporting, "import_module", missing)
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4318")
    with traces_exported() as is_on:
        assert not is_on
    (line,) = log_lines
    assert line["event"] == "tracing.failed"
    assert "repertory[otel]" in line["reason"]
