"""Turn the batch into token-level inputs in the fixed buffers, in one vectorised pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define

from .input_buffers import (
    LOGITS_INDICES,
    POSITIONS,
    QUERY_START_LOC,
    SAMPLED_INDEX,
    SEQ_LENS,
    TOKEN_INDEX,
    InputBuffers,
    PaddedBuffer,
)
from .input_upload import InputUpload, input_upload
from .records import Batch, DecodeRun, IntArray, PreparedInputs, PromptSpan
from .request_table import RequestTable


@define(eq=False)
class _Kept:
    """What the host arrays of one slot hold: the inputs of a step of ``run``, which the next ones are made from.

    ``growing`` are the parts of them that count tokens, ``[num_reqs]`` each, and a 1 of their type: numpy takes as long
    to make that of an integer as to add it. It holds as long as ``num_fills`` of the token-level buffer stays.
    """

    run: DecodeRun
    num_steps_before: int
    num_fills: int
    inputs: PreparedInputs
    growing: tuple[tuple[npt.NDArray[Any], npt.NDArray[Any]], ...]

    @classmethod
    def of(cls, run: DecodeRun, inputs: PreparedInputs, tokens: PaddedBuffer) -> _Kept:
        """What ``inputs`` of the latest step of ``run`` show; ``tokens`` is the token-level buffer."""
        num_reqs = len(run.rows)
        counted = [tokens.array[row, :num_reqs] for row in (POSITIONS, TOKEN_INDEX, SAMPLED_INDEX)]
        growing = [(counts, np.ones((), counts.dtype)) for counts in (*counted, inputs.seq_lens_host)]
        return cls(run, run.num_steps_before, tokens.num_fills, inputs, tuple(growing))

    def grow(self) -> None:
        """Make it the inputs of the latest step of the run."""
        num_steps = self.run.num_steps_before - self.num_steps_before
        for counts, one in self.growing:
            np.add(counts, one if num_steps == 1 else num_steps, counts)
        self.num_steps_before = self.run.num_steps_before


class PrepareInputs:
    """Ids, positions, offsets and lengths, and which tokens need logits.

    A request samples when its last known token is scheduled: a prompt chunk that is not the last one gets no logits,
    unless its prompt's log probabilities are wanted.

    In a :class:`~twostroke.stages.records.DecodeRun` what counts tokens is made larger where it lies, and the record is
    that of the step before.
    """

    def __init__(
        self,
        table: RequestTable,
        buffers: InputBuffers,
        make_upload: Callable[[RequestTable, InputBuffers], InputUpload] = input_upload,
    ) -> None:
        """``make_upload`` says how the inputs get to the device."""
        self._table = table
        self._buffers = buffers
        count = max(buffers.max_tokens, buffers.max_reqs) + 1
        self._counting: IntArray = np.arange(count)
        self._offsets = self._counting[: buffers.max_reqs + 1].astype(np.int32)
        self._bring = make_upload(table, buffers)
        self._rows = self._row_starts = self._counting[:0]
        self._kept: list[_Kept | None] = [None] * buffers.depth

    def __call__(self, batch: Batch) -> PreparedInputs:
        """Fill the buffers and say where the logits of this step come from."""
        buffers, run = self._buffers, batch.latest_of_run()
        buffers.begin_step()
        slot = buffers.slot
        kept, self._kept[slot] = self._kept[slot], None  # an interrupt on the way leaves nothing that is half grown
        is_kept = kept is not None and kept.run is run and kept.num_fills == buffers.tokens.num_fills
        if kept is None or not is_kept or not self._grow(kept, batch):
            inputs = self._prepare(batch)
            owes = run is not None and self._table.owes_prompt_logprobs[batch.rows].any()
            if run is None or owes or len(inputs.sampling_reqs) < batch.num_reqs:
                return inputs
            kept = _Kept.of(run, inputs, buffers.tokens)
        self._kept[slot] = kept
        return kept.inputs

    def _grow(self, kept: _Kept, batch: Batch) -> bool:
        """Make what is kept the inputs of this step of its run; False where the step samples otherwise."""
        run = kept.run
        if self._table.num_tokens[run.rows].tobytes() != run.num_known_tokens.tobytes():
            return False
        kept.grow()
        self._bring(batch.num_tokens)
        return True

    def _prepare(self, batch: Batch) -> PreparedInputs:
        table, buffers, heads = self._table, self._buffers, self._buffers.heads
        num_reqs, num_tokens = len(batch.req_ids), batch.num_tokens
        scheduled, computed = batch.num_scheduled_tokens, batch.num_computed_tokens
        seq_lens, row_starts = computed + scheduled, self._starts_of(batch.rows)
        is_decode = num_tokens == num_reqs
        if is_decode:  # as below, for one token each
            ends, rows, positions, starts = self._counting[1 : num_reqs + 1], batch.rows, computed, row_starts
        else:
            ends = scheduled.cumsum()
            requests = self._counting[:num_reqs].repeat(scheduled)
            rows, starts = batch.rows[requests], row_starts[requests]
            positions = self._counting[:num_tokens] + (seq_lens - ends)[requests]

        # Never above for a request; the null row of a dummy run knows no tokens and so counts as sampling.
        known = table.num_tokens[batch.rows]
        sampling_reqs = (seq_lens >= known).nonzero()[0]
        num_sampling = len(sampling_reqs)
        if num_sampling == num_reqs:
            logits_indices, sampled_index = ends - 1, row_starts + known
        else:
            logits_indices, sampled_index = ends[sampling_reqs] - 1, (row_starts + known)[sampling_reqs]
        sampling_logits = self._counting[:num_sampling]
        spans: tuple[PromptSpan, ...] = ()
        if np.logical_or.reduce(table.owes_prompt_logprobs[batch.rows]):
            logits_indices, sampling_logits, spans = self._with_prompt_spans(batch, ends, logits_indices)
        num_logits = len(logits_indices)

        self._fill_tokens(positions, starts, logits_indices, sampled_index)
        self._fill_requests(ends, seq_lens, num_tokens)
        self._bring(num_tokens)

        max_query_len = 1 if is_decode else int(scheduled.max(initial=0))
        offsets_and_lengths = buffers.requests.array
        return PreparedInputs(
            input_ids=heads.input_ids.first(num_tokens),
            positions=heads.positions.first(num_tokens),
            query_start_loc=heads.query_start_loc.first(num_reqs + 1),
            seq_lens=heads.seq_lens.first(num_reqs),
            logits_indices=heads.logits_indices.first(num_logits),
            query_start_loc_host=offsets_and_lengths[QUERY_START_LOC, : num_reqs + 1],
            seq_lens_host=offsets_and_lengths[SEQ_LENS, :num_reqs],
            token_rows=rows,
            logits_indices_host=logits_indices,
            sampling_reqs=sampling_reqs,
            sampling_logits=sampling_logits,
            prompt_spans=spans,
            max_query_len=max_query_len,
            is_uniform_decode=max_query_len == 1,
            sampled_index=heads.sampled_index.first(num_sampling),
            is_sampled_in_order=not spans,
        )

    def _starts_of(self, rows: IntArray) -> IntArray:
        """Where each row begins in the flattened token table."""
        if rows is not self._rows:
            self._row_starts = rows * self._table.token_ids.shape[1]
            self._rows = rows
        return self._row_starts

    def _fill_tokens(
        self, positions: IntArray, starts: IntArray, logits_indices: IntArray, sampled_index: IntArray
    ) -> None:
        num_tokens, num_logits = len(positions), len(logits_indices)
        tokens = self._buffers.tokens.pad(num_tokens)
        tokens[POSITIONS, :num_tokens] = positions
        np.add(starts, positions, out=tokens[TOKEN_INDEX, :num_tokens])
        tokens[LOGITS_INDICES, :num_logits] = logits_indices
        tokens[LOGITS_INDICES, num_logits:num_tokens] = 0
        tokens[SAMPLED_INDEX, : len(sampled_index)] = sampled_index

    def _fill_requests(self, ends: IntArray, seq_lens: IntArray, num_tokens: int) -> None:
        num_reqs, array = len(ends), self._buffers.requests.array
        if num_reqs == num_tokens:
            np.minimum(self._offsets, num_tokens, out=array[QUERY_START_LOC])
        else:
            array[QUERY_START_LOC, 0] = 0
            array[QUERY_START_LOC, 1 : num_reqs + 1] = ends
            array[QUERY_START_LOC, num_reqs + 1 :] = num_tokens
        array[SEQ_LENS, :num_reqs] = seq_lens
        array[SEQ_LENS, num_reqs:] = 0

    def _with_prompt_spans(
        self, batch: Batch, ends: IntArray, sampling_tokens: IntArray
    ) -> tuple[IntArray, IntArray, tuple[PromptSpan, ...]]:
        """Logits indices that also cover wanted prompt positions, where sampling finds its rows, and the spans."""
        table = self._table
        wanted: list[tuple[int, int, int, int]] = []
        for index in np.flatnonzero(table.owes_prompt_logprobs[batch.rows]).tolist():
            req_id = batch.req_ids[int(index)]
            collected = table.records[req_id].prompt_logprobs
            assert collected is not None, f"row of {req_id!r} owes prompt logprobs that it never wanted"
            computed, scheduled = int(batch.num_computed_tokens[index]), int(batch.num_scheduled_tokens[index])
            start = max(computed, collected.num_done)
            count = max(min(computed + scheduled, collected.num_positions) - start, 0)
            if count or not collected.num_left:
                wanted.append((index, int(ends[index]) - scheduled + start - computed, count, start))
        pieces = [np.arange(first, first + count) for _, first, count, _ in wanted]
        logits_indices = np.unique(np.concatenate([sampling_tokens, *pieces]))
        spans = tuple(
            PromptSpan(index, int(np.searchsorted(logits_indices, first)), count, start)
            for index, first, count, start in wanted
        )
        return logits_indices, np.searchsorted(logits_indices, sampling_tokens), spans
