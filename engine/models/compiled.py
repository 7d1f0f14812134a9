"""A model whose pieces between attention calls are compiled by ``torch.compile``, for a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from shutil import which
from time import perf_counter
from typing import Any

import torch
from attrs import evolve

from ...fsm.errors import TwoStrokeError
from ...stages.forward_context import ForwardContext, Model
from ...stages.records import ModelInputs, SegmentRunner
from ...stages.specs import ModelSpec
from .decoder import Decoder

logger = logging.getLogger(__name__)

SLOW_CALL_S = 1.0
"""A piece that takes longer than this was being compiled, and is logged."""


class CompilationFailed(TwoStrokeError, RuntimeError):
    """``torch.compile`` can't compile a piece of this model on this machine."""


class CompiledModel:
    """A :class:`Model` around another one.

    Pieces are compiled when they are first called, for one row, then for any number of rows; what is compiled for one
    layer serves every layer of the same shape. Where a tap looks into the pieces they run as they are. The product with
    the vocabulary stays as it is: nothing could be joined with it.

    Raises:
        CompilationFailed: there is no C++ compiler.
    """

    def __init__(self, model: Model) -> None:
        _require_compiler()
        self._model = model
        self._pieces = CompiledPieces()

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model."""
        return self._model.spec

    @property
    def observable(self) -> tuple[str, ...]:
        """What the model's pieces show to a tap."""
        return getattr(self._model, "observable", ())

    @property
    def compile_seconds(self) -> float:
        """Seconds spent in calls that compiled, so far."""
        return self._pieces.seconds

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden]`` after the final norm. Seconds on the first calls.

        Raises:
            CompilationFailed: a piece could not be compiled; the cause is torch's.
        """
        if context.segments.is_tapped:
            return self._model.forward(inputs, context)
        if isinstance(self._model, Decoder):
            self._model.refresh_stale_copies()  # compiled pieces don't look whether a weight was written since
        return self._model.forward(inputs, evolve(context, segments=_CompiledSegments(context.segments, self._pieces)))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return self._model.compute_logits(hidden_states)


class _CompiledSegments(SegmentRunner):
    """Hands each piece on in its compiled form, so that a graph captures that form."""

    def __init__(self, inner: SegmentRunner, pieces: CompiledPieces) -> None:
        self._inner = inner
        self._pieces = pieces

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        return self._inner.run(index, self._pieces.of(piece), *args)


class CompiledPieces:
    """The compiled form of each function that a piece is made of, once for all layers.

    A piece that is a ``functools.partial`` is taken apart: the layer that it is bound to becomes an argument.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._of_partials: dict[Callable[..., Any], Callable[..., Any]] = {}

    def of(self, piece: Callable[..., Any]) -> Callable[..., Any]:
        """``piece``, compiled when it is called."""
        if not isinstance(piece, partial):
            return self._function(piece)
        known = self._of_partials.get(piece)
        if known is None:
            known = partial(self._function(piece.func), *piece.args, **piece.keywords)
            self._of_partials[piece] = known
        return known

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        known = self._compiled.get(function)
        if known is None:
            compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
            name = getattr(function, "__name__", repr(function))
            known = self._compiled[function] = partial(self._call, name, compiled)
        return known

    def _call(self, name: str, compiled: Callable[..., Any], *args: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        started = perf_counter()
        try:
            result = compiled(*args)
        except TorchDynamoException as error:
            raise CompilationFailed(
                f"torch.compile could not compile {name!r} ({type(error).__name__}); "
                "leave compile=False, or look at the cause"
            ) from error
        seconds = perf_counter() - started
        if seconds > SLOW_CALL_S:
            self.seconds += seconds
            logger.info("compiled %s in %.1f s (%.1f s in all)", name, seconds, self.seconds)
        return result


def _require_compiler() -> None:
    from torch._inductor import config

    wanted = config.cpp.cxx
    names = [name for name in (wanted if isinstance(wanted, list | tuple) else [wanted]) if name]
    if not any(map(which, names)):
        raise CompilationFailed(
            f"compile=True needs a C++ compiler, and there is none of {', '.join(names)}; "
            "install g++ or name one in the variable CXX, or leave compile=False"
        )
