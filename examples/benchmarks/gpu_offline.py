"""Output tokens a second of a batch job on a GPU, beside the best peer.

    python examples/benchmarks/gpu_offline.py [--shape 0.6b 8b] [--temperature 0.6 0]

256 requests at once, prompts and outputs uniform in 100 to 1024 tokens (seed 0, 133,966 output tokens), end-of-sequence
ignored, through the serving loop. The median of ``--rounds``. Peers: see qwen3.py.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

import qwen3
from twostroke.engine import ServingLoop
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.sampling_params import SamplingParams

REQUESTS, LOW, HIGH = 256, 100, 1024


def work(vocab_size: int, scale: int = 1) -> list[tuple[list[int], int]]:
    """Prompts and output lengths."""
    rng = random.Random(0)

    def length() -> int:
        return rng.randint(LOW, HIGH) // scale

    prompts = [[rng.randint(0, min(10_000, vocab_size - 1)) for _ in range(length())] for _ in range(REQUESTS)]
    return [(prompt, length()) for prompt in prompts]


def serve(runner: ModelRunner, requests: list[tuple[list[int], int]], temperature: float) -> tuple[float, int]:
    """Seconds for all of it, and steps."""
    with ServingLoop(runner) as loop:
        start = time.perf_counter()
        handles = [
            loop.add(prompt, SamplingParams(temperature=temperature, max_tokens=outputs, ignore_eos=True))
            for prompt, outputs in requests
        ]
        for handle, (_, outputs) in zip(handles, requests, strict=True):
            got = len(handle.result().outputs[0].token_ids)
            if got != outputs:
                raise SystemExit(f"{handle.request_id} got {got} tokens instead of {outputs}")
        return time.perf_counter() - start, loop.num_steps


def main() -> None:
    """Measure and print a line for each shape and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=[*qwen3.SIZES], default=["0.6b", "8b"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.6, 0.0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ratios: list[float] = []
    for shape in args.shape:
        runner = qwen3.runner(shape)
        requests = work(runner.spec.vocab_size, 8 if shape == "tiny" else 1)
        total = sum(outputs for _, outputs in requests)
        for temperature in args.temperature:
            rounds = [serve(runner, requests, temperature) for _ in range(args.rounds)]
            seconds = statistics.median(seconds for seconds, _ in rounds)
            line = f"{shape} T={temperature}: {total} tokens in {seconds:.2f} s, {rounds[-1][1]} steps, "
            line += f"{total / seconds:,.0f} tok/s"
            peer = qwen3.BEST_PEER_TOKENS_PER_S.get((shape, temperature))
            if peer is not None:
                ratios.append(total / seconds / peer)
                line += f", {ratios[-1]:.2f} x the best peer's {peer:,}"
            print(line, flush=True)
        runner.shutdown()
    if ratios:
        print(f"geometric mean: {math.exp(statistics.fmean(map(math.log, ratios))):.3f} x")


if __name__ == "__main__":
    main()
