"""Requests with random sampling parameters, sampled by the torch stage on a CPU and by the kernels of a GPU's path."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from twostroke.engine.cuda.sample import CudaSample
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import (
    Batch,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ExecuteModelState,
    LogprobsTensors,
    PreparedInputs,
    SamplerOutput,
)
from twostroke.stages.sample import Sample
from twostroke.stages.sampling.columns import SamplingColumns
from twostroke.stages.sampling_params import SamplingParams

EAGER = BatchExecutionDescriptor(mode=CUDAGraphMode.NONE, num_tokens=1, num_reqs=1)


@frozen
class Request:
    """What a column sees of a request."""

    sampling_params: SamplingParams
    seed: int


@define
class History:
    """Known tokens of every row; what lies behind the last of a row is out of the vocabulary."""

    token_ids: torch.Tensor
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray


class SamplingWorld:
    """A batch of requests in scattered rows, with histories as they are in the middle of generation."""

    def __init__(
        self, params: Sequence[SamplingParams], vocab: int, device: str = "cpu", seed: int = 0, longest: int = 35
    ) -> None:
        """``longest`` is the most tokens that a request knows."""
        chooser, count, num_rows = random.Random(seed), len(params), 2 * len(params) + 1
        self.vocab, self.device = vocab, torch.device(device)
        self.columns = SamplingColumns(num_rows, vocab)
        self.history = History(
            torch.full((num_rows, longest + 50), 2**30, dtype=torch.int32), *np.zeros((2, num_rows), int)
        )
        self.rows = np.array(chooser.sample(range(1, num_rows), count))
        for row, one in zip(self.rows.tolist(), params, strict=True):
            self.columns.add(row, Request(one.checked_for(vocab), chooser.getrandbits(64)))
            length = chooser.randint(longest // 16, longest)
            self.history.num_tokens[row], self.history.num_prompt_tokens[row] = length, chooser.randint(1, length)
            # Of few kinds, so that some come again and some complete a bad word.
            tokens = chooser.choices(range(min(vocab, 6)), k=length)
            self.history.token_ids[row, :length] = torch.tensor(tokens, dtype=torch.int32)
        on_device = History(
            self.history.token_ids.to(self.device), self.history.num_tokens, self.history.num_prompt_tokens
        )
        self.device_history = on_device
        self.general = Sample(self.columns, self.history)
        self.fused = CudaSample(self.columns, on_device, self.device)
        self.batch = Batch(
            req_ids=[f"r{index}" for index in range(count)],
            rows=self.rows,
            num_scheduled_tokens=np.ones(count, dtype=np.int64),
            num_computed_tokens=self.history.num_tokens[self.rows] - 1,
            num_tokens=count,
        )

    def append(self, tokens: Sequence[int]) -> None:
        """A token more for each request, also where the device keeps them."""
        for row, token in zip(self.rows.tolist(), tokens, strict=True):
            place = int(self.history.num_tokens[row])
            self.history.token_ids[row, place] = token
            self.device_history.token_ids[row, place] = token
            self.history.num_tokens[row] = place + 1

    def inputs(self, sampling: Sequence[int] | None = None, device: torch.device | None = None) -> PreparedInputs:
        """Inputs of a step; ``sampling`` are the batch indices that sample, whose logits are the rows of these."""
        reqs = np.arange(len(self.rows)) if sampling is None else np.array(sampling)
        lengths, nothing = self.history.num_tokens[self.rows].astype(np.int32), torch.empty(0, dtype=torch.int64)
        unread: Any = np.zeros(0, dtype=np.int64)
        return PreparedInputs(
            input_ids=nothing,
            positions=nothing,
            query_start_loc=nothing,
            seq_lens=torch.from_numpy(lengths).to(device or "cpu"),
            logits_indices=nothing,
            query_start_loc_host=unread,
            seq_lens_host=lengths,
            token_rows=unread,
            logits_indices_host=unread,
            sampling_reqs=reqs,
            sampling_logits=reqs,
            prompt_spans=(),
            max_query_len=1,
            is_uniform_decode=True,
        )

    def compare(
        self, logits: torch.Tensor, grammar: GrammarOutput | None = None, sampling: Sequence[int] | None = None
    ) -> SamplerOutput:
        """Sample with both, from logits on the CPU; they must agree. What the kernels gave, on the CPU."""
        given = logits.to(self.device)
        wanted = self.general(self.batch, self.inputs(sampling), ExecuteModelState(logits), grammar)
        inputs = self.inputs(sampling, self.device)
        got = on_cpu(self.fused(self.batch, inputs, EAGER, ExecuteModelState(given), grammar))
        assert torch.equal(given.cpu().nan_to_num(7), logits.nan_to_num(7)), "logits were written"
        # torch adds up a large vocabulary on a CPU in float32, one after the other: that is what is inexact then.
        atol = 2e-5 if self.vocab < 10_000 else 2e-4
        assert_sampled_alike(got, wanted, 0 if self.device.type == "cpu" else 2, atol)
        return got


def on_cpu(output: SamplerOutput) -> SamplerOutput:
    """An output whose tensors are on the CPU."""

    def table(logprobs: LogprobsTensors) -> LogprobsTensors:
        return LogprobsTensors(*(column.cpu() for column in logprobs))

    return SamplerOutput(
        output.sampled_token_ids.cpu(),
        health=None if output.health is None else output.health.cpu(),
        logprobs=None if output.logprobs is None else table(output.logprobs),
        logprobs_reqs=output.logprobs_reqs,
        num_logprobs=output.num_logprobs,
        prompt_logprobs=tuple(map(table, output.prompt_logprobs)),
    )


def assert_sampled_alike(got: SamplerOutput, wanted: SamplerOutput, rank_slack: int = 0, atol: float = 2e-5) -> None:
    """Equal tokens, health and log probabilities; of rows that cannot be sampled from, only the health is compared."""
    healthy = torch.zeros_like(wanted.sampled_token_ids)
    health = healthy if wanted.health is None else wanted.health
    assert torch.equal(healthy if got.health is None else got.health, health)
    well = health == 0
    assert got.sampled_token_ids[well].tolist() == wanted.sampled_token_ids[well].tolist()
    for name in ("logprobs_reqs", "num_logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
    if wanted.logprobs is not None:
        assert got.logprobs is not None
        asked = well[torch.from_numpy(wanted.logprobs_reqs)]
        assert_scored_alike(got.logprobs, wanted.logprobs, asked, rank_slack, atol)
    for mine, other in zip(got.prompt_logprobs, wanted.prompt_logprobs, strict=True):
        assert_scored_alike(mine, other, torch.ones(len(other.ranks), dtype=torch.bool), rank_slack, atol)


def assert_scored_alike(
    got: LogprobsTensors, wanted: LogprobsTensors, asked: torch.Tensor, rank_slack: int = 0, atol: float = 2e-5
) -> None:
    """Equal ids, close log probabilities, of the rows that ``asked`` (bool) says.

    Ranks may be ``rank_slack`` apart: what rounds to one log probability on a CPU may not do so on a GPU.
    """
    assert torch.equal(got.token_ids[asked], wanted.token_ids[asked])
    assert ((got.ranks[asked] - wanted.ranks[asked]).abs() <= rank_slack).all()
    torch.testing.assert_close(got.logprobs[asked], wanted.logprobs[asked], atol=atol, rtol=1e-5)


def some_params(chooser: random.Random, vocab: int) -> SamplingParams:
    """Parameters that use each feature now and then, ids among them also twice."""

    def sometimes(share: float, **values: Any) -> dict[str, Any]:
        return values if chooser.random() < share else {}

    def ids(count: int) -> list[int]:
        return [chooser.randrange(min(vocab, 6) if chooser.random() < 0.5 else vocab) for _ in range(count)]

    biases = (5.0, -5.0, -math.inf, 1e39, 0.25)
    options: dict[str, Any] = {"temperature": chooser.choice([0.0, 0.0, 0.3, 1.0, 2.0])}
    options |= sometimes(0.4, top_k=chooser.choice([1, 2, 7, vocab]))
    options |= sometimes(0.4, top_p=chooser.choice([1e-6, 0.5, 0.95, 1 - 1e-9]))
    options |= sometimes(0.3, min_p=chooser.choice([0.01, 0.3, 1.0]))
    options |= sometimes(0.2, repetition_penalty=chooser.choice([0.7, 1.3]))
    options |= sometimes(0.2, frequency_penalty=chooser.choice([-0.5, 0.4]), presence_penalty=0.3)
    options |= sometimes(0.3, logit_bias={token: chooser.choice(biases) for token in ids(4)})
    options |= sometimes(0.3, bad_words_token_ids=[ids(chooser.randint(1, 3)) for _ in range(5)])
    options |= sometimes(0.3, allowed_token_ids=ids(max(vocab // 2, 1)))
    options |= sometimes(0.3, min_tokens=chooser.randint(1, 16), stop_token_ids=ids(3), eos_token_ids=[vocab + 2])
    options |= sometimes(0.4, logprobs=chooser.choice([0, 1, min(5, vocab), -1 if vocab <= 64 else 3]))
    return SamplingParams(**options)


def some_logits(chooser: random.Random, num_rows: int, vocab: int) -> torch.Tensor:
    """Logits as models give them, and now and then with equal, infinite, huge or missing ones."""
    generator = torch.Generator().manual_seed(chooser.getrandbits(32))
    logits = torch.randn(num_rows, vocab, generator=generator) * chooser.choice([0.3, 1.0, 4.0])
    row = chooser.randrange(num_rows)
    kind = chooser.choice(["plain", "plain", "plain", "tied", "half", "inf", "huge", "nan", "nothing"])
    if kind == "tied":
        logits = logits.round()
    elif kind == "half":
        logits = logits.to(torch.bfloat16).float()
    elif kind == "inf":
        logits[row, ::3] = torch.inf
    elif kind == "huge":
        logits[row] *= 1e30
    elif kind == "nan":
        logits[row, -1] = torch.nan
    elif kind == "nothing":
        logits[row] = -torch.inf
    return logits


def some_grammar(chooser: random.Random, vocab: int, req_ids: Sequence[str]) -> GrammarOutput | None:
    """Masks of some requests that forbid about half of the vocabulary, or None."""
    constrained = [req_id for req_id in req_ids if chooser.random() < 0.4]
    if not constrained or chooser.random() < 0.5:
        return None
    shape = (len(constrained), -(-vocab // 32))
    masks = np.random.default_rng(chooser.getrandbits(32)).integers(-(2**31), 2**31, shape, dtype=np.int32)
    return GrammarOutput(structured_output_request_ids=constrained, grammar_bitmask=masks)
