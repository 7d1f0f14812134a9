"""Graph runners without a GPU: one that calls, and one that replays closures over fixed buffers like a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import frozen

from ..stages.graphs import (
    CapturedKeys,
    ForwardFunction,
    ForwardOutput,
    GraphError,
    GraphKey,
    GraphNotCaptured,
    GraphReport,
)
from ..stages.records import (
    EAGER_SEGMENTS,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ModelInputs,
    SegmentRunner,
)


class EagerRunner:
    """Calls every forward and keeps nothing, so dispatch never finds a graph."""

    def __init__(self) -> None:
        self.captured = CapturedKeys()
        self.captured.reason = "graphs are off"

    def capture(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Runs the forward; there is nothing to keep."""
        return forward(inputs, EAGER_SEGMENTS)

    def run(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Runs the forward, whatever mode is planned."""
        return forward(inputs, EAGER_SEGMENTS)

    def drop(self, reason: str) -> None:
        """Nothing to forget."""

    def describe(self) -> GraphReport:
        """An empty report."""
        return GraphReport(keys=(), static_bytes=0, reason=self.captured.reason)


@frozen(eq=False)
class Captured:
    """A closure, the very objects it was captured with, and the tensors that every replay writes its result into.

    ``inputs`` are arguments that a replay copies from what it is called with; None where the captured tensor lies in a
    fixed buffer and is read where it is.
    """

    closure: Callable[..., Any]
    arguments: tuple[Any, ...]
    inputs: tuple[torch.Tensor | None, ...]
    output: ForwardOutput

    def replay(self) -> ForwardOutput:
        """Run the closure again over the captured objects."""
        result = self.closure(*self.arguments)
        for static, fresh in zip(tensors_of(self.output), tensors_of(result), strict=True):
            static.copy_(fresh)
        return self.output

    @property
    def static_bytes(self) -> int:
        """Bytes of the copies that this entry owns."""
        owned = (*(tensor for tensor in self.inputs if tensor is not None), *tensors_of(self.output))
        return sum(tensor.nbytes for tensor in owned)


class CapturedPiece(Protocol):
    """A piece that was captured. ``inputs`` are arguments that a replay is given by copy; None where it reads them."""

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """One for each argument."""
        ...

    def replay(self) -> ForwardOutput:
        """Run it again over what it was captured with."""
        ...


Piece = TypeVar("Piece", bound=CapturedPiece)


class ClosureGraphRunner:
    """The CPU stand-in for CUDA graphs: what a replay reads is what was captured, not what it is called with.

    A FULL graph is the whole forward. A PIECEWISE graph is one closure for each piece between attention calls, for each
    micro-batch; attention runs as usual in between. So stale buffer tails, buffers that were rebound after capture, and
    host values baked into a closure give wrong results here as they do on a GPU.
    """

    def __init__(self) -> None:
        self.captured = CapturedKeys()
        self._full: dict[GraphKey, Captured] = {}
        self._pieces: dict[tuple[GraphKey, int], dict[int, Captured]] = {}

    def capture(
        self, execution: BatchExecutionDescriptor, forward: ForwardFunction, inputs: ModelInputs, ubatch: int = 0
    ) -> ForwardOutput:
        """Run the forward once and keep its closures, inputs and outputs under the plan's key.

        Raises:
            GraphError: the plan names no graph, or a piece takes or returns something else than tensors.
        """
        key = GraphKey.of(execution)
        if key.mode is CUDAGraphMode.FULL:
            output = static_copy(forward(inputs, EAGER_SEGMENTS))
            self._full[key] = Captured(forward, (inputs, EAGER_SEGMENTS), (), output)
        else:
            recorder = _CapturingClosures(inputs)
            output = forward(inputs, recorder)
            self._pieces[key, ubatch] = recorder.pieces
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
        if key in self._full:
            return self._full[key].replay()
        pieces = self._pieces.get((key, ubatch))
        if pieces is None:
            raise GraphNotCaptured(key, self.captured.reason)
        return forward(inputs, ReplayingSegments(key, pieces))

    def drop(self, reason: str) -> None:
        """Forget all graphs."""
        self._full.clear()
        self._pieces.clear()
        self.captured.clear(reason)

    def describe(self) -> GraphReport:
        """Keys in order of capture and the bytes of all static copies."""
        entries = [*self._full.values(), *(entry for pieces in self._pieces.values() for entry in pieces.values())]
        return GraphReport(
            keys=tuple(self.captured),
            static_bytes=sum(entry.static_bytes for entry in entries),
            reason=self.captured.reason,
        )


class CapturingSegments(SegmentRunner, ABC, Generic[Piece]):
    """Runs each piece over static inputs and keeps it; how it is kept differs by runner."""

    def __init__(self, inputs: ModelInputs) -> None:
        self.pieces: dict[int, Piece] = {}
        fixed = (inputs.input_ids, inputs.positions, inputs.inputs_embeds, *inputs.extras.values())
        self._fixed = {address_of(tensor) for tensor in fixed if isinstance(tensor, torch.Tensor)}

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        """Capture ``piece`` as graph ``index``."""
        if index in self.pieces:
            raise GraphError(f"piece {index} is run twice in one forward; number the pieces in order")
        copies: list[torch.Tensor | None] = []
        for position, argument in enumerate(args):
            if not isinstance(argument, torch.Tensor | None):
                raise GraphError(
                    f"piece {index} takes a {type(argument).__name__}; pieces take and return tensors only"
                )
            if argument is None or address_of(argument) in self._fixed:
                copies.append(None)
            else:
                copies.append(self.static_input(position, argument))
        arguments = tuple(given if static is None else static for given, static in zip(args, copies, strict=True))
        self.pieces[index], output = self.keep(piece, arguments, tuple(copies))
        # The next pieces may take this one's results as they are: those addresses are fixed from now on.
        self._fixed.update(address_of(tensor) for tensor in tensors_of(output))
        return output

    @abstractmethod
    def static_input(self, position: int, given: torch.Tensor) -> torch.Tensor:
        """A copy of argument ``position`` that replays write into."""
        ...

    @abstractmethod
    def keep(
        self, piece: Callable[..., Any], arguments: tuple[Any, ...], copies: tuple[torch.Tensor | None, ...]
    ) -> tuple[Piece, ForwardOutput]:
        """Run a piece: what is kept of it, and its result."""
        ...


class _CapturingClosures(CapturingSegments[Captured]):
    """Keeps the closures themselves."""

    def static_input(self, position: int, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    def keep(
        self, piece: Callable[..., Any], arguments: tuple[Any, ...], copies: tuple[torch.Tensor | None, ...]
    ) -> tuple[Captured, ForwardOutput]:
        output = static_copy(piece(*arguments))
        return Captured(piece, arguments, copies, output), output


class ReplayingSegments(SegmentRunner):
    """Replays each piece, taking in by copy what does not lie in a fixed buffer."""

    def __init__(self, key: GraphKey, pieces: Mapping[int, CapturedPiece]) -> None:
        self._key = key
        self._pieces = pieces

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        """Replay graph ``index``; ``piece`` itself is not called."""
        captured = self._pieces.get(index)
        if captured is None:
            raise GraphError(f"graph {self._key} has no piece {index}: the model changed after capture")
        for static, given in zip(captured.inputs, args, strict=True):
            if static is None:
                continue
            if static.shape != given.shape:
                raise GraphError(
                    f"piece {index} of graph {self._key} was captured with {tuple(static.shape)} "
                    f"and is called with {tuple(given.shape)}; pad to the planned size"
                )
            static.copy_(given)
        return captured.replay()


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory starts that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def tensors_of(output: Any) -> Iterable[torch.Tensor]:
    """The tensors of a forward's or a piece's result.

    Raises:
        GraphError: it holds something else.
    """
    tensors = output if isinstance(output, tuple) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(f"a captured function returned a {type(tensor).__name__}; expected tensors only")
    return tensors


def static_copy(output: Any) -> ForwardOutput:
    """The same tensors in memory of their own."""
    copies = tuple(tensor.clone() for tensor in tensors_of(output))
    return copies if isinstance(output, tuple) else copies[0]
