"""A model whose every row comes out with the same bits, whatever rows are computed beside it.

A matrix product adds up in an order that its kernel chooses by the number of rows, so that a token's logits change in
their last bits with the batch (He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Here the pieces of a model
between its attention calls, which treat rows alike, see blocks of a few fixed sizes and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen

from ...fsm.errors import TwoStrokeError
from ...stages.forward_context import ForwardContext, Model, Tap
from ...stages.records import ModelInputs, SegmentRunner
from ...stages.specs import ModelSpec

Rows = TypeVar("Rows", bound=torch.Tensor | tuple[torch.Tensor, ...])

REFERENCE_SIZE = 8
"""Rows of the block whose bits count."""

OTHER_SIZES = (4, 16, 32, 64)
"""Sizes that are used too once they gave the same bits. Below 4 rows, kernels differ on every machine that was seen."""

_LOGITS = -1  # what compute_logits counts as, beside the numbers of the pieces


class BatchInvarianceLost(TwoStrokeError, RuntimeError):
    """The kernels of this machine give a row other bits by its place in a block: there is no fixed order to hold to."""


class InvariantModel:
    """A :class:`Model` around another one, whose pieces between attention calls must treat each row on its own.

    Together with attention of the same property, a token's logits depend on the tokens before it and on nothing else:
    for one machine, one torch and one number of threads.

    Which sizes of block agree is a property of the kernels, not of the data, and is found out when a size is first
    used: the block is computed in the reference size too and compared bit for bit, in every piece. One difference, and
    the size is not used again with that number of threads; its rows are taken from the reference.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._blocks = RowBlocks()

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model."""
        return self._model.spec

    @property
    def observable(self) -> tuple[str, ...]:
        """What the model's pieces show to a tap."""
        return getattr(self._model, "observable", ())

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Sizes of block that are in use with the present number of threads."""
        return self._blocks.sizes

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden]`` after the final norm.

        Raises:
            BatchInvarianceLost: a row's bits depend on its place in a block.
        """
        segments = _BlockedSegments(context.segments, self._blocks)
        return self._model.forward(inputs, evolve(context, segments=segments))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``. Raises as :meth:`forward`."""
        return self._blocks.run(_LOGITS, self._model.compute_logits, hidden_states)


class _BlockedSegments(SegmentRunner):
    """Hands each piece on in a form that works in blocks, so that a graph captures that form."""

    def __init__(self, inner: SegmentRunner, blocks: RowBlocks) -> None:
        self._inner = inner
        self._blocks = blocks

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        return self._inner.run(index, _BlockedPiece(self._blocks, index, piece), *args)


@frozen(eq=False)
class _BlockedPiece:
    """A piece in blocks. Where a tap wants to see all rows of what is inside, the blocks get there together."""

    _blocks: RowBlocks
    _index: int
    _piece: Callable[..., Any]

    def __call__(self, *args: torch.Tensor, tap: Tap | None = None) -> Any:
        if tap is None:
            return self._blocks.run(self._index, self._piece, *args)
        shown: list[torch.Tensor] = []  # what goes on after each tap so far, for all rows
        row_numbers = torch.arange(len(args[0]), device=args[0].device)
        while True:
            reached: list[str] = []
            function = partial(self._up_to_next_tap, shown, reached)
            result = self._blocks.run((self._index, len(shown)), function, row_numbers, *args)
            if not reached:
                return result
            shown.append(tap(reached[0], result))

    def _up_to_next_tap(
        self, shown: list[torch.Tensor], reached: list[str], row_numbers: torch.Tensor, *args: torch.Tensor
    ) -> Any:
        """The rows for the next tap, whose name goes into ``reached``; the piece's result where no tap is left."""
        given = iter(shown)

        def tap(name: str, values: torch.Tensor) -> torch.Tensor:
            after = next(given, None)
            if after is None:
                reached.append(name)
                raise _TapReached(values)
            return after.index_select(0, row_numbers)

        try:
            return self._piece(*args, tap=tap)
        except _TapReached as stop:
            return stop.values


class _TapReached(Exception):
    """Stops a piece at a tap that has not seen all rows yet."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        super().__init__()


class RowBlocks:
    """Runs functions that treat rows alike, in blocks of sizes that were seen to give every row the same bits."""

    def __init__(self) -> None:
        self._refused: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int, Hashable]] = set()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that may be used with the present number of threads, ascending."""
        num_threads = torch.get_num_threads()
        others = (size for size in OTHER_SIZES if (num_threads, size) not in self._refused)
        return tuple(sorted((REFERENCE_SIZE, *others)))

    def run(self, index: Hashable, function: Callable[..., Rows], *args: torch.Tensor) -> Rows:
        """``function(*args)``, for tensors that share their first dimension; ``index`` says which function it is."""
        num_rows = args[0].shape[0]
        if not num_rows:
            return function(*args)
        parts = [self._block(index, function, args, *span) for span in split_rows(num_rows, self.sizes)]
        return _joined(parts)

    def _block(
        self, index: Hashable, function: Callable[..., Rows], args: tuple[torch.Tensor, ...], start: int, size: int
    ) -> Rows:
        """Rows from ``start`` on, ``size`` of them or as many as there are."""
        rows = [tensor[start : start + size] for tensor in args]
        num_rows = rows[0].shape[0]
        filled = [_filled(tensor, size) for tensor in rows]
        num_threads = torch.get_num_threads()
        if (num_threads, size, index) not in self._seen:
            self._try(num_threads, index, function, filled)
            self._seen.add((num_threads, size, index))
        is_refused = (num_threads, size) in self._refused
        result = self._by_reference(function, filled) if is_refused else function(*filled)
        return result if num_rows == size else _head(result, num_rows)

    def _try(self, num_threads: int, index: Hashable, function: Callable[..., Any], rows: list[torch.Tensor]) -> None:
        """Compare a size with the reference, where it is first used for a function; the reference with itself."""
        size = rows[0].shape[0]
        first = [_filled(tensor[:1], REFERENCE_SIZE) for tensor in rows]
        if not all(_same_bits(tensor, tensor[:1].expand_as(tensor)) for tensor in _tensors(function(*first))):
            raise BatchInvarianceLost(
                f"equal rows came out of piece {index} of the model with other bits by their place in a block of "
                f"{REFERENCE_SIZE}, with {num_threads} threads; try torch.set_num_threads(1)"
            )
        reference = self._by_reference(function, rows)
        if not all(map(_same_bits, _tensors(function(*rows)), _tensors(reference))):
            self._refused.add((num_threads, size))

    def _by_reference(self, function: Callable[..., Rows], rows: list[torch.Tensor]) -> Rows:
        size = rows[0].shape[0]
        starts = range(0, size, REFERENCE_SIZE)
        parts = [function(*(_filled(t[i : i + REFERENCE_SIZE], REFERENCE_SIZE) for t in rows)) for i in starts]
        return _head(_joined(parts), size)


def split_rows(num_rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and size of each block: the largest that can be filled, then the smallest that takes what is left."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        size = max((size for size in sizes if size <= left), default=sizes[0])
        yield start, size
        start += size


def _filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Up to ``size`` rows, by repeating those that there are: numbers like the real ones, for the comparisons."""
    num_rows = rows.shape[0]
    if num_rows == size:
        return rows
    return rows.index_select(0, torch.arange(size, device=rows.device) % num_rows)


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def _joined(parts: list[Any]) -> Any:
    """The rows of all parts, one below the other."""
    if len(parts) == 1:
        return parts[0]
    joined = tuple(torch.cat(tensors) for tensors in zip(*map(_tensors, parts), strict=True))
    return joined[0] if isinstance(parts[0], torch.Tensor) else joined


def _head(result: Any, num_rows: int) -> Any:
    """The first rows."""
    if isinstance(result, torch.Tensor):
        return result[:num_rows]
    return tuple(tensor[:num_rows] for tensor in result)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one == other).logical_or_(one.isnan() & other.isnan()).all())
