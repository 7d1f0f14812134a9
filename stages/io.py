"""What goes into a step and what comes out of it: plain, torch-free records with the field names of vLLM's v1 engine.

A scheduler of one's own needs only this module and :mod:`twostroke.stages.sampling_params`. Token ids are Python ints,
block ids are per KV-cache group, and nothing here holds a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import Factory, evolve, field, frozen

from .sampling_params import SamplingParams

V = TypeVar("V")

BlockIds = Sequence[Sequence[int]]
"""Block ids of one request: one list for each KV-cache group."""


def _only(values: Mapping[str, V], req_ids: Collection[str]) -> dict[str, V]:
    return {req_id: value for req_id, value in values.items() if req_id in req_ids}


@frozen(kw_only=True)
class NewRequestData:
    """A request that the runner sees for the first time (or again, after it finished or was preempted).

    ``prefill_token_ids`` holds every known token (prompt and outputs so far) of a request that is resumed by being sent
    as new; it must start with ``prompt_token_ids``. ``num_computed_tokens`` counts tokens whose keys and values already
    lie in ``block_ids`` (a prefix-cache hit).
    """

    req_id: str
    prompt_token_ids: Sequence[int]
    block_ids: BlockIds
    num_computed_tokens: int = 0
    sampling_params: SamplingParams = Factory(SamplingParams)
    prefill_token_ids: Sequence[int] | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    pooling_params: Any = None
    prompt_embeds: Any = None


@frozen(kw_only=True)
class CachedRequestData:
    """Requests that the runner already knows, as parallel lists (one entry a request).

    ``new_block_ids[i]`` is appended to the request's block table, or replaces it when the request is in
    ``resumed_req_ids``; ``all_token_ids`` then restores its tokens. ``new_token_ids`` may be empty (the runner knows
    what it sampled); where given, they are the tokens from ``num_computed_tokens`` on, written over what the runner
    has. ``num_output_tokens[i]`` below what the runner has drops its latest outputs (a rewind). An empty list stands
    for "nothing to say" in ``new_token_ids``, ``new_block_ids`` and ``num_output_tokens``.
    """

    req_ids: Sequence[str] = ()
    resumed_req_ids: frozenset[str] | set[str] = frozenset()
    new_token_ids: Sequence[Sequence[int]] = ()
    all_token_ids: Mapping[str, Sequence[int]] = field(factory=dict)
    new_block_ids: Sequence[BlockIds | None] = ()
    num_computed_tokens: Sequence[int] = ()
    num_output_tokens: Sequence[int] = ()

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No continued requests."""
        return cls()

    def restricted_to(self, req_ids: Collection[str]) -> CachedRequestData:
        """The entries of ``req_ids``."""
        kept = [index for index, req_id in enumerate(self.req_ids) if req_id in req_ids]
        lists = {
            name: [values[index] for index in kept] if len(values := getattr(self, name)) else ()
            for name in ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
        }
        return CachedRequestData(
            resumed_req_ids=self.resumed_req_ids & set(req_ids),
            all_token_ids=_only(self.all_token_ids, req_ids),
            **lists,
        )


@frozen(kw_only=True)
class SchedulerOutput:
    """What one step is to compute. Finished and preempted requests are dealt with before new ones."""

    scheduled_new_reqs: Sequence[NewRequestData] = ()
    scheduled_cached_reqs: CachedRequestData = Factory(CachedRequestData)
    num_scheduled_tokens: Mapping[str, int] = field(factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = field(factory=dict)
    scheduled_encoder_inputs: Mapping[str, Sequence[int]] = field(factory=dict)
    num_common_prefix_blocks: Sequence[int] = ()
    finished_req_ids: frozenset[str] | set[str] = frozenset()
    preempted_req_ids: frozenset[str] | set[str] | None = frozenset()
    free_encoder_mm_hashes: Sequence[str] = ()
    kv_connector_metadata: Any = None

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step that schedules nothing."""
        return cls()

    def restricted_to(self, req_ids: Iterable[str], *, is_first: bool = True) -> SchedulerOutput:
        """The part of this step that schedules ``req_ids`` (those of them that it schedules at all).

        A step can be executed in parts; the first carries the finished and preempted ids, later ones none.
        """
        kept = set(req_ids) & self.num_scheduled_tokens.keys()
        counts = {req_id: count for req_id, count in self.num_scheduled_tokens.items() if req_id in kept}
        return evolve(
            self,
            scheduled_new_reqs=[data for data in self.scheduled_new_reqs if data.req_id in kept],
            scheduled_cached_reqs=self.scheduled_cached_reqs.restricted_to(kept),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=_only(self.scheduled_spec_decode_tokens, kept),
            scheduled_encoder_inputs=_only(self.scheduled_encoder_inputs, kept),
            finished_req_ids=self.finished_req_ids if is_first else frozenset(),
            preempted_req_ids=self.preempted_req_ids if is_first else frozenset(),
            free_encoder_mm_hashes=self.free_encoder_mm_hashes if is_first else (),
            num_common_prefix_blocks=[0] * len(self.num_common_prefix_blocks),
        )


@frozen(kw_only=True, eq=False)
class GrammarOutput:
    """Structured-output masks for one step.

    ``grammar_bitmask`` is int32 ``[len(structured_output_request_ids), ceil(vocab_size / 32)]`` as xgrammar packs it:
    bit ``token % 32`` of word ``token // 32`` is 1 where the token is allowed. Rows are matched to requests by id, in
    any order; requests of the batch that are not listed are unconstrained.
    """

    structured_output_request_ids: Sequence[str]
    grammar_bitmask: npt.NDArray[np.int32]


@frozen(eq=False)
class LogprobsLists:
    """Log probabilities of several positions; column 0 is the token that was chosen (or came next in the prompt).

    ``logprob_token_ids`` int64 and ``logprobs`` float32 are ``[num_positions, 1 + k]``, ``sampled_token_ranks`` int64
    ``[num_positions]`` (1 = most likely). Positions of request ``i`` are
    ``cu_num_generated_tokens[i] : cu_num_generated_tokens[i + 1]``. ``k`` is the largest any request asked for; columns
    beyond a request's own ``k`` hold token id -1 and ``-inf``.
    """

    logprob_token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    sampled_token_ranks: npt.NDArray[np.int64]
    cu_num_generated_tokens: Sequence[int] | None = None

    def for_request(self, index: int) -> LogprobsLists:
        """The positions of batch entry ``index``, trimmed to the ``k`` that it asked for."""
        offsets = self.cu_num_generated_tokens
        if offsets is None:
            return self
        rows = slice(offsets[index], offsets[index + 1])
        ids = self.logprob_token_ids[rows]
        width = int((ids[:1] >= 0).sum()) if len(ids) else ids.shape[1]
        return LogprobsLists(ids[:, :width], self.logprobs[rows, :width], self.sampled_token_ranks[rows])


@frozen(kw_only=True, eq=False)
class ModelRunnerOutput:
    """What a step produced. ``req_ids`` is the batch in row order; the other lists run parallel to it.

    ``sampled_token_ids[i]`` is empty for a request that sampled nothing (a prompt chunk that is not the last one, or a
    request in ``request_errors``; the runner counts a token for that one all the same, so a scheduler that keeps it
    must rewind it with ``num_output_tokens``). ``prompt_logprobs_dict[req_id]`` is the whole table of a prompt,
    delivered once, by the step that computed the prompt's last position.
    """

    req_ids: Sequence[str] = ()
    req_id_to_index: Mapping[str, int] = field(factory=dict)
    sampled_token_ids: Sequence[Sequence[int]] = ()
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: Mapping[str, LogprobsLists | None] = field(factory=dict)
    pooler_output: Sequence[Any] = ()
    kv_connector_output: Any = None
    num_nans_in_logits: Mapping[str, int] = field(factory=dict)
    request_errors: Mapping[str, Exception] = field(factory=dict)

    def ready(self) -> bool:
        """True: an output that is here can be read like one that is on its way."""
        return True

    def get_output(self) -> ModelRunnerOutput:
        """Itself."""
        return self


class AsyncModelRunnerOutput(ABC):
    """A step's output on its way from the device. May be read from any thread."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether ``get_output`` would return at once. Never waits."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output; the same object each time.

        Raises:
            Exception: whatever went wrong on the device after it was launched. The runner is FAULTED then.
        """


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
"""What a step that had nothing to compute gives back."""
