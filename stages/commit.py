"""Make the sampled tokens known, and launch their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..fsm import Transaction
from ..fsm.errors import TwoStrokeError
from .io import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from .records import Batch, IntArray, PreparedInputs, PromptSpan, SamplerOutput
from .request_table import LateTokens, RequestRecord, RequestTable
from .step_output import SampledDownload, SampledOnHost, StepOutput, are_in_vocabulary

TokenStore = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""``store(table, index, token_ids, vocab_size)`` is ``table[index] = token_ids``, ids kept inside the vocabulary."""


def store_tokens(table: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> None:
    """The same in torch; ``table`` is int32 and flat, ``index`` and ``token_ids`` int64 ``[n]``."""
    table.index_copy_(0, index, token_ids.clamp(0, vocab_size - 1).to(table.dtype))


class SampledTokensMismatch(TwoStrokeError, ValueError):
    """A sampler that gave another number of tokens than there are requests, or no int64. Nothing was written."""


class Commit:
    """Last stage of a step: writes each sampled token behind the request's known tokens, as an absolute value.

    The tokens stay on the device, where the next step finds them; what the host is told follows in an output that can
    be waited for. A sampled id outside the vocabulary (a replaced sampler can return anything) fails its request.
    """

    def __init__(
        self,
        table: RequestTable,
        vocab_size: int,
        on_error: Callable[[BaseException], None],
        store: TokenStore = store_tokens,
    ) -> None:
        """``on_error`` hears of an error that surfaces while an output is waited for: the runner is at fault then.

        ``store`` writes tokens on the device, where that is not the host.
        """
        self._table = table
        self._store = store
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._flat_tokens = table.token_ids.view(-1)
        self._flat_tokens_host = table.token_ids_host.reshape(-1)
        self._inputs: PreparedInputs | None = None
        self._places: IntArray | None = None
        self._one = np.ones((), dtype=np.int64)  # numpy takes as long to make it of an integer as to add it
        self._put = self._put_on_host if table.device.shares_host_memory else self._put_on_device
        self._req_ids: Sequence[str] = ()
        self._index: dict[str, int] = {}

    def __call__(
        self, output: SamplerOutput, batch: Batch, inputs: PreparedInputs, transaction: Transaction
    ) -> AsyncModelRunnerOutput:
        """The step's output, parallel to ``batch.req_ids``, on its way."""
        table, sampling = self._table, inputs.sampling_reqs
        is_all = len(sampling) == len(batch.req_ids)
        rows = batch.rows if is_all else batch.rows[sampling]
        tokens = output.sampled_token_ids
        if tokens.shape != (len(rows),) or tokens.dtype is not torch.int64:
            raise SampledTokensMismatch(
                f"the sampler gave {tokens.dtype} tokens of shape {tuple(tokens.shape)} for {len(rows)} requests; "
                "give one int64 for each of sampling_reqs, in their order"
            )
        counts = table.num_tokens[rows]
        transaction.on_undo(table.num_tokens.__setitem__, rows, counts)
        # Ids are kept inside the vocabulary: the next step looks them up before the host has seen them.
        are_checked = self._put(inputs, rows, counts, tokens)
        table.num_tokens[rows] = np.add(counts, self._one)
        late = None if table.device.shares_host_memory else self._late(batch, None if is_all else sampling, counts)
        scored = (
            [self._advance(span, batch, transaction) for span in inputs.prompt_spans] if inputs.prompt_spans else ()
        )
        index = self._index_of(batch)

        def build(download: SampledDownload) -> ModelRunnerOutput:
            req_ids = batch.req_ids if is_all else [batch.req_ids[position] for position in _listed(sampling)]
            sampled = download.wait(req_ids, self._vocab_size, are_checked)
            if late is not None:
                table.settle_tokens(late, sampled.token_ids, self._vocab_size)
            return _model_runner_output(batch, index, None if is_all else sampling, sampled, _deliver(scored, sampled))

        latest = table.latest_output
        previous = latest if latest is not None and latest.is_pending else None
        step_output = StepOutput(SampledDownload.launch(output, table.device), build, previous, self._on_error)
        transaction.on_undo(setattr, table, "latest_output", latest)
        table.latest_output = step_output
        return step_output

    def _late(self, batch: Batch, sampling: IntArray | None, counts: IntArray) -> LateTokens:
        """Where tokens belong whose values are known to the device alone; ``sampling`` None if all requests sample."""
        table = self._table
        if sampling is None:
            rows, records = batch.rows, table.records_of(batch.req_ids, batch.rows)
        else:
            rows = batch.rows[sampling]
            records = [table.records[batch.req_ids[position]] for position in _listed(sampling)]
        return LateTokens(records, rows, table.generations[rows], counts)

    def _put_on_host(self, inputs: PreparedInputs, rows: IntArray, counts: IntArray, token_ids: torch.Tensor) -> bool:
        """By numpy: a fifth of the time of torch calls for few tokens. Whether all ids are known to be in order."""
        ids = token_ids.numpy()
        are_in_order = are_in_vocabulary(ids, self._vocab_size)
        if not are_in_order:
            ids = ids.clip(0, self._vocab_size - 1)
        if inputs is not self._inputs:  # steps of a run share them
            self._inputs = inputs
            self._places = None if inputs.sampled_index is None else inputs.sampled_index.numpy()
        if self._places is None:
            self._table.token_ids_host[rows, counts] = ids
        else:
            self._flat_tokens_host.put(self._places, ids)
        return are_in_order

    def _put_on_device(self, inputs: PreparedInputs, rows: IntArray, counts: IntArray, token_ids: torch.Tensor) -> bool:
        index = inputs.sampled_index
        if index is None:  # inputs of a stage that does not say
            places = torch.from_numpy(rows * self._table.token_ids.shape[1] + counts)
            index = places.to(token_ids.device, non_blocking=True)
        self._store(self._flat_tokens, index, token_ids, self._vocab_size)
        return False

    def _index_of(self, batch: Batch) -> dict[str, int]:
        """What ``ModelRunnerOutput.req_id_to_index`` is copied from; steps with the same requests share it."""
        if batch.req_ids is not self._req_ids:
            self._index = {req_id: index for index, req_id in enumerate(batch.req_ids)}
            self._req_ids = batch.req_ids
        return self._index

    def _advance(self, span: PromptSpan, batch: Batch, transaction: Transaction) -> _Scored:
        """Book prompt positions that this step scored."""
        table, req_id = self._table, batch.req_ids[span.batch_index]
        row, record = batch.rows[span.batch_index], table.records[req_id]
        collected = record.prompt_logprobs
        assert collected is not None, f"request {req_id!r} has a prompt span but wants no prompt logprobs"
        transaction.on_undo(collected.restore, collected.num_done, collected.is_delivered)
        transaction.on_undo(table.owes_prompt_logprobs.__setitem__, row, True)
        collected.advance(span.position + span.num_positions)
        is_whole = not collected.num_left
        collected.is_delivered = is_whole
        table.owes_prompt_logprobs[row] = not is_whole
        return span, record, is_whole


def _listed(positions: IntArray) -> list[int]:
    return positions.tolist()


_Scored = tuple[PromptSpan, RequestRecord, bool]


def _deliver(scored: Sequence[_Scored], sampled: SampledOnHost) -> dict[str, LogprobsLists | None]:
    """Put arrived rows on their requests; tables that this step completed."""
    whole: dict[str, LogprobsLists | None] = {}
    for (span, record, is_whole), rows in zip(scored, sampled.prompt_logprobs, strict=True):
        assert record.prompt_logprobs is not None, "only requests that want prompt logprobs are scored"
        record.prompt_logprobs.write(span.position, rows)
        if is_whole:
            whole[record.req_id] = record.prompt_logprobs.table()
    return whole


def _model_runner_output(
    batch: Batch,
    index: dict[str, int],
    sampling: IntArray | None,
    sampled: SampledOnHost,
    prompt_logprobs: dict[str, LogprobsLists | None],
) -> ModelRunnerOutput:
    """The output of a step, with lists of its own; ``sampling`` are the batch indices that sampled, None for all."""
    tokens: list[list[int]] = sampled.token_ids[:, None].tolist()
    if sampling is not None:
        of_sampling, tokens = tokens, [[] for _ in batch.req_ids]
        for position, token in zip(sampling.tolist(), of_sampling, strict=True):
            tokens[position] = token
    if not (sampled.errors or sampled.num_nans or sampled.logprobs is not None):
        return ModelRunnerOutput(
            req_ids=list(batch.req_ids),
            req_id_to_index=index.copy(),
            sampled_token_ids=tokens,
            prompt_logprobs_dict=prompt_logprobs,
        )
    indices = np.arange(batch.num_reqs) if sampling is None else sampling
    errors: dict[str, Exception] = {}
    for position, error in sampled.errors.items():
        failed = int(indices[position])
        tokens[failed] = []
        errors[batch.req_ids[failed]] = error
    return ModelRunnerOutput(
        req_ids=list(batch.req_ids),
        req_id_to_index=index.copy(),
        sampled_token_ids=tokens,
        logprobs=_logprobs(batch.num_reqs, indices, sampled),
        prompt_logprobs_dict=prompt_logprobs,
        num_nans_in_logits={batch.req_ids[int(indices[i])]: count for i, count in sampled.num_nans.items()},
        request_errors=errors,
    )


def _logprobs(num_reqs: int, sampling: IntArray, sampled: SampledOnHost) -> LogprobsLists | None:
    """Rows of the requests that asked and got a token, with offsets for every request of the batch."""
    rows, asked = sampled.logprobs, sampled.logprobs_reqs
    if rows is None or asked is None:
        return None
    kept = ~np.isin(asked, list(sampled.errors))
    counts = np.zeros(num_reqs + 1, dtype=np.int64)
    counts[sampling[asked[kept]] + 1] = 1
    return LogprobsLists(
        rows.logprob_token_ids[kept], rows.logprobs[kept], rows.sampled_token_ranks[kept], np.cumsum(counts).tolist()
    )
