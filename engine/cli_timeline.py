"""The command ``twostroke timeline``: a recording as a page to look at, and as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .recording_reader import read_recording
from .timeline import timeline_of
from .timeline_chrome import chrome_trace
from .timeline_html import timeline_page


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.set_defaults(run=timeline_command)
    parser.description = "Make one HTML page, which needs no network, and a Chrome trace for https://ui.perfetto.dev."
    parser.add_argument("recording", type=Path, help="JSON lines, as written by --record")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (default: beside the recording)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the trace (default: beside the recording)")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="add the device kernels of a trace that torch.profiler exported"
    )


def timeline_command(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    recording = read_recording(args.recording)
    timeline = timeline_of(recording)
    notes = tuple(note for note in (recording.torn,) if note)
    if not timeline.is_timed:
        notes = (*notes, "no times were recorded: every step is drawn one unit long")
    html = args.html or args.recording.with_suffix(".html")
    trace = args.trace or args.recording.with_suffix(".trace.json")
    html.write_text(timeline_page(timeline, args.recording.name, notes), encoding="utf-8")
    trace.write_text(json.dumps(chrome_trace(timeline, args.profile)), encoding="utf-8")
    print(f"{html}: open it in a browser")
    print(f"{trace}: open it in https://ui.perfetto.dev")
    return 0
