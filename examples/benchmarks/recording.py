"""What recording costs a step, by number of decoding requests: python examples/benchmarks/recording.py

Runners over the same two-layer toy model decode side by side, in turns of 100 steps, each recorded in another way. A
step is `execute_model`, `sample_tokens` and `get_output`. Its time is the thread's on the processor, so that other
programs do not count, and the mean of whole turns, which last long enough for lines to be made into text and written in
each: that is what most of the cost is, and it falls on a few steps. The peer is the runner that is not recorded, the
limit 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from twostroke.engine import EngineConfig, ModelRunner, SamplingParams, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.serving_loop import scheduler_for

LIMIT = 1.05
STEPS_A_TURN = 100
RECORDERS: dict[str, Callable[[ModelRunner, Path], object]] = {
    "nothing": lambda runner, folder: None,
    "steps": lambda runner, folder: runner.record(folder / "steps.jsonl", times=False),
    "steps, times": lambda runner, folder: runner.record(folder / "times.jsonl"),
    "failure ring": lambda runner, folder: runner.record_failures(folder),
}


class Decoding:
    """A runner with requests that decode for ever."""

    def __init__(self, num_reqs: int) -> None:
        model = random_model(tiny_config(max_position_embeddings=4096))
        config = EngineConfig(
            device="cpu",
            max_num_seqs=num_reqs,
            max_num_batched_tokens=max(4 * num_reqs, 16),
            max_model_len=4096,
            num_kv_blocks=num_reqs * 257 + 2,
            enable_prefix_caching=False,
        )
        self.runner = build_runner(config, model=model)
        self.scheduler = scheduler_for(self.runner)
        for index in range(num_reqs):
            self.scheduler.add_request(f"request-{index}", [1, 2, 3], SamplingParams(temperature=0, max_tokens=None))
        self.seconds: list[float] = []
        self.turn()
        self.seconds.clear()

    def turn(self) -> None:
        """Some steps, timed."""
        seconds = 0.0
        for _ in range(STEPS_A_TURN):
            scheduled = self.scheduler.schedule()
            started = time.thread_time()
            self.runner.execute_model(scheduled)
            output = self.runner.sample_tokens().get_output()
            seconds += time.thread_time() - started
            self.scheduler.update_from_output(scheduled, output)
        self.seconds.append(seconds / STEPS_A_TURN)


def extra_seconds(run: Decoding, peer: Decoding) -> float:
    """What a step takes longer than the peer's: the median over turns, each against the peer's of the same round."""
    return statistics.median(own - other for own, other in zip(run.seconds, peer.seconds, strict=True))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'requests':>8} {'recorded':>14} {'µs a step':>10} {'more':>7} {'ratio':>7} {'of limit':>9}")
    for num_reqs in args.requests:
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: Decoding(num_reqs) for name in RECORDERS}
            for name, run in runs.items():
                RECORDERS[name](run.runner, Path(folder))
            for _ in range(args.turns):
                for run in runs.values():
                    run.turn()
            plain = statistics.median(runs["nothing"].seconds)
            for name, run in runs.items():
                more = extra_seconds(run, runs["nothing"])
                step, ratio = (plain + more) * 1e6, 1 + more / plain
                print(f"{num_reqs:8d} {name:>14} {step:10.1f} {more * 1e6:+7.1f} {ratio:7.3f} {ratio / LIMIT:8.2f}x")
            for run in runs.values():
                run.runner.shutdown()


if __name__ == "__main__":
    main()
