"""ubatch_slice: cut the batch into micro-batches of equal token counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..fsm.errors import TwoStrokeError
from .records import Batch, BatchExecutionDescriptor, IntArray, UBatchSlice, UBatchSlices


class EmptyUBatch(TwoStrokeError, ValueError):
    """A split that would leave a micro-batch without a real token. Dispatch refuses such plans beforehand."""


def splits_evenly(num_tokens: int, num_tokens_padded: int, num_ubatches: int) -> bool:
    """Whether each of ``num_ubatches`` equal cuts of the padded size holds one of the ``num_tokens`` real ones."""
    size = num_tokens_padded // num_ubatches
    return size > 0 and num_tokens > size * (num_ubatches - 1)


def make_ubatch_slices(
    num_scheduled_tokens: IntArray | Sequence[int],
    num_tokens_padded: int,
    num_reqs_padded: int,
    num_ubatches: int,
) -> UBatchSlices:
    """Micro-batches of ``num_tokens_padded // num_ubatches`` tokens each; the last takes the rest.

    ``num_scheduled_tokens`` holds the tokens of each request, all positive, in batch order. A request that lies across
    a border is in both micro-batches; padded requests and tokens belong to the last one.

    Raises:
        EmptyUBatch: a micro-batch would hold padding only.
    """
    ends = np.cumsum(num_scheduled_tokens)
    num_tokens = int(ends[-1])
    if not splits_evenly(num_tokens, num_tokens_padded, num_ubatches):
        raise EmptyUBatch(
            f"{num_tokens} tokens (padded to {num_tokens_padded}) leave one of {num_ubatches} micro-batches empty; "
            "run the batch whole"
        )
    size = num_tokens_padded // num_ubatches
    borders = [*range(0, size * num_ubatches, size), num_tokens]
    slices = [
        UBatchSlice(
            slice(int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(ends, stop, side="left")) + 1),
            slice(start, stop),
        )
        for start, stop in pairwise(borders)
    ]
    last = slices[-1]
    padded_last = UBatchSlice(
        slice(last.request_slice.start, num_reqs_padded), slice(last.token_slice.start, num_tokens_padded)
    )
    return UBatchSlices(slices=tuple(slices), padded=(*slices[:-1], padded_last))


class SliceUBatches:
    """The stage: the whole batch as one micro-batch, or ``num_ubatches`` of them when the plan says so."""

    def __init__(self, num_ubatches: int = 1) -> None:
        self._num_ubatches = num_ubatches
        self._whole: tuple[tuple[int, ...], UBatchSlices] | None = None

    def __call__(self, batch: Batch, execution: BatchExecutionDescriptor) -> UBatchSlices:
        """Slices of the real tokens, and the same padded to the planned shape."""
        if execution.should_ubatch:
            return make_ubatch_slices(
                batch.num_scheduled_tokens, execution.num_tokens, execution.num_reqs, self._num_ubatches
            )
        sizes = (batch.num_reqs, batch.num_tokens, execution.num_reqs, execution.num_tokens)
        if self._whole is None or self._whole[0] != sizes:  # most steps are of the size of the one before
            real, padded = (UBatchSlice(slice(0, sizes[at]), slice(0, sizes[at + 1])) for at in (0, 2))
            self._whole = sizes, UBatchSlices(slices=(real,), padded=(padded,))
        return self._whole[1]
