"""Fills a step: who gets how many tokens, who gets blocks, who has to give way."""

from __future__ import annotations

from .request_queue import RequestQueues
from .scheduler_blocks import BlockTables
from .scheduler_records import SchedulerConfig
from .scheduler_request import Request
from .scheduler_step import Preempted, ScheduledStep


class Planner:
    """First come, first served, within the token budget: running requests go on, then waiting ones are admitted.

    A request that finds no block preempts the latest one, which has to be computed anew. Nobody is admitted in a step
    that preempts.
    """

    def __init__(self, config: SchedulerConfig, queues: RequestQueues, blocks: BlockTables) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks

    def plan(self, step: ScheduledStep) -> None:
        """Fill an empty step, and move queues, tables and computed tokens to where they are once it has run."""
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)

    def undo(self, step: ScheduledStep) -> None:
        """Move everything back after the block pool was rolled back; requests that were aborted since stay out."""
        for request in step.admitted:
            self._blocks.detach(request)
            request.num_computed_tokens = request.num_written_tokens = 0
            if not request.num_preemptions:
                request.num_cached_tokens = None
        self._queues.undo_starts(step.admitted)
        for request, appended in zip(step.continued, step.new_block_ids, strict=False):
            request.num_computed_tokens -= step.num_scheduled_tokens[request.req_id]
            if appended is not None:
                self._blocks.shrink(request, appended)
        for entry in step.preempted:
            self._blocks.attach(entry.request, entry.block_ids)
            entry.request.num_computed_tokens = entry.request.num_written_tokens = entry.num_computed_tokens
            entry.request.num_preemptions -= 1
        self._queues.undo_preemptions([entry.request for entry in step.preempted])

    def _schedule_running(self, step: ScheduledStep) -> None:
        max_chunk = self._config.max_chunk
        for request in self._queues.running:  # preemption only pops from its end, behind the request at hand
            computed = request.num_computed_tokens
            num_tokens = min(len(request.token_ids) - computed, max_chunk, step.budget)
            if num_tokens <= 0:
                if step.budget == 0:
                    return
                continue
            new_block_ids = None
            if computed + num_tokens > request.num_slots:
                new_block_ids = self._make_room(request, computed + num_tokens, step)
                if new_block_ids is None:
                    return
            step.proceed(request, num_tokens, new_block_ids)

    def _make_room(self, request: Request, num_tokens: int, step: ScheduledStep) -> tuple[list[int], ...] | None:
        """The blocks that a request still needs, by preempting the latest; None when that was the request itself."""
        while (new_block_ids := self._blocks.grow(request, num_tokens)) is None:
            victim = self._queues.preempt_last()
            step.preempted.append(Preempted(victim, self._blocks.release(victim), victim.num_computed_tokens))
            victim.num_computed_tokens = victim.num_written_tokens = 0
            victim.num_preemptions += 1
            if victim is request:
                return None
        return new_block_ids

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        queues, max_num_seqs = self._queues, self._config.max_num_seqs
        while queues.num_waiting and step.budget > 0 and len(queues.running) < max_num_seqs:
            request = queues.first_waiting()
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
