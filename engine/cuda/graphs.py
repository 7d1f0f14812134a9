"""CUDA graphs: whole forwards, or the pieces between attention calls, captured into one pool and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from ...stages.graphs import (
    CapturedKeys,
    ForwardFunction,
    ForwardOutput,
    GraphError,
    GraphKey,
    GraphNotCaptured,
    GraphReport,
)
from ...stages.records import EAGER_SEGMENTS, BatchExecutionDescriptor, CUDAGraphMode, ModelInputs
from ..graphs import CapturingSegments, ReplayingSegments, tensors_of


class _Memory:
    """A piece of device memory by address, for whoever takes arrays of other libraries."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which is not kept alive by it: a graph's pool owns it, and other graphs may use it in between.

    Raises:
        GraphError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise GraphError(f"a graph's result {tuple(tensor.shape)} is not contiguous; return a contiguous tensor")
    if not tensor.numel():
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def alias_all(output: ForwardOutput) -> ForwardOutput:
    """Every tensor of a result as :func:`alias` gives it."""
    aliases = tuple(alias(tensor) for tensor in tensors_of(output))
    return aliases if isinstance(output, tuple) else aliases[0]


@frozen(eq=False)
class _Captured:
    """A graph and where its result lies. ``inputs`` are arguments that a replay copies; None where it need not."""

    graph: torch.cuda.CUDAGraph
    output: ForwardOutput
    inputs: tuple[torch.Tensor | None, ...] = ()

    def replay(self) -> ForwardOutput:
        self.graph.replay()
        return self.output


class CudaGraphRunner:
    """The graphs of one runner. All share one pool of memory: only one of them runs at a time, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self.captured = CapturedKeys()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._full: dict[GraphKey, _Captured] = {}
        self._pieces: dict[tuple[GraphKey, int], dict[int, _Captured]] = {}
        self._inputs: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._pool: Any = None
        self.generation = 0
        """How often all graphs were dropped: what was captured beside them before is void when this changes."""
        self._pool_bytes = 0

    def capture(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Run the forward once, so that kernels are compiled, then capture it under the plan's key.

        Raises:
            GraphError: the plan names no graph, or the forward cannot be captured. Nothing was kept.
        """
        key = GraphKey.of(execution)
        before = torch.cuda.memory_reserved(self._device)
        forward(inputs, EAGER_SEGMENTS)
        if key.mode is CUDAGraphMode.FULL:
            graph, output = self.record(lambda: forward(inputs, EAGER_SEGMENTS))
            output = alias_all(output)
            self._full[key] = _Captured(graph, output)
        else:
            recorder = _CapturingGraphs(self, inputs)
            output = alias_all(forward(inputs, recorder))
            self._pieces[key, ubatch] = recorder.pieces
        self._pool_bytes += torch.cuda.memory_reserved(self._device) - before
        self.captured.add(key)
        return output

    def run(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Run as planned; a replay ignores ``forward`` and ``inputs`` where its graph has its own.

        Raises:
            GraphNotCaptured: the plan names a graph that was not captured, or was dropped.
            GraphError: a piece is called with other shapes than were captured.
        """
        if execution.mode is CUDAGraphMode.NONE:
            return forward(inputs, EAGER_SEGMENTS)
        key = GraphKey.of(execution)
        captured = self._full.get(key)
        if captured is not None:
            return captured.replay()
        pieces = self._pieces.get((key, ubatch))
        if pieces is None:
            raise GraphNotCaptured(key, self.captured.reason)
        return forward(inputs, ReplayingSegments(key, pieces))

    def drop(self, reason: str) -> None:
        """Forget all graphs, and give their pool back."""
        if self._full or self._pieces:
            torch.cuda.synchronize(self._device)
        self._full.clear()
        self._pieces.clear()
        self._inputs.clear()
        self._pool, self._pool_bytes = None, 0
        self.generation += 1
        self.captured.clear(reason)

    def describe(self) -> GraphReport:
        """Keys in order of capture and the bytes that capturing took."""
        return GraphReport(keys=tuple(self.captured), static_bytes=self._pool_bytes, reason=self.captured.reason)

    def record(self, work: Callable[[], ForwardOutput], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, ForwardOutput]:
        """A graph of ``work`` and its result, whose memory is the pool's again once it is dropped.

        What works on a forward graph's result, which lies in the runner's own pool and is not kept there, needs another
        ``pool`` (a handle).

        Raises:
            GraphError: something in it cannot be captured.
        """
        if pool is None:
            pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise GraphError(f"the forward cannot be captured: {error}; use cudagraph_mode='NONE'") from error
        return graph, output

    def static_input(self, position: int, given: torch.Tensor) -> torch.Tensor:
        """Memory for argument ``position`` of a piece, shared by all pieces: each has read it when the next is run."""
        place = (position, given.shape, given.dtype)
        if place not in self._inputs:
            self._inputs[place] = torch.empty_like(given)
        return self._inputs[place]


class _CapturingGraphs(CapturingSegments[_Captured]):
    """Captures each piece as a CUDA graph, and replays it for its result.

    A result's memory is the pool's again once the model lets go of it, and so at the same moment of each replay.
    """

    def __init__(self, runner: CudaGraphRunner, inputs: ModelInputs) -> None:
        super().__init__(inputs)
        self._runner = runner

    def static_input(self, position: int, given: torch.Tensor) -> torch.Tensor:
        return self._runner.static_input(position, given).copy_(given)

    def keep(
        self, piece: Callable[..., Any], arguments: tuple[Any, ...], copies: tuple[torch.Tensor | None, ...]
    ) -> tuple[_Captured, ForwardOutput]:
        graph, output = self._runner.record(lambda: piece(*arguments))
        graph.replay()
        return _Captured(graph, alias_all(output), copies), output
