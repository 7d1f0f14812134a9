"""Figures for Prometheus: those of the HTTP side are counted here, those of the engine are read when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...fsm import LifeState, StageTimes
from ..outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from ..serving_loop import ServingLoop

OWN = "twostroke"
VLLM = "vllm"
VLLM_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }
)
"""What means the same as vLLM's metric of that name (counters without their ``_total``)."""

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_LABELS = ("model_name",)


class Metrics:
    """Everything that ``/metrics`` shows, in a registry of its own.

    Args:
        loop: whose engine is looked at. Its stages are timed from now on.
        model_name: the label ``model_name``.
        vllm_names: export under vLLM's names too what means the same.
    """

    def __init__(self, loop: ServingLoop, model_name: str, *, vllm_names: bool = False) -> None:
        self._loop = loop
        self._label = model_name
        self._stage_times = StageTimes()
        loop.runner.observers.add(self._stage_times)
        inner = CollectorRegistry(auto_describe=False)
        self.prompt_tokens = self._counter(inner, "prompt_tokens", "Prompt tokens of requests that got a token.")
        self.generation_tokens = self._counter(inner, "generation_tokens", "Tokens handed to clients.")
        self.aborted = self._counter(inner, "requests_aborted", "Prompts whose client left or whose time ran out.")
        self.failed = self._counter(inner, "requests_failed", "Requests that the engine took and could not finish.")
        self.rejected = self._counter(inner, "requests_rejected", "Requests answered with 429.")
        self._success = Counter(
            f"{OWN}:request_success", "Completions by how they ended.", (*_LABELS, "finished_reason"), registry=inner
        )
        self._http = Counter(f"{OWN}:http_requests", "HTTP requests.", ("method", "path", "status"), registry=inner)
        self.first_token = self._histogram(inner, "time_to_first_token_seconds", "From arrival to first token.", _TTFT)
        self.between_tokens = self._histogram(inner, "inter_token_latency_seconds", "Between tokens of a stream.", _ITL)
        self.queue = self._histogram(inner, "request_queue_time_seconds", "From arrival to the first step.", _E2E)
        self.prefill = self._histogram(
            inner, "request_prefill_time_seconds", "From the first step to the first token.", _E2E
        )
        self.decode = self._histogram(inner, "request_decode_time_seconds", "From first token to end.", _E2E)
        self.inference = self._histogram(inner, "request_inference_time_seconds", "From the first step to end.", _E2E)
        self.whole = self._histogram(inner, "e2e_request_latency_seconds", "From arrival to end.", _E2E)
        self.per_token = self._histogram(
            inner, "request_time_per_output_token_seconds", "Mean after the first token, a request.", _ITL
        )
        self.request_prompt_tokens = self._histogram(
            inner, "request_prompt_tokens", "Prompt tokens a request.", _TOKENS
        )
        self.request_tokens = self._histogram(inner, "request_generation_tokens", "Tokens a completion.", _TOKENS)
        inner.register(_Engine(self._engine_families))
        self._registry = inner
        if vllm_names:
            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(_BothNames(inner))

    def close(self) -> None:
        """Stop timing the stages."""
        self._loop.runner.observers.remove(self._stage_times)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def http(self, method: str, path: str, status: int) -> None:
        """One HTTP request was answered; ``path`` is a route, not what a client sent."""
        self._http.labels(method, path, str(status)).inc()

    def finished(self, reason: str) -> None:
        """One completion ended."""
        self._success.labels(self._label, reason).inc()

    def track(self) -> Track:
        """Follows one request."""
        return Track(self)

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Host seconds by stage since the server began."""
        return dict(self._stage_times.seconds)

    def _counter(self, registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(f"{OWN}:{name}", text, _LABELS, registry=registry).labels(self._label)

    def _histogram(self, registry: CollectorRegistry, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(f"{OWN}:{name}", text, _LABELS, registry=registry, buckets=tuple(buckets))
        return histogram.labels(self._label)

    def _engine_families(self) -> Iterator[Metric]:
        """The engine's figures of this moment. They are single numbers, so that reading them needs no lock."""
        loop, label = self._loop, [self._label]
        stats = loop.scheduler.stats()
        num_faults = sum(list(self._stage_times.failures.values()))
        for name, text, value in (
            ("num_requests_running", "Completions that hold KV blocks.", stats.num_running),
            ("num_requests_waiting", "Completions that wait, or were preempted.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks that is in use, 0 to 1.", stats.kv_cache_usage),
            ("healthy", "1 while requests can be served.", float(loop.healthy)),
            ("faulted", "1 once the engine can't go on.", float(loop.runner.life is LifeState.FAULTED)),
            ("asleep", "1 while the engine sleeps.", float(loop.runner.life is LifeState.ASLEEP)),
            ("paused", "1 while no steps are made.", float(loop.is_paused)),
        ):
            gauge = GaugeMetricFamily(f"{OWN}:{name}", text, labels=_LABELS)
            gauge.add_metric(label, value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
            ("num_preemptions", "Times a request had to give way.", stats.num_preemptions),
            ("engine_steps", "Steps of the engine.", loop.num_steps),
            ("faults", "Stages that raised; the step was undone and tried again.", num_faults),
        ):
            counter = CounterMetricFamily(f"{OWN}:{name}", text, labels=_LABELS)
            counter.add_metric(label, value)
            yield counter
        yield from self._by_stage()
        yield self._graph_modes()

    def _by_stage(self) -> Iterator[Metric]:
        times = self._stage_times
        for name, text, values in (
            ("stage_seconds", "Host seconds by stage.", times.seconds),
            ("stage_calls", "Calls by stage that returned.", times.calls),
            ("stage_failures", "Calls by stage that raised.", times.failures),
        ):
            family = CounterMetricFamily(f"{OWN}:{name}", text, labels=("model_name", "stage"))
            for stage, value in list(values.items()):
                family.add_metric([self._label, stage], value)
            yield family

    def _graph_modes(self) -> Metric:
        family = CounterMetricFamily(
            f"{OWN}:graph_steps",
            "Steps by graph mode, and why not a better one.",
            labels=("model_name", "mode", "reason"),
        )
        for (mode, reason), count in graph_counts(self._loop).items():
            family.add_metric([self._label, mode, reason], count)
        return family


def graph_counts(loop: ServingLoop) -> dict[tuple[str, str], int]:
    """Steps by graph mode and reason; empty where the stage that counts them was replaced or is gone."""
    if loop.runner.life not in (LifeState.READY, LifeState.ASLEEP):
        return {}
    counts = getattr(loop.runner.parts.dispatch, "counts", {})
    return {(mode.name, str(reason)): count for (mode, reason), count in list(counts.items())}


class Track:
    """Follows one prompt: when its first token came, how long each took, how its completions ended.

    ``times`` are those of the latest delta, ``reasons`` why completions ended, in the order in which they did.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.times: RequestMetrics | None = None
        self.reasons: list[str] = []
        self.num_prompt_tokens = 0
        self._metrics = metrics
        self._latest: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that were noted."""
        return sum(self._counts.values())

    def note(self, delta: RequestOutput) -> int:
        """A delta, or a whole result, was taken; returns how many tokens it has."""
        metrics, now = self._metrics, time.monotonic()
        total = 0
        self.times = delta.metrics
        for output in delta.outputs:
            if count := len(output.token_ids):
                total += count
                if not self._counts:
                    self._begin(delta)
                if (latest := self._latest.get(output.index)) is not None:
                    metrics.between_tokens.observe((now - latest) / count)
                self._latest[output.index] = now
                self._counts[output.index] = self._counts.get(output.index, 0) + count
            if output.finish_reason is not None:
                self.reasons.append(output.finish_reason)
                metrics.finished(output.finish_reason)
                metrics.request_tokens.observe(self._counts.get(output.index, 0))
        if total:
            metrics.generation_tokens.inc(total)
        if delta.finished:
            self._end(delta.metrics)
        return total

    def _begin(self, delta: RequestOutput) -> None:
        self.num_prompt_tokens = len(delta.prompt_token_ids)
        self._metrics.prompt_tokens.inc(self.num_prompt_tokens)
        self._metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        if (seconds := delta.metrics.time_to_first_token) is not None:
            self._metrics.first_token.observe(seconds)
        if (seconds := delta.metrics.queue_time) is not None:
            self._metrics.queue.observe(seconds)

    def _end(self, times: RequestMetrics) -> None:
        metrics = self._metrics
        if times.latency is not None:
            metrics.whole.observe(times.latency)
        scheduled, first, finished = times.scheduled_time, times.first_token_time, times.finished_time
        if scheduled is None or first is None or finished is None:
            return
        metrics.prefill.observe(first - scheduled)
        metrics.decode.observe(finished - first)
        metrics.inference.observe(finished - scheduled)
        most = max(self._counts.values(), default=0)
        if most > 1:
            metrics.per_token.observe((finished - first) / (most - 1))


class _Engine(Collector):
    """Figures that are made when they are asked for."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


class _BothNames(Collector):
    """Every family of a registry, and some of them once more under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            name = family.name.removeprefix(f"{OWN}:")
            if name in VLLM_NAMES:
                twin = Metric(f"{VLLM}:{name}", family.documentation, family.type, family.unit)
                twin.samples = [
                    sample._replace(name=sample.name.replace(f"{OWN}:", f"{VLLM}:", 1)) for sample in family.samples
                ]
                yield twin
