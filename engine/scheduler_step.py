"""One step being scheduled, and afterwards the record from which it is settled or undone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from attrs import define, field, frozen

from ..fsm.errors import InputRefused
from ..stages.io import BlockIds, CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from .block_pool import PoolJournal
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
    when they were preempted. ``untold`` were preempted by a step that was undone, so the runner has not heard of it.
    ``is_short_of_blocks`` says that a request waits for blocks that steps in flight use; ``gives_way`` is the latest
    request where it is left out, to be preempted once it has landed. ``queries`` and ``hits`` count the tokens of
    admitted requests that were looked up, and found, in the prefix cache.
    """

    budget: int
    journal: PoolJournal
    finished_req_ids: set[str]
    untold: list[Request]
    continued: list[Request] = field(factory=list)
    admitted: list[Request] = field(factory=list)
    preempted: list[Preempted] = field(factory=list)
    is_short_of_blocks: bool = False
    gives_way: Request | None = None
    queries: int = 0
    hits: int = 0
    num_scheduled_tokens: dict[str, int] = field(factory=dict)
    output: SchedulerOutput = field(factory=SchedulerOutput.make_empty)

    new_requests: list[NewRequestData] = field(factory=list)
    resumed: list[Request] = field(factory=list)
    new_block_ids: list[BlockIds | None] = field(factory=list)
    num_computed_tokens: list[int] = field(factory=list)
    num_output_tokens: list[int] = field(factory=list)

    def decode(self) -> Callable[[Request, int, int], None]:
        """What :meth:`proceed` does for a request whose next token is its last known one, with as little as that takes.

        Nearly all requests of nearly all steps go this way. The function takes the request, and its computed and known
        tokens.
        """
        add_blocks, add_computed = self.new_block_ids.append, self.num_computed_tokens.append
        add_outputs, add_request = self.num_output_tokens.append, self.continued.append
        counts = self.num_scheduled_tokens

        def decode(request: Request, computed: int, known: int) -> None:
            add_blocks(None)
            add_computed(computed)
            add_outputs(known - request.num_prompt_tokens)
            counts[request.req_id] = 1
            self.budget -= 1
            add_request(request)
            request.num_computed_tokens = known
            request.num_tokens = known + 1  # the step samples it

        return decode

    def proceed(self, request: Request, num_tokens: int, new_block_ids: BlockIds | None) -> None:
        """Schedule the next ``num_tokens`` of a request that the runner has in its table."""
        computed, known = request.num_computed_tokens, request.num_tokens
        self.new_block_ids.append(new_block_ids)
        self.num_computed_tokens.append(computed)
        self.num_output_tokens.append(known - request.num_prompt_tokens)
        self.num_scheduled_tokens[request.req_id] = num_tokens
        self.budget -= num_tokens
        self.continued.append(request)
        request.num_computed_tokens = computed = computed + num_tokens
        if computed == known:  # its last token: the step samples the next one
            request.num_tokens = known + 1

    def admit(self, request: Request, num_tokens: int) -> None:
        """Schedule the first ``num_tokens`` of a request that the runner does not have."""
        self.admitted.append(request)
        block_ids = tuple(list(ids) for ids in request.block_ids)
        if request.num_preemptions:
            self.new_block_ids.append(block_ids)
            self.num_computed_tokens.append(request.num_computed_tokens)
            self.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
            self.resumed.append(request)
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
        self.budget -= num_tokens
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1

    def close(self, num_common_prefix_blocks: list[int]) -> SchedulerOutput:
        """The step as the runner reads it."""
        cached = CachedRequestData(
            req_ids=[request.req_id for request in chain(self.continued, self.resumed)],
            resumed_req_ids={request.req_id for request in self.resumed},
            all_token_ids={request.req_id: list(request.token_ids) for request in self.resumed},
            new_block_ids=self.new_block_ids,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
        )
        preempted = chain((entry.request for entry in self.preempted), self.untold)
        self.output = SchedulerOutput(
            scheduled_new_reqs=self.new_requests,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids={request.req_id for request in preempted},
        )
        return self.output

    def check_complete(self, output: ModelRunnerOutput) -> None:
        """Refuse a runner's output that leaves out a request of this step that is still live and has no error.

        Raises:
            RunnerOutputMismatch: naming the requests.
            InputRefused: it is no output.
        """
        if not hasattr(output, "req_id_to_index"):
            raise InputRefused(
                f"a step is settled with a ModelRunnerOutput, not a {type(output).__name__}: execute_model() returns "
                "None where sample_tokens() is to be called, and what that returns has its output in get_output()"
            )
        known = output.req_id_to_index.keys()
        if not known >= self.num_scheduled_tokens.keys():
            known = known | output.request_errors.keys()
            live = (
                request.req_id
                for request in chain(self.continued, self.admitted)
                if request.status is RequestStatus.RUNNING
            )
            missing = tuple(req_id for req_id in live if req_id not in known)
            if missing:
                raise RunnerOutputMismatch(missing)
