"""A timeline as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .recording_reader import RecordingError
from .timeline import Part, Span, Timeline, TimelineStep

Event = dict[str, Any]
_RUNNER, _REQUESTS, _DEVICE = 1, 2, 3
_STAGES, _STROKES, _MACHINE = 1, 2, 3
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def chrome_trace(timeline: Timeline, profile: Path | None = None) -> dict[str, Any]:
    """Stages, strokes and states of the runner; requests as rows; counters of tokens and KV blocks.

    ``profile`` is a trace that ``torch.profiler`` exported during the recording: its device kernels are added.

    Raises:
        RecordingError: the profile is none, or the recording does not say when it began.
    """
    events = [*_names(timeline), *_spans(timeline.states, _MACHINE)]
    rows = {request.req_id: row for row, request in enumerate(timeline.requests, 1)}
    for step in timeline.steps:
        events += _step_events(step, rows)
    if profile is not None:
        events += _device_events(timeline, profile)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"recorded_by": "twostroke"}}


def _names(timeline: Timeline) -> Iterator[Event]:
    processes = {_RUNNER: "runner", _REQUESTS: "requests"}
    threads = {
        **{(_RUNNER, row): name for row, name in ((_STAGES, "stages"), (_STROKES, "strokes"), (_MACHINE, "machine"))},
        **{(_REQUESTS, row): request.req_id for row, request in enumerate(timeline.requests, 1)},
    }
    for process, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, thread), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _spans(spans: tuple[Span, ...], thread: int, **args: Any) -> Iterator[Event]:
    for span in spans:
        yield _complete(span.name, (span.start_us, span.end_us), _RUNNER, thread, args)


def _complete(name: str, times: tuple[float, float], process: int, thread: int, args: dict[str, Any]) -> Event:
    start, end = times
    event = {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start, 3),
        "dur": round(end - start, 3),
    }
    return event | ({"args": args} if args else {})


def _step_events(step: TimelineStep, rows: dict[str, int]) -> Iterator[Event]:
    plan = {"step": step.number, "mode": step.mode, "reason": step.reason, "tokens": step.num_scheduled}
    strokes = tuple(span for span in (step.first_stroke, step.second_stroke) if span is not None)
    yield from _spans(step.stages, _STAGES, step=step.number)
    yield from _spans(strokes, _STROKES, **plan, padded=step.num_padded)
    for part in step.parts:
        args = {"step": step.number, "computed": part.num_computed, "sampled": list(part.sampled)}
        times = (step.start_us, step.end_us)
        yield _complete(_label(part), times, _REQUESTS, rows[part.req_id], args)
    if step.failure:
        where = {"pid": _RUNNER, "tid": _STAGES, "ts": round(step.end_us, 3), "s": "g"}
        yield {"ph": "i", "name": f"failed: {step.failure}", **where}
    counters = {
        "tokens": {
            "wanted": step.num_scheduled,
            "padding": step.num_padded - step.num_scheduled,
        },
        "KV blocks": {"in use": step.num_blocks},
    }
    for name, values in counters.items():
        yield {"ph": "C", "name": name, "pid": _RUNNER, "ts": round(step.start_us, 3), "args": values}


def _label(part: Part) -> str:
    return "decode" if part.is_decode else f"prefill {part.num_scheduled}"


def _device_events(timeline: Timeline, profile: Path) -> Iterator[Event]:
    """Kernels and copies, moved from the profiler's clock to that of the timeline."""
    try:
        trace = json.loads(profile.read_text(encoding="utf-8"))
        base_us, events = trace.get("baseTimeNanoseconds", 0) / 1e3, trace["traceEvents"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{profile} is no trace of torch.profiler: {error!r}") from error
    if timeline.began_unix_us is None:
        raise RecordingError("the recording does not say when it began; record it with times")
    yield {"ph": "M", "name": "process_name", "pid": _DEVICE, "args": {"name": "device"}}
    for event in events:
        if event.get("cat") in _DEVICE_CATEGORIES and event.get("ph") == "X":
            start = base_us + event["ts"] - timeline.began_unix_us
            stream = event.get("args", {}).get("stream", event.get("tid", 0))
            yield _complete(event["name"], (start, start + event["dur"]), _DEVICE, stream, {})
