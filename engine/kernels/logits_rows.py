"""Rows of logits as sampling kernels read them, and what a row holds by chunks of a few tokens.

Most of what truncation and log probabilities ask of a row concerns its few likeliest tokens. One pass keeps the largest
logit and the probability mass of each chunk of :data:`CHUNK` tokens; after it only chunks that can matter are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import kernel

TILE = 4096
"""Tokens that a program reads at once."""

CHUNK = 64
"""Tokens of a chunk: a few cache lines, so that reading one alone wastes nothing."""

LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_THERE = tl.constexpr(-(2**31))
"""The key of what lies outside a row: below those of all values."""

MINUS_INF = tl.constexpr(-(2**31) + 0x7FFFFF)
"""The key of -inf."""


class EditedRows(NamedTuple):
    """Logits of the requests that change them: float32 ``logits`` ``[num_edited, vocab]``, the edited row of each
    request that samples (int32 ``slots`` ``[num_rows]``, -1 for none), and how many of the raw logits of each tile of
    :data:`TILE` tokens are NaN (int32 ``num_nan`` ``[num_edited, num_tiles]``)."""

    logits: torch.Tensor
    slots: torch.Tensor
    num_nan: torch.Tensor


class LogitsRows(NamedTuple):
    """What ``num_rows`` requests choose from: rows of ``logits`` ``[n, vocab]`` (each row contiguous), the first ones
    in order, or those that int64 ``rows`` ``[num_rows]`` says; ``edited`` stands for them where it has a row."""

    logits: torch.Tensor
    rows: torch.Tensor | None = None
    edited: EditedRows | None = None

    @property
    def num_tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.logits.shape[1] // TILE)

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The first arguments of a kernel that reads rows; :meth:`constants` says which of them count."""
        edited, slots = (self.logits, self.logits) if self.edited is None else self.edited[:2]
        return self.logits, self.logits if self.rows is None else self.rows, edited, slots, self.logits.stride(0)

    def constants(self) -> dict[str, int]:
        """The constants of such a kernel."""
        return {
            "VOCAB": self.logits.shape[1],
            "HAS_ROWS": self.rows is not None,
            "HAS_EDITED": self.edited is not None,
        }


class ChunkSummary(NamedTuple):
    """Float32 ``maxima`` ``[num_rows, num_chunks]`` and ``masses`` of the same shape: the sum of
    ``exp((logit - maximum) / temperature)`` over the chunk.

    Of a chunk with a NaN the maximum is +inf: whoever looks for the likeliest tokens reads it and finds the NaN.
    """

    maxima: torch.Tensor
    masses: torch.Tensor


@triton.jit
def row_of(
    row,
    logits_ptr,
    rows_ptr,
    edited_ptr,
    slots_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """Where the logits of a request lie."""
    source = row.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows_ptr + row)
    start = logits_ptr + source * row_stride
    if HAS_EDITED:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        start = tl.where(slot >= 0, edited_ptr + slot * VOCAB, start)
    return start


@triton.jit
def scaled(logits, peak, temperature):
    """``(logit - peak) / temperature``, at most 0, rounded as torch rounds it; several +inf share the peak."""
    shift = tl.minimum(tl.maximum(peak, -LARGEST), LARGEST)
    return tl.div_rn(tl.minimum(logits - shift, 0.0), temperature)


@triton.jit
def ordered(values):
    """Int32 keys in the order of float32 values; zero has one key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 value of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def list_chunks(is_listed, ids_ptr, NUM: tl.constexpr):
    """Write down the chunks, in order; their number."""
    places = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # what was listed before has been read
    tl.store(ids_ptr + places, tl.arange(0, NUM), mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32))


@kernel(do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "temperatures_ptr", "wanted_ptr"])
def _summary_kernel(
    logits_ptr,
    rows_ptr,
    edited_ptr,
    slots_ptr,
    row_stride,
    temperatures_ptr,
    wanted_ptr,
    maxima_ptr,
    masses_ptr,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
):
    row = tl.program_id(1)
    temperature = 1.0
    is_wanted = True
    if HAS_TEMPERATURES:
        temperature = tl.load(temperatures_ptr + row)
        is_wanted = (temperature > 0) & (tl.load(wanted_ptr + row) != 0)
    if is_wanted:
        start = row_of(row, logits_ptr, rows_ptr, edited_ptr, slots_ptr, row_stride, VOCAB, HAS_ROWS, HAS_EDITED)
        chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
        tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = tokens < VOCAB
        logits = tl.load(start + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        is_nan = logits != logits
        logits = tl.where(is_nan, -float("inf"), logits)
        maxima = tl.max(logits, axis=1)
        limited = tl.where(logits > LARGEST, LARGEST, logits)
        tops = tl.minimum(tl.maximum(maxima, -LARGEST), LARGEST)
        masses = tl.sum(tl.exp((limited - tops[:, None]) / temperature), axis=1)
        maxima = tl.where(tl.max(is_nan.to(tl.int32), axis=1) > 0, float("inf"), maxima)
        place = row.to(tl.int64) * ROW_CHUNKS + chunks
        tl.store(maxima_ptr + place, maxima, mask=chunks < ROW_CHUNKS)
        tl.store(masses_ptr + place, masses, mask=chunks < ROW_CHUNKS)


def summarise_chunks(
    source: LogitsRows, num_rows: int, temperatures: torch.Tensor | None = None, wanted: torch.Tensor | None = None
) -> ChunkSummary:
    """Summaries of the rows, in one pass.

    Args:
        source: what is summarised.
        num_rows: how many rows.
        temperatures: float32 ``[num_rows]``; None for 1. Rows with 0 are left out.
        wanted: int32 ``[num_rows]``, given with temperatures: rows with 0 are left out.
    """
    num_chunks, device = -(-source.logits.shape[1] // CHUNK), source.logits.device
    maxima, masses = (torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device) for _ in range(2))
    _summary_kernel[(source.num_tiles, num_rows)](
        *source.pointers(),
        source.logits if temperatures is None else temperatures,
        source.logits if wanted is None else wanted,
        maxima,
        masses,
        **source.constants(),
        HAS_TEMPERATURES=temperatures is not None,
        CHUNK=CHUNK,
        CHUNKS=TILE // CHUNK,
        ROW_CHUNKS=num_chunks,
        num_warps=4,
    )
    return ChunkSummary(maxima, masses)
