"""A request's span and its children, as the SDK's in-memory exporter has them."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from repertory import SamplingParams, ValidationError
from repertory.actors.observing import tracing
from repertory.actors.observing.tracing import Outcome, RequestTrace, wall_ns
from repertory.protocol.errors import EngineDeadError
from repertory.protocol.ids import RequestId
from repertory.protocol.journey import Journey, Leg
from repertory.protocol.messages import Submit
from repertory.tests.engine.stage import greedy, prompt_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder:
    """An SDK, set up for one test."""

    def __init__(self, **options):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    @property
    def root(self):
        (root,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return root

    @property
    def children(self):
        context = self.root.context
        children = [span for span in self.spans if span.kind is SpanKind.INTERNAL]
        assert all(span.parent.span_id == context.span_id for span in children)
        assert all(span.context.trace_id == context.trace_id for span in children)
        return children


@pytest.fixture
def install(monkeypatch):
    """Sets an SDK up as the process's, until the test ends."""

    def installed(**options):
        recorder = Recorder(**options)
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorder.provider)
        return recorder

    return installed


@pytest.fixture
def recorder(install):
    return install()


async def test_a_request_is_one_server_span_with_a_child_for_each_stage(stage, recorder):
    on = await stage(served_model_name="tiny")
    params = SamplingParams(temperature=0.0, max_tokens=5, seed=7, top_k=3)
    output = await on.ask(prompt_of(9), params, request_id="my-request")
    root = recorder.root
    assert root.name == "text_completion tiny"
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "repertory",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "my-request",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "repertory.request.id": root.attributes["repertory.request.id"],
        "repertory.request.num_preemptions": 0,
    }
    assert root.status.status_code is StatusCode.UNSET
    assert root.start_time == wall_ns(output.metrics.arrival)
    children = recorder.children
    assert {"queue", "prefill", "decode"} <= {child.name for child in children}
    for child in children:
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time
    for before, after in itertools.pairwise(children):
        assert before.end_time == after.start_time, "no gap, no overlap"


async def test_a_conversation_is_a_chat(stage, recorder):
    on = await stage()
    await on.ask([{"role": "user", "content": "hello"}])
    assert recorder.root.attributes["gen_ai.operation.name"] == "chat"


async def test_several_completions_have_a_finish_reason_each(stage, recorder):
    on = await stage()
    await on.ask(prompt_of(5), SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=1))
    attributes = recorder.root.attributes
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 12


@pytest.mark.parametrize("key", ["traceparent", "Traceparent"])
async def test_the_callers_trace_goes_on(stage, recorder, key):
    on = await stage()
    await on.ask(prompt_of(4), trace_context={key: TRACEPARENT})
    root = recorder.root
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"


async def test_without_a_trace_context_the_callers_current_span_is_the_parent(stage, recorder):
    on = await stage()
    with recorder.provider.get_tracer("test").start_as_current_span("caller") as caller:
        await on.ask(prompt_of(4))
    assert recorder.root.parent.span_id == caller.get_span_context().span_id


@pytest.mark.parametrize("context", [{"traceparent": "garbage"}, {}, {"unknown": "x"}])
async def test_a_context_that_says_nothing_begins_a_new_trace(stage, recorder, context):
    on = await stage()
    await on.ask(prompt_of(4), trace_context=context)
    assert recorder.root.parent is None


@pytest.mark.parametrize("context", ["00-abc", {"traceparent": 3}, {3: "x"}, [], {"traceparent": "x" * 5000}])
@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_context_that_is_none_is_refused_by_name(stage, install, log_lines, context, is_recorded):
    if is_recorded:
        install()
    on = await stage()
    with pytest.raises(ValidationError, match="trace_context") as refusal:
        await on.ask(prompt_of(4), trace_context=context)
    assert refusal.value.field == "trace_context"
    await on.ask(prompt_of(4))


async def test_a_refused_request_is_an_error_span(stage, recorder):
    on = await stage()
    with pytest.raises(ValidationError):
        await on.ask(prompt_of(4), SamplingParams(temperature=-1.0))
    assert recorder.root.status.status_code is StatusCode.ERROR
    assert recorder.root.attributes["error.type"] == "ValidationError"
    assert not recorder.children


async def test_an_aborted_request_ends_its_span(stage, recorder):
    on = await stage()
    on.gate.shut()
    async with on.engine.generate(prompt_of(4), greedy(50)):
        await on.gate.arrival()
    on.gate.open()
    await on.engine._company.settle(3.0)
    assert recorder.root.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert recorder.root.status.status_code is StatusCode.UNSET


async def test_when_the_engine_dies_open_spans_end_with_it(stage, recorder):
    on = await stage()
    on.gate.shut()
    task = on.begin(prompt_of(4), greedy(50))
    await on.gate.arrival()
    on.gate.open()
    await on.engine.aclose()
    with pytest.raises(EngineDeadError):
        await task
    assert recorder.root.attributes["error.type"] == "EngineDeadError"
    assert recorder.root.status.status_code is StatusCode.ERROR


async def test_a_request_that_is_not_sampled_makes_no_trace(stage, install):
    recorder = install(sampler=ParentBased(ALWAYS_OFF))
    on = await stage()
    stream = on.engine.generate(prompt_of(4))
    assert stream._delivery.trace is None
    async for _ in stream:
        pass
    assert not recorder.spans


async def test_without_an_sdk_nothing_is_made(stage, monkeypatch):
    def fail(*_args, **_options):
        raise AssertionError("a tracer was asked for")

    monkeypatch.setattr(trace.ProxyTracerProvider, "get_tracer", fail)
    on = await stage()
    stream = on.engine.generate(prompt_of(4))
    assert stream._delivery.trace is None
    async for _ in stream:
        pass


async def test_a_broken_sdk_fails_no_request(stage, recorder, log_lines, monkeypatch):
    on = await stage()
    monkeypatch.setattr(recorder.provider, "get_tracer", None)
    output = await on.ask(prompt_of(4))
    assert output.finished
    assert [line["event"] for line in log_lines].count("tracing.failed") == 1


async def test_an_sdk_that_breaks_meanwhile_fails_no_request(stage, recorder, log_lines, monkeypatch):
    on = await stage()
    on.gate.shut()
    task = on.begin(prompt_of(4))
    await on.gate.arrival()
    monkeypatch.setattr(trace, "set_span_in_context", None)
    on.gate.open()
    assert (await task).finished
    assert [line["event"] for line in log_lines].count("tracing.failed") == 1


def trace_of(recorder, arrival_s) -> Iterator[RequestTrace]:
    submit = Submit(RequestId(2**32 + 5), "label", "prompt", SamplingParams(), arrival_s)
    begun = tracing.begin(submit, "tiny")
    assert begun is not None
    return begun


def test_each_leg_of_a_journey_is_a_child_with_its_times(recorder):
    legs = [Leg("tokenise", 0.0, 0.25), Leg("prefill", 0.25, 0.5, 0.125), Leg("preempted", 0.5, 1.0), Leg("prefill", 1.0, 1.5)]
    journey = Journey(legs, [(RequestId(2**32 + 9), 0.125)])
    arrival_s = -tracing._OFFSET_NS / 1e9 + 1e9  # long ago: all of it is over
    begun = trace_of(recorder, arrival_s)
    begun.end(Outcome(finish_reasons=["stop"], num_prompt_tokens=4, num_output_tokens=2, journey=journey))
    spans = [
        (span.name, span.start_time - wall_ns(arrival_s), span.end_time - wall_ns(arrival_s)) for span in recorder.children
    ]
    rounded = [(name, round(start / 1e6), round(end / 1e6)) for name, start, end in spans]
    assert rounded == [("tokenise", 0, 250), ("prefill", 250, 500), ("preempted", 500, 1000), ("prefill", 1000, 1500)]
    assert recorder.children[1].attributes["repertory.stalled.seconds"] == 0.125
    assert recorder.root.attributes["repertory.stalled.by"] == ("00000001-9",)


async def test_many_requests_side_by_side_keep_their_spans_apart(stage, recorder):
    on = await stage()
    await asyncio.gather(*(on.begin(prompt_of(4, seed), greedy(3 + seed), request_id=f"r{seed}") for seed in range(8)))
    roots = [span for span in recorder.spans if span.kind is SpanKind.SERVER]
    tokens = {span.attributes["gen_ai.response.id"]: span.attributes["gen_ai.usage.output_tokens"] for span in roots}
    assert tokens == {f"r{seed}": 3 + seed for seed in range(8)}
    assert len({span.context.trace_id for span in roots}) == 8
