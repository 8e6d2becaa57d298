"""Sends traces where the environment says, for a process of the server: the SDK is an extra (`repertory[otel]`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from typing import Any

from opentelemetry import trace

from .logs import logger

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The standard variables that name a collector; one of them switches tracing on."""


FLUSH_S = 2.0
"""What sending the last spans may take when the process ends."""


@contextmanager
def traces_exported() -> Iterator[bool]:
    """Set the SDK up where a collector is named and nobody has done so; yields whether it did. The last spans leave at the end.

    All of the standard `OTEL_*` variables apply. Where the extra is not installed, that is logged, and requests are served.
    """
    is_wanted = any(os.environ.get(variable) for variable in ENDPOINTS)
    is_free = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    provider = _set_up() if is_wanted and is_free else None
    try:
        yield provider is not None
    finally:
        if provider is not None:
            # Not waited for when nobody takes them: a collector that is gone must not keep a server from ending.
            flushing = Thread(target=provider.force_flush, daemon=True)
            flushing.start()
            flushing.join(FLUSH_S)


def _set_up() -> Any | None:
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        batches = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        logger("frontend").warning("tracing.failed", reason=f"traces are asked for, and repertory[otel] is missing: {error}")
        return None
    # A name from the environment wins over ours.
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "repertory"}
    provider = sdk.TracerProvider(resource=resources.Resource.create(name))
    provider.add_span_processor(batches.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider
