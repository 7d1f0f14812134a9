"""The command ``twostroke replay``: run a recording again, or compare it with another one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..fsm import InputRefused
from .recording_reader import Recording, read_recording
from .replay_compare import Comparison, Tolerance, compare_recordings

_MOST_LINES = 5


def add_replay(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.set_defaults(run=replay_command)
    parser.description = (
        "Run a recording again and say where tokens or log probabilities first differ. "
        "Exit code 0: no difference but near ties; 1: a difference."
    )
    parser.add_argument("recording", type=Path, help="JSON lines, as written by --record or --record-failures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with another recording, and run nothing")
    parser.add_argument("--step", type=int, default=1, metavar="N", help="compare from this step on (1)")
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="NAME=SPEC",
        help="replay with another stage; may be given again",
    )
    parser.add_argument("--model", help="folder, GGUF file, hub id, or smollm2 (default: the recorded one)")
    parser.add_argument("--device", help="cpu or cuda (default: the recorded one)")
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "float16", "bfloat16"], help="(default: the recorded one)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="log probabilities within X are equal (0.001)"
    )
    parser.add_argument(
        "--tie", type=float, default=0.01, metavar="X", help="a token that won by less than X is a near tie (0.01)"
    )


def replay_command(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    recording = read_recording(args.recording)
    tolerance = Tolerance(logprobs=args.tolerance, tie=args.tie)
    if args.against is not None:
        if args.stage or args.model or args.device or args.dtype:
            raise InputRefused("--against runs nothing; leave out --stage, --model, --device and --dtype")
        comparison = compare_recordings(recording, read_recording(args.against), tolerance)
        print(f"{args.recording} against {args.against}")
        _print_comparison(comparison)
        return 0 if comparison.first is None else 1
    return _replay(recording, args, tolerance)


def _replay(recording: Recording, args: argparse.Namespace, tolerance: Tolerance) -> int:
    from .plugins import split_stage
    from .replay import replay, runner_for

    overrides: dict[str, Any] = {
        name: value for name in ("model", "device", "dtype") if (value := getattr(args, name)) is not None
    }
    if recording.header.get("source") == "vllm":
        overrides.setdefault("model", "smollm2")
        overrides.setdefault("dtype", "float32")
    if args.stage:
        overrides["stages"] = tuple(map(split_stage, args.stage))
    runner = runner_for(recording, **overrides)
    try:
        report = replay(recording, runner, first_step=args.step, tolerance=tolerance)
    finally:
        runner.shutdown()
    print(f"{args.recording}: {report.num_steps} steps")
    _print_comparison(report.comparison)
    if report.recorded_failure:
        print(f"the last step failed with {report.recorded_failure}")
        print(f"now: {'the same' if report.is_same_failure else report.failure or 'it does not fail'}")
    for note in report.notes:
        print(f"note: {note}")
    return 0 if report.is_same else 1


def _print_comparison(comparison: Comparison) -> None:
    print(f"compared: {comparison.num_tokens} tokens, {comparison.num_logprobs} log probabilities")
    differences, ties = comparison.differences, comparison.near_ties
    if comparison.first is None:
        print("no difference")
    else:
        print(f"first difference: {comparison.first}")
        for difference in differences[1:_MOST_LINES]:
            print(f"  then: {difference}")
        if len(differences) > _MOST_LINES:
            print(f"  and {len(differences) - _MOST_LINES} more")
    if ties:
        print(f"near ties, which rounding decides: {len(ties)}")
        for tie in ties[:_MOST_LINES]:
            print(f"  {tie}")
