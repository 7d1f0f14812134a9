"""The command ``twostroke ab``: the runner as it is against the runner with some stages swapped.

Reading the arguments needs no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..stages.sampling_params import SamplingParams
    from .ab import Comparison


def add_ab(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.set_defaults(run=ab)
    parser.description = (
        "Serve the same prompts with the runner as it is (A) and with stages swapped (B), in turns, and compare speed, "
        "time by stage, and tokens. Both draw the same random numbers."
    )
    parser.add_argument(
        "--stage",
        action="append",
        required=True,
        metavar="PLACE=SPEC",
        help="a stage of B: sample=my_package:MinKSampler, sample=path/to/file.py:MinKSampler or sample=ENTRY_POINT; "
        "after:NAME=… and before:NAME=… insert one; may be given again",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line (default: eight of its own)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens for each prompt (32)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (0.7)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first prompt (0)")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME=VALUE", help="a parameter of a stage; may be given again"
    )
    parser.add_argument("--model", default="smollm2", help="folder, GGUF file, hub id, or smollm2 (the packaged model)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    parser.add_argument("--num-threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


def ab(args: argparse.Namespace) -> int:
    """Run the command and print its report; returns the exit code.

    Raises:
        InvalidConfig, PluginError, WiringError: what is asked for can't be done.
    """
    import torch

    from .ab import compare_stages
    from .cli_generate import DEMO_PROMPTS
    from .config import EngineConfig, InvalidConfig
    from .model_runner import build_runner
    from .plugins import load_stage, split_stage

    if args.repeats < 1 or (args.num_threads is not None and args.num_threads < 1):
        raise InvalidConfig("--repeats and --num-threads must be at least 1")
    places = [split_stage(text) for text in args.stage]
    prompts = list(DEMO_PROMPTS)
    if args.prompts is not None:
        prompts = [line for line in args.prompts.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        if not prompts:
            raise InvalidConfig(f"{args.prompts} holds no prompts; write one a line")
    params = [_params(args, index) for index in range(len(prompts))]
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    runner = build_runner(EngineConfig(model=args.model, device=args.device, dtype=args.dtype))
    try:
        stages = [(place, load_stage(spec, runner.parts)) for place, spec in places]
        print(report(compare_stages(runner, stages, prompts, params, repeats=args.repeats)))
    finally:
        runner.shutdown()
    return 0


def report(comparison: Comparison) -> str:
    """Speed, time by stage, agreement by prompt, and the verdict, as lines of text."""
    a, b = comparison.a, comparison.b
    lines = [
        f"{'':<24}{'A':>10}{'B':>10}{'B/A':>8}",
        _line("tokens/s", a.tokens_per_second, b.tokens_per_second, ".1f"),
        *(_line(f"{name}, ms a step", a.stage_ms(name), b.stage_ms(name), ".3f") for name in comparison.stages),
        "",
        f"{'prompt':>6}{'tokens of A':>13}{'of B':>6}  first difference",
    ]
    texts = zip(a.runs[0].tokens, b.runs[0].tokens, comparison.first_differences, strict=True)
    for index, (left, right, place) in enumerate(texts):
        lines.append(f"{index:>6}{len(left):>13}{len(right):>6}  {'none' if place is None else f'position {place}'}")
    return "\n".join([*lines, "", f"verdict: {comparison.verdict()}"])


def _line(label: str, a: float, b: float, form: str) -> str:
    ratio = f"{b / a:.2f}" if a else "-"
    return f"{label:<24}{a:>10{form}}{b:>10{form}}{ratio:>8}"


def _params(args: argparse.Namespace, index: int) -> SamplingParams:
    from ..stages.sampling_params import SamplingParams
    from .plugins import split_extra

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=(args.seed + index) % 2**64 if index else args.seed,
        extra=dict(map(split_extra, args.extra)),
    )
