"""Time of a decode step on a GPU, beside the best peer and the limit that memory sets.

    python examples/benchmarks/gpu_decode.py [--shape 0.6b 8b] [--batch 1 8 32 64 128 256] [--profile DIR]

All requests have a 512-token prompt and run in lock step through the serving loop, greedily. A figure is the mean over
256 steps from the first one with all of them (mean context 640), the median of ``--rounds``. ``host us`` is the CPU
time of the whole process a step, waiting for the device included. ``--profile`` also writes a trace of some steps and
prints time by kernel, the share of the time in which the GPU was busy, and between which kernels it was not. Peers: see
qwen3.py. GPU_NOTES.md holds the figures of one run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import qwen3
import torch
from twostroke.engine import ServingLoop
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.sampling_params import SamplingParams

PROMPT, STEPS = 512, 256


class Cell(NamedTuple):
    """One batch size: milliseconds a step, and CPU microseconds of the process a step."""

    step_ms: float
    host_us: float


def lock_step(runner: ModelRunner, batch: int, steps: int, profile: Path | None = None) -> Cell:
    """Serve ``batch`` requests and time ``steps`` steps of all of them."""
    prompts = torch.randint(0, runner.spec.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.0, max_tokens=steps + 400, ignore_eos=True)
    with ServingLoop(runner) as loop:
        handles = [loop.add(prompt, params) for prompt in prompts.tolist()]
        while not all(handle.has_tokens for handle in handles):
            time.sleep(0.0005)
        first, start, cpu = loop.num_steps, time.perf_counter(), time.process_time()
        while loop.num_steps < first + steps and not handles[0].finished:
            time.sleep(0.0005)
        count = loop.num_steps - first
        cell = Cell((time.perf_counter() - start) * 1e3 / count, (time.process_time() - cpu) * 1e6 / count)
        if profile is not None:
            _profile(loop, profile)
        for handle in handles:
            handle.close()
    return cell


def _profile(loop: ServingLoop, path: Path) -> None:
    """Trace 20 steps, print the kernels that take longest, and the share of the time in which one ran."""
    if not loop.num_live_requests:
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        first = loop.num_steps
        while loop.num_steps < first + 20:
            time.sleep(0.0005)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    (first_start, end, last), busy = spans[0], 0.0
    idle: dict[tuple[str, str], list[float]] = defaultdict(list)
    for begin, stop, name in spans:
        busy += max(0.0, stop - max(begin, end))
        if begin > end:
            idle[last, name].append(begin - end)
        if stop > end:
            end, last = stop, name
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=60))
    for (before, after), gaps in sorted(idle.items(), key=lambda item: -sum(item[1]))[:8]:
        print(f"idle {sum(gaps):7.0f} us in {len(gaps):4} gaps: {before[:50]} -> {after[:50]}")
    print(f"GPU busy {busy / (end - first_start):.1%} of {path.stem}", flush=True)


def main() -> None:
    """Measure and print a row for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=[*qwen3.SIZES], default=["0.6b", "8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=list(qwen3.BATCH_SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--mode", default="auto", help="cudagraph_mode")
    parser.add_argument("--profile", type=Path, metavar="DIR")
    args = parser.parse_args()
    ratios: list[float] = []
    for shape in args.shape:
        start = time.perf_counter()
        runner = qwen3.runner(shape, cudagraph_mode=args.mode)
        print(f"{shape}: ready after {time.perf_counter() - start:.1f} s, {runner.config.num_kv_blocks} KV blocks")
        print(f"{'batch':>6} {'ms/step':>8} {'best peer':>10} {'x':>6} {'limit':>6} {'of limit':>9} {'host us':>8}")
        for batch in args.batch:
            cells = [lock_step(runner, batch, args.steps) for _ in range(args.rounds)]
            step_ms = statistics.median(cell.step_ms for cell in cells)
            line = f"{batch:>6} {step_ms:>8.3f}"
            if shape in qwen3.BEST_PEER_MS and batch in qwen3.BATCH_SIZES:
                index = qwen3.BATCH_SIZES.index(batch)
                peer, limit = qwen3.BEST_PEER_MS[shape][index], qwen3.LIMIT_MS[shape][index]
                ratios.append(peer / step_ms)
                line += f" {peer:>10.2f} {peer / step_ms:>6.2f} {limit:>6.2f} {limit / step_ms:>9.0%}"
            print(f"{line} {statistics.median(cell.host_us for cell in cells):>8.0f}", flush=True)
            if args.profile:
                lock_step(runner, batch, 20, args.profile / f"{shape}-{batch}.json")
        runner.shutdown()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if ratios:
        print(f"geometric mean over {len(ratios)} cells: {math.exp(statistics.fmean(map(math.log, ratios))):.3f} x")


if __name__ == "__main__":
    main()
