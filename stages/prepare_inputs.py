"""Turn the batch into token-level inputs in the fixed buffers, in one vectorised pass."""

from __future__ import annotations

import numpy as np
import torch

from .input_buffers import LOGITS_INDICES, POSITIONS, QUERY_START_LOC, SEQ_LENS, TOKEN_INDEX, InputBuffers
from .records import Batch, IntArray, PreparedInputs, PromptSpan
from .request_table import RequestTable


class PrepareInputs:
    """Ids, positions, offsets and lengths, and which tokens need logits.

    A request samples when its last known token is scheduled: a prompt chunk that is not the last one gets no logits,
    unless its prompt's log probabilities are wanted.
    """

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._table = table
        self._buffers = buffers
        self._counting: IntArray = np.arange(max(buffers.max_tokens, buffers.max_reqs) + 1)

    def __call__(self, batch: Batch) -> PreparedInputs:
        """Fill the buffers and say where the logits of this step come from."""
        table, buffers = self._table, self._buffers
        buffers.begin_step()
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        scheduled, computed = batch.num_scheduled_tokens, batch.num_computed_tokens
        seq_lens = computed + scheduled
        if num_tokens == num_reqs:  # as below, for one token each
            ends, rows, positions = self._counting[1 : num_reqs + 1], batch.rows, computed
        else:
            ends = scheduled.cumsum()
            requests = self._counting[:num_reqs].repeat(scheduled)
            rows = batch.rows[requests]
            positions = self._counting[:num_tokens] + (seq_lens - ends)[requests]

        # Never above for a request; the null row of a dummy run knows no tokens and so counts as sampling.
        sampling_reqs = (seq_lens >= table.num_tokens[batch.rows]).nonzero()[0]
        logits_indices = ends[sampling_reqs] - 1
        sampling_logits = self._counting[: len(sampling_reqs)]
        spans: tuple[PromptSpan, ...] = ()
        if table.owes_prompt_logprobs[batch.rows].any():
            logits_indices, sampling_logits, spans = self._with_prompt_spans(batch, ends, logits_indices)

        tokens, requests_array = buffers.tokens.array, buffers.requests.array
        tokens[:, num_tokens:] = 0
        tokens[POSITIONS, :num_tokens] = positions
        tokens[TOKEN_INDEX, :num_tokens] = rows * table.token_ids.shape[1] + positions
        tokens[LOGITS_INDICES, : len(logits_indices)] = logits_indices
        tokens[LOGITS_INDICES, len(logits_indices) : num_tokens] = 0
        requests_array[QUERY_START_LOC, 0] = 0
        requests_array[QUERY_START_LOC, 1 : num_reqs + 1] = ends
        requests_array[QUERY_START_LOC, num_reqs + 1 :] = num_tokens
        requests_array[SEQ_LENS, :num_reqs] = seq_lens
        requests_array[SEQ_LENS, num_reqs:] = 0
        buffers.tokens.flush()
        buffers.requests.flush()
        # Gathered on the device: the latest tokens may not have reached the host.
        input_ids = buffers.input_ids[:num_tokens]
        torch.index_select(table.token_ids.view(-1), 0, buffers.token_index[:num_tokens], out=input_ids)
        buffers.input_ids[num_tokens:].zero_()

        max_query_len = 1 if num_tokens == num_reqs else int(scheduled.max(initial=0))
        return PreparedInputs(
            input_ids=input_ids,
            positions=buffers.positions[:num_tokens],
            query_start_loc=buffers.query_start_loc[: num_reqs + 1],
            seq_lens=buffers.seq_lens[:num_reqs],
            logits_indices=buffers.logits_indices[: len(logits_indices)],
            query_start_loc_host=requests_array[QUERY_START_LOC, : num_reqs + 1],
            seq_lens_host=requests_array[SEQ_LENS, :num_reqs],
            token_rows=rows,
            logits_indices_host=logits_indices,
            sampling_reqs=sampling_reqs,
            sampling_logits=sampling_logits,
            prompt_spans=spans,
            max_query_len=max_query_len,
            max_seq_len=int(seq_lens.max(initial=0)),
            is_uniform_decode=max_query_len == 1,
        )

    def _with_prompt_spans(
        self, batch: Batch, ends: IntArray, sampling_tokens: IntArray
    ) -> tuple[IntArray, IntArray, tuple[PromptSpan, ...]]:
        """Logits indices that also cover wanted prompt positions, where sampling finds its rows, and the spans."""
        table = self._table
        wanted: list[tuple[int, int, int, int]] = []
        for index in np.flatnonzero(table.owes_prompt_logprobs[batch.rows]).tolist():
            collected = table.records[batch.req_ids[index]].prompt_logprobs
            assert collected is not None, f"row of {batch.req_ids[index]!r} owes prompt logprobs that it never wanted"
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
