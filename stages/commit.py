"""Make the sampled tokens known, and launch their way to the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..fsm import Transaction
from .io import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from .records import Batch, IntArray, PreparedInputs, PromptSpan, SamplerOutput
from .request_table import LateTokens, RequestRecord, RequestTable
from .step_output import SampledDownload, SampledOnHost, StepOutput


class Commit:
    """Last stage of a step: writes each sampled token behind the request's known tokens, as an absolute value.

    The tokens stay on the device, where the next step finds them; what the host is told follows in an output that can
    be waited for. A sampled id outside the vocabulary (a replaced sampler can return anything) fails its request.
    """

    def __init__(self, table: RequestTable, vocab_size: int, on_error: Callable[[BaseException], None]) -> None:
        """``on_error`` hears of an error that surfaces while an output is waited for: the runner is at fault then."""
        self._table = table
        self._vocab_size = vocab_size
        self._on_error = on_error

    def __call__(
        self, output: SamplerOutput, batch: Batch, inputs: PreparedInputs, transaction: Transaction
    ) -> AsyncModelRunnerOutput:
        """The step's output, parallel to ``batch.req_ids``, on its way."""
        table, sampling = self._table, inputs.sampling_reqs
        rows = batch.rows[sampling]
        counts = table.num_tokens[rows]
        transaction.on_undo(table.num_tokens.__setitem__, rows, counts)
        self._store(rows, counts, output.sampled_token_ids)
        table.num_tokens[rows] = counts + 1
        records = [table.records[batch.req_ids[int(index)]] for index in sampling]
        late = LateTokens(records, rows, table.generations[rows], counts)
        scored = [self._advance(span, batch, transaction) for span in inputs.prompt_spans]

        def build(download: SampledDownload) -> ModelRunnerOutput:
            sampled = download.wait([record.req_id for record in records], self._vocab_size)
            table.settle_tokens(late, np.clip(sampled.token_ids, 0, self._vocab_size - 1))  # as on the device
            return _model_runner_output(batch, sampling, sampled, _deliver(scored, sampled))

        step_output = StepOutput(
            SampledDownload.launch(output, table.device), build, table.latest_output, self._on_error
        )
        transaction.on_undo(setattr, table, "latest_output", table.latest_output)
        table.latest_output = step_output
        return step_output

    def _store(self, rows: IntArray, counts: IntArray, token_ids: torch.Tensor) -> None:
        """Write on the device. Ids are kept inside the vocabulary there: the next step looks them up before we do."""
        table = self._table
        index = torch.from_numpy(rows * table.token_ids.shape[1] + counts).to(token_ids.device, non_blocking=True)
        safe = token_ids.clamp(0, self._vocab_size - 1).to(table.token_ids.dtype)
        table.token_ids.view(-1).index_copy_(0, index, safe)

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


_Scored = tuple[PromptSpan, RequestRecord, bool]


def _deliver(scored: list[_Scored], sampled: SampledOnHost) -> dict[str, LogprobsLists | None]:
    """Put arrived rows on their requests; tables that this step completed."""
    whole: dict[str, LogprobsLists | None] = {}
    for (span, record, is_whole), rows in zip(scored, sampled.prompt_logprobs, strict=True):
        assert record.prompt_logprobs is not None, "only requests that want prompt logprobs are scored"
        record.prompt_logprobs.write(span.position, rows)
        if is_whole:
            whole[record.req_id] = record.prompt_logprobs.table()
    return whole


def _model_runner_output(
    batch: Batch, sampling: IntArray, sampled: SampledOnHost, prompt_logprobs: dict[str, LogprobsLists | None]
) -> ModelRunnerOutput:
    tokens: list[list[int]] = [[] for _ in batch.req_ids]
    for index, token in zip(sampling.tolist(), sampled.token_ids.tolist(), strict=True):
        tokens[index] = [token]
    errors: dict[str, Exception] = {}
    for position, error in sampled.errors.items():
        index = int(sampling[position])
        tokens[index] = []
        errors[batch.req_ids[index]] = error
    return ModelRunnerOutput(
        req_ids=batch.req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(batch.req_ids)},
        sampled_token_ids=tokens,
        logprobs=_logprobs(batch.num_reqs, sampling, sampled),
        prompt_logprobs_dict=prompt_logprobs,
        num_nans_in_logits={batch.req_ids[int(sampling[i])]: count for i, count in sampled.num_nans.items()},
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
