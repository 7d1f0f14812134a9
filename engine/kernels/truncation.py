"""top_k, top_p and min_p without a sort: the smallest scaled logit of each row that may still be drawn.

The set is that of :mod:`twostroke.stages.sampling.truncation`: what chunks hold (:mod:`.logits_rows`) and the search of
:mod:`.floor_search` find its least member.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .floor_search import ONE, mass_from, search
from .launching import kernel
from .logits_rows import CHUNK, MINUS_INF, NOT_THERE, LogitsRows, ordered, row_of, scaled, summarise_chunks, value_of

LANES = 32
"""Chunks that the threads of a program read side by side; others follow in the same threads."""


class Truncation(NamedTuple):
    """Limits by row, each ``[num_rows]``: int32 ``top_k`` (0 = off), float32 ``top_p`` (1 = off), float32 ``log_min_p``
    (-inf = off), int32 ``is_used``: 0 where all are off."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    is_used: torch.Tensor


class Floors(NamedTuple):
    """Float32 ``floors`` ``[num_rows]``, -inf where nothing is cut off; ``peaks`` ``[num_rows]``, the largest logit of
    a row with a floor; ``maxima`` ``[num_rows, num_chunks]`` of such a row's chunks.

    A token may be drawn when ``(logit - peak) / temperature`` is at least the floor.
    """

    floors: torch.Tensor
    peaks: torch.Tensor
    maxima: torch.Tensor


class SearchSizes(NamedTuple):
    """How many chunks are looked at in registers at once (a power of two), and for how many tokens of a row there is
    room in memory where more have to be looked at."""

    block_chunks: int = 128
    capacity: int = 65536


@kernel(
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "slots_ptr",
        "temperatures_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "log_min_p_ptr",
        "is_used_ptr",
        "floors_ptr",
        "peaks_ptr",
    ]
)
def _floor_kernel(
    logits_ptr,
    rows_ptr,
    edited_ptr,
    slots_ptr,
    row_stride,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    is_used_ptr,
    maxima_ptr,
    masses_ptr,
    ids_ptr,
    values_ptr,
    floors_ptr,
    peaks_ptr,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    NUM: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + row)
    floor = -float("inf")
    peak = 0.0
    if (temperature > 0) & (tl.load(is_used_ptr + row) != 0):
        start = row_of(row, logits_ptr, rows_ptr, edited_ptr, slots_ptr, row_stride, VOCAB, HAS_ROWS, HAS_EDITED)
        chunks = tl.arange(0, NUM)
        inside = chunks < ROW_CHUNKS
        place = row.to(tl.int64) * ROW_CHUNKS
        ids_ptr += place
        values_ptr += row.to(tl.int64) * CAPACITY
        maxima = tl.load(maxima_ptr + place + chunks, mask=inside, other=-float("inf"))
        peak = tl.max(maxima)
        tops = scaled(maxima, peak, temperature)
        masses = tl.load(masses_ptr + place + chunks, mask=inside, other=0.0) * tl.exp(tops)
        keys = tl.where(inside, ordered(tops), NOT_THERE)
        high = tl.max(keys).to(tl.int64) + 1
        least = tl.minimum(ordered(tl.load(log_min_p_ptr + row)).to(tl.int64), high - 1)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        total = tl.sum((masses * ONE).to(tl.int64))
        for kind in range(0, 2):  # top_k, then top_p of what it leaves
            is_mass = kind == 1
            target = tl.where(is_mass, 0, top_k.to(tl.int64))
            if is_mass & (top_p < 1):
                if least > MINUS_INF:  # of what is left; otherwise chunks have summed it up
                    total = mass_from(start, ids_ptr, keys, least, peak, temperature, VOCAB, CHUNK, CHUNKS, NUM)
                wanted = total.to(tl.float64) * top_p.to(tl.float64)
                target = wanted.to(tl.int64)
                target += (target.to(tl.float64) < wanted).to(tl.int64)
            if target > 0:
                least = search(
                    start, ids_ptr, values_ptr, keys, masses, least, high, target, peak, temperature,
                    is_mass, VOCAB, CHUNK, CHUNKS, LANES, NUM, CAPACITY,
                )  # fmt: skip
        floor = value_of(least.to(tl.int32))
    tl.store(floors_ptr + row, floor)
    tl.store(peaks_ptr + row, peak)


def find_floors(
    source: LogitsRows, temperatures: torch.Tensor, truncation: Truncation, sizes: SearchSizes | None = None
) -> Floors:
    """The floor of each row, out of one pass over the logits and a look at what that leaves open.

    Args:
        source: what is drawn from.
        temperatures: float32 ``[num_rows]``; rows with 0 are greedy and have no floor.
        truncation: their limits.
        sizes: of the search, for tests.
    """
    num_rows, vocab, device = temperatures.shape[0], source.logits.shape[1], source.logits.device
    sizes = sizes or SearchSizes()
    summary = summarise_chunks(source, num_rows, temperatures, truncation.is_used)
    num_chunks = summary.maxima.shape[1]
    padded = max(triton.next_power_of_2(num_chunks), 2)
    ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    values = torch.empty(num_rows, min(sizes.capacity, vocab), dtype=torch.int32, device=device)
    results = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    _floor_kernel[(num_rows,)](
        *source.pointers(),
        temperatures,
        *truncation,
        *summary,
        ids,
        values,
        results[0],
        results[1],
        **source.constants(),
        CHUNK=CHUNK,
        CHUNKS=min(sizes.block_chunks, padded),
        LANES=min(sizes.block_chunks, padded, LANES),
        ROW_CHUNKS=num_chunks,
        NUM=padded,
        CAPACITY=values.shape[1],
        num_warps=16,
    )
    return Floors(results[0], results[1], summary.maxima)
