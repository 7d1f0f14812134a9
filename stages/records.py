"""The records that flow between stages. Each is written by exactly one stage; tensors live until the next step.

numpy arrays are host facts, tensors are device data (on a CPU the two may share memory). ``num_reqs`` counts the
requests of the batch, ``num_tokens`` their scheduled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from .attention import AttentionPlan

IntArray = npt.NDArray[np.int64]


class CUDAGraphMode(Enum):
    """How a forward runs; larger is better. Data-parallel ranks agree on the minimum."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2

    __hash__ = object.__hash__  # there is one object a member; the library's own goes by name, in Python


@define(eq=False)
class DecodeRun:
    """Steps one after the other that decode the same requests, each of them one token further than the step before.

    All known tokens of the requests are computed then, so all of them sample. ``rows`` and ``num_scheduled_tokens``
    are the same objects in all steps; ``num_computed_tokens`` and ``num_known_tokens``, one more each, are those of the
    latest step, the ``num_steps_before``-th (from 0).
    """

    rows: IntArray
    num_scheduled_tokens: IntArray
    num_computed_tokens: IntArray
    num_known_tokens: IntArray
    num_steps_before: int = 0


@frozen(eq=False)
class Batch:
    """The requests of this step (update_states). Arrays are int64 ``[num_reqs]``, in batch order.

    ``rows`` are rows of the request table, ``num_scheduled_tokens`` the tokens to compute now,
    ``num_computed_tokens`` those computed before. ``run`` is the run of steps that this one belongs to, or None: what
    a stage has kept of an earlier step of that very run holds, as many tokens further as there were steps.
    """

    req_ids: Sequence[str]
    rows: IntArray
    num_scheduled_tokens: IntArray
    num_computed_tokens: IntArray
    num_tokens: int
    has_lora: bool = False
    eager_reason: str | None = None
    """Why this step must not use a graph (its inputs differ from what a graph can replay), or None."""
    run: DecodeRun | None = field(default=None, eq=False)

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)

    def latest_of_run(self) -> DecodeRun | None:
        """``run``, if this is its latest step and still what update_states made it: an edit replaces the arrays."""
        run = self.run
        if (
            run is None
            or run.num_computed_tokens is not self.num_computed_tokens
            or run.num_scheduled_tokens is not self.num_scheduled_tokens
            or run.rows is not self.rows
        ):
            return None
        return run


class PromptSpan(NamedTuple):
    """``num_positions`` logits rows, from ``first_logit`` on, that score the prompt tokens from ``position + 1`` on."""

    batch_index: int
    first_logit: int
    num_positions: int
    position: int


@frozen(kw_only=True, eq=False)
class PreparedInputs:
    """Token-level inputs (prepare_inputs): views of the fixed buffers, cut to the real sizes.

    ``input_ids`` int32 and ``positions`` int64 ``[num_tokens]``; ``query_start_loc`` int32 ``[num_reqs + 1]``;
    ``seq_lens`` int32 ``[num_reqs]`` (computed + scheduled); ``logits_indices`` int64 ``[num_logits]``, ascending token
    indices whose logits are needed. ``sampling_reqs`` int64 ``[num_sampling]`` are the batch indices that sample (their
    last known token is scheduled), ``sampling_logits`` the logits row of each. ``prompt_spans`` ask for prompt
    logprobs. ``*_host`` are the host copies. ``is_uniform_decode``: every request schedules one token.
    ``sampled_index`` int64 ``[num_sampling]`` says where in the flattened token table the sampled tokens belong.
    ``is_sampled_in_order``: ``sampling_logits`` are known to be 0, 1, 2, … Steps of one :class:`DecodeRun` may share a
    record: the buffers that it shows are what changes.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    query_start_loc_host: npt.NDArray[np.int32]
    seq_lens_host: npt.NDArray[np.int32]
    token_rows: IntArray
    logits_indices_host: IntArray
    sampling_reqs: IntArray
    sampling_logits: IntArray
    prompt_spans: tuple[PromptSpan, ...]
    max_query_len: int
    _max_seq_len: int | None = field(default=None, alias="max_seq_len")
    is_uniform_decode: bool
    sampled_index: torch.Tensor | None = None
    is_sampled_in_order: bool = False

    @property
    def max_seq_len(self) -> int:
        """The largest of ``seq_lens``; read from them where the constructor was not given it."""
        if self._max_seq_len is not None:
            return self._max_seq_len
        return int(np.maximum.reduce(self.seq_lens_host, initial=0))


class BatchDescriptor(NamedTuple):
    """The key of a captured graph. ``num_reqs`` is None where the graph does not depend on it (PIECEWISE)."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False


@frozen(kw_only=True)
class BatchExecutionDescriptor:
    """How the batch runs (dispatch). ``num_tokens`` and ``num_reqs`` are padded; ``reason`` says why this mode."""

    mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int
    descriptor: BatchDescriptor | None = None
    should_ubatch: bool = False
    num_tokens_across_dp: tuple[int, ...] | None = None
    reason: str = ""


class UBatchSlice(NamedTuple):
    """One micro-batch: half-open ranges of requests and of tokens. A request cut by a border is in both neighbours."""

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        """Tokens in this micro-batch."""
        return self.token_slice.stop - self.token_slice.start

    @property
    def num_reqs(self) -> int:
        """Requests with at least one token in this micro-batch."""
        return self.request_slice.stop - self.request_slice.start


@frozen(kw_only=True)
class UBatchSlices:
    """The micro-batches (ubatch_slice): ``slices`` covers the real tokens, ``padded`` the planned shape."""

    slices: tuple[UBatchSlice, ...]
    padded: tuple[UBatchSlice, ...]


@frozen(eq=False)
class AttentionMetadata:
    """Attention plans (build_attn): ``plans[ubatch][group]``; ``slot_mapping[group]`` int64 ``[padded num_tokens]``."""

    plans: tuple[tuple[AttentionPlan, ...], ...]
    slot_mapping: tuple[torch.Tensor, ...]


@frozen(eq=False)
class ModelInputs:
    """What the model is called with (preprocess), padded: ids or embeddings, positions, and model-specific extras."""

    input_ids: torch.Tensor | None
    positions: torch.Tensor
    inputs_embeds: torch.Tensor | None = None
    extras: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class IntermediateTensors:
    """What a pipeline-parallel rank hands to the next: named tensors ``[num_tokens, …]``."""

    tensors: Mapping[str, torch.Tensor]


@frozen(eq=False)
class ExecuteModelState:
    """What the forward left: ``logits`` float32 ``[num_logits, vocab]``, ``hidden_states`` ``[num_tokens, hidden]``.

    Rows of ``logits`` follow :attr:`PreparedInputs.logits_indices`. Never written: sampling can be retried.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


class LogprobsTensors(NamedTuple):
    """``token_ids`` int64 and ``logprobs`` float32 ``[n, 1 + k]``, the chosen token first; ``ranks`` int64 ``[n]``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


@frozen(eq=False)
class SamplerOutput:
    """Sampled tokens (sample), on the device, in the order of ``PreparedInputs.sampling_reqs``.

    ``sampled_token_ids`` int64 ``[num_sampling]``. ``health`` int64 ``[num_sampling]``: 0 where all is well, the number
    of NaN among a request's logits, or :data:`NOTHING_LEFT`; None if the sampler doesn't know. ``logprobs`` has a row
    for each sampling request that asked: ``logprobs_reqs`` are their positions, ``num_logprobs`` what each asked for.
    ``prompt_logprobs[i]`` belongs to ``PreparedInputs.prompt_spans[i]``.
    """

    sampled_token_ids: torch.Tensor
    health: torch.Tensor | None = None
    logprobs: LogprobsTensors | None = None
    logprobs_reqs: IntArray | None = None
    num_logprobs: IntArray | None = None
    prompt_logprobs: tuple[LogprobsTensors, ...] = ()


NOTHING_LEFT = -1
"""``SamplerOutput.health`` of a request whose logits are all -inf once everything that forbids tokens is applied."""


class SegmentRunner:
    """Runs a piece of a model between two attention calls; this one just calls it."""

    is_tapped = False
    """Whether pieces are handed a tap, and so must name what they compute."""

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        """``piece(*args)``. A capturing or replaying runner keeps one graph for each index."""
        return piece(*args)


EAGER_SEGMENTS = SegmentRunner()
