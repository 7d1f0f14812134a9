"""What recording costs a step, by number of decoding requests: python examples/benchmarks/recording.py

Runners over the same two-layer toy model decode side by side, in turns of a few steps, each recorded in another way. A
step is `execute_model`, `sample_tokens` and `get_output`; its time is the thread's on the processor, so that other
programs do not count. The peer is the runner that is not recorded, the limit 1.05.
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
STEPS_A_TURN = 20
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
        """Some steps, timed one by one."""
        for _ in range(STEPS_A_TURN):
            scheduled = self.scheduler.schedule()
            started = time.thread_time()
            self.runner.execute_model(scheduled)
            output = self.runner.sample_tokens().get_output()
            self.seconds.append(time.thread_time() - started)
            self.scheduler.update_from_output(scheduled, output)

    @property
    def ms(self) -> float:
        """Of a step: the mean of the fastest half, which other programs slowed down least."""
        kept = sorted(self.seconds)[: len(self.seconds) // 2]
        return statistics.mean(kept) * 1e3


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'requests':>8} {'recorded':>14} {'ms a step':>10} {'ratio':>7} {'of limit':>9}")
    for num_reqs in args.requests:
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: Decoding(num_reqs) for name in RECORDERS}
            for name, run in runs.items():
                RECORDERS[name](run.runner, Path(folder))
            for _ in range(args.turns):
                for run in runs.values():
                    run.turn()
            for name, run in runs.items():
                ratio = run.ms / runs["nothing"].ms
                print(f"{num_reqs:8d} {name:>14} {run.ms:10.3f} {ratio:7.3f} {ratio / LIMIT:8.2f}x")
            for run in runs.values():
                run.runner.shutdown()


if __name__ == "__main__":
    main()
