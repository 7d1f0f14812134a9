"""The command ``twostroke generate``: several prompts at once through the serving loop, and where the time went."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ..fsm import StageTimes, TwoStrokeError
from ..stages.sampling_params import SamplingParams
from .cli_recording import recorded, require_rich
from .cli_report import Report
from .cli_view import View, choose_view
from .config import EngineConfig, InvalidConfig
from .loop_admission import Prompt
from .loop_handle import RequestHandle
from .model_runner import ModelRunner, build_runner
from .outputs import RequestOutput
from .plugins import split_extra, split_stage
from .serving_loop import ServingLoop
from .watch import Watcher

_MOST_THREADS = 4096
DEMO_PROMPTS = (
    "Explain what a finite-state machine is to a child.",
    "Write a short poem about two-stroke engines.",
    "What is the capital of France, and what is it known for?",
    "Give me three tips for writing clear code.",
    "Tell me a joke about computers.",
    "Why is the sky blue?",
    "Translate to French: Good morning, how are you?",
    "Write a Python function that adds two numbers.",
)


def generate(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    texts = _texts(args)
    params = [_params(args, index) for index in range(len(texts))]
    if args.num_threads is not None:
        if not 1 <= args.num_threads <= _MOST_THREADS:
            raise InvalidConfig(f"--num-threads must be between 1 and {_MOST_THREADS}, got {args.num_threads}")
        torch.set_num_threads(args.num_threads)
    if args.watch:
        require_rich()
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        async_scheduling=not args.sync,
        stages=map(split_stage, args.stage),
    )
    started = time.monotonic()
    runner = build_runner(config)
    load_seconds = time.monotonic() - started
    try:
        watcher = Watcher() if args.watch else None
        view = _view(texts, args, watcher)
        with recorded(runner, args, watcher):
            return _run(runner, _prompts(args, texts), params, view, load_seconds)
    finally:
        runner.shutdown()


def _view(texts: Sequence[str], args: argparse.Namespace, watcher: Watcher | None) -> View:
    total = args.max_tokens * len(texts)
    if watcher is None:
        return choose_view(texts, total, plain=args.plain)
    from .cli_watch import WatchView

    return WatchView(texts, total, watcher)


def _run(
    runner: ModelRunner,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    view: View,
    load_seconds: float,
) -> int:
    times = StageTimes()
    runner.observers.add(times)
    started = time.monotonic()
    with ServingLoop(runner) as loop:
        handles = [loop.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        with view:
            outcomes = asyncio.run(_follow_all(handles, view))
        run_seconds = time.monotonic() - started
        num_steps = loop.num_steps
    results = [outcome if isinstance(outcome, RequestOutput) else None for outcome in outcomes]
    view.results(results)
    view.report(
        Report(
            model=runner.config.model,
            load_seconds=load_seconds,
            run_seconds=run_seconds,
            num_steps=num_steps,
            results=[result for result in results if result is not None],
            stage_seconds=dict(times.seconds),
        )
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, TwoStrokeError)]
    for error in errors:
        print(f"twostroke: {error}", file=sys.stderr)
    return 1 if errors else 0


async def _follow_all(handles: Sequence[RequestHandle], view: View) -> list[RequestOutput | TwoStrokeError]:
    return await asyncio.gather(*(_follow(index, handle, view) for index, handle in enumerate(handles)))


async def _follow(index: int, handle: RequestHandle, view: View) -> RequestOutput | TwoStrokeError:
    try:
        async for delta in handle:
            view.delta(index, delta)
        return handle.result()
    except TwoStrokeError as error:
        return error


def _texts(args: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    if args.prompts_file is not None:
        lines = [line for line in _read(args.prompts_file).splitlines() if line.strip()]
        if not lines and not args.prompt:
            raise InvalidConfig(f"{args.prompts_file} holds no prompts; write one a line")
    return [*args.prompt, *lines] or list(DEMO_PROMPTS)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{file} is not UTF-8 text: {error}") from error


def _params(args: argparse.Namespace, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        # Of its own, or all prompts would draw the same luck; beyond 64 bits it starts over.
        seed=(args.seed + index) % 2**64 if index else args.seed,
        stop=args.stop,
        extra=dict(map(split_extra, args.extra)),
    )


def _prompts(args: argparse.Namespace, texts: Sequence[str]) -> list[Prompt]:
    own = not args.prompt and args.prompts_file is None
    if own if args.chat is None else args.chat:
        return [[{"role": "user", "content": text}] for text in texts]
    return list(texts)
