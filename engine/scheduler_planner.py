"""Fills a step: who gets how many tokens, who gets blocks, who has to give way."""

from __future__ import annotations

from .request_queue import RequestQueues
from .scheduler_blocks import BlockTables
from .scheduler_records import SchedulerConfig
from .scheduler_request import Request
from .scheduler_step import Preempted, ScheduledStep


class Planner:
    """First come, first served, within the token budget: running requests go on, then waiting ones are admitted.

    A request that finds no block preempts the latest one, which has to be computed anew. One that is in flight is not
    preempted (its next token would be lost): it is left out of the step instead, so that it can give way once it has
    landed, and until then those without a block wait. Nobody is admitted in a step that preempts or is short of blocks.
    """

    def __init__(self, config: SchedulerConfig, queues: RequestQueues, blocks: BlockTables) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks

    def plan(self, step: ScheduledStep, *, admit_new: bool) -> None:
        """Fill an empty step, and move queues, tables and computed tokens to where they are once it has run.

        Without ``admit_new``, nobody is admitted who has never run.
        """
        self._schedule_running(step)
        if not (step.preempted or step.is_short_of_blocks):
            self._schedule_waiting(step, admit_new)

    def undo(self, step: ScheduledStep, *, written: bool) -> None:
        """Move everything back after the block pool was rolled back; requests that ended since stay out.

        ``written``: blocks that the step took may have been written to. Those whom they were taken from stay preempted.
        """
        for request in step.admitted:
            self._blocks.detach(request)
            request.num_computed_tokens = request.num_written_tokens = 0
            request.num_tokens = len(request.token_ids)
            if not request.num_preemptions:
                request.num_cached_tokens = None
        self._queues.undo_starts(step.admitted)
        before = (step.new_block_ids, step.num_computed_tokens, step.num_output_tokens)
        for request, appended, computed, outputs in zip(step.continued, *before, strict=False):
            request.num_computed_tokens = computed
            request.num_tokens = request.num_prompt_tokens + outputs
            if appended is not None:
                self._blocks.shrink(request, appended)
        for entry in step.preempted:
            self._blocks.attach(entry.request, entry.block_ids)
            if written:
                self._blocks.release(entry.request)
            else:
                entry.request.num_computed_tokens = entry.request.num_written_tokens = entry.num_computed_tokens
                entry.request.num_preemptions -= 1
        if not written:
            self._queues.undo_preemptions([entry.request for entry in step.preempted])

    def _schedule_running(self, step: ScheduledStep) -> None:
        max_chunk, decode = self._config.max_chunk, step.decode()
        for request in self._queues.running:  # preemption only pops from its end, behind the request at hand
            if request is step.gives_way:
                return
            computed, known = request.num_computed_tokens, request.num_tokens
            if (
                known - computed == 1
                and known <= request.num_slots
                and known < request.max_total_tokens
                and step.budget
            ):
                decode(request, computed, known)
                continue
            num_tokens = min(known - computed, max_chunk, step.budget)
            if num_tokens <= 0 or known >= request.max_total_tokens:  # its last token is in flight
                if step.budget == 0:
                    return
                continue
            new_block_ids = None
            if computed + num_tokens > request.num_slots:
                new_block_ids = self._make_room(request, computed + num_tokens, step)
                if new_block_ids is None:
                    continue
            step.proceed(request, num_tokens, new_block_ids)

    def _make_room(self, request: Request, num_tokens: int, step: ScheduledStep) -> tuple[list[int], ...] | None:
        """The blocks that a request still needs, by preempting the latest; None when it has to wait, or was the latest.

        Whoever waits goes first in the next step: nobody behind it gets blocks in this one.
        """
        if step.is_short_of_blocks:
            return None
        while (new_block_ids := self._blocks.grow(request, num_tokens)) is None:
            latest = self._queues.running[-1]
            if self._queues.leaving or latest.is_in_flight:
                step.is_short_of_blocks = True
                step.gives_way = None if self._queues.leaving else latest  # blocks come free, or are made free
                return None
            step.preempted.append(self._preempt_latest())
            if latest is request:
                return None
        return new_block_ids

    def preempt_all(self) -> list[Request]:
        """Have every running request give its blocks back, while no step is in flight; returns them."""
        return [self._preempt_latest().request for _ in range(len(self._queues.running))]

    def _preempt_latest(self) -> Preempted:
        request = self._queues.preempt_last()
        preempted = Preempted(request, self._blocks.release(request), request.num_computed_tokens)
        request.num_computed_tokens = request.num_written_tokens = 0
        request.num_preemptions += 1
        return preempted

    def _schedule_waiting(self, step: ScheduledStep, admit_new: bool) -> None:
        queues, max_num_seqs = self._queues, self._config.max_num_seqs
        while queues.num_waiting and step.budget > 0 and len(queues.running) < max_num_seqs:
            request = queues.first_waiting()
            if not (admit_new or request.num_preemptions):
                return
            prefix = self._blocks.find_prefix(request)
            num_tokens = min(len(request.token_ids) - prefix.num_tokens, self._config.max_chunk, step.budget)
            if not self._blocks.admit(request, prefix, prefix.num_tokens + num_tokens):
                return
            queues.start_first()
            request.num_computed_tokens = request.num_written_tokens = prefix.num_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = prefix.num_tokens
            step.queries += prefix.num_queried
            step.hits += prefix.num_tokens
            step.admit(request, num_tokens)
