"""Observing and steering: functions called with a model's activations, and with which request each row belongs to.

Names are ``embedding``, ``layers.N.attention_input`` (normed, what queries, keys and values are made of),
``layers.N.attention`` and ``layers.N.mlp`` (what the two blocks add), ``layers.N.residual`` (the hidden state after the
layer), ``norm`` and ``logits``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Self

import numpy as np
import torch
from attrs import evolve, frozen

from ..fsm import InputRefused, Observers, TwoStrokeError
from ..fsm.observers import StageObserver
from ..stages.forward_context import ForwardTaps, Model
from ..stages.graphs import CapturedKeys
from ..stages.records import (
    EAGER_SEGMENTS,
    Batch,
    ExecuteModelState,
    IntArray,
    PreparedInputs,
    SegmentRunner,
    UBatchSlice,
    UBatchSlices,
)

LOGITS = "logits"
OBSERVED = "activations are observed"
"""Why a step runs without a graph while a hook looks at what happens inside one; dispatch counts by it."""

_OF_NO_LAYER = frozenset({"embedding", "norm"})
_OF_NEXT_LAYER = frozenset({"attention_input"})
_LOG = logging.getLogger(__name__)


class SteeringFailed(TwoStrokeError, ValueError):
    """An editing hook that returned something else than a tensor of the same shape."""


@frozen(kw_only=True, eq=False)
class Activation:
    """Rows of one tensor of one step, without padding.

    ``tensor`` is ``[num_rows, …]`` in the model's own memory, valid during the call: clone what you keep. Rows of
    ``req_ids[i]`` are ``query_start_loc[i] : query_start_loc[i + 1]``; ``positions`` int64 ``[num_rows]`` says where in
    its request's text each row's token stands. A row is a scheduled token; of ``logits``, a token whose logits are
    needed. Micro-batches come one after another, and a request that is cut by a border comes in both.
    """

    name: str
    tensor: torch.Tensor
    req_ids: Sequence[str]
    query_start_loc: IntArray
    positions: IntArray

    def rows(self, req_id: str) -> slice:
        """The rows of a request; none where it is not in the batch."""
        if req_id not in self.req_ids:
            return slice(0, 0)
        index = list(self.req_ids).index(req_id)
        return slice(int(self.query_start_loc[index]), int(self.query_start_loc[index + 1]))

    def of(self, req_id: str) -> torch.Tensor:
        """A request's part of the tensor: a view."""
        return self.tensor[self.rows(req_id)]


HookFunction = Callable[[Activation], torch.Tensor | None]


class ObserveHandle:
    """A hook that is in place. Close it, or use it as a context manager.

    ``names`` are the activations it hears of; ``num_calls`` and ``num_failures`` count. What a reading hook raises is
    logged once and never fails a step, what an editing one raises does.
    """

    def __init__(self, hooks: ActivationHooks, names: frozenset[str], fn: HookFunction, *, edit: bool) -> None:
        self.names = names
        self.num_calls = 0
        self.num_failures = 0
        self._hooks = hooks
        self._fn = fn
        self._edit = edit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hook away, from the next forward on. Idempotent."""
        self._hooks.remove(self)

    def apply(self, activation: Activation) -> torch.Tensor | None:
        """Call the function; what is to be put in the activation's place, or None."""
        self.num_calls += 1
        if self._edit:
            return self._edited(activation, self._fn(activation))
        try:
            self._fn(activation)
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                _LOG.exception("a hook on %s raised; it goes on being called, and is not logged again", activation.name)
        return None

    @staticmethod
    def _edited(activation: Activation, result: object) -> torch.Tensor | None:
        if result is None:
            return None
        if not isinstance(result, torch.Tensor) or result.shape != activation.tensor.shape:
            got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise SteeringFailed(
                f"a hook on {activation.name} returned {got}; return a tensor {tuple(activation.tensor.shape)}, or None"
            )
        return result


@frozen(kw_only=True, eq=False)
class _Rows:
    """Which request and position each row of a tensor belongs to."""

    req_ids: Sequence[str]
    query_start_loc: IntArray
    positions: IntArray

    def activation(self, name: str, tensor: torch.Tensor) -> Activation:
        return Activation(
            name=name,
            tensor=tensor,
            req_ids=self.req_ids,
            query_start_loc=self.query_start_loc,
            positions=self.positions,
        )


@frozen(eq=False)
class _Step:
    """What is known of the step under way."""

    batch: Batch | None = None
    inputs: PreparedInputs | None = None
    ubatches: UBatchSlices | None = None

    def token_rows(self, ubatch: int) -> _Rows | None:
        """The scheduled tokens of a micro-batch; None outside a step."""
        if self.batch is None or self.inputs is None or self.ubatches is None:
            return None
        whole = self._whole(self.batch, self.inputs)
        if ubatch >= len(self.ubatches.slices):
            return None
        return _cut(whole, self.ubatches.slices[ubatch])

    def logits_rows(self) -> _Rows | None:
        """The tokens that get logits."""
        if self.batch is None or self.inputs is None:
            return None
        whole, wanted = self._whole(self.batch, self.inputs), self.inputs.logits_indices_host
        starts = np.searchsorted(wanted, whole.query_start_loc)
        return evolve(whole, query_start_loc=starts, positions=whole.positions[wanted])

    @staticmethod
    def _whole(batch: Batch, inputs: PreparedInputs) -> _Rows:
        starts = inputs.query_start_loc_host.astype(np.int64)
        counts = batch.num_scheduled_tokens
        first = np.repeat(batch.num_computed_tokens - starts[:-1], counts)
        return _Rows(req_ids=batch.req_ids, query_start_loc=starts, positions=first + np.arange(batch.num_tokens))


def _cut(whole: _Rows, part: UBatchSlice) -> _Rows:
    tokens, requests = part.token_slice, part.request_slice
    starts = whole.query_start_loc[requests.start : requests.stop + 1].clip(tokens.start, tokens.stop) - tokens.start
    return _Rows(
        req_ids=whole.req_ids[requests],
        query_start_loc=starts,
        positions=whole.positions[tokens],
    )


class ActivationHooks(StageObserver, ForwardTaps):
    """A runner's hooks. Hears of the step's records as an observer, and of its tensors as the taps of the forward.

    Without hooks it is no observer and taps nothing. While a hook needs what happens inside a graph, the graphs are
    suspended: they stay, and serve again when the last such hook is gone.
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._captured = CapturedKeys()
        self._hooks: tuple[ObserveHandle, ...] = ()
        self._step = _Step()

    def use_graphs(self, captured: CapturedKeys) -> None:
        """The graphs to suspend."""
        self._captured = captured

    def add(self, observable: Iterable[str], pattern: str, fn: HookFunction, *, edit: bool) -> ObserveHandle:
        """Call ``fn`` with every activation whose name matches.

        Raises:
            InputRefused: none does.
        """
        available = tuple(observable)
        names = frozenset(name for name in available if fnmatchcase(name, pattern))
        if not names:
            shown = ", ".join((*available[:6], "…", *available[-2:]) if len(available) > 9 else available)
            raise InputRefused(f"nothing to observe is called {pattern!r}; there are: {shown}")
        handle = ObserveHandle(self, names, fn, edit=edit)
        self._set((*self._hooks, handle))
        return handle

    def remove(self, handle: ObserveHandle) -> None:
        """Take a hook away; one that is not there is fine."""
        self._set(tuple(other for other in self._hooks if other is not handle))

    def _set(self, hooks: tuple[ObserveHandle, ...]) -> None:
        self._hooks = hooks
        self._observers.remove(self)
        if hooks:
            self._observers.add(self)
        if any(hook.names != {LOGITS} for hook in hooks):
            self._captured.suspend(OBSERVED)
        else:
            self._captured.resume()

    # ---- the step

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        if isinstance(record, Batch):
            self._step = _Step(record)
        elif isinstance(record, PreparedInputs):
            self._step = evolve(self._step, inputs=record)
        elif isinstance(record, UBatchSlices):
            self._step = evolve(self._step, ubatches=record)
        elif isinstance(record, ExecuteModelState):
            self._step = _Step()

    def stage_failed(self, name: str, error: BaseException) -> None:
        self._step = _Step()

    def segments(self, segments: SegmentRunner, ubatch: int) -> SegmentRunner:
        if not self._hooks or segments is not EAGER_SEGMENTS:
            return segments
        rows = self._step.token_rows(ubatch)
        return segments if rows is None else _TappedSegments(self, rows)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        rows = self._step.logits_rows() if self._hooks else None
        return logits if rows is None else self.tap(LOGITS, logits, rows)

    def tap(self, name: str, values: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Show ``values`` to the hooks of this name; they, or what the hooks put in their place."""
        num_rows = len(rows.positions)
        for hook in self._hooks:
            if name in hook.names:
                edited = hook.apply(rows.activation(name, values[:num_rows]))
                if edited is not None:
                    values = values.clone()
                    values[:num_rows] = edited
        return values


@frozen(eq=False)
class _TappedSegments(SegmentRunner):
    """Runs the pieces of a model that names what it computes: piece i ends layer i - 1 and begins layer i."""

    is_tapped = True
    _hooks: ActivationHooks
    _rows: _Rows

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        def tap(name: str, values: torch.Tensor) -> torch.Tensor:
            if name not in _OF_NO_LAYER:
                name = f"layers.{index if name in _OF_NEXT_LAYER else index - 1}.{name}"
            return self._hooks.tap(name, values, self._rows)

        return piece(*args, tap=tap)


def observable(model: Model) -> tuple[str, ...]:
    """The names of what can be observed of a model: logits always, the rest where the model names it."""
    return (*getattr(model, "observable", ()), LOGITS)
