"""Make the sampled tokens known and hand them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..fsm import Transaction
from .errors import RequestFailed
from .io import LogprobsLists, ModelRunnerOutput
from .records import Batch, IntArray, PreparedInputs, SamplerOutput
from .request_table import RequestTable


class Commit:
    """Last stage of a step: writes each sampled token behind the request's known tokens, as an absolute value.

    A sampled id outside the vocabulary (a replaced sampler can return anything) fails its request and is not stored.
    """

    def __init__(self, table: RequestTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size

    def __call__(
        self, output: SamplerOutput, batch: Batch, inputs: PreparedInputs, transaction: Transaction
    ) -> ModelRunnerOutput:
        """The step's output, parallel to ``batch.req_ids``."""
        sampling = inputs.sampling_reqs
        tokens = output.sampled_token_ids.cpu().numpy()
        errors = self._errors(output, batch, sampling, tokens)
        stored = np.ones(len(sampling), dtype=np.bool_)
        stored[list(errors)] = False
        self._store(batch.rows[sampling[stored]], tokens[stored], transaction)
        sampled: list[list[int]] = [[] for _ in batch.req_ids]
        for index, token in zip(sampling[stored].tolist(), tokens[stored].tolist(), strict=True):
            sampled[index] = [token]
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(output, batch, sampling, stored),
            prompt_logprobs_dict=self._prompt_logprobs(output, inputs, batch, transaction),
            num_nans_in_logits={batch.req_ids[int(sampling[i])]: count for i, count in output.num_nans.items()},
            request_errors={batch.req_ids[int(sampling[i])]: error for i, error in errors.items()},
        )

    def _errors(
        self, output: SamplerOutput, batch: Batch, sampling: IntArray, tokens: npt.NDArray[np.int64]
    ) -> dict[int, Exception]:
        errors = dict(output.failed)
        for position in np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size)).tolist():
            reason = f"sampled token {tokens[position]} is outside the vocabulary of {self._vocab_size}"
            errors.setdefault(position, RequestFailed(batch.req_ids[int(sampling[position])], reason))
        return errors

    def _store(self, rows: IntArray, tokens: npt.NDArray[np.int64], transaction: Transaction) -> None:
        table = self._table
        counts = table.num_tokens[rows]
        transaction.on_undo(table.num_tokens.__setitem__, rows, counts)
        table.token_ids_host[rows, counts] = tokens
        table.num_tokens[rows] = counts + 1

    def _logprobs(
        self, output: SamplerOutput, batch: Batch, sampling: IntArray, stored: npt.NDArray[np.bool_]
    ) -> LogprobsLists | None:
        """Rows of the requests that asked and whose token was stored, with offsets for every request of the batch."""
        rows, asked = output.logprobs, output.logprobs_reqs
        if rows is None or asked is None:
            return None
        kept = stored[asked]
        counts = np.zeros(batch.num_reqs + 1, dtype=np.int64)
        counts[sampling[asked[kept]] + 1] = 1
        return LogprobsLists(
            rows.logprob_token_ids[kept],
            rows.logprobs[kept],
            rows.sampled_token_ranks[kept],
            np.cumsum(counts).tolist(),
        )

    def _prompt_logprobs(
        self, output: SamplerOutput, inputs: PreparedInputs, batch: Batch, transaction: Transaction
    ) -> dict[str, LogprobsLists | None]:
        """Collect this step's rows on the requests; tables that are whole now are delivered, once."""
        table, whole = self._table, dict[str, LogprobsLists | None]()
        for span, rows in zip(inputs.prompt_spans, output.prompt_logprobs, strict=True):
            req_id, row = batch.req_ids[span.batch_index], batch.rows[span.batch_index]
            collected = table.records[req_id].prompt_logprobs
            assert collected is not None, f"request {req_id!r} has a prompt span but wants no prompt logprobs"
            transaction.on_undo(collected.restore, collected.num_done, collected.is_delivered)
            transaction.on_undo(table.owes_prompt_logprobs.__setitem__, row, True)
            collected.write(span.position, rows)
            if not collected.num_left:
                collected.is_delivered = True
                table.owes_prompt_logprobs[row] = False
                whole[req_id] = collected.table()
        return whole
