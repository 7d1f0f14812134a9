"""Offline throughput and the speed of a single stream on a CPU, SmolLM2 in float32, against Hugging Face transformers.

    python examples/benchmarks/cpu_offline.py --threads 1
    OMP_WAIT_POLICY=passive python examples/benchmarks/cpu_offline.py --threads 2
    python examples/benchmarks/cpu_offline.py --quick
    python examples/benchmarks/cpu_offline.py --quick --compile --torch

32 requests with random prompts of 16 to 128 tokens and 16 to 64 greedy outputs; then one of 32 and 64. Every contender
runs in the same process with the same weights, one after the other, again and again; the table shows medians. Peers are
``generate`` (one static batch, padded on the left: it runs until its longest request ends) and transformers' continuous
batching. "linear layers alone" is the ceiling: the very steps that the scheduler made, with nothing but
the products of rows with weights. With --compile the engine runs a second time with ``compile=True``, and what its
compilation took (the first round less a later one) is printed; with --torch another time with ``native=False``, torch's
kernels in the place of this package's. With two threads the engine is measured with one as
well. Idle threads of OpenMP spin by default, which hurts when the cores are shared; hence the wait policy.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from attrs import frozen
from twostroke.engine import EngineConfig, LoadedModel, ModelRunner, SamplingParams, Scheduler, SchedulerConfig
from twostroke.engine import build_runner as build
from twostroke.stages.records import Batch, PreparedInputs

Tokens = list[list[int]]
COMPILED, ONE_THREAD = "twostroke, compiled", "twostroke, one thread"
BY_TORCH = "twostroke, by torch"
Step = tuple[int, int]
"""Rows that a step sends through the layers, and rows that it sends through the head."""


@frozen
class Workload:
    """Prompts as token ids, and how many tokens each request generates."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def random(cls, name: str, num_requests: int, prompt: tuple[int, int], output: tuple[int, int]) -> Workload:
        """Sizes drawn evenly from ranges, ends included."""
        rng = np.random.default_rng(0)
        sizes = rng.integers(prompt[0], prompt[1] + 1, num_requests)
        prompts = tuple(tuple(rng.integers(100, 40_000, size).tolist()) for size in sizes)
        return cls(name, prompts, tuple(rng.integers(output[0], output[1] + 1, num_requests).tolist()))

    @property
    def num_outputs(self) -> int:
        """Tokens that were asked for."""
        return sum(self.lengths)


class Engine:
    """This engine, through its runner and its scheduler, driven by the calling thread."""

    def __init__(self, *, compiled: bool = False, native: bool = True) -> None:
        config = EngineConfig(
            model="smollm2",
            device="cpu",
            compile=compiled,
            native=native,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=32,
            kv_cache_memory_bytes=400 * 2**20,
        )
        self.runner: ModelRunner = build(config)
        self.steps: list[Step] = []
        self.runner.stages.insert(self._note, after="prepare_inputs")

    @property
    def loaded(self) -> LoadedModel:
        """The model with its weights."""
        assert self.runner.loaded is not None, "the runner read its model itself"
        return self.runner.loaded

    def _note(self, batch: Batch, inputs: PreparedInputs) -> None:
        self.steps.append((batch.num_tokens, len(inputs.logits_indices)))

    def run(self, workload: Workload) -> Tokens:
        """Every request's tokens; ``steps`` then holds the schedule."""
        config = self.runner.config
        assert isinstance(config.num_kv_blocks, int), "a runner that is ready has decided this"
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=256,
                num_kv_blocks=config.num_kv_blocks,
                block_sizes=tuple(group.block_size for group in self.runner.kv_groups),
                enable_prefix_caching=False,
            )
        )
        self.steps.clear()
        outputs: dict[str, list[int]] = {}
        for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
            scheduler.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
            outputs[str(index)] = []
        while scheduler.has_work():
            scheduled = scheduler.schedule()
            output = self.runner.execute_model(scheduled)
            if output is None:
                output = self.runner.sample_tokens()
            for update in scheduler.update_from_output(scheduled, output.get_output()):
                outputs[update.req_id] += update.new_token_ids
        return list(outputs.values())

    def linears_alone(self, steps: Iterable[Step]) -> None:
        """Nothing but the products of these steps."""
        weights = self.loaded.model.weights
        linears = [linear for name, linear in weights.linears.items() if name != "lm_head"]
        inputs = {size: torch.randn(4096, size) for size in {linear.weight.shape[1] for linear in linears}}
        head = weights.linears["lm_head"]
        with torch.inference_mode():
            for num_rows, num_logits in steps:
                for linear in linears:
                    linear(inputs[linear.weight.shape[1]][:num_rows])
                head(inputs[head.weight.shape[1]][:num_logits])


class HuggingFace:
    """The same weights in transformers' own model (they share their memory), with its SDPA attention."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = transformers.LlamaConfig(**{key: loaded.config[key] for key in loaded.config if "dtype" not in key})
        config._attn_implementation = "sdpa"
        self.model: Any = transformers.LlamaForCausalLM(config).eval()
        weights = dict(loaded.model.parameters)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.model.load_state_dict(weights, assign=True)
        self.settings = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)

    def generate(self, workload: Workload) -> Tokens:
        """One static batch, until its longest request ends; each request's own tokens are kept."""
        width = max(map(len, workload.prompts))
        ids = torch.zeros(len(workload.prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(workload.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self.settings.max_new_tokens = max(workload.lengths)
        with torch.inference_mode():
            output = self.model.generate(ids, attention_mask=mask, generation_config=self.settings)
        rows = output[:, width:].tolist()
        return [row[:length] for row, length in zip(rows, workload.lengths, strict=True)]

    def continuous(self, workload: Workload) -> Tokens:
        """Continuous batching, with a length for each request and a cache of the size that is needed."""
        config = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=2048)
        requests = zip(workload.prompts, workload.lengths, strict=True)
        results: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=self.settings, continuous_batching_config=config
        ) as manager:
            names = [manager.add_request(list(prompt), max_new_tokens=length) for prompt, length in requests]
            while len(results) < len(names):
                result = manager.get_result(timeout=600)
                if result is None:
                    raise RuntimeError("continuous batching ended without the results of every request")
                if result.is_finished():
                    results[result.request_id] = list(result.generated_tokens)
        return [results[str(name)] for name in names]


@frozen
class Timing:
    """One run: seconds on the wall, and of the processor (all threads together)."""

    wall: float
    processor: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> Timing:
        """Time a call; garbage is collected before it."""
        gc.collect()
        wall, processor = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - processor)


@frozen
class Contender:
    """Something that serves a workload with so many threads."""

    name: str
    num_threads: int
    serve: Callable[[Workload], object]


def contenders(
    num_threads: int, *, with_continuous: bool, with_compiled: bool = False, by_torch: bool = False
) -> list[Contender]:
    """All of them, in the order of one round. The ceiling follows the engine, whose last schedule it repeats."""
    engine = Engine()
    other = HuggingFace(engine.loaded)
    chosen = [
        Contender("generate", num_threads, other.generate),
        Contender("twostroke", num_threads, engine.run),
        Contender("linear layers alone", num_threads, lambda _: engine.linears_alone(list(engine.steps))),
    ]
    if with_continuous:
        chosen.insert(1, Contender("continuous batching", num_threads, other.continuous))
    if with_compiled:
        chosen.append(Contender(COMPILED, num_threads, Engine(compiled=True).run))
    if by_torch:
        chosen.append(Contender(BY_TORCH, num_threads, Engine(native=False).run))
    if num_threads > 1:
        chosen.append(Contender(ONE_THREAD, 1, engine.run))
    return chosen


@frozen
class Results:
    """What a workload took: every contender's first round, the medians of the others, and its tokens."""

    workload: Workload
    num_rounds: int
    first: Mapping[str, Timing]
    medians: Mapping[str, Timing]
    tokens: Mapping[str, Tokens]

    def speed(self, name: str) -> float:
        """Output tokens a second on the wall."""
        return self.workload.num_outputs / self.medians[name].wall

    def ratio(self, name: str, peer: str = "generate") -> float:
        """How many times as fast as a peer, on the wall."""
        return self.medians[peer].wall / self.medians[name].wall

    def processor_ratio(self, name: str, peer: str = "generate") -> float:
        """The same in time of the processor, which others on the machine disturb less."""
        return self.medians[peer].processor / self.medians[name].processor

    def agreement(self) -> str:
        """How many requests got the very same tokens from the engine and from its peers."""
        ours, parts = self.tokens["twostroke"], list[str]()
        for name in self.tokens.keys() - {"twostroke", ONE_THREAD}:
            same = sum(mine == theirs for mine, theirs in zip(ours, self.tokens[name], strict=True))
            parts.append(f"{same} of {len(ours)} requests equal to {name}")
        return "; ".join(sorted(parts))


def measure(workload: Workload, chosen: Sequence[Contender], repeats: int) -> Results:
    """Rounds of all contenders, the first one uncounted."""
    timings: dict[str, list[Timing]] = {contender.name: [] for contender in chosen}
    tokens: dict[str, Tokens] = {}
    for _ in range(repeats + 1):
        for contender in chosen:
            torch.set_num_threads(contender.num_threads)
            served: list[object] = []
            timing = Timing.of(lambda contender=contender, served=served: served.append(contender.serve(workload)))
            timings[contender.name].append(timing)
            if isinstance(served[0], list):
                tokens[contender.name] = served[0]
    medians = {
        name: Timing(median(run.wall for run in runs[1:]), median(run.processor for run in runs[1:]))
        for name, runs in timings.items()
    }
    return Results(workload, repeats, {name: runs[0] for name, runs in timings.items()}, medians, tokens)


def report(results: Results) -> None:
    """Print the table of a workload."""
    workload, medians = results.workload, results.medians
    print(
        f"\n{workload.name}: {len(workload.prompts)} requests, {sum(map(len, workload.prompts))} prompt tokens, "
        f"{workload.num_outputs} outputs; medians of {results.num_rounds}"
    )
    print(f"{'':24}{'tokens/s':>10}{'ratio':>8}{'tokens/CPU s':>14}{'ratio':>8}")
    for name, timing in medians.items():
        print(
            f"{name:24}{results.speed(name):10.1f}{results.ratio(name):8.2f}"
            f"{workload.num_outputs / timing.processor:14.1f}{results.processor_ratio(name):8.2f}"
        )
    print(
        f"twostroke takes {results.ratio('linear layers alone', 'twostroke'):.2f} times as long as its linear layers "
        f"alone ({results.processor_ratio('linear layers alone', 'twostroke'):.2f} in CPU time)"
    )
    if COMPILED in medians:
        print(
            f"compiled it is {results.ratio(COMPILED, 'twostroke'):.2f} times as fast "
            f"({results.processor_ratio(COMPILED, 'twostroke'):.2f} in CPU time); its compilation took "
            f"{results.first[COMPILED].wall - medians[COMPILED].wall:.1f} s of the first round"
        )
    if BY_TORCH in medians:
        print(
            f"its native kernels make it {results.ratio('twostroke', BY_TORCH):.2f} times as fast as torch's "
            f"({results.processor_ratio('twostroke', BY_TORCH):.2f} in CPU time)"
        )
    if ONE_THREAD in medians:
        print(f"and is {results.ratio('twostroke', ONE_THREAD):.2f} times as fast as with one thread")
    print(results.agreement())


def workloads(*, quick: bool) -> tuple[Workload, ...]:
    """The batch and the single stream."""
    if quick:
        return (
            Workload.random("offline", 8, (16, 64), (8, 16)),
            Workload.random("single stream", 1, (32, 32), (16, 16)),
        )
    return (
        Workload.random("offline", 32, (16, 128), (16, 64)),
        Workload.random("single stream", 1, (32, 32), (64, 64)),
    )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Offline throughput and a single stream on a CPU.")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds")
    parser.add_argument("--quick", action="store_true", help="a small workload, one round, no continuous batching")
    parser.add_argument("--compile", action="store_true", help="the engine with compile=True as well")
    parser.add_argument("--torch", action="store_true", help="the engine with native=False as well")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {chosen.threads} of {os.cpu_count()} "
        f"cores, load before {os.getloadavg()[0]:.1f}"
    )
    everyone = contenders(
        chosen.threads, with_continuous=not chosen.quick, with_compiled=chosen.compile, by_torch=chosen.torch
    )
    for workload in workloads(quick=chosen.quick):
        report(measure(workload, everyone, 1 if chosen.quick else chosen.repeats))


if __name__ == "__main__":
    main()
