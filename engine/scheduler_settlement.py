"""What a step's output means for its requests: tokens appended, blocks published, requests ended."""

from __future__ import annotations

from itertools import chain

from ..stages.errors import RequestFailed
from ..stages.io import ModelRunnerOutput
from .scheduler_blocks import BlockTables
from .scheduler_records import FinishReason, RequestUpdate, first_positions
from .scheduler_request import Request, RequestStatus
from .scheduler_step import ScheduledStep


class Settlement:
    """Settles steps; the scheduler takes requests that ended out of its queues."""

    def __init__(self, blocks: BlockTables) -> None:
        self._blocks = blocks

    def settle(self, step: ScheduledStep, output: ModelRunnerOutput) -> tuple[list[RequestUpdate], list[Request]]:
        """The updates of a step's requests, in their order, and those that ended with it.

        Requests that ended since the step was scheduled are passed over. ``output`` holds all others.
        """
        updates: list[RequestUpdate] = []
        ended: list[Request] = []
        counts, running, block_step = step.num_scheduled_tokens, RequestStatus.RUNNING, self._blocks.smallest_step
        tokens_of, index_of = output.sampled_token_ids, output.req_id_to_index
        is_plain = not (output.request_errors or output.prompt_logprobs_dict or output.logprobs is not None)
        for request in chain(step.continued, step.admitted):
            req_id, start, token_ids = request.req_id, request.num_written_tokens, request.token_ids
            end = request.num_written_tokens = start + counts[req_id]
            if request.status is not running:
                continue
            # Nearly all requests of nearly all steps: one token more, within its block, and nothing else to tell.
            if is_plain and end - start == 1 and end % block_step and end == len(token_ids):
                sampled = tokens_of[index_of[req_id]]
                if len(sampled) == 1 and end + 1 < request.max_total_tokens and sampled[0] not in request.end_token_ids:
                    token_ids.append(sampled[0])
                    cached = request.num_cached_tokens or 0
                    updates.append(RequestUpdate(req_id, sampled, None, None, None, None, None, cached))
                    continue
            update = self._advance(request, start, output)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    ended.append(request)
        return updates, ended

    def _advance(self, request: Request, start: int, output: ModelRunnerOutput) -> RequestUpdate | None:
        """Settle one request's share of a step, from position ``start``; None when it has nothing to tell."""
        req_id, end = request.req_id, request.num_written_tokens
        if output.request_errors and (error := output.request_errors.get(req_id)) is not None:
            return self._fail(request, error)
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
        if len(sampled) != 1:
            if len(sampled) == 0:
                reason = "nothing was sampled though its last token was computed"
                return self._fail(request, RequestFailed(req_id, reason))
            if request.is_in_flight:
                reason = f"{len(sampled)} tokens were sampled, but the step in flight after it counts on one"
                return self._fail(request, RequestFailed(req_id, reason))
            request.num_tokens += len(sampled) - 1
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
