"""A recording laid out in time: its totals, its way through the machine, the trace and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import GREEDY, Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.recording_reader import Recording, RecordingError, read_recording
from twostroke.engine.timeline import Timeline, timeline_of
from twostroke.engine.timeline_chrome import chrome_trace
from twostroke.engine.timeline_html import payload, timeline_page
from twostroke.engine.timeline_machine import machine_svg
from twostroke.fsm import InputRefused
from twostroke.fsm.life import LIFE_TRIGGERS, LifeState
from twostroke.fsm.machine import STEP_TRIGGERS, StepState
from twostroke.stages.io import SchedulerOutput


@pytest.fixture(scope="module")
def timeline(recording: Recording) -> Timeline:
    return timeline_of(recording)


def test_totals_are_those_of_the_recording(timeline: Timeline, recording: Recording) -> None:
    outputs = [step.output for step in recording.steps if step.output is not None]
    assert timeline.num_sampled == sum(len(ids) for output in outputs for ids in output.tokens.values())
    assert len(timeline.steps) == len(recording.steps)
    assert {request.req_id for request in timeline.requests} == {key for own in outputs for key in own.tokens}
    assert sum(use.num_steps for use in timeline.modes) == len(outputs)
    assert all(step.start_us <= step.end_us for step in timeline.steps)
    starts = [step.start_us for step in timeline.steps]
    assert starts == sorted(starts)
    assert starts[0] == 0.0


def test_the_last_part_of_a_prompt_is_no_decode(timeline: Timeline) -> None:
    prompts = {request.req_id: request.num_prompt for request in timeline.requests}
    for step in timeline.steps:
        for part in step.parts:
            assert part.is_decode == (part.num_computed >= prompts[part.req_id])


def test_padding_is_counted(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=(4, 8))
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.record(tmp_path / "run.jsonl"):
        driver.step({"a": 3})
        driver.step({"a": 1})
    timeline = timeline_of(read_recording(tmp_path / "run.jsonl"))
    assert [(step.num_scheduled, step.num_padded) for step in timeline.steps] == [(3, 4), (1, 4)]
    assert timeline.padding == 0.5
    assert {(use.mode, use.num_steps) for use in timeline.modes} == {("PIECEWISE", 1), ("FULL", 1)}


def test_the_way_through_the_machine(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    """One of each: skip, execute, sample, rollback, settle, and a stroke that failed and moved nothing."""
    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.record(tmp_path / "run.jsonl"):
        runner.execute_model(SchedulerOutput())
        first = driver.output({"a": 3})
        runner.execute_model(first)
        runner.rollback()
        driver.run(first)
        with pytest.raises(InputRefused):
            runner.execute_model(SchedulerOutput(num_scheduled_tokens={"x": 1}, total_num_scheduled_tokens=1))
        driver.step({"a": 1})
        runner.settle()
    timeline = timeline_of(read_recording(tmp_path / "run.jsonl"))
    assert timeline.transitions == {
        ("IDLE", "IDLE", "skip"): 1,
        ("IDLE", "FORWARDED", "execute"): 2,
        ("FORWARDED", "IDLE", "rollback"): 1,
        ("FORWARDED", "SAMPLED", "sample"): 2,
        ("SAMPLED", "FORWARDED", "execute"): 1,
        ("SAMPLED", "IDLE", "settle"): 1,
    }
    assert timeline.num_failures == 1
    ends = [span.end_us for span in timeline.states]
    assert ends == sorted(ends)


@pytest.mark.parametrize("scenario", ["plain", "preempt"])
def test_a_trace_without_times_gets_a_unit_a_step(data_path: Path, scenario: str) -> None:
    timeline = timeline_of(read_recording(data_path / "vllm_traces" / f"{scenario}.jsonl"))
    assert not timeline.is_timed
    assert timeline.duration_us == 1000.0 * len(timeline.steps)
    assert timeline.num_sampled > 100
    if scenario == "preempt":
        assert sum(request.num_preemptions for request in timeline.requests) == 3
        assert max(step.num_blocks for step in timeline.steps) <= timeline.num_kv_blocks


# ---- the trace


def test_the_trace_has_every_stage_and_every_request(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    stages = [event for event in spans if (event["pid"], event["tid"]) == (1, 1)]
    assert len(stages) == sum(len(step.stages) for step in timeline.steps)
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named >= {"stages", "strokes", "machine", *(request.req_id for request in timeline.requests)}
    rows = [event for event in spans if event["pid"] == 2]
    assert len(rows) == sum(len(step.parts) for step in timeline.steps)


def test_device_kernels_are_moved_to_the_clock_of_the_recording(timeline: Timeline, tmp_path: Path) -> None:
    assert timeline.began_unix_us is not None
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 30.0, "dur": 5.0, "args": {"stream": 7}}
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 5.0}
    profile = tmp_path / "profile.json"
    base = int(timeline.began_unix_us * 1000)
    profile.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": [kernel, host]}))
    device = [event for event in chrome_trace(timeline, profile)["traceEvents"] if event["pid"] == 3]
    (span,) = [event for event in device if event["ph"] == "X"]
    assert (span["name"], span["tid"], span["dur"]) == ("gemm", 7, 5.0)
    assert span["ts"] == pytest.approx(30.0, abs=1.0)


def test_what_is_no_profile_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(RecordingError, match=r"torch\.profiler"):
        chrome_trace(timeline, tmp_path / "profile.json")


# ---- the page


def test_the_page_needs_nothing_else(timeline: Timeline) -> None:
    page = timeline_page(timeline, "run.jsonl")
    assert "@@" not in page
    assert re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*\"", page) == []
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_text_of_a_request_cannot_end_the_script(timeline: Timeline) -> None:
    page = timeline_page(timeline, "</script><script>alert(1)</script>", ("</script>",))
    assert "<script>alert" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["notes"] == ["</script>"]


def test_the_payload_has_every_token(timeline: Timeline) -> None:
    data = payload(timeline, "run", ())
    tokens = [token for step in data["steps"] for part in step["p"] for token in part[4]]
    assert len(tokens) == timeline.num_sampled
    assert sum(share["us"] for share in data["stages"]) == pytest.approx(sum(timeline.stage_us.values()), rel=1e-3)


def test_the_diagram_is_drawn_from_the_table() -> None:
    svg = machine_svg(STEP_TRIGGERS, StepState.IDLE, {("SAMPLED", "FORWARDED", "execute"): 1234})
    for state in StepState:
        assert f">{state.name}</text>" in svg
    for trigger in STEP_TRIGGERS:
        assert trigger.name in svg
    assert "execute × 1,234" in svg
    assert svg.count("× ") == 1
    pairs = {
        (source, source if trigger.target is None else trigger.target)
        for trigger in STEP_TRIGGERS
        for source in trigger.sources
    }
    assert svg.count('marker-end="url(#arrowhead)"') == len(pairs)


def test_any_table_can_be_drawn() -> None:
    svg = machine_svg(LIFE_TRIGGERS, LifeState.CREATED, {})
    assert all(f">{state.name}</text>" in svg for state in LifeState)
    assert "nan" not in svg
