"""Graphs as the stages see them: which exist, how a forward is run through one, and the plans that they hold on to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from attrs import frozen

from ..fsm.errors import TwoStrokeError
from .attention import AttentionBackend, AttentionPlan
from .records import (
    BatchDescriptor,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    IntArray,
    ModelInputs,
    PreparedInputs,
    SegmentRunner,
)
from .specs import KVCacheGroupSpec

ForwardOutput = torch.Tensor | tuple[torch.Tensor, ...]
ForwardFunction = Callable[[ModelInputs, SegmentRunner], ForwardOutput]


NOT_CAPTURED = "not captured"


class GraphError(TwoStrokeError, RuntimeError):
    """A forward that cannot be captured or replayed as asked; the message names the key and the cure."""


class GraphNotCaptured(GraphError):
    """A plan that names a graph which does not exist."""

    def __init__(self, key: GraphKey, reason: str) -> None:
        self.key = key
        super().__init__(f"no graph {key}: {reason}; capture it first, or run the plan in mode NONE")


class GraphKey(NamedTuple):
    """One graph. Micro-batched steps have graphs of their own: their pieces are smaller."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    should_ubatch: bool = False

    @classmethod
    def of(cls, execution: BatchExecutionDescriptor) -> GraphKey:
        """The graph that a plan names.

        Raises:
            GraphError: the plan names none.
        """
        if execution.descriptor is None or execution.mode is CUDAGraphMode.NONE:
            raise GraphError(f"plan of {execution.num_tokens} tokens in mode {execution.mode.name} names no graph")
        return cls(execution.mode, execution.descriptor, execution.should_ubatch)

    def __str__(self) -> str:
        """Mode and shape in a few words."""
        shape, ubatched = self.descriptor, ", micro-batched" if self.should_ubatch else ""
        return f"{self.mode.name}(num_tokens={shape.num_tokens}, num_reqs={shape.num_reqs}{ubatched})"


class CapturedKeys(Container[GraphKey]):
    """The graphs that exist now. Its runner writes it; dispatch reads it.

    ``reason`` says why a key is not there. While suspended, no graph may be used, though all are kept. ``version``
    grows with every change: what was found holds as long as it stays.
    """

    def __init__(self) -> None:
        self.version = 0
        self._keys: dict[GraphKey, None] = {}
        self._reason = NOT_CAPTURED
        self._suspended = ""

    @property
    def reason(self) -> str:
        """Why a graph cannot be replayed now."""
        return self._suspended or self._reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self.version += 1
        self._reason = reason

    def __contains__(self, key: object) -> bool:
        """Whether this graph can be replayed."""
        return not self._suspended and key in self._keys

    def __iter__(self) -> Iterator[GraphKey]:
        """The keys, in order of capture."""
        return iter(self._keys)

    def __len__(self) -> int:
        """How many graphs can be replayed."""
        return 0 if self._suspended else len(self._keys)

    def suspend(self, reason: str) -> None:
        """Use no graph for now, for this reason (a constant text: dispatch counts by it)."""
        self.version += 1
        self._suspended = reason

    def resume(self) -> None:
        """Use them again."""
        self.version += 1
        self._suspended = ""

    def add(self, key: GraphKey) -> None:
        """A graph was captured."""
        self._keys[key] = None
        self.reason = NOT_CAPTURED

    def clear(self, reason: str) -> None:
        """All graphs are gone, for this reason (a constant text: dispatch counts by it)."""
        self._keys.clear()
        self.reason = reason


@frozen(kw_only=True)
class GraphReport:
    """What a runner holds: its keys in order of capture, the bytes of its static tensors, why others are missing."""

    keys: tuple[GraphKey, ...]
    static_bytes: int
    reason: str


class CUDAGraphRunner(Protocol):
    """Runs forwards, through graphs where the plan names one.

    The forward stage calls it once for each micro-batch (a FULL graph always runs the whole batch). ``forward`` takes
    the model's inputs and a :class:`SegmentRunner` for the pieces between attention calls. What a graph returns is
    overwritten by its next replay.
    """

    @property
    def captured(self) -> CapturedKeys:
        """The graphs that exist; the same object for the runner's whole life."""
        ...

    def capture(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Run ``forward`` once and keep it as the graph of ``execution``.

        Raises:
            GraphError: the plan names no graph, or the forward cannot be captured. Nothing was kept.
        """
        ...

    def run(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Run the forward as planned: called as it is in mode NONE, replayed otherwise.

        Raises:
            GraphNotCaptured: the plan names a graph that does not exist.
        """
        ...

    def drop(self, reason: str) -> None:
        """Forget all graphs; dispatch then says NONE with this reason."""
        ...

    def describe(self) -> GraphReport:
        """What is held now."""
        ...


def full_graph_rows(inputs: PreparedInputs, descriptor: BatchDescriptor) -> IntArray | None:
    """Rows of a FULL graph's logits that are those of ``inputs.logits_indices``, int64 ``[num_logits]``.

    A graph of a uniform key computes logits of every token, any other those of the last token of each request. None
    when a row that the batch needs is not among them.
    """
    wanted = inputs.logits_indices_host
    if descriptor.uniform:
        return wanted
    ends = inputs.query_start_loc_host[1:]
    requests = np.searchsorted(ends, wanted, side="right")
    return requests if np.array_equal(ends[requests] - 1, wanted) else None


class PlanCache:
    """The attention plans of a runner.

    A FULL graph reads the plans it was captured with, so each FULL key has its own, kept and planned again in place.
    All other steps share one set, which is valid until the next step.
    """

    def __init__(self, backend: AttentionBackend, groups: Sequence[KVCacheGroupSpec]) -> None:
        self._backend = backend
        self._groups = tuple(groups)
        self._plans: dict[tuple[GraphKey | None, int, int], AttentionPlan] = {}

    def plans_for(self, execution: BatchExecutionDescriptor, ubatch: int, group_index: int) -> AttentionPlan:
        """The plan object to ``plan`` now for this micro-batch and KV-cache group."""
        key = GraphKey.of(execution) if execution.mode is CUDAGraphMode.FULL else None
        plan = self._plans.get((key, ubatch, group_index))
        if plan is None:
            plan = self._plans[key, ubatch, group_index] = self._backend.make_plan(self._groups[group_index])
        return plan

    def drop(self) -> None:
        """Forget all plans; those that graphs hold live as long as the graphs do."""
        self._plans.clear()
