"""Host time of a step outside the model, by number of decoding requests: python examples/benchmarks/step_overhead.py

The model is a one-layer toy, so that nearly all of a step is host work; the time inside the model and its attention
is measured and taken off. Batch sizes are interleaved, each figure is a median over all rounds; "least" is the least
median of a round, which others on the machine have disturbed least. The first steps of a round are not counted: after
other sizes a step takes three times as long, and some twenty go by until caches are warm again. Ratios are against the
limits that the project sets itself: runner 0.25 ms at 1 request and 0.6 ms at 256, scheduler and loop with
detokenization 0.1 ms and 1.5 ms. (vLLM 0.25's runner takes 0.9 and 2.4 ms there, its engine beside the runner 0.25 and
7 ms.)

What was tried, and what it gave, is in CPU_NOTES.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from twostroke.engine import EngineConfig, ModelRunner, SamplingParams, Scheduler, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.serving_loop import ServingLoop, scheduler_for
from twostroke.fsm import StageTimes

RUNNER_LIMITS_MS = {1: 0.25, 256: 0.6}
LOOP_LIMITS_MS = {1: 0.1, 256: 1.5}
PROMPT = [1, 2, 3]
STEPS_A_ROUND = 24
WARM_UP_STEPS = 20


class Stopwatch:
    """Adds up the time inside wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def read(self) -> float:
        """Seconds since the last reading."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def make_runner(num_reqs: int) -> tuple[ModelRunner, Stopwatch]:
    """A runner over a toy model, and the time that its forwards take."""
    model, watch = random_model(tiny_config(num_hidden_layers=1, max_position_embeddings=1024)), Stopwatch()
    for name in ("forward", "compute_logits"):
        setattr(model, name, watch.wrap(getattr(model, name)))
    config = EngineConfig(
        device="cpu",
        max_num_seqs=num_reqs,
        max_num_batched_tokens=max(num_reqs * len(PROMPT), 16),
        max_model_len=1024,
        num_kv_blocks=num_reqs * 66 + 2,
        enable_prefix_caching=False,
    )
    return build_runner(config, model=model), watch


class RunnerBench:
    """Decodes with the reference scheduler; times the runner's two calls."""

    def __init__(self, num_reqs: int) -> None:
        self.runner, self.model = make_runner(num_reqs)
        self.scheduler: Scheduler = scheduler_for(self.runner)
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.rounds: list[float] = []
        params = SamplingParams(temperature=0, max_tokens=None)
        for index in range(num_reqs):
            self.scheduler.add_request(f"r{index}", PROMPT, params)
        self.step()

    def step(self) -> tuple[float, float]:
        """Seconds in the runner, and in the scheduler."""
        began = time.perf_counter()
        scheduled = self.scheduler.schedule()
        started = time.perf_counter()
        self.runner.execute_model(scheduled)
        output = self.runner.sample_tokens().get_output()
        ended = time.perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        return ended - started, started - began + time.perf_counter() - ended

    def round(self) -> None:
        """Some steps without observers, for the whole; some with, for the split."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        for _ in range(STEPS_A_ROUND):
            self.model.read()
            runner, scheduler = self.step()
            self.samples["runner"].append(runner - self.model.read())
            self.samples["scheduler"].append(scheduler)
        self.rounds.append(statistics.median(self.samples["runner"][-STEPS_A_ROUND:]))
        times = StageTimes()
        self.runner.observers.add(times)
        for _ in range(STEPS_A_ROUND):
            times.seconds.clear()
            self.model.read()
            runner, _ = self.step()
            model = self.model.read()
            for name, seconds in times.seconds.items():
                self.samples[name].append(seconds - model if name == "forward" else seconds)
            self.samples["machine, pipeline"].append(runner - sum(times.seconds.values()))
        self.runner.observers.remove(times)


class LoopBench:
    """Decodes behind a serving loop; times what is outside the runner."""

    def __init__(self, num_reqs: int) -> None:
        self.runner, _ = make_runner(num_reqs)
        self.num_reqs = num_reqs
        self.inside = Stopwatch()
        for name in ("execute_model", "sample_tokens"):
            setattr(self.runner, name, self.inside.wrap(getattr(self.runner, name)))
        self.samples: list[float] = []

    def round(self) -> None:
        """One batch of requests from start to end; text is not made, tokens are delivered."""
        params = SamplingParams(temperature=0, max_tokens=STEPS_A_ROUND, ignore_eos=True)
        with ServingLoop(self.runner) as loop:
            handles = [loop.add(PROMPT, params) for _ in range(self.num_reqs)]
            self.inside.read()
            steps, started = loop.num_steps, time.perf_counter()
            for handle in handles:
                handle.result()
            seconds = time.perf_counter() - started - self.inside.read()
            self.samples.append(seconds / max(loop.num_steps - steps, 1))


def pulse() -> float:
    """Seconds for a fixed piece of Python: more where others use the same core, inside this machine or outside."""
    started, total = time.perf_counter(), 0
    for number in range(10_000):
        total += number * number
    return time.perf_counter() - started


def ms(samples: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(samples) * 1e3


def report(benches: dict[int, RunnerBench], loops: dict[int, LoopBench]) -> None:
    """One row a batch size."""
    names = [name for name in next(iter(benches.values())).samples if name not in ("runner", "scheduler")]
    header = f"{'requests':>8} {'runner ms':>10} {'of limit':>9} {'least ms':>9}  "
    print(header + "  ".join(f"{name:>8}" for name in names))
    for num_reqs, bench in benches.items():
        limit = RUNNER_LIMITS_MS.get(num_reqs)
        ratio = f"{ms(bench.samples['runner']) / limit:8.2f}x" if limit else " " * 9
        split = "  ".join(f"{ms(bench.samples[name]) * 1e3:{max(len(name), 8)}.0f}" for name in names)
        runner, least = ms(bench.samples["runner"]), min(bench.rounds) * 1e3
        print(f"{num_reqs:8d} {runner:10.3f} {ratio} {least:9.3f}  {split}   (stages in us)")
    small, large = min(benches), max(benches)
    if large > small:
        growth = (ms(benches[large].samples["runner"]) - ms(benches[small].samples["runner"])) / (large - small)
        print(f"growth in the runner: {growth * 1e3:.2f} us a request ({growth * 1e3 / 2:.2f}x the aim of 2 us)")
    print(f"\n{'requests':>8} {'scheduler ms':>13} {'scheduler + loop ms':>20} {'of limit':>9} {'least ms':>9}")
    for num_reqs, loop in loops.items():
        limit = LOOP_LIMITS_MS.get(num_reqs)
        ratio = f"{ms(loop.samples) / limit:8.2f}x" if limit else ""
        scheduler, least = ms(benches[num_reqs].samples["scheduler"]), min(loop.samples) * 1e3
        print(f"{num_reqs:8d} {scheduler:13.3f} {ms(loop.samples):20.3f} {ratio:>9} {least:9.3f}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128, 256, 1024])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    benches = {num_reqs: RunnerBench(num_reqs) for num_reqs in args.requests}
    loops = {num_reqs: LoopBench(num_reqs) for num_reqs in args.requests}
    gc.collect()
    gc.freeze()
    pulses: list[float] = []
    for _ in range(args.rounds):
        for bench in (*benches.values(), *loops.values()):
            bench.round()
            pulses.append(pulse())
    report(benches, loops)
    print(f"\na fixed piece of Python: {ms(pulses) / min(pulses) / 1e3:.2f}x its least time in the median")


if __name__ == "__main__":
    main()
