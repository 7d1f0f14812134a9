"""One step being scheduled, and afterwards the record from which it is settled or undone."""

from __future__ import annotations

from itertools import chain

from attrs import define, field, frozen

from ..stages.io import BlockIds, CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from .scheduler_records import RunnerOutputMismatch
from .scheduler_request import Request, RequestStatus


@frozen(eq=False)
class Preempted:
    """A request that had to give way in a step, with the blocks and computed tokens that it lost."""

    request: Request
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@define(eq=False, kw_only=True)
class ScheduledStep:
    """What a step schedules, gathered in one pass over the requests.

    ``continued`` are the requests that the runner has in its table, ``admitted`` those it has not seen, or has dropped
    when they were preempted. ``queries`` and ``hits`` count the tokens of admitted requests that were looked up, and
    found, in the prefix cache.
    """

    budget: int
    finished_req_ids: set[str]
    continued: list[Request] = field(factory=list)
    admitted: list[Request] = field(factory=list)
    preempted: list[Preempted] = field(factory=list)
    aborted: list[Request] = field(factory=list)
    queries: int = 0
    hits: int = 0
    num_scheduled_tokens: dict[str, int] = field(factory=dict)
    output: SchedulerOutput = field(factory=SchedulerOutput.make_empty)

    new_requests: list[NewRequestData] = field(factory=list)
    resumed: list[Request] = field(factory=list)
    new_block_ids: list[BlockIds | None] = field(factory=list)
    num_computed_tokens: list[int] = field(factory=list)

    def proceed(self, request: Request, num_tokens: int, new_block_ids: BlockIds | None) -> None:
        """Schedule the next ``num_tokens`` of a request that the runner has in its table."""
        self.continued.append(request)
        self.new_block_ids.append(new_block_ids)
        self.num_computed_tokens.append(request.num_computed_tokens)
        self.num_scheduled_tokens[request.req_id] = num_tokens
        request.num_computed_tokens += num_tokens
        self.budget -= num_tokens

    def admit(self, request: Request, num_tokens: int) -> None:
        """Schedule the first ``num_tokens`` of a request that the runner does not have."""
        self.admitted.append(request)
        block_ids = tuple(list(ids) for ids in request.block_ids)
        if request.num_preemptions:
            self.resumed.append(request)
            self.new_block_ids.append(block_ids)
            self.num_computed_tokens.append(request.num_computed_tokens)
        else:
            self.new_requests.append(
                NewRequestData(
                    req_id=request.req_id,
                    prompt_token_ids=request.prompt_token_ids,
                    block_ids=block_ids,
                    num_computed_tokens=request.num_computed_tokens,
                    sampling_params=request.sampling_params,
                )
            )
        self.num_scheduled_tokens[request.req_id] = num_tokens
        request.num_computed_tokens += num_tokens
        self.budget -= num_tokens

    def close(self, num_common_prefix_blocks: list[int]) -> SchedulerOutput:
        """The step as the runner reads it."""
        requests = self.continued + self.resumed
        cached = CachedRequestData(
            req_ids=[request.req_id for request in requests],
            resumed_req_ids={request.req_id for request in self.resumed},
            all_token_ids={request.req_id: list(request.token_ids) for request in self.resumed},
            new_block_ids=self.new_block_ids,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=[len(request.token_ids) - request.num_prompt_tokens for request in requests],
        )
        self.output = SchedulerOutput(
            scheduled_new_reqs=self.new_requests,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids={entry.request.req_id for entry in self.preempted},
        )
        return self.output

    def check_complete(self, output: ModelRunnerOutput) -> None:
        """Refuse a runner's output that leaves out a request of this step that is still live.

        Raises:
            RunnerOutputMismatch: naming the requests.
        """
        known = output.req_id_to_index.keys()
        if not known >= self.num_scheduled_tokens.keys():
            live = (
                request.req_id
                for request in chain(self.continued, self.admitted)
                if request.status is RequestStatus.RUNNING
            )
            missing = tuple(req_id for req_id in live if req_id not in known)
            if missing:
                raise RunnerOutputMismatch(missing)
