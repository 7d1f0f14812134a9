"""Traces: one span a request, with what the conventions for generative AI name, and nothing of the text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from twostroke.engine.serve.config import InvalidServeConfig, ServeConfig
from twostroke.engine.serve.tracing import NoTracing, OpenTelemetry, TracingNotInstalled, tracing_to
from twostroke.stages.records import Batch


@pytest.fixture
def traced(start: Callable[..., Any], stack: ExitStack) -> tuple[Any, InMemorySpanExporter]:
    """A server whose spans stay in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served = start(stack)
    served.service.tracing = OpenTelemetry(provider, "tiny")
    return served, exporter


def finished(exporter: InMemorySpanExporter, count: int) -> tuple[ReadableSpan, ...]:
    """So many spans; the last one ends a moment after its client has the answer."""
    deadline = time.monotonic() + 10
    while len(spans := exporter.get_finished_spans()) < count:
        assert time.monotonic() < deadline, f"{len(spans)} of {count} spans ended"
        time.sleep(0.01)
    return spans


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_span(traced: tuple[Any, InMemorySpanExporter], is_stream: bool) -> None:
    served, exporter = traced
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    body = {"prompt": "secret", "max_tokens": 5, "n": 2, "seed": 3, "ignore_eos": True, "stream": is_stream}
    with served.http() as http:
        text = http.post("/v1/completions", json=body, headers={"traceparent": parent}).text
    (span,) = finished(exporter, 1)
    assert (span.name, span.kind) == ("text_completion tiny", SpanKind.SERVER)
    assert span.parent is not None
    assert span.context is not None
    assert (span.context.trace_id, span.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
    assert span.status.status_code is StatusCode.UNSET
    found = attributes_of(span)
    assert found["gen_ai.response.id"] in text
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (6, 10)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.choice.count"]) == (5, 2)
    assert found["gen_ai.request.seed"] == "3"
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert [event.name for event in span.events] == ["scheduled", "first token", "finished"]
    moments = [event.timestamp for event in span.events]
    assert moments == sorted(moments)
    assert "secret" not in span.to_json()


def test_what_is_refused_is_a_span_with_an_error(traced: tuple[Any, InMemorySpanExporter]) -> None:
    served, exporter = traced
    with served.http() as http:
        body = {"messages": [{"role": "user", "content": "x" * 600}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 400
    (span,) = finished(exporter, 1)
    assert span.name == "chat tiny"
    assert span.status.status_code is StatusCode.ERROR
    assert "gen_ai.response.id" not in attributes_of(span)


def test_what_fails_on_the_way_is_a_span_with_an_error(traced: tuple[Any, InMemorySpanExporter]) -> None:
    served, exporter = traced

    def explode(batch: Batch) -> None:
        if 5 in batch.num_computed_tokens:
            raise ZeroDivisionError("five")

    served.loop.runner.stages.insert(explode, after="build_attn", name="explode")
    with served.http() as http:
        for is_stream in (False, True):
            http.post("/v1/completions", json={"prompt": "abc", "ignore_eos": True, "stream": is_stream})
    spans = finished(exporter, 2)
    assert [span.status.status_code for span in spans] == [StatusCode.ERROR] * 2
    assert attributes_of(spans[1])["error.type"] == "RequestFailed"
    assert attributes_of(spans[1])["gen_ai.usage.output_tokens"] == 3


def test_without_an_endpoint_there_is_nothing() -> None:
    assert isinstance(tracing_to("", "tiny"), NoTracing)


def test_an_endpoint_is_an_address() -> None:
    with pytest.raises(InvalidServeConfig, match="otlp_traces_endpoint: must be like http://localhost:4318/v1/traces"):
        ServeConfig(otlp_traces_endpoint="localhost:4317")


def test_a_collector_that_is_not_there_holds_nothing_up(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    assert isinstance(served.service.tracing, OpenTelemetry)
    with served.http() as http:
        assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingNotInstalled, match=r"opentelemetry\.sdk\.trace: pip install 'twostroke\[otel\]'"):
        tracing_to("http://localhost:4318/v1/traces", "tiny")
