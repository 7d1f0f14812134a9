"""Sampling on a GPU: one pass over the logits for steps that are greedy or tempered, the general stage for others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...stages.io import GrammarOutput
from ...stages.records import (
    Batch,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ExecuteModelState,
    PreparedInputs,
    SamplerOutput,
)
from ...stages.sample import Sample, score
from ...stages.sampling.columns import Feature, SamplingColumns
from ...stages.sampling.step import RowParameters, SamplingStep, TokenHistory, to_device
from ..kernels.sampling import DrawParams, choose_tokens
from .graphs import CudaGraphRunner

FUSED = Feature.RANDOM | Feature.LOGPROBS
"""What requests may use for the one pass to serve them."""

Chosen = tuple[torch.Tensor, torch.Tensor]


class _Captured(NamedTuple):
    """A graph that samples from logits at one address, and where it puts tokens and health."""

    graph: torch.cuda.CUDAGraph
    chosen: Chosen


class CudaSample:
    """The sample stage; tokens are those of :class:`~twostroke.stages.sample.Sample`, which takes all other steps.

    After a forward that was one graph, sampling is a second one: it reads the logits where that graph leaves them.
    """

    def __init__(
        self, columns: SamplingColumns, table: TokenHistory, device: torch.device, graphs: CudaGraphRunner | None = None
    ) -> None:
        """``graphs`` captures; None to launch every kernel."""
        self._general = Sample(columns, table)
        self._columns = columns
        self._table = table
        self._device = device
        self._graphs = graphs
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._generation = -1
        self._pool: Any = None
        self._parameters: RowParameters | None = None
        size = len(columns.rows)
        self._temperatures = torch.zeros(size, device=device)
        self._seeds = torch.zeros(2, size, dtype=torch.int32, device=device)

    def warm_up(self) -> None:
        """Compile the kernels, so that no request waits for that."""
        logits = torch.zeros(2, self._columns.vocab_size, device=self._device)
        lengths = torch.ones(3, dtype=torch.int32, device=self._device)
        for rows in (None, torch.zeros(1, dtype=torch.int64, device=self._device)):
            count = 2 if rows is None else 1
            choose_tokens(logits, self._draw_params(count, lengths[1 : 1 + count]), rows)
        _ = lengths[to_device(np.zeros(1, dtype=np.int64), self._device)]

    def __call__(
        self,
        batch: Batch,
        inputs: PreparedInputs,
        execution: BatchExecutionDescriptor,
        state: ExecuteModelState,
        grammar: GrammarOutput | None,
    ) -> SamplerOutput:
        """Sample.

        Raises:
            InvalidGrammarOutput: grammar masks that fit neither batch nor vocabulary.
        """
        sampling = inputs.sampling_reqs
        count, is_all = len(sampling), len(sampling) == len(batch.req_ids)
        if grammar is not None or inputs.prompt_spans or not count:
            return self._general(batch, inputs, state, grammar)
        before = self._parameters
        rows = batch.rows if is_all else batch.rows[sampling]
        parameters = RowParameters.read(self._columns, rows, before)
        if parameters.active & ~int(FUSED):
            return self._general(batch, inputs, state, grammar)
        if parameters is not before:
            self._upload(parameters)
            self._parameters = parameters  # last: an interrupt before it only makes the same be uploaded again
        if is_all and self._graphs is not None and execution.mode is CUDAGraphMode.FULL:
            chosen = self._replay(self._graphs, inputs, execution, state.logits)
        elif is_all:
            chosen = choose_tokens(state.logits, self._draw_params(count, inputs.seq_lens))
        else:
            lengths = inputs.seq_lens[to_device(sampling, self._device)]
            wanted = to_device(inputs.sampling_logits, self._device)
            chosen = choose_tokens(state.logits, self._draw_params(count, lengths), wanted)
        tokens, health = (part[:count] for part in chosen)
        if not parameters.active & int(Feature.LOGPROBS):
            return SamplerOutput(tokens, health=health)
        raw = state.logits[:count] if is_all else state.logits[to_device(inputs.sampling_logits, self._device)]
        logprobs, logprobs_reqs, num_logprobs = score(raw, tokens, SamplingStep.of(parameters, self._table))
        return SamplerOutput(
            tokens, health=health, logprobs=logprobs, logprobs_reqs=logprobs_reqs, num_logprobs=num_logprobs
        )

    def _replay(
        self,
        graphs: CudaGraphRunner,
        inputs: PreparedInputs,
        execution: BatchExecutionDescriptor,
        logits: torch.Tensor,
    ) -> Chosen:
        """Sample every row of the padded batch; those behind the batch are nobody's."""
        if self._generation != graphs.generation:
            self._captured.clear()
            self._generation = graphs.generation
        count, lengths = execution.num_reqs, inputs.seq_lens
        key = logits.data_ptr(), lengths.data_ptr(), count
        captured = self._captured.get(key)
        if captured is None:
            if logits.storage_offset() or logits.untyped_storage().nbytes() < count * logits.stride(0) * 4:
                return choose_tokens(logits, self._draw_params(len(lengths), lengths))  # not the graph's own memory
            padded = logits.as_strided((count, logits.shape[1]), logits.stride())
            params = self._draw_params(count, lengths.as_strided((count,), (1,)))
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, chosen = graphs.record(lambda: choose_tokens(padded, params), self._pool)
            assert isinstance(chosen, tuple), "sampling gives two tensors"
            captured = self._captured[key] = _Captured(graph, (chosen[0], chosen[1]))
        captured.graph.replay()
        return captured.chosen

    def _draw_params(self, count: int, positions: torch.Tensor) -> DrawParams:
        return DrawParams(self._temperatures[:count], self._seeds[:, :count], positions)

    def _upload(self, parameters: RowParameters) -> None:
        """Bring temperatures and seeds to where kernels and graphs read them."""
        params, count = parameters.params, len(parameters.params)
        is_random = (params["flags"] & int(Feature.RANDOM)) > 0
        temperatures = np.where(is_random, params["temperature"], np.float32(0))
        seeds = np.ascontiguousarray(params["seed"]).view(np.int32).reshape(-1, 2).T  # little-endian: low, high
        self._temperatures[:count].copy_(to_device(temperatures, self._device))
        self._seeds[:, :count].copy_(to_device(seeds, self._device))
