"""The README's table of figures on a CPU, as markdown: OMP_NUM_THREADS=1 python examples/benchmarks/cpu_table.py

Runs step_overhead.py, cpu_offline.py and memory.py, the second in its quick form unless --full is given, and prints one
line a figure with the peer or limit that it is measured by. Speeds against transformers are in time of the
processor, which others on the machine disturb less than the clock on the wall. The load on the machine is printed with
the table: figures from a busy machine are not to be published.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from cpu_offline import Results, contenders, measure, workloads
from memory import MIB, Figures, measured
from step_overhead import LOOP_LIMITS_MS, RUNNER_LIMITS_MS, LoopBench, RunnerBench, ms

COMMAND = "OMP_NUM_THREADS=1 python examples/benchmarks/cpu_table.py"
BEGIN, END = "<!-- cpu-table -->", "<!-- /cpu-table -->"


def line(what: str, figure: str, measured_by: str, ratio: float) -> str:
    """One line of the table."""
    return f"| {what} | {figure} | {measured_by} | {ratio:.2f} |"


def speed_lines(results: Results) -> Iterator[str]:
    """A workload against its peers."""
    workload, medians = results.workload, results.medians
    speed = workload.num_outputs / medians["twostroke"].processor
    what = f"SmolLM2 float32, {workload.name}, {len(workload.prompts)} request{'s' * (len(workload.prompts) > 1)}"
    for peer in (name for name in medians if name != "twostroke"):
        peer_speed = workload.num_outputs / medians[peer].processor
        name = "its linear layers alone, the ceiling" if peer == "linear layers alone" else f"transformers, {peer}"
        ratio = results.processor_ratio("twostroke", peer)
        yield line(what, f"{speed:.1f} tokens/CPU s", f"{name}: {peer_speed:.1f}", ratio)


def host_lines(rounds: int) -> Iterator[str]:
    """Host time of a step at 1 and 256 requests against the project's limits."""
    sizes = tuple(RUNNER_LIMITS_MS)
    runners = {num_reqs: RunnerBench(num_reqs) for num_reqs in sizes}
    loops = {num_reqs: LoopBench(num_reqs) for num_reqs in sizes}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for bench in (*runners.values(), *loops.values()):
            bench.round()
    gc.unfreeze()
    for num_reqs in sizes:
        for what, samples, limits in (
            ("runner outside the model", runners[num_reqs].samples["runner"], RUNNER_LIMITS_MS),
            ("scheduler and loop", loops[num_reqs].samples, LOOP_LIMITS_MS),
        ):
            limit, taken = limits[num_reqs], ms(samples)
            requests = f"{num_reqs} request{'s' * (num_reqs > 1)}"
            yield line(f"a step's host time, {what}, {requests}", f"{taken:.2f} ms", f"limit {limit} ms", taken / limit)


def memory_lines(figures: Figures, *names: str) -> Iterator[str]:
    """Some of a part's sizes."""
    for name in names:
        size = figures.sizes[name]
        peer = f"{figures.peer_name}: {figures.peer / MIB:.0f} MiB"
        yield line(f"{figures.title.partition(':')[0]}: {name}", f"{size / MIB:.1f} MiB", peer, size / figures.peer)


def processor_name() -> str:
    """What the kernel calls the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [entry.partition(":")[2].strip() for entry in lines if entry.startswith("model name")]
    return names[0] if names else platform.machine()


def lines(*, full: bool, rounds: int, steps: int) -> Iterator[str]:
    """The lines of the table, those of the host's time first: they are measured before a large model is there."""
    yield from host_lines(rounds)
    everyone = contenders(1, with_continuous=full)
    for workload in workloads(quick=not full):
        yield from speed_lines(measure(workload, everyone, 1))
    yield from memory_lines(measured("demo"), "grown when loaded", "grown after serving")
    yield from memory_lines(measured("tables"), "all of it", "growth of the process")
    growth = measured("growth", steps)
    yield from memory_lines(growth, *growth.sizes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole workloads, and continuous batching: minutes")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of step_overhead.py")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the growth of memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    before = os.getloadavg()[0]
    table = list(lines(full=args.full, rounds=args.rounds, steps=args.steps))
    after, cores = os.getloadavg()[0], os.cpu_count()
    print(BEGIN)
    command = f"`{COMMAND}{' --full' * args.full}` on {cores} cores ({processor_name()})"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{command}, one thread, {versions}; load {before:.1f} before and {after:.1f} after.\n")
    print("| what | figure | measured by | ratio |\n|---|---|---|---|")
    print("\n".join(table))
    print(f"\n{END}")


if __name__ == "__main__":
    main()
