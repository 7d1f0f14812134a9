"""A timeline as one HTML page that needs nothing else: no network, no fonts, no scripts of others."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from ..fsm.machine import STEP_TRIGGERS, StepState
from .timeline import Timeline, TimelineStep
from .timeline_machine import machine_svg

_SCRIPTS = ("draw.js", "timeline.js", "panels.js", "main.js")


def timeline_page(timeline: Timeline, title: str, notes: tuple[str, ...] = ()) -> str:
    """The page, as text in UTF-8."""
    folder = files(__name__.rpartition(".")[0]) / "timeline_page"
    parts = {
        "title": escape(title),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "machine": machine_svg(STEP_TRIGGERS, StepState.IDLE, timeline.transitions),
        "data": json.dumps(payload(timeline, title, notes), separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"@@{name}@@", text)
    return page


def payload(timeline: Timeline, title: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """What the page's script draws. Times in microseconds; requests and stages by number."""
    stages = {name: index for index, name in enumerate(timeline.stage_us)}
    requests = {request.req_id: index for index, request in enumerate(timeline.requests)}
    header, config = timeline.header, timeline.header.get("config", {})
    model = header.get("model")
    return {
        "title": title,
        "notes": list(notes),
        "model": model.get("architecture", "") if isinstance(model, dict) else str(model or ""),
        "facts": {name: config[name] for name in ("device", "dtype", "cudagraph_mode", "block_size") if name in config},
        "isTimed": timeline.is_timed,
        "durationUs": round(timeline.duration_us, 1),
        "padding": timeline.padding,
        "numSampled": timeline.num_sampled,
        "numFailures": timeline.num_failures,
        "numKvBlocks": timeline.num_kv_blocks,
        "stages": [{"name": name, "us": round(us, 1)} for name, us in timeline.stage_us.items()],
        "modes": [[use.mode, use.reason, use.num_steps, use.num_scheduled, use.num_padded] for use in timeline.modes],
        "states": [[span.name, round(span.start_us, 1), round(span.end_us, 1)] for span in timeline.states],
        "requests": [
            {
                "id": request.req_id,
                "prompt": request.num_prompt,
                "sampled": request.num_sampled,
                "first": request.first_step,
                "last": request.last_step,
                "preempted": request.num_preemptions,
                "firstTokenUs": None
                if request.first_token_us is None
                else round(request.first_token_us - request.arrived_us, 1),
            }
            for request in timeline.requests
        ],
        "steps": [_step(step, stages, requests) for step in timeline.steps],
    }


def _step(step: TimelineStep, stages: dict[str, int], requests: dict[str, int]) -> dict[str, Any]:
    line: dict[str, Any] = {
        "n": step.number,
        "t": [round(step.start_us, 1), round(step.end_us, 1)],
        "s": [
            [stages[span.name], round(span.start_us, 1), round(span.end_us - span.start_us, 1)] for span in step.stages
        ],
        "p": [
            [requests[part.req_id], part.num_scheduled, part.num_computed, int(part.is_decode), list(part.sampled)]
            for part in step.parts
        ],
        "wanted": step.num_scheduled,
        "ran": step.num_padded,
        "mode": step.mode,
        "why": step.reason,
        "blocks": step.num_blocks,
    }
    optional = {
        "failed": step.failure,
        "undone": step.is_rolled_back,
        "finished": list(step.finished),
        "preempted": list(step.preempted),
        "errors": {part.req_id: part.error for part in step.parts if part.error},
    }
    return line | {name: value for name, value in optional.items() if value}
