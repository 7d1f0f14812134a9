"""The reference scheduler: continuous batching with chunked prefill, prefix caching and preemption by recompute.

Continuous batching is Orca's (Yu et al., OSDI 2022), chunked prefill under a token budget Sarathi-Serve's (Agrawal et
al., OSDI 2024); the outputs have the shapes and meanings of vLLM's v1 scheduler. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ..fsm.errors import StepStateError
from ..stages.errors import RequestFailed
from ..stages.io import ModelRunnerOutput, SchedulerOutput
from ..stages.sampling_params import SamplingParams
from .block_pool import BlockPool
from .request_queue import RequestQueues
from .scheduler_admission import check_servable
from .scheduler_blocks import BlockTables
from .scheduler_planner import Planner
from .scheduler_records import (
    FinishReason,
    InvalidSchedulerConfig,
    RequestRefused,
    RequestUpdate,
    RunnerOutputMismatch,
    SchedulerConfig,
    SchedulerStats,
    first_positions,
)
from .scheduler_request import Request, RequestStatus
from .scheduler_step import ScheduledStep

__all__ = [
    "FinishReason",
    "InvalidSchedulerConfig",
    "RequestRefused",
    "RequestUpdate",
    "RunnerOutputMismatch",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
]


class Scheduler:
    """Decides what each step computes: first come, first served.

    ``schedule()`` hands out one step; it is settled by ``update_from_output`` when it ran, by ``rollback`` when it did
    not, and only then comes the next one (a step without tokens needs neither). Requests may be added and aborted at
    any time; what an aborted one holds is freed when the step in flight is settled.

    Not thread-safe: the serving loop owns it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_kv_blocks, config.enable_prefix_caching)
        self._blocks = BlockTables(self._pool, config.block_sizes)
        self._requests: dict[str, Request] = {}
        self._queues = RequestQueues()
        self._planner = Planner(config, self._queues, self._blocks)
        self._finished_req_ids: set[str] = set()
        self._step: ScheduledStep | None = None
        self._queries = self._hits = self._preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, or were preempted."""
        return self._queues.num_waiting

    def has_unfinished_requests(self) -> bool:
        """Whether any request is still to be served."""
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether another step is needed: for unfinished requests, or to tell the runner which ones finished."""
        return bool(self._requests or self._finished_req_ids)

    def stats(self) -> SchedulerStats:
        """The figures of this moment."""
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=self._queues.num_waiting,
            kv_cache_usage=self._pool.usage,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            num_preemptions=self._preemptions,
        )

    def add_request(
        self, req_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, cache_salt: str = ""
    ) -> None:
        """Put a request at the end of the waiting queue.

        Requests share cached prefixes only with those of the same ``cache_salt`` (a LoRA id, a tenant).

        Raises:
            RequestRefused: it could never be served as it is, or its id is in use.
        """
        if req_id in self._requests:
            raise RequestRefused(req_id, "is live already; abort it with finish_requests() first, or use another id")
        prompt = tuple(prompt_token_ids)
        max_total = self.config.max_model_len
        if sampling_params.max_tokens is not None:
            max_total = min(max_total, len(prompt) + sampling_params.max_tokens)
        request = Request(
            req_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=sampling_params,
            max_total_tokens=max_total,
            cache_salt=cache_salt,
        )
        check_servable(request, self.config)
        self._requests[req_id] = request
        self._queues.add(request)

    def finish_requests(self, req_ids: Iterable[str]) -> list[str]:
        """Abort requests wherever they are; the next step tells the runner. Their ids may be used again at once.

        Ids that are unknown, finished already or given twice are passed over. Returns the ids that were live.
        """
        aborted = [request for req_id in req_ids if (request := self._requests.pop(req_id, None)) is not None]
        self._retire(aborted)
        if self._step is None:
            self._release(aborted)
        else:
            self._step.aborted.extend(aborted)
        return [request.req_id for request in aborted]

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: the weights were changed, or the cache's memory was given back.

        Raises:
            StepStateError: requests are running, whose blocks would be stale too. Finish or abort them first.
        """
        self._settle_empty_step("reset_prefix_cache")
        if self._queues.running:
            raise StepStateError(
                f"reset_prefix_cache() with {self.num_running} requests running, whose keys and values would be stale; "
                "let them finish or abort them with finish_requests() first",
                state="RUNNING",
                call="reset_prefix_cache",
                allowed=("finish_requests", "schedule"),
            )
        self._pool.forget_all()

    def schedule(self) -> SchedulerOutput:
        """The next step: running requests go on, then waiting ones are admitted while budget and blocks last.

        It may hold no tokens and still carry finished ids for the runner.

        Raises:
            StepStateError: the step before this one has tokens and is not settled.
        """
        self._settle_empty_step("schedule")
        self._pool.begin()
        step = ScheduledStep(budget=self.config.max_num_batched_tokens, finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        self._step = step
        try:
            self._planner.plan(step)
        except BaseException:  # an interrupt too must not leave half a step behind
            self._undo(step)
            raise
        self._queries += step.queries
        self._hits += step.hits
        self._preemptions += len(step.preempted)
        return step.close(self._blocks.num_common_prefix_blocks(self._queues.running))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Settle a step that ran: append what was sampled, end what has ended, publish the blocks that were filled.

        Returns an update for each request that has something to tell. Requests that were aborted since the step was
        scheduled are passed over.

        Raises:
            StepStateError: this is not the step in flight.
            RunnerOutputMismatch: the runner's output leaves out a live request of the step.
        """
        step = self._step_in_flight(scheduler_output, "update_from_output")
        step.check_complete(model_runner_output)
        updates: list[RequestUpdate] = []
        ended: list[Request] = []
        for request in chain(step.continued, step.admitted):
            if request.status is not RequestStatus.RUNNING:
                continue
            update = self._advance(request, step.num_scheduled_tokens[request.req_id], model_runner_output)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    ended.append(request)
                    del self._requests[request.req_id]
        self._settle(step)
        self._retire(ended)
        self._release(ended)
        return updates

    def rollback(self, scheduler_output: SchedulerOutput) -> None:
        """Undo the latest ``schedule()``, whose step did not run: the next one gives the same step again.

        Queues, tables, blocks, the order of eviction and the statistics are as they were, apart from requests that
        were added or aborted since; the finished ids will be sent again.

        Raises:
            StepStateError: this is not the step in flight.
        """
        step = self._step_in_flight(scheduler_output, "rollback")
        self._undo(step)
        self._queries -= step.queries
        self._hits -= step.hits
        self._preemptions -= len(step.preempted)

    def _advance(self, request: Request, num_tokens: int, output: ModelRunnerOutput) -> RequestUpdate | None:
        """Settle one request's share of a step; None when it has nothing to tell."""
        req_id = request.req_id
        if output.request_errors and (error := output.request_errors.get(req_id)) is not None:
            return self._fail(request, error)
        start = request.num_written_tokens
        request.num_written_tokens = end = start + num_tokens
        step = self._blocks.smallest_step
        if start // step != end // step:
            self._blocks.publish(request, start, end)
        prompt_logprobs = output.prompt_logprobs_dict.get(req_id) if output.prompt_logprobs_dict else None
        cached = request.num_cached_tokens or 0
        if end < len(request.token_ids):  # a prompt chunk that is not the last one: nothing was sampled for it
            if prompt_logprobs is None:
                return None
            return RequestUpdate(req_id, [], prompt_logprobs=prompt_logprobs, num_cached_tokens=cached)
        index = output.req_id_to_index[req_id]
        sampled = output.sampled_token_ids[index]
        if len(sampled) == 0:
            return self._fail(request, RequestFailed(req_id, "nothing was sampled though its last token was computed"))
        tokens, finish_reason, stop_reason = request.append_until_end(sampled)
        logprobs = None
        if output.logprobs is not None and request.sampling_params.logprobs is not None:
            logprobs = first_positions(output.logprobs.for_request(index), len(tokens))
        return RequestUpdate(req_id, tokens, finish_reason, stop_reason, logprobs, prompt_logprobs, None, cached)

    def _fail(self, request: Request, error: Exception) -> RequestUpdate:
        # What spoilt it may lie in its blocks, where others would find it.
        self._blocks.forget(request)
        cached = request.num_cached_tokens or 0
        return RequestUpdate(request.req_id, [], FinishReason.ERROR, error=error, num_cached_tokens=cached)

    def _retire(self, requests: list[Request]) -> None:
        """Take requests out of their queues for good; the next step tells the runner."""
        if requests:
            self._queues.remove(requests)
            self._finished_req_ids.update(request.req_id for request in requests)

    def _release(self, requests: list[Request]) -> None:
        for request in requests:
            self._blocks.release(request)

    def _undo(self, step: ScheduledStep) -> None:
        self._pool.rollback()
        self._planner.undo(step)
        self._finished_req_ids |= step.finished_req_ids
        self._settle(step)

    def _step_in_flight(self, output: SchedulerOutput, call: str) -> ScheduledStep:
        step = self._step
        if step is None or step.output is not output:
            problem = "no step is in flight" if step is None else "this is not the output of the latest schedule()"
            raise StepStateError(
                f"{call}(): {problem}; a step is settled once, with the very object that schedule() returned",
                state="IDLE" if step is None else "SCHEDULED",
                call=call,
                allowed=("schedule",) if step is None else ("update_from_output", "rollback"),
            )
        return step

    def _settle_empty_step(self, call: str) -> None:
        step = self._step
        if step is None:
            return
        if step.num_scheduled_tokens:
            raise StepStateError(
                f"{call}() while a step with {len(step.num_scheduled_tokens)} requests is in flight; settle it first "
                "with update_from_output() or rollback()",
                state="SCHEDULED",
                call=call,
                allowed=("update_from_output", "rollback"),
            )
        self._settle(step)

    def _settle(self, step: ScheduledStep) -> None:
        """Close the step in flight, and free what requests held that were aborted meanwhile."""
        self._pool.commit()
        self._step = None
        self._release(step.aborted)
