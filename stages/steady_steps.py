"""Recognises the step that most steps are: the requests of the step before, one token more for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import InvalidSchedulerOutput
from .io import BlockIds, CachedRequestData, SchedulerOutput
from .records import IntArray
from .request_table import RequestTable
from .step_changes import Continuation, StepLimits
from .step_reading import read_integers, read_one_block_each


class SteadySteps:
    """Reads a scheduler output that goes on with the batch it remembers, in a few comparisons of whole lists.

    It never refuses. Whatever is not plainly such a step, or not plainly right, is left to
    :class:`~twostroke.stages.scheduler_checks.SchedulerOutputCheck`, which says what is wrong with it.
    """

    def __init__(self, table: RequestTable, limits: StepLimits) -> None:
        self._table = table
        self._limits = limits
        self._ones: IntArray = np.ones(limits.max_num_seqs, dtype=np.int64)
        self._epoch = -1
        self._req_ids: list[str] = []
        self._rows = self._scheduled = self._prompts = self._ones[:0]

    def remember(self, req_ids: Sequence[str], rows: IntArray) -> None:
        """The batch of this step, by requests that are known to be distinct. Its arrays are shared by those to come."""
        self._epoch = -1  # an interrupt leaves nothing that could be taken for whole
        self._req_ids = list(req_ids)
        self._rows, self._scheduled = rows, self._ones[: len(rows)]
        self._prompts = self._table.num_prompt_tokens[rows]
        self._epoch = self._table.epoch

    def read(self, output: SchedulerOutput) -> Continuation | None:
        """What the step continues, or None if it has to be looked at closely."""
        cached = output.scheduled_cached_reqs
        if self._epoch != self._table.epoch or self._does_more(output, cached) or not self._decodes(output, cached):
            return None
        table, rows = self._table, self._rows
        try:
            computed = read_integers("num_computed_tokens", cached.num_computed_tokens)
            outputs = read_integers("num_output_tokens", cached.num_output_tokens)
        except InvalidSchedulerOutput:
            return None
        known = table.num_tokens[rows]
        if len(computed) != len(rows) or np.logical_or.reduce(computed >= known) or np.minimum.reduce(computed) < 0:
            return None
        if np.maximum.reduce(computed) >= self._limits.max_model_len:
            return None
        if len(outputs) != len(rows):
            if len(outputs):
                return None
        elif np.logical_or.reduce(self._prompts + outputs != known):
            return None
        return self._with_blocks(cached.new_block_ids, computed)

    def _does_more(self, output: SchedulerOutput, cached: CachedRequestData) -> bool:
        """Whether the step says anything that a decode of the same requests does not."""
        return bool(
            output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.scheduled_spec_decode_tokens
            or output.scheduled_encoder_inputs
            or output.kv_connector_metadata is not None
            or cached.resumed_req_ids
            or cached.all_token_ids
            or len(cached.new_token_ids)
        )

    def _decodes(self, output: SchedulerOutput, cached: CachedRequestData) -> bool:
        """Whether exactly the requests remembered are scheduled, in their order, with one token each."""
        counts, expected = output.num_scheduled_tokens, self._req_ids
        num_reqs, values = len(expected), list(counts.values())
        return (
            len(values) == num_reqs > 0
            and output.total_num_scheduled_tokens == num_reqs
            and values.count(1) == num_reqs
            and type(sum(values)) is int
            and list(cached.req_ids) == expected
            and list(counts) == expected
        )

    def _with_blocks(self, new_block_ids: Sequence[BlockIds | None], computed: IntArray) -> Continuation | None:
        table, rows, index = self._table, self._rows, None
        ids: IntArray | None = None
        if len(new_block_ids) and list(new_block_ids).count(None) != len(rows):
            if len(new_block_ids) != len(rows):
                return None
            some = [(position, new) for position, new in enumerate(new_block_ids) if new is not None]
            ids = read_one_block_each([new for _, new in some], len(table.block_tables), self._limits.num_blocks)
            if ids is None:
                return None
            index = np.array([position for position, _ in some])
        for block_table in table.block_tables:
            held = block_table.counts[rows]
            if index is not None:
                held[index] += 1
                if int(held.max()) > block_table.max_blocks:
                    return None
            if np.logical_or.reduce(held * block_table.block_size <= computed):
                return None
        one_block_rows = None if index is None else rows[index]
        return Continuation(self._req_ids, rows, self._scheduled, computed, (), (), one_block_rows, ids)
