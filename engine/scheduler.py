"""The reference scheduler: continuous batching with chunked prefill, prefix caching and preemption by recompute.

Continuous batching is Orca's (Yu et al., OSDI 2022), chunked prefill under a token budget Sarathi-Serve's (Agrawal et
al., OSDI 2024); the outputs have the shapes and meanings of vLLM's v1 scheduler. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..fsm.errors import InputRefused, StepStateError
from ..stages.io import ModelRunnerOutput, SchedulerOutput
from ..stages.sampling_params import SamplingParams
from .block_pool import BlockPool
from .request_queue import RequestQueues
from .scheduler_admission import check_servable, checked_prompt
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
)
from .scheduler_request import Request, RequestStatus
from .scheduler_settlement import Settlement
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

    ``schedule()`` hands out one step. It is in flight until it is settled: by ``update_from_output`` when it ran, by
    ``rollback`` when it did not. A step without tokens needs neither. More steps may be scheduled before the first is
    settled, to any depth: a token that a step in flight samples counts as known, because the runner has its value, and
    the outputs count it too. Steps are updated in the order in which they were scheduled, and rolled back in reverse.
    Scheduling ahead never goes past ``max_tokens`` or ``max_model_len``; where a request turns out to have ended
    earlier, what later steps in flight computed for it is dropped.

    Requests may be added and aborted at any time, and ids used again at once. The blocks of a request that ended are
    freed when the last step that uses them is settled. A request in flight is never preempted. If nothing can go on
    before an earlier step is settled, the step is empty: no tokens and no ids, while ``num_in_flight`` is not 0; such
    an output need not be sent to the runner. With nothing in flight, a scheduler with unfinished requests always gives
    tokens.

    Not thread-safe: the serving loop owns it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_kv_blocks, config.enable_prefix_caching)
        self._blocks = BlockTables(self._pool, config.block_sizes)
        self._requests: dict[str, Request] = {}
        self._queues = RequestQueues()
        self._planner = Planner(config, self._queues, self._blocks)
        self._settlement = Settlement(self._blocks)
        self._finished_req_ids: set[str] = set()
        self._untold: list[Request] = []
        self._steps: deque[ScheduledStep] = deque()
        self._queries = self._hits = self._preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, or were preempted."""
        return self._queues.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Steps with tokens that were scheduled and are not settled yet."""
        return sum(1 for step in self._steps if step.num_scheduled_tokens)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is not known to have ended; the last token of one may be in flight."""
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether the loop has to go on: for unfinished requests, for steps in flight, or to tell the runner who ended.

        True does not mean that ``schedule()`` gives tokens now: see the class.
        """
        return bool(self._requests or self._finished_req_ids or self.num_in_flight)

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
        prompt = checked_prompt(req_id, prompt_token_ids, sampling_params)
        if req_id in self._requests:
            raise RequestRefused(req_id, "is live already; abort it with finish_requests() first, or use another id")
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

        What steps in flight still bring for them is dropped. Ids that are unknown, finished already or given twice are
        passed over. Returns the ids that were live.
        """
        aborted = [request for req_id in req_ids if (request := self._requests.pop(req_id, None)) is not None]
        self._retire(aborted)
        return [request.req_id for request in aborted]

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget every cached prefix: the weights were changed, or the cache's memory was given back.

        With ``preempt_running``, running requests give their blocks back and go on from their tokens.

        Raises:
            StepStateError: steps are in flight, or requests are running, whose blocks would be stale too.
        """
        if self.num_in_flight:
            raise StepStateError(
                f"reset_prefix_cache() with {self.num_in_flight} steps in flight; settle them first",
                state="SCHEDULED",
                call="reset_prefix_cache",
                allowed=("update_from_output", "rollback"),
            )
        if preempt_running:
            preempted = self._planner.preempt_all()
            self._untold += preempted
            self._preemptions += len(preempted)
        if self._queues.running:
            raise StepStateError(
                f"reset_prefix_cache() with {self.num_running} requests running, whose keys and values would be stale; "
                "let them finish, abort them with finish_requests(), or pass preempt_running=True",
                state="RUNNING",
                call="reset_prefix_cache",
                allowed=("finish_requests", "schedule"),
            )
        self._steps.clear()
        self._pool.forget_all()

    def schedule(self, *, admit_new: bool = True) -> SchedulerOutput:
        """The next step: running requests go on, then waiting ones are admitted while budget and blocks last.

        It may hold no tokens and still carry finished ids for the runner. Without ``admit_new``, requests that have
        never run stay in the queue.
        """
        while self._steps and not self._steps[0].num_scheduled_tokens:
            self._steps.popleft()
        step = ScheduledStep(
            budget=self.config.max_num_batched_tokens,
            journal=self._pool.begin(),
            finished_req_ids=self._finished_req_ids,
            untold=[request for request in self._untold if request.status is RequestStatus.WAITING],
        )
        self._finished_req_ids, self._untold = set(), []
        try:
            self._planner.plan(step, admit_new=admit_new)
            running, num_leaving = self._queues.running, len(self._queues.leaving)
            output = step.close(self._blocks.num_common_prefix_blocks(running, num_leaving))
        except BaseException:  # an interrupt too must not leave half a step behind
            self._undo(step, written=False)
            raise
        finally:
            self._pool.end()
        self._queries += step.queries
        self._hits += step.hits
        self._preemptions += len(step.preempted)
        if not _is_blank(output):
            self._steps.append(step)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Settle the oldest step: append what was sampled, end what has ended, publish the blocks that were filled.

        Returns an update for each request that has something to tell. Requests that ended since the step was scheduled
        are passed over. Where the output of a step without tokens is given, nothing happens.

        Raises:
            StepStateError: this is not the oldest step in flight.
            RunnerOutputMismatch: the runner's output leaves out a live request of the step and gives no error for it.
            InputRefused: one of the two is no output of its kind.
        """
        _require_output(scheduler_output, "update_from_output")
        if not scheduler_output.num_scheduled_tokens:
            return []
        oldest = next((step for step in self._steps if step.num_scheduled_tokens), None)
        step = self._expect(oldest, scheduler_output, "update_from_output")
        step.check_complete(model_runner_output)
        updates, ended = self._settlement.settle(step, model_runner_output)
        for request in ended:
            del self._requests[request.req_id]
        while self._steps.popleft() is not step:
            pass  # steps without tokens before it are done too
        self._retire(ended)
        return updates

    def rollback(self, scheduler_output: SchedulerOutput, *, executed: bool = False) -> None:
        """Undo the latest ``schedule()``, whose step did not run: the next one gives the same step again.

        Queues, tables, blocks, the order of eviction and the statistics are as they were, apart from requests that
        were added or ended since; the finished ids will be sent again. Earlier steps may be in flight.

        ``executed``: the step, or a part of it, was sent to the runner, whose forward pass may have written to blocks
        before it failed. Prefixes that were evicted for the step then stay evicted, and requests preempted for it stay
        preempted; the next step says so to the runner, which must have undone the step too.

        Raises:
            StepStateError: this is not the latest step in flight.
            InputRefused: this is no scheduler output.
        """
        _require_output(scheduler_output, "rollback")
        if _is_blank(scheduler_output):
            return
        latest = self._steps[-1] if self._steps else None
        step = self._expect(latest, scheduler_output, "rollback")
        self._steps.pop()
        self._undo(step, written=executed)
        self._queries -= step.queries
        self._hits -= step.hits
        if executed:
            self._untold += [entry.request for entry in step.preempted]
        else:
            self._preemptions -= len(step.preempted)

    def _retire(self, requests: list[Request]) -> None:
        """Take requests out of their queues for good, and free what no step in flight uses any more."""
        if requests:
            self._queues.remove(requests)
            self._finished_req_ids.update(request.req_id for request in requests)
        if self._queues.leaving:
            for request in self._queues.take_left():
                self._blocks.release(request)

    def _undo(self, step: ScheduledStep, *, written: bool) -> None:
        self._pool.rollback(step.journal, written=written)
        self._planner.undo(step, written=written)
        self._finished_req_ids |= step.finished_req_ids
        self._untold = step.untold + self._untold
        self._retire([])

    def _expect(self, step: ScheduledStep | None, output: SchedulerOutput, call: str) -> ScheduledStep:
        """The step whose turn it is, if this is its output."""
        if step is not None and step.output is output:
            return step
        if step is None:
            problem = "no step is in flight"
        elif any(other.output is output for other in self._steps):
            problem = "its turn has not come: steps are updated from the oldest on and rolled back from the latest back"
        else:
            problem = "this is not the output of a step in flight"
        raise StepStateError(
            f"{call}(): {problem}; a step is settled once, with the very object that schedule() returned",
            state="IDLE" if step is None else "SCHEDULED",
            call=call,
            allowed=("schedule",) if step is None else ("schedule", "update_from_output", "rollback"),
        )


def _require_output(output: object, call: str) -> None:
    if not hasattr(output, "num_scheduled_tokens"):
        raise InputRefused(
            f"{call}() wants the SchedulerOutput that schedule() returned, not a {type(output).__name__}"
        )


def _is_blank(output: SchedulerOutput) -> bool:
    """Whether it has nothing to compute and nothing to tell the runner, so that there is nothing to settle."""
    return not (output.num_scheduled_tokens or output.finished_req_ids or output.preempted_req_ids)
