"""OpenTelemetry traces: one span a request, with the attributes that the conventions for generative AI name.

OpenTelemetry is looked for only where an endpoint is configured. The tracer provider is this server's own: what the
program around it traces elsewhere is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from ...fsm.errors import TwoStrokeError
from ..outputs import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from .metrics import Track
    from .service import Plan

_EXPORT_SECONDS = 3.0  # how long a collector that does not answer can hold up the end of the server
_OPERATIONS = {"chat.completion": "chat", "text_completion": "text_completion"}


class TracingNotInstalled(TwoStrokeError, ImportError):
    """An endpoint for traces is configured, and OpenTelemetry is missing."""


class RequestSpan(Protocol):
    """What is told of one request. Any method may be called once, and ``end`` ends it."""

    def let_in(self, call_id: str, plan: Plan) -> None:
        """The engine has it."""
        ...

    def failed(self, error: BaseException) -> None:
        """It was refused, or failed on the way; goes before ``end``."""
        ...

    def end(self, tracks: Sequence[Track]) -> None:
        """It is over. ``tracks`` know what came of its prompts; none where it was not let in."""
        ...


class Tracing(Protocol):
    """Makes a span for each request."""

    def begin(self, kind: str, headers: Mapping[str, str]) -> RequestSpan:
        """A request of that kind of answer arrived; a ``traceparent`` among the headers is the span's parent."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


class NoTracing:
    """No traces: both, the maker of spans and the span, that do nothing."""

    def begin(self, kind: str, headers: Mapping[str, str]) -> NoTracing:
        """A span that does nothing."""
        return self

    def let_in(self, call_id: str, plan: Plan) -> None:
        """Nothing."""

    def failed(self, error: BaseException) -> None:
        """Nothing."""

    def end(self, tracks: Sequence[Track]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OpenTelemetry:
    """Spans by OpenTelemetry, of requests for one model."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("twostroke")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def begin(self, kind: str, headers: Mapping[str, str]) -> RequestSpan:
        """A span that began now, below the one that the headers name."""
        from opentelemetry.trace import SpanKind

        operation = _OPERATIONS.get(kind, kind)
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "twostroke",
                "gen_ai.request.model": self._model_name,
            },
        )
        return _OpenTelemetrySpan(span)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.shutdown()


@frozen(eq=False)
class _OpenTelemetrySpan:
    """Values that tell of the text (the prompt, stop strings) are left out."""

    _span: Span

    def let_in(self, call_id: str, plan: Plan) -> None:
        """Its id and its parameters."""
        params = plan.params
        found: dict[str, Any] = {
            "gen_ai.response.id": call_id,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": None if params.seed is None else str(params.seed),  # may exceed 63 bits
        }
        self._span.set_attributes({name: value for name, value in found.items() if value is not None})

    def failed(self, error: BaseException) -> None:
        """The error, as the span's status."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))

    def end(self, tracks: Sequence[Track]) -> None:
        """Tokens, reasons and moments; then it is handed to the exporter."""
        times = [track.times for track in tracks if track.times is not None]
        if times:
            self._events(times)
        if tracks:
            reasons = [reason for track in tracks for reason in track.reasons]
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": sum(track.num_prompt_tokens for track in tracks),
                    "gen_ai.usage.output_tokens": sum(track.num_tokens for track in tracks),
                    "gen_ai.response.finish_reasons": reasons,
                }
            )
        self._span.end()

    def _events(self, times: Sequence[RequestMetrics]) -> None:
        """When the first prompt was scheduled and had its first token, and when the last one was done."""
        since_epoch = time.time() - time.monotonic()
        for name, moments, choose in (
            ("scheduled", [own.scheduled_time for own in times], min),
            ("first token", [own.first_token_time for own in times], min),
            ("finished", [own.finished_time for own in times], max),
        ):
            known = [moment for moment in moments if moment is not None]
            if known and (choose is min or len(known) == len(moments)):
                self._span.add_event(name, timestamp=int((choose(known) + since_epoch) * 1e9))
        first = times[0]
        found = {
            "gen_ai.latency.time_in_queue": first.queue_time,
            "gen_ai.latency.time_to_first_token": first.time_to_first_token,
            "gen_ai.latency.e2e": first.latency,
        }
        self._span.set_attributes({name: value for name, value in found.items() if value is not None})


def tracing_to(endpoint: str, model_name: str) -> Tracing:
    """Traces that are sent to an OTLP endpoint over HTTP (``http://localhost:4318/v1/traces``); none where it is empty.

    Raises:
        TracingNotInstalled: OpenTelemetry, or its exporter, is missing.
    """
    if not endpoint:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"traces need the package {error.name}: pip install 'twostroke[otel]', or leave the endpoint out"
        raise TracingNotInstalled(message) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "twostroke"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OpenTelemetry(provider, model_name)
