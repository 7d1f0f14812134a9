"""What a recording says about each request: its tokens, blocks and parameters, step by step. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

from ..stages.io import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from ..stages.sampling_params import SamplingParams
from .recording_format import Fields, TokenWriter, params_fields, redact, sampling_params, show, stand_ins
from .recording_lines import OutputLine, StepLine


@define(eq=False)
class BookedRequest:
    """One request. ``block_ids`` has one list a KV-cache group, or none while the request is preempted."""

    prompt_token_ids: Sequence[int]
    token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[list[int]] = field(factory=list)

    def put(self, position: int, token: int) -> None:
        """A sampled token, behind the known ones or in the place of one that was dropped."""
        del self.token_ids[position:]
        self.token_ids.append(token)

    def append_blocks(self, blocks: BlockIds | None) -> None:
        """More blocks, if any, behind those that it holds."""
        if blocks is not None:
            self.block_ids = self.block_ids or [[] for _ in blocks]
            for held, more in zip(self.block_ids, blocks, strict=True):
                held.extend(more)

    def to_fields(self, req_id: str, tokens: TokenWriter = show) -> Fields:
        """As a ``state`` line lists it."""
        return {
            "req_id": req_id,
            "prompt_token_ids": tokens(self.prompt_token_ids),
            "token_ids": tokens(self.token_ids),
            "block_ids": [list(ids) for ids in self.block_ids],
            "sampling_params": params_fields(self.sampling_params, is_redacted=tokens is redact),
        }


class RequestBook:
    """Every request that has not finished, as the recording knows it."""

    def __init__(self, state: Iterable[Mapping[str, Any]] = ()) -> None:
        """``state`` are the requests of a ``state`` line."""
        self.requests = {
            line["req_id"]: BookedRequest(
                prompt_token_ids=stand_ins(line["prompt_token_ids"]),
                token_ids=stand_ins(line["token_ids"]),
                sampling_params=sampling_params(line["sampling_params"]),
                block_ids=[list(ids) for ids in line["block_ids"]],
            )
            for line in state
        }

    @property
    def num_blocks(self) -> int:
        """Blocks of the first KV-cache group that some request holds."""
        return len({block for request in self.requests.values() for block in (request.block_ids or [()])[0]})

    def schedule(self, step: SchedulerOutput) -> None:
        """A step was executed."""
        for req_id in step.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_id in step.preempted_req_ids or ():
            if req_id in self.requests:
                self.requests[req_id].block_ids = []
        for data in step.scheduled_new_reqs:
            self._take_in(data)
        for index in range(len(step.scheduled_cached_reqs.req_ids)):
            self._go_on(step.scheduled_cached_reqs, index)

    def continued(self, step: StepLine, output: OutputLine) -> None:
        """A step that only continued requests was executed, and gave tokens."""
        tokens = dict(zip(output.req_ids, output.tokens, strict=True))
        places = zip(step.lineup.req_ids, step.computed, step.lineup.counts_in_order, strict=True)
        for index, (req_id, computed, count) in enumerate(places):
            request = self.requests.get(req_id)
            if request is None:  # a recording that began in the middle, without a state
                continue
            if step.outputs:
                del request.token_ids[len(request.prompt_token_ids) + step.outputs[index] :]
            if step.block_ids is not None:
                request.append_blocks(step.block_ids[index])
            for offset, token in enumerate(tokens.get(req_id, ())):
                request.put(computed + count + offset, max(token, 0))

    def sampled(self, ends: Mapping[str, int], tokens: Mapping[str, Sequence[int]]) -> None:
        """What a step sampled; ``ends`` says where each request's tokens go."""
        for req_id, ids in tokens.items():
            request = self.requests.get(req_id)
            if request is not None:
                for offset, token in enumerate(ids):
                    request.put(ends[req_id] + offset, max(token, 0))

    def _take_in(self, data: NewRequestData) -> None:
        known = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
        self.requests[data.req_id] = BookedRequest(
            data.prompt_token_ids, list(known), data.sampling_params, _copied(data.block_ids)
        )

    def _go_on(self, cached: CachedRequestData, index: int) -> None:
        req_id = cached.req_ids[index]
        request = self.requests.get(req_id)
        if request is None:  # a recording that began in the middle, without a state
            return
        blocks = cached.new_block_ids[index] if cached.new_block_ids else None
        if req_id in cached.resumed_req_ids:
            request.block_ids = []
            request.token_ids = list(cached.all_token_ids.get(req_id, request.token_ids))
        if cached.num_output_tokens:
            del request.token_ids[len(request.prompt_token_ids) + cached.num_output_tokens[index] :]
        if cached.new_token_ids and len(cached.new_token_ids[index]):
            start, new = cached.num_computed_tokens[index], cached.new_token_ids[index]
            request.token_ids[start : start + len(new)] = new
        request.append_blocks(blocks)


def _copied(block_ids: BlockIds) -> list[list[int]]:
    return [list(ids) for ids in block_ids]
