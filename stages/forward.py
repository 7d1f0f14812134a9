"""Run the model: hidden states of the padded batch, then logits of the tokens that need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .forward_context import NO_TAPS, ForwardContext, ForwardTaps, Model
from .graphs import CUDAGraphRunner, ForwardOutput, GraphError, full_graph_rows
from .records import (
    EAGER_SEGMENTS,
    AttentionMetadata,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ExecuteModelState,
    ModelInputs,
    PreparedInputs,
    SegmentRunner,
    UBatchSlices,
)
from .specs import KVCacheGroupSpec

_FULL = CUDAGraphMode.FULL  # to look it up in its class is a call


class Forward:
    """The forward stage, over a graph runner: each forward is called, captured or replayed by it.

    ``query_start_loc`` is the fixed buffer from which a FULL graph of a mixed batch reads where requests end.
    ``taps`` look at what is computed on the way.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: Sequence[torch.Tensor],
        groups: Sequence[KVCacheGroupSpec],
        graphs: CUDAGraphRunner,
        query_start_loc: torch.Tensor,
        taps: ForwardTaps = NO_TAPS,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._group_of_layer = [0] * len(kv_caches)
        for index, group in enumerate(groups):
            for layer in group.layers:
                self._group_of_layer[layer] = index
        self._graphs = graphs
        self._execute = graphs.run
        self._query_start_loc = query_start_loc
        self._taps = taps
        self._latest: tuple[AttentionMetadata, ForwardContext] | None = None

    def capturing(self) -> Forward:
        """The same stage, capturing a graph where this one replays it."""
        twin = Forward.__new__(Forward)
        twin.__dict__.update(self.__dict__, _execute=self._graphs.capture)
        return twin

    def __call__(
        self,
        inputs: PreparedInputs,
        execution: BatchExecutionDescriptor,
        ubatches: UBatchSlices,
        attention: AttentionMetadata,
        model_inputs: ModelInputs,
    ) -> ExecuteModelState:
        """Logits in the order of ``inputs.logits_indices``, and the hidden states of the real tokens."""
        num_tokens = inputs.input_ids.shape[0]
        if execution.mode is _FULL:
            forward = partial(self._to_logits, execution, attention)
            hidden, logits = self._execute(execution, forward, model_inputs)
            logits = self._taps.logits(_wanted_rows(logits, inputs, execution))
            return ExecuteModelState(logits, hidden[:num_tokens])
        hidden = self._hidden_states(execution, ubatches, attention, model_inputs)
        if hidden.shape[0] > num_tokens:
            hidden = hidden[:num_tokens]
        indices = inputs.logits_indices
        scored = hidden if indices.shape[0] == num_tokens else hidden[indices]
        return ExecuteModelState(self._taps.logits(self._model.compute_logits(scored)), hidden)

    def _hidden_states(
        self,
        execution: BatchExecutionDescriptor,
        ubatches: UBatchSlices,
        attention: AttentionMetadata,
        model_inputs: ModelInputs,
    ) -> torch.Tensor:
        """Those of the padded batch ``[padded tokens, hidden]``, one micro-batch after the other."""
        if len(ubatches.padded) == 1:
            tokens = ubatches.padded[0].token_slice
            forward = partial(self._to_hidden, attention, 0, tokens)
            return _one_tensor(self._execute(execution, forward, _part(model_inputs, tokens), 0))
        parts: list[torch.Tensor] = []
        for index, part in enumerate(ubatches.padded):
            forward = partial(self._to_hidden, attention, index, part.token_slice)
            hidden = _one_tensor(self._execute(execution, forward, _part(model_inputs, part.token_slice), index))
            parts.append(hidden.clone())  # what a graph returns is overwritten by its next replay, perhaps the next one
        return torch.cat(parts)

    def _to_hidden(
        self,
        attention: AttentionMetadata,
        ubatch: int,
        tokens: slice,
        model_inputs: ModelInputs,
        segments: SegmentRunner,
    ) -> torch.Tensor:
        """Hidden states ``[padded tokens, hidden]`` of one micro-batch."""
        segments = self._taps.segments(segments, ubatch)
        latest = self._latest
        if latest is None or latest[0] is not attention or latest[1].segments is not segments:
            latest = attention, self._context(attention, ubatch, tokens, segments)
            # Steps that share a record share a context. Other segments hold graphs, which are to go when dropped.
            self._latest = latest if segments is EAGER_SEGMENTS and len(attention.plans) == 1 else None
        return self._model.forward(model_inputs, latest[1])

    def _context(
        self, attention: AttentionMetadata, ubatch: int, tokens: slice, segments: SegmentRunner
    ) -> ForwardContext:
        plans, slots = attention.plans[ubatch], attention.slot_mapping
        if len(attention.plans) > 1:
            slots = tuple(mapping[tokens] for mapping in slots)
        return ForwardContext(
            spec=self._model.spec,
            plans=[plans[group] for group in self._group_of_layer],
            kv_caches=self._kv_caches,
            slots=[slots[group] for group in self._group_of_layer],
            segments=segments,
            ubatch=ubatch,
        )

    def _to_logits(
        self,
        execution: BatchExecutionDescriptor,
        attention: AttentionMetadata,
        model_inputs: ModelInputs,
        segments: SegmentRunner,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All of a FULL graph: hidden states, and logits of every token (uniform) or of each request's last one."""
        hidden = self._to_hidden(attention, 0, slice(0, execution.num_tokens), model_inputs, segments)
        if execution.descriptor is not None and execution.descriptor.uniform:
            return hidden, self._model.compute_logits(hidden)
        last_tokens = self._query_start_loc[1 : execution.num_reqs + 1].to(torch.int64) - 1
        return hidden, self._model.compute_logits(hidden[last_tokens])


def _one_tensor(output: ForwardOutput) -> torch.Tensor:
    assert isinstance(output, torch.Tensor), "a forward to hidden states gives one tensor"
    return output


def _wanted_rows(logits: torch.Tensor, inputs: PreparedInputs, execution: BatchExecutionDescriptor) -> torch.Tensor:
    """The rows of a FULL graph's logits that the step needs; the graph's own memory where it is exactly its head."""
    assert execution.descriptor is not None, "a FULL plan names its graph"
    rows = full_graph_rows(inputs, execution.descriptor)
    if rows is None:
        raise GraphError(
            f"a FULL graph has no logits for some tokens of this batch ({execution.reason}); plan it lower"
        )
    if len(rows) and rows[-1] == len(rows) - 1:
        return logits[: len(rows)]
    return logits[torch.from_numpy(rows).to(logits.device)]


def _part(inputs: ModelInputs, tokens: slice) -> ModelInputs:
    if tokens.start == 0 and tokens.stop == inputs.positions.shape[0]:
        return inputs
    return ModelInputs(
        input_ids=None if inputs.input_ids is None else inputs.input_ids[tokens],
        positions=inputs.positions[tokens],
        inputs_embeds=None if inputs.inputs_embeds is None else inputs.inputs_embeds[tokens],
        extras=inputs.extras,
    )
