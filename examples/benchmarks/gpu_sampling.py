"""What sampling a step costs: the kernels' stage beside the torch stage, and beside FlashInfer's kernels if wanted.

    python examples/benchmarks/gpu_sampling.py [--rows 1 64 256] [--flashinfer]

Prints a line for each kind of parameters, number of rows and shape of the logits: ``zipf`` has the long tail of a
language model, ``flat`` is Gaussian, where nothing is likely. ``device_us`` adds up what runs on the GPU in a step,
``step_us`` is the time from one step to the next, with everything that the host does. ``--flashinfer`` compiles for
some minutes where its sampling kernels are not built.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from attrs import define
from twostroke.engine.cuda.sample import CudaSample
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import Batch, BatchExecutionDescriptor, CUDAGraphMode, ExecuteModelState, PreparedInputs
from twostroke.stages.sample import Sample
from twostroke.stages.sampling.columns import SamplingColumns
from twostroke.stages.sampling_params import SamplingParams

VOCAB, KNOWN = 151_936, 1000
ROWS = (1, 64, 256)
TEMPERATURE = 0.8
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": TEMPERATURE},
    "top_k 50": {"temperature": TEMPERATURE, "top_k": 50},
    "top_p 0.9": {"temperature": TEMPERATURE, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": TEMPERATURE, "top_k": 50, "top_p": 0.9},
    "edits": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": dict.fromkeys(range(10), 1.0),
        "bad_words_token_ids": [[11], [12, 13], [14, 15, 16]],
    },
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}
"""``edits`` come with a grammar's mask for each request."""


class Request(NamedTuple):
    """What a column sees of a request."""

    sampling_params: SamplingParams
    seed: int


@define(eq=False)
class History:
    """A thousand known tokens in every row."""

    token_ids: torch.Tensor
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray


class Step:
    """A decode step of ``rows`` requests with the same parameters."""

    def __init__(self, case: str, rows: int, logits: torch.Tensor) -> None:
        device, vocab, order = logits.device, logits.shape[1], np.arange(rows)
        self.columns = SamplingColumns(rows, vocab)
        for row in range(rows):
            params = SamplingParams(**CASES[case])
            self.columns.add(row, Request(params.checked_for(vocab), row))
        tokens = torch.randint(vocab, (rows, KNOWN + 1), dtype=torch.int32, device=device)
        self.history = History(tokens, np.full(rows, KNOWN), np.full(rows, KNOWN // 2))
        self.batch = Batch([str(row) for row in range(rows)], order, np.ones(rows, int), np.full(rows, KNOWN - 1), rows)
        nothing, unread = torch.empty(0, dtype=torch.int64), np.zeros(0, dtype=np.int64)
        lengths = np.full(rows, KNOWN, dtype=np.int32)
        self.inputs = PreparedInputs(
            input_ids=nothing,
            positions=nothing,
            query_start_loc=nothing,
            seq_lens=torch.from_numpy(lengths).to(device),
            logits_indices=nothing,
            query_start_loc_host=unread.astype(np.int32),
            seq_lens_host=lengths,
            token_rows=unread,
            logits_indices_host=unread,
            sampling_reqs=order,
            sampling_logits=order,
            prompt_spans=(),
            max_query_len=1,
            is_uniform_decode=True,
            is_sampled_in_order=True,
        )
        self.state = ExecuteModelState(logits)
        masks = np.full((rows, -(-vocab // 32)), -2, dtype=np.int32)  # one token in 32 is forbidden
        self.grammar = GrammarOutput(structured_output_request_ids=list(self.batch.req_ids), grammar_bitmask=masks)
        self.grammar = self.grammar if case == "edits" else None

    def kernels(self) -> Callable[[], object]:
        """The step by kernels."""
        stage = CudaSample(self.columns, self.history, self.state.logits.device)
        eager = BatchExecutionDescriptor(mode=CUDAGraphMode.NONE, num_tokens=1, num_reqs=1)
        return lambda: stage(self.batch, self.inputs, eager, self.state, self.grammar)

    def torch_calls(self) -> Callable[[], object]:
        """The step by torch calls."""
        stage = Sample(self.columns, self.history)
        return lambda: stage(self.batch, self.inputs, self.state, self.grammar)


def flashinfer_work(case: str, logits: torch.Tensor) -> Callable[[], object] | None:
    """The same choice by FlashInfer; None for what it does not do."""
    from flashinfer import sampling  # pyright: ignore[reportMissingImports]

    def probabilities() -> torch.Tensor:
        return torch.softmax(logits / TEMPERATURE, dim=-1)

    works: dict[str, Callable[[], object]] = {
        "temperature": lambda: sampling.sampling_from_logits(logits / TEMPERATURE),
        "top_k 50": lambda: sampling.top_k_sampling_from_probs(probabilities(), 50),
        "top_p 0.9": lambda: sampling.top_p_sampling_from_probs(probabilities(), 0.9),
        "top_k 50, top_p 0.9": lambda: sampling.top_k_top_p_sampling_from_logits(logits / TEMPERATURE, 50, 0.9),
    }
    return works.get(case)


def times_of(work: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds of a step, and on the device."""
    is_cuda = device.type == "cuda"

    def repeat() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if is_cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e6 / repeats

    repeat()
    times = {"step_us": round(min(repeat() for _ in range(3)), 1)}
    if is_cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            repeat()
        total = sum(event.self_device_time_total for event in profile.key_averages())
        times["device_us"] = round(total / repeats, 1)
    return times


def logits_like(shape: str, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Float32 ``[rows, vocab]``, of a language model's long tail or Gaussian."""
    noise = torch.randn(rows, vocab, device=device)
    if shape == "flat":
        return noise
    ranks = torch.rand(rows, vocab, device=device).argsort(dim=1) + 1
    return noise * 0.5 - 1.6 * ranks.float().log()


def measure(args: argparse.Namespace) -> None:
    """Print a line for each case."""
    where, repeats = torch.device(args.device), args.repeats
    for count, shape, case in itertools.product(args.rows, ("zipf", "flat"), CASES):
        logits = logits_like(shape, count, args.vocab, where)
        step, line = Step(case, count, logits), {"op": "sample", "case": case, "rows": count, "logits": shape}
        mine, other = times_of(step.kernels(), where, repeats), times_of(step.torch_calls(), where, repeats)
        line |= {"kernels": mine, "torch": other}
        for name in mine:
            line[f"kernels/torch {name}"] = round(mine[name] / other[name], 3)
        work = flashinfer_work(case, logits) if args.flashinfer else None
        if work is not None:
            line["flashinfer"] = times_of(work, where, repeats)
        print(json.dumps(line), flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--flashinfer", action="store_true")
    args = parser.parse_args()
    measure(args)


if __name__ == "__main__":
    main()
