"""What goes into a step and what comes out of it: plain, torch-free records with the field names of vLLM's v1 engine.

A scheduler of one's own needs only this module and :mod:`twostroke.stages.sampling_params`. Token ids are Python ints,
block ids are per KV-cache group, and nothing here holds a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

from .sampling_params import SamplingParams

BlockIds = Sequence[Sequence[int]]
"""Block ids of one request: one list for each KV-cache group."""


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
    request in ``request_errors``). ``prompt_logprobs_dict[req_id]`` is the whole table of a prompt, delivered once, by
    the step that computed the prompt's last position.
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


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
"""What a step that had nothing to compute gives back."""
