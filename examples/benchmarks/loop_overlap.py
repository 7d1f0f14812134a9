"""What asynchronous scheduling costs the host, and how much of the host's time it hides.

    python examples/benchmarks/loop_overlap.py [--requests N] [--tokens N] [--rounds N] [--forward-ms MS]

Part one serves the same requests by two loops, one synchronous and one with two steps in flight, on a one-layer toy
model, in turns. The figure is the processor time of the loop's thread for a step, without the model: the ratio is to
the synchronous loop, and to the limit of 1.10.

Part two shows the overlap. On a CPU the model computes in the thread that calls it, so nothing can overlap there. The
accelerator of part two is therefore **simulated**: a thread that does what is launched on it in order, where a forward
pass is a sleep of a fixed length and computes nothing. The host's side is the real one (scheduler, runner, stages,
loop), and it waits where it would wait for a device. A step can't be shorter than the forward pass: that is the limit
that its length is compared with.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from statistics import median
from typing import Any

import torch
from twostroke.engine import EngineConfig, SamplingParams, ServingLoop, build_runner
from twostroke.engine.models import Decoder, random_model, tiny_config
from twostroke.stages.device import HostArray, HostDevice
from twostroke.stages.forward_context import ForwardContext
from twostroke.stages.records import ModelInputs

ASYNC_LIMIT = 1.10
Interval = tuple[float, float]


def toy_model() -> Decoder:
    """One narrow layer."""
    return random_model(tiny_config(num_hidden_layers=1, max_position_embeddings=512))


class TimedModel:
    """A model that adds up the processor time that it takes."""

    def __init__(self, model: Decoder) -> None:
        self.spec = model.spec
        self.seconds = 0.0
        self._model = model

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        started = time.thread_time()
        hidden = self._model.forward(inputs, context)
        self.seconds += time.thread_time() - started
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        started = time.thread_time()
        logits = self._model.compute_logits(hidden_states)
        self.seconds += time.thread_time() - started
        return logits


class Accelerator:
    """A simulated device: see the module. ``busy`` and ``waits`` are when it computed and when the host waited."""

    torch_device = torch.device("cpu")
    shares_host_memory = False

    def __init__(self) -> None:
        self.busy: list[Interval] = []
        self.waits: list[Interval] = []
        self._work: SimpleQueue[float | threading.Event] = SimpleQueue()
        threading.Thread(target=self._compute, daemon=True).start()

    def launch(self, seconds: float) -> None:
        """Compute that long, after everything launched before."""
        self._work.put(seconds)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def scatter(self, pieces: Sequence[HostArray], starts: Sequence[int], target: torch.Tensor) -> None:
        HostDevice().scatter(pieces, starts, target)

    def download(self, source: torch.Tensor) -> Arrival:
        return Arrival(self, source)

    def fence(self) -> Arrival:
        return Arrival(self, torch.empty(0))

    def mark(self) -> threading.Event:
        """Set once everything that was launched so far is done."""
        done = threading.Event()
        self._work.put(done)
        return done

    def _compute(self) -> None:
        while True:
            work = self._work.get()
            if isinstance(work, threading.Event):
                work.set()
                continue
            started = time.perf_counter()
            time.sleep(work)
            self.busy.append((started, time.perf_counter()))


class Arrival:
    """A fence, or a download, of the simulated device."""

    def __init__(self, device: Accelerator, content: torch.Tensor) -> None:
        self._device = device
        self._content = content.clone()
        self._done = device.mark()

    def ready(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        started = time.perf_counter()
        self._done.wait()
        self._device.waits.append((started, time.perf_counter()))
        return self._content.numpy()


class LaunchedModel:
    """A model whose forward pass is launched on the simulated device; its logits never change."""

    def __init__(self, device: Accelerator, seconds: float) -> None:
        self.spec = toy_model().spec
        self._device = device
        self._seconds = seconds
        self._logits = torch.arange(self.spec.vocab_size, dtype=torch.float32)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        self._device.launch(self._seconds)
        return torch.zeros(len(inputs.positions), self.spec.hidden_size)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden_states), -1)


class Bench:
    """A serving loop, and batches of requests for it that are all there before the first step."""

    def __init__(self, model: Any, args: argparse.Namespace, *, is_async: bool, device: Any = None) -> None:
        config = EngineConfig(
            device="cpu",
            async_scheduling=is_async,
            max_num_seqs=args.requests,
            max_num_batched_tokens=max(4 * args.requests, 16),
            max_model_len=args.tokens + 4,
            num_kv_blocks=args.requests * (args.tokens // 16 + 2) + 1,
            enable_prefix_caching=False,
        )
        self.loop = ServingLoop(build_runner(config, model=model, device=device)).start()
        self.model = model
        self._args = args

    def serve(self) -> tuple[float, int]:
        """Processor seconds of the loop's thread for one batch, and how many steps it took."""
        params = SamplingParams(temperature=0, max_tokens=self._args.tokens, ignore_eos=True)
        self.loop.pause()
        handles = [self.loop.add([1, 2, 3], params) for _ in range(self._args.requests)]
        steps, started = self.loop.num_steps, self.loop.between_steps(time.thread_time)
        self.loop.resume()
        for handle in handles:
            handle.result()
        return self.loop.between_steps(time.thread_time) - started, self.loop.num_steps - steps

    def host_ms(self) -> float:
        """Processor time of a step without the model."""
        before = self.model.seconds
        seconds, steps = self.serve()
        return (seconds - (self.model.seconds - before)) / steps * 1e3

    def close(self) -> None:
        self.loop.stop()
        self.loop.runner.shutdown()


def compare_cost(args: argparse.Namespace) -> None:
    """Part one."""
    benches = [Bench(TimedModel(toy_model()), args, is_async=is_async) for is_async in (False, True)]
    rounds = [[bench.host_ms() for bench in benches] for _ in range(args.rounds + 1)][1:]
    for bench in benches:
        bench.close()
    sync, two_in_flight = (median(column) for column in zip(*rounds, strict=True))
    ratio = median(both[1] / both[0] for both in rounds)
    print(f"processor time of a step without the model, {args.requests} requests, {args.rounds} rounds in turns:")
    print(f"  sync {sync:.3f} ms, async {two_in_flight:.3f} ms: {ratio:.2f} of sync (limit {ASYNC_LIMIT:.2f})")


def show_overlap(args: argparse.Namespace) -> None:
    """Part two."""
    print(f"simulated accelerator, {args.forward_ms:g} ms a forward pass, {args.requests} requests:")
    for is_async in (False, True):
        device = Accelerator()
        bench = Bench(LaunchedModel(device, args.forward_ms / 1e3), args, is_async=is_async, device=device)
        bench.serve()
        first = len(device.busy)
        bench.serve()
        bench.close()
        busy = device.busy[first:]
        began, ended = busy[0][0], busy[-1][1]
        waited = overlap([(began, ended)], device.waits)
        computed = sum(end - start for start, end in busy)
        hidden = computed - overlap(busy, device.waits)
        host, step = ended - began - waited, (ended - began) / len(busy)
        print(
            f"  {'async' if is_async else 'sync':<5} step {step * 1e3:.2f} ms, {step * len(busy) / computed:.2f} of the"
            f" forward pass; host {host / len(busy) * 1e3:.2f} ms, {hidden / host:.0%} of it while the device was busy"
        )


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Seconds that lie in intervals of both; those of one list do not overlap each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each request, so many steps (64)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forward-ms", type=float, default=8.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare_cost(args)
    show_overlap(args)


if __name__ == "__main__":
    main()
