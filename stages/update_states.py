"""Bring the request table in line with the scheduler: finished and preempted out, new and resumed in, others on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..fsm import Transaction
from .io import SchedulerOutput
from .records import Batch, IntArray
from .request_table import RequestTable
from .scheduler_checks import SchedulerOutputCheck
from .steady_steps import SteadySteps
from .step_changes import Binding, Continuation, StepLimits


class UpdateStates:
    """First stage of a step. Refuses a wrong scheduler output whole, before anything changes."""

    def __init__(self, table: RequestTable, limits: StepLimits) -> None:
        self._table = table
        self._limits = limits
        self._steady = SteadySteps(table, limits)

    def __call__(self, scheduler_output: SchedulerOutput, transaction: Transaction) -> Batch:
        """The batch: continued requests, then resumed ones, then new ones, each in the order of the scheduler's lists.

        Raises:
            InvalidSchedulerOutput: naming the request and the reason.
        """
        table = self._table
        table.recover_rows()
        table.apply_late_tokens()
        continued = self._steady.read(scheduler_output)
        if continued is not None:
            self._continue(continued, transaction)
            return self._batch(scheduler_output, continued, (), transaction)
        changes = SchedulerOutputCheck(scheduler_output, table, self._limits).changes
        for record in changes.finished:
            table.finish(record, transaction)
        for record in changes.preempted:
            table.preempt(record, transaction)
        for binding in changes.bindings:
            if binding.is_new:
                table.add(binding.record, binding.tokens, transaction)
            else:
                table.bind(binding.record, binding.tokens, transaction)
            row = table.rows[binding.record.req_id]
            table.append_blocks(row, binding.block_ids, transaction)
            table.num_computed_tokens[row] = binding.num_computed_tokens
        self._continue(changes.continued, transaction)
        batch = self._batch(scheduler_output, changes.continued, changes.bindings, transaction)
        self._steady.remember(batch.req_ids, batch.rows)
        return batch

    def _continue(self, continued: Continuation, transaction: Transaction) -> None:
        table = self._table
        for row, start, tokens in continued.tokens:
            table.set_tokens(row, start, tokens, transaction)
        for row, block_ids in continued.blocks:
            table.append_blocks(row, block_ids, transaction)
        if continued.one_block_rows is not None and continued.one_block_ids is not None:
            table.append_one_block(continued.one_block_rows, continued.one_block_ids, transaction)
        table.set_computed(continued.rows, continued.num_computed_tokens, transaction)
        table.flush()

    def _batch(
        self,
        scheduler_output: SchedulerOutput,
        continued: Continuation,
        bindings: Sequence[Binding],
        transaction: Transaction,
    ) -> Batch:
        req_ids, rows = continued.req_ids, continued.rows
        scheduled, computed = continued.num_scheduled_tokens, continued.num_computed_tokens
        if bindings:
            bound_ids = [binding.record.req_id for binding in bindings]
            req_ids = [*req_ids, *bound_ids]
            rows = _joined(rows, [self._table.rows[req_id] for req_id in bound_ids])
            counts = scheduler_output.num_scheduled_tokens
            scheduled = _joined(scheduled, [counts[req_id] for req_id in bound_ids])
            computed = _joined(computed, [binding.num_computed_tokens for binding in bindings])
        transaction.request_ids = req_ids
        total = scheduler_output.total_num_scheduled_tokens
        return Batch(req_ids, rows, scheduled, computed, total, run=continued.run)


def _joined(first: IntArray, second: list[int]) -> IntArray:
    return np.concatenate([first, np.array(second, dtype=np.int64)])
