"""A span for each request, with a child for each stage of its way. The application's OpenTelemetry SDK does the rest.

Without an SDK, and for requests that are not sampled, nothing is made: that is looked up once per request. Children
are made at the end, from the request's journey, with the times that were noted down on the way; so there is no span to
carry about, and nothing happens per token. Times are monotonic in the engine and become times of day by one offset.

Whatever goes wrong here is logged and fails no request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ...protocol.conversation import Conversation
from ...protocol.errors import Problem
from ...protocol.ids import RequestId, show_request_id
from ...protocol.journey import Journey
from ...protocol.messages import Metrics, Submit
from ...protocol.sampling import SamplingParams
from . import conventions as name
from .logs import logger

_SCOPE = "repertory"
_OFFSET_NS = time.time_ns() - time.monotonic_ns()
_context_of = TraceContextTextMapPropagator().extract


def wall_ns(monotonic_s: float) -> int:
    """The time of day of a moment on the monotonic clock, in nanoseconds."""
    return _OFFSET_NS + round(monotonic_s * 1e9)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended, as far as its trace wants to know."""

    finish_reasons: list[str]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    metrics: Metrics | None = None
    journey: Journey | None = None
    problem: Problem | None = None


class RequestTrace:
    """The span of a request that is being recorded. `end` it once."""

    def __init__(self, tracer: Tracer, span: Span, submit: Submit, model: str) -> None:
        self._tracer = tracer
        self._span = span
        self._model = model
        self._request_id: RequestId = submit.request_id
        self._arrival_s = submit.arrival_s

    def end(self, outcome: Outcome) -> None:
        """The request has ended, or never will."""
        try:
            self._end(outcome)
        except Exception as error:
            _warn(error)

    def _end(self, outcome: Outcome) -> None:
        ended_ns = time.time_ns()
        span = self._span
        span.set_attributes(dict(_results(outcome, self._model)))
        if outcome.problem is not None:
            span.set_attribute(name.ERROR_TYPE, outcome.problem.kind)
            span.set_status(Status(StatusCode.ERROR, outcome.problem.message))
        elif "error" in outcome.finish_reasons:
            span.set_attribute(name.ERROR_TYPE, "RequestFailedError")
            span.set_status(Status(StatusCode.ERROR))
        context = trace.set_span_in_context(span)
        for stage, start_s, end_s, stalled_s in self._legs(outcome):
            # A child is over before its parent, whatever rounding says.
            start_ns, end_ns = (min(wall_ns(moment), ended_ns) for moment in (start_s, end_s))
            child = self._tracer.start_span(stage, context, start_time=start_ns)
            if stalled_s:
                child.set_attribute(name.STALLED_SECONDS, stalled_s)
            child.end(end_ns)
        span.end(ended_ns)

    def _legs(self, outcome: Outcome) -> Iterator[tuple[str, float, float, float]]:
        """Stages with their times on the monotonic clock. Without a journey there are the three that its times tell."""
        if outcome.journey is not None:
            for leg in outcome.journey.legs:
                yield leg.stage, self._arrival_s + leg.start_s, self._arrival_s + leg.end_s, leg.stalled_s
        elif outcome.metrics is not None:
            times = outcome.metrics
            moments = times.arrival, times.first_scheduled, times.first_token, times.last_token
            for stage, start_s, end_s in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
                if start_s is not None and end_s is not None:
                    yield stage, start_s, end_s, 0.0


def begin(submit: Submit, model: str) -> RequestTrace | None:
    """Start the span of a request that has just arrived; None where nobody records it.

    It is a child of the span that `submit.trace_context` names (W3C), else of the caller's current one.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, ProxyTracerProvider):
        return None  # no SDK
    try:
        tracer = provider.get_tracer(_SCOPE)
        carrier = {key.lower(): value for key, value in (submit.trace_context or {}).items()}
        operation = _operation(submit)
        span = tracer.start_span(
            f"{operation} {model}",
            _context_of(carrier) if carrier else None,
            SpanKind.SERVER,
            dict(_request(submit, operation, model)),
            start_time=wall_ns(submit.arrival_s),
        )
        return RequestTrace(tracer, span, submit, model) if span.is_recording() else None
    except Exception as error:
        _warn(error)
        return None


def _operation(submit: Submit) -> str:
    prompt = submit.prompt
    is_chat = isinstance(prompt, Conversation) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict))
    return name.CHAT if is_chat else name.TEXT_COMPLETION


def _request(submit: Submit, operation: str, model: str) -> Iterator[tuple[str, AttributeValue]]:
    params, defaults = submit.params, SamplingParams()
    yield name.OPERATION_NAME, operation
    yield name.PROVIDER_NAME, name.PROVIDER
    yield name.REQUEST_MODEL, model
    yield name.REQUEST_ID, show_request_id(submit.request_id)
    yield name.RESPONSE_ID, submit.label
    yield name.REQUEST_TEMPERATURE, params.temperature
    yield name.REQUEST_TOP_P, params.top_p
    optional: list[tuple[str, int | float | None, int | float | None]] = [
        (name.REQUEST_MAX_TOKENS, params.max_tokens, None),
        (name.REQUEST_TOP_K, params.top_k, defaults.top_k),
        (name.REQUEST_SEED, params.seed, None),
        (name.REQUEST_CHOICE_COUNT, params.n, defaults.n),
        (name.REQUEST_PRESENCE_PENALTY, params.presence_penalty, defaults.presence_penalty),
        (name.REQUEST_FREQUENCY_PENALTY, params.frequency_penalty, defaults.frequency_penalty),
    ]
    for key, value, default in optional:
        if value is not None and value != default:
            yield key, value


def _results(outcome: Outcome, model: str) -> Iterator[tuple[str, AttributeValue]]:
    yield name.RESPONSE_MODEL, model
    yield name.RESPONSE_FINISH_REASONS, outcome.finish_reasons
    yield name.USAGE_INPUT_TOKENS, outcome.num_prompt_tokens
    yield name.USAGE_OUTPUT_TOKENS, outcome.num_output_tokens
    yield name.USAGE_CACHED_TOKENS, outcome.num_cached_tokens
    if outcome.metrics is not None:
        yield name.NUM_PREEMPTIONS, outcome.metrics.num_preemptions
    if outcome.journey is not None and outcome.journey.stalled_by:
        yield name.STALLED_BY, [show_request_id(request_id) for request_id, _ in outcome.journey.stalled_by]


def _warn(error: Exception) -> None:
    logger("frontend").warning("tracing.failed", reason=repr(error))
