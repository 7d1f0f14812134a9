"""The figures at ``/metrics``: they count what was done, under our names and under vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families
from twostroke.engine.serve.metrics import VLLM_NAMES
from twostroke.stages.records import Batch
from twostroke.stages.sampling_params import SamplingParams


def figures(http: httpx.Client) -> dict[str, float]:
    """Every sample by name; those with labels of their own are added up under the name, and kept apart beside it."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if "le" not in labels:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                for value in labels.values():
                    found[f"{sample.name} {value}"] = found.get(f"{sample.name} {value}", 0.0) + sample.value
    return found


def test_requests_and_the_engine_are_counted(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack)
    with served.http() as http:
        before = figures(http)
        assert before["twostroke:healthy"] == 1
        http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 5, "n": 2, "ignore_eos": True})
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "stream": True, "ignore_eos": True})
        http.post("/v1/completions", json={"prompt": ""})
        http.get("/nowhere/at/all")
        after = figures(http)
    assert after["twostroke:prompt_tokens_total"] == 9
    assert after["twostroke:generation_tokens_total"] == 14
    assert after["twostroke:request_success_total length"] == 3
    assert after["twostroke:time_to_first_token_seconds_count"] == 2
    assert after["twostroke:e2e_request_latency_seconds_count"] == 2
    for name in ("queue", "prefill", "decode", "inference"):
        assert after[f"twostroke:request_{name}_time_seconds_count"] == 2
    parts = sum(after[f"twostroke:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(after["twostroke:e2e_request_latency_seconds_sum"])
    assert after["twostroke:faults_total"] == after["twostroke:requests_failed_total"] == 0
    assert after["twostroke:faulted"] == 0
    assert after["twostroke:request_prompt_tokens_sum"] == 9
    assert after["twostroke:request_generation_tokens_sum"] == 14
    assert after["twostroke:num_requests_running"] == after["twostroke:num_requests_waiting"] == 0
    assert after["twostroke:engine_steps_total"] > 5
    assert after["twostroke:stage_calls_total forward"] > 5
    assert after["twostroke:stage_seconds_total sample"] > 0
    assert after["twostroke:graph_steps_total NONE"] > 5
    assert after["twostroke:http_requests_total (unknown)"] == 1
    assert after["twostroke:http_requests_total 400"] == 1
    assert not any(name.startswith("vllm:") for name in after)


def test_time_between_tokens_is_shared_by_those_that_came_at_once(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack)
    whole = served.loop.add("abc", SamplingParams(max_tokens=3, ignore_eos=True)).result(30)
    (output,) = whole.outputs
    track = served.service.metrics.track()
    for tokens in (output.token_ids[:1], output.token_ids[1:]):
        track.note(evolve(whole, finished=False, outputs=(evolve(output, token_ids=tokens, finish_reason=None),)))
    with served.http() as http:
        found = figures(http)
    assert found["twostroke:inter_token_latency_seconds_count"] == 1
    assert found["twostroke:time_to_first_token_seconds_count"] == 1
    assert found["twostroke:generation_tokens_total"] == 3
    assert track.num_tokens == 3


def test_the_prefix_cache_and_waiting_requests_are_seen(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, engine={"max_num_seqs": 2})
    body = {"prompt": "the same prompt of some length", "max_tokens": 2}
    with served.http() as http:
        http.post("/v1/completions", json=body)
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
        assert figures(http)["twostroke:prefix_cache_hits_total"] == 16
        served.loop.pause()
        handles = [served.loop.add("x") for _ in range(3)]
        assert figures(http)["twostroke:num_requests_waiting"] == 3
        assert figures(http)["twostroke:paused"] == 1
        for handle in handles:
            handle.close()


def test_time_in_the_queue_is_that_before_the_first_step(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, engine={"max_num_seqs": 1})
    handles = [served.loop.add("abc", SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(2)]
    first, second = (handle.result(30).metrics for handle in handles)
    for times in (first, second):
        assert times.queue_time == times.scheduled_time - times.arrival_time >= 0
        assert times.scheduled_time <= times.first_token_time <= times.finished_time
    assert second.scheduled_time >= first.first_token_time, "it waited until the other one had left"


def test_faults_and_failed_requests_are_counted(start: Callable[..., Any], stack: ExitStack) -> None:
    def explode(batch: Batch) -> None:
        if 5 in batch.num_computed_tokens:
            raise ZeroDivisionError("five")

    served = start(stack)
    served.loop.runner.stages.insert(explode, after="build_attn", name="explode")
    with served.http() as http:
        assert http.post("/v1/completions", json={"prompt": "abc", "ignore_eos": True}).status_code == 500
        after = figures(http)
    assert after["twostroke:faults_total"] == after["twostroke:stage_failures_total explode"] > 0
    assert after["twostroke:requests_failed_total"] == 1
    assert after["twostroke:healthy"] == 1


def test_vllms_names_come_with_a_flag_and_mean_the_same(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, vllm_metrics=True)
    with served.http() as http:
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
        text = http.get("/metrics").text
        found = figures(http)
    twins = [name for name in found if name.startswith("vllm:")]
    assert {name for name in VLLM_NAMES if any(twin.startswith(f"vllm:{name}") for twin in twins)} == VLLM_NAMES
    for twin in twins:
        if not twin.endswith("_created"):
            assert found[twin] == found[twin.replace("vllm:", "twostroke:")]
    assert 'vllm:generation_tokens_total{model_name="tiny"} 5.0' in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
