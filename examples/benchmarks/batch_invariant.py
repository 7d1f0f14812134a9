"""What EngineConfig(batch_invariant=True) costs: python examples/benchmarks/batch_invariant.py [--model smollm2]

Decode steps of several batch sizes and a prefill, with and without, in turns; medians, and the ratio of the two. Also
says whether logits of a request alone and in the batch have the same bits in either.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from twostroke.engine import EngineConfig, ModelRunner, SamplingParams, build_runner
from twostroke.engine.serving_loop import scheduler_for
from twostroke.fsm import StageObserver
from twostroke.stages.records import ExecuteModelState

_NAMES = ((False, "as it is"), (True, "invariant"))


class LastLogits(StageObserver):
    """Keeps the logits of the last step."""

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        if isinstance(record, ExecuteModelState):
            self.logits = record.logits.clone()


def serve(runner: ModelRunner, prompts: list[list[int]], num_steps: int) -> tuple[float, float, torch.Tensor]:
    """Seconds of the first step (the prefill), the median of the others, and the logits of the first step."""
    scheduler, tap = scheduler_for(runner), LastLogits()
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        scheduler.add_request(f"r{index}", prompt, params)
    seconds: list[float] = []
    first = torch.empty(0)
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        if not seconds:
            runner.observers.add(tap)
        started = perf_counter()
        output = runner.execute_model(scheduled)
        if output is None:
            output = runner.sample_tokens().get_output()
            seconds.append(perf_counter() - started)
        if len(seconds) == 1:
            runner.observers.remove(tap)
            first = tap.logits
        scheduler.update_from_output(scheduled, output)
    return seconds[0], median(seconds[1:]), first


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    config = EngineConfig(model=args.model, device="cpu", enable_prefix_caching=False)
    runners = {flag: build_runner(config.replace(batch_invariant=flag)) for flag in (False, True)}
    print(f"{'requests':>8} {'step':>8} {'as it is ms':>12} {'invariant ms':>13} {'ratio':>6}  same bits as alone")
    for count in args.requests:
        prompts = [[7 * request + 3 * index for index in range(args.prompt_tokens)] for request in range(count)]
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        same: dict[bool, bool] = {}
        for turn in range(args.rounds + 1):  # the first is a warm-up
            for flag, runner in runners.items():
                prefill, decode, logits = serve(runner, prompts, args.steps)
                times[flag] += [(prefill, decode)] if turn else []
                if not turn:
                    same[flag] = torch.equal(serve(runner, prompts[:1], 2)[2][0], logits[0])
        for column, step in enumerate(("prefill", "decode")):
            plain, invariant = (median(pair[column] for pair in times[flag]) * 1e3 for flag in (False, True))
            answers = (f"{name}: {'yes' if same[flag] else 'no'}" for flag, name in _NAMES) if not column else ()
            row = f"{count:>8} {step:>8} {plain:>12.1f} {invariant:>13.1f} {invariant / plain:>6.2f}  "
            print(row + ", ".join(answers))


if __name__ == "__main__":
    main()
