"""Sampling on a GPU: every request is served by kernels, and nothing waits for the device."""

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
    IntArray,
    LogprobsTensors,
    PreparedInputs,
    PromptSpan,
    SamplerOutput,
)
from ...stages.sampling.columns import LOGIT_EDITS, Feature, SamplingColumns
from ...stages.sampling.grammar import match_grammar
from ...stages.sampling.step import RowParameters, SamplingStep, TokenHistory, to_device
from ..kernels.logits_rows import LogitsRows
from ..kernels.logprobs import score_tokens
from ..kernels.sampling import DrawParams, choose_tokens
from ..kernels.truncation import Truncation, find_floors
from .graphs import CudaGraphRunner
from .sample_edits import LogitEdits

TRUNCATION = Feature.MIN_P | Feature.TOP_K | Feature.TOP_P
"""Features that draw from a part of the vocabulary."""

_TRUNCATION = int(TRUNCATION)
_DRAWN = int(Feature.RANDOM | TRUNCATION)

Chosen = tuple[torch.Tensor, torch.Tensor]


class _Captured(NamedTuple):
    """A graph that samples from logits at one address, and where it puts tokens and health."""

    graph: torch.cuda.CUDAGraph
    chosen: Chosen


class RowDraws:
    """How rows are drawn, where kernels and graphs read it: a column for each request of a step, in fixed memory."""

    def __init__(self, columns: SamplingColumns, device: torch.device) -> None:
        num_rows = len(columns.rows)
        self.order = torch.arange(num_rows, device=device)
        """Int64, the first rows of anything."""
        self._vocab_size = columns.vocab_size
        self._device = device
        self._words = torch.zeros(7, num_rows, dtype=torch.int32, device=device)

    def upload(self, parameters: RowParameters) -> None:
        """Bring temperatures, seeds and limits to the device."""
        params, flags = parameters.params, parameters.flags
        words = np.zeros((7, len(params)), dtype=np.int32)
        floats = words.view(np.float32)
        floats[0] = np.where(flags & int(Feature.RANDOM), params["temperature"], np.float32(0))
        words[1:3] = np.ascontiguousarray(params["seed"]).view(np.int32).reshape(-1, 2).T  # little-endian: low, high
        words[3] = np.where(params["top_k"] < self._vocab_size, params["top_k"], 0)
        floats[4] = params["top_p"]
        # torch's logarithm: what is as likely as the limit must be kept as the torch sampler keeps it.
        floats[5] = torch.from_numpy(params["min_p"].copy()).log().numpy()
        words[6] = flags & _TRUNCATION != 0
        self._words[:, : len(params)].copy_(to_device(words, self._device))

    def draw_params(self, count: int, positions: torch.Tensor) -> DrawParams:
        """Of the first ``count`` requests, which draw the tokens at ``positions`` (int32 ``[count]``)."""
        return DrawParams(self._words.view(torch.float32)[0, :count], self._words[1:3, :count], positions)

    def listed(self, source: LogitsRows, count: int) -> LogitsRows:
        """The same with its first ``count`` rows listed, so that fewer kinds of kernels have to be compiled."""
        return source if source.rows is not None else source._replace(rows=self.order[:count])

    def truncation(self, count: int) -> Truncation:
        """Of the first ``count`` requests."""
        words = self._words[:, :count]
        floats = words.view(torch.float32)
        return Truncation(words[3], floats[4], floats[5], words[6])


class CudaSample:
    """The sample stage; tokens are those of :class:`~twostroke.stages.sample.Sample`.

    After a forward that was one graph, sampling is a second one where no request edits its logits: it reads them where
    that graph leaves them.
    """

    def __init__(
        self, columns: SamplingColumns, table: TokenHistory, device: torch.device, graphs: CudaGraphRunner | None = None
    ) -> None:
        """``graphs`` captures; None to launch every kernel."""
        self._columns = columns
        self._table = table
        self._device = device
        self._graphs = graphs
        self._captured: dict[tuple[int, int, int, bool], _Captured] = {}
        self._generation = -1
        self._pool: Any = None
        self._parameters: RowParameters | None = None
        self._draws = RowDraws(columns, device)
        self._edits = LogitEdits(columns, table, device)

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
        matched = match_grammar(grammar, batch, inputs, state.logits.shape[1])
        prompt_logprobs = tuple(self._score_prompt(batch, span, state.logits) for span in inputs.prompt_spans)
        sampling = inputs.sampling_reqs
        count, is_all = len(sampling), len(sampling) == len(batch.req_ids)
        if not count:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return SamplerOutput(nothing, prompt_logprobs=prompt_logprobs)
        parameters = self._current(batch.rows if is_all else batch.rows[sampling])
        step = None
        if matched is not None or parameters.active & ~_DRAWN:
            step = SamplingStep.of(parameters, self._table)
        is_truncated = bool(parameters.active & _TRUNCATION)
        is_edited = matched is not None or (step is not None and step.uses(LOGIT_EDITS))
        is_first = inputs.is_sampled_in_order or np.array_equal(inputs.sampling_logits, np.arange(count))
        if is_all and is_first and not is_edited and self._graphs and execution.mode is CUDAGraphMode.FULL:
            chosen = self._replay(self._graphs, inputs, execution, state.logits, is_truncated)
        else:
            lengths = inputs.seq_lens if is_all else inputs.seq_lens[to_device(sampling, self._device)]
            source = LogitsRows(state.logits, None if is_first else to_device(inputs.sampling_logits, self._device))
            if step is not None and is_edited:
                source = self._draws.listed(source, count)
                source = source._replace(edited=self._edits.edit(source, lengths, step, matched))
            chosen = self._choose(source, self._draws.draw_params(count, lengths), is_truncated)
        tokens, health = (part[:count] for part in chosen)
        rows = None if is_first else inputs.sampling_logits
        logprobs, logprobs_reqs, num_logprobs = self._score(state.logits, rows, tokens, step)
        return SamplerOutput(
            tokens,
            health=health,
            logprobs=logprobs,
            logprobs_reqs=logprobs_reqs,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def captured(self) -> tuple[bool, ...]:
        """For each graph that there is, whether it truncates."""
        return tuple(key[-1] for key in self._captured)

    def _current(self, rows: IntArray) -> RowParameters:
        """Parameters of these rows, which the device has as well."""
        before = self._parameters
        parameters = RowParameters.read(self._columns, rows, before)
        if parameters is not before:
            self._draws.upload(parameters)
            self._parameters = parameters  # last: an interrupt before it only makes the same be uploaded again
        return parameters

    def _choose(self, source: LogitsRows, params: DrawParams, is_truncated: bool) -> Chosen:
        if not is_truncated:
            return choose_tokens(source, params)
        count = len(params.temperatures)
        source = self._draws.listed(source, count)
        return choose_tokens(source, params, find_floors(source, params.temperatures, self._draws.truncation(count)))

    def _replay(
        self,
        graphs: CudaGraphRunner,
        inputs: PreparedInputs,
        execution: BatchExecutionDescriptor,
        logits: torch.Tensor,
        is_truncated: bool,
    ) -> Chosen:
        """Sample every row of the padded batch; those behind the batch are nobody's."""
        if self._generation != graphs.generation:
            self._captured.clear()
            self._generation = graphs.generation
        count, lengths = execution.num_reqs, inputs.seq_lens
        key = logits.data_ptr(), lengths.data_ptr(), count, is_truncated
        captured = self._captured.get(key)
        if captured is None:
            if logits.storage_offset() or logits.untyped_storage().nbytes() < count * logits.stride(0) * 4:
                params = self._draws.draw_params(len(lengths), lengths)
                return self._choose(LogitsRows(logits), params, is_truncated)  # not the graph's own memory
            padded = LogitsRows(logits.as_strided((count, logits.shape[1]), logits.stride()))
            params = self._draws.draw_params(count, lengths.as_strided((count,), (1,)))
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, chosen = graphs.record(lambda: self._choose(padded, params, is_truncated), self._pool)
            assert isinstance(chosen, tuple), "sampling gives two tensors"
            captured = self._captured[key] = _Captured(graph, (chosen[0], chosen[1]))
        captured.graph.replay()
        return captured.chosen

    def _score(
        self, logits: torch.Tensor, rows: IntArray | None, tokens: torch.Tensor, step: SamplingStep | None
    ) -> tuple[LogprobsTensors | None, IntArray | None, IntArray | None]:
        """Log probabilities under raw logits, the positions of the requests that asked, and for how many each.

        ``rows`` are the rows of ``logits`` of the step's requests, None for the first ones.
        """
        if step is None or not step.uses(Feature.LOGPROBS):
            return None, None, None
        positions = step.positions_with(Feature.LOGPROBS)
        num_logprobs = step.params["num_logprobs"][positions]
        if rows is None and len(positions) == len(tokens):
            source = self._draws.listed(LogitsRows(logits), len(tokens))
        else:
            tokens = tokens[to_device(positions, self._device)]
            source = LogitsRows(logits, to_device(positions if rows is None else rows[positions], self._device))
        return score_tokens(source, tokens, int(num_logprobs.max())), positions, num_logprobs

    def _score_prompt(self, batch: Batch, span: PromptSpan, logits: torch.Tensor) -> LogprobsTensors:
        """Log probabilities of the prompt tokens that really follow each position of a span."""
        row, first, length = int(batch.rows[span.batch_index]), span.first_logit, span.num_positions
        following = self._table.token_ids[row, span.position + 1 : span.position + 1 + length].to(torch.int64)
        num_logprobs = max(int(self._columns.rows[row]["num_prompt_logprobs"]), 0)
        rows = torch.arange(first, first + length, device=self._device)
        return score_tokens(LogitsRows(logits, rows), following, num_logprobs)

    def warm_up(self) -> None:
        """Compile the kernels, so that no request waits for that."""
        device, vocab = self._device, self._columns.vocab_size
        logits, lengths = torch.zeros(2, vocab, device=device), torch.ones(2, dtype=torch.int32, device=device)
        params = self._draws.draw_params(2, lengths)
        plain, listed = LogitsRows(logits), self._draws.listed(LogitsRows(logits), 2)
        sources = [plain, listed, *(listed._replace(edited=edited) for edited in self._edits.warm_up(listed, lengths))]
        for source in sources:
            self._choose(source, params, False)
            self._choose(source, params, True)
        score_tokens(listed, self._draws.order[:2], 1)
        _ = lengths[to_device(np.zeros(1, dtype=np.int64), device)]
