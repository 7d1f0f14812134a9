"""Choosing tokens from logits in one pass: argmax of logits, or of scaled logits plus Gumbel noise, and their health.

Noise is that of :mod:`twostroke.stages.sampling.random`, word for word; only the last bits of its logarithms differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...stages.records import NOTHING_LEFT
from ...stages.sampling.random import NoisePurpose
from .launching import kernel
from .logits_rows import CHUNK, LARGEST, TILE, LogitsRows, row_of, scaled
from .truncation import Floors

AT_ONCE = tl.constexpr(8)
"""Chunks that a program draws from at once."""


class DrawParams(NamedTuple):
    """What each row is drawn with: float32 ``temperatures`` ``[num_rows]`` (0 = greedy), int32 ``seeds``
    ``[2, num_rows]`` (low and high halves, rows contiguous), int32 ``positions`` ``[num_rows]`` of the drawn tokens.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@triton.jit
def _mix(word):
    """lowbias32 on uint32."""
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _key(START: tl.constexpr, low, high, position, PURPOSE: tl.constexpr):
    """One word of a row's noise key."""
    return _mix(_mix(_mix(_mix(low ^ START) ^ high) ^ position) ^ PURPOSE)


@triton.jit
def _log(value, FAST: tl.constexpr):
    """Natural logarithm; the hardware's own is within 2 units of the last place here."""
    if FAST:
        binary = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
        return binary * 0.6931471805599453
    return tl.log(value)


@triton.jit
def gumbel(token_ids, first, second, FAST: tl.constexpr):
    """Standard Gumbel variates of the noise words of ``token_ids``."""
    word = _mix(_mix(token_ids.to(tl.uint32) ^ first) + second)
    uniform = ((word & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.999999940395355)
    # -log1p(-u): by its series where 1 - u would lose the digits of u.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.3333333333333 + uniform * (0.25 + uniform * 0.2))))
    return -_log(tl.where(uniform < 0.015625, series, -_log(1.0 - uniform, FAST)), FAST)


@triton.jit
def _draw_from_chunks(
    start,
    maxima_ptr,
    first_chunk,
    floor,
    peak,
    temperature,
    first,
    second,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    FAST: tl.constexpr,
):
    """The best score, its token, and the number of NaN among chunks that reach the floor: mostly few of a tile."""
    chunks = first_chunk + tl.arange(0, CHUNKS)
    is_there = chunks < ROW_CHUNKS
    maxima = tl.load(maxima_ptr + chunks, mask=is_there, other=-float("inf"))
    is_active = (is_there & (scaled(maxima, peak, temperature) >= floor)).to(tl.int32)
    ranks = tl.where(is_active > 0, tl.cumsum(is_active, axis=0), 0)
    best = -float("inf")
    token = tl.full((), 0, tl.int32)
    num_nan = tl.full((), 0, tl.int32)
    for done in range(0, tl.sum(is_active), AT_ONCE):
        is_next = (ranks[None, :] == (done + 1 + tl.arange(0, AT_ONCE))[:, None]).to(tl.int32)
        chosen = tl.sum(is_next * (chunks[None, :] + 1), axis=1) - 1  # -1 where there are no more
        tokens = chosen[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = (tokens >= 0) & (tokens < VOCAB)
        logits = tl.load(start + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        is_nan = logits != logits
        num_nan += tl.sum(is_nan.to(tl.int32))
        relative = scaled(tl.where(is_nan, -float("inf"), logits), peak, temperature)
        scores = relative + gumbel(tokens, first, second, FAST)
        scores = tl.where(inside & (relative >= floor), scores, -float("inf"))
        highest = tl.max(scores)
        lowest_id = tl.min(tl.where(scores == highest, tokens, VOCAB))
        is_better = highest > best
        best = tl.where(is_better, highest, best)
        token = tl.where(is_better, lowest_id, token)
    return best, token, num_nan


@kernel(
    do_not_specialize=["seeds_stride"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "slots_ptr",
        "temperatures_ptr",
        "seeds_ptr",
        "positions_ptr",
        "floors_ptr",
        "row_peaks_ptr",
        "peaks_ptr",
        "shifts_ptr",
        "tokens_ptr",
        "health_ptr",
    ],
)
def _tile_kernel(
    logits_ptr,
    rows_ptr,
    edited_ptr,
    slots_ptr,
    row_stride,
    edited_nan_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    floors_ptr,
    row_peaks_ptr,
    maxima_ptr,
    peaks_ptr,
    shifts_ptr,
    tokens_ptr,
    health_ptr,
    seeds_stride,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    PURPOSE: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(1)
    tile = tl.program_id(0)
    start = row_of(row, logits_ptr, rows_ptr, edited_ptr, slots_ptr, row_stride, VOCAB, HAS_ROWS, HAS_EDITED)
    temperature = tl.load(temperatures_ptr + row)
    first = tl.full((), 0, tl.uint32)
    second = tl.full((), 0, tl.uint32)
    if temperature > 0:
        low = tl.load(seeds_ptr + row).to(tl.uint32, bitcast=True)
        high = tl.load(seeds_ptr + seeds_stride + row).to(tl.uint32, bitcast=True)
        position = tl.load(positions_ptr + row).to(tl.uint32, bitcast=True)
        first = _key(0x243F6A88, low, high, position, PURPOSE)
        second = _key(0x85A308D3, low, high, position, PURPOSE)
    floor = -float("inf")
    if HAS_FLOORS:
        floor = tl.load(floors_ptr + row)
    if floor > -float("inf"):
        row_peak = tl.load(row_peaks_ptr + row)
        peak, token, num_nan = _draw_from_chunks(
            start, maxima_ptr + row.to(tl.int64) * ROW_CHUNKS, tile * (BLOCK // CHUNK), floor, row_peak, temperature,
            first, second, VOCAB, CHUNK, BLOCK // CHUNK, ROW_CHUNKS, FAST,
        )  # fmt: skip
        shift = row_peak
    else:
        tokens = tile * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < VOCAB
        logits = tl.load(start + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        is_nan = logits != logits
        num_nan = tl.sum(is_nan.to(tl.int32))
        scores = tl.where(is_nan, -float("inf"), logits)
        shift = 0.0
        if temperature > 0:
            # Differences to the tile's peak: noise must not drown in huge logits, and several +inf share the chance.
            shift = tl.minimum(tl.maximum(tl.max(scores, axis=0), -LARGEST), LARGEST)
            scores = tl.minimum(scores - shift, 0.0) / temperature + gumbel(tokens, first, second, FAST)
        scores = tl.where(inside, scores, -float("inf"))
        peak, index = tl.max(scores, axis=0, return_indices=True)
        token = tile * BLOCK + index
    if HAS_EDITED:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:  # what was forbidden may have been NaN
            num_nan = tl.load(edited_nan_ptr + slot.to(tl.int64) * TILES + tile)
    place = row * TILES + tile
    tl.store(peaks_ptr + place, peak)
    tl.store(shifts_ptr + place, shift)
    tl.store(tokens_ptr + place, token)
    tl.store(health_ptr + place, num_nan)


@kernel(
    do_not_specialize_on_alignment=[
        "temperatures_ptr",
        "peaks_ptr",
        "shifts_ptr",
        "tile_tokens_ptr",
        "tile_health_ptr",
        "tokens_ptr",
        "health_ptr",
    ]
)
def _choose_kernel(
    temperatures_ptr,
    peaks_ptr,
    shifts_ptr,
    tile_tokens_ptr,
    tile_health_ptr,
    tokens_ptr,
    health_ptr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    NOTHING: tl.constexpr,
):
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK)
    inside = tiles < TILES
    temperature = tl.load(temperatures_ptr + row)
    peaks = tl.load(peaks_ptr + row * TILES + tiles, mask=inside, other=-float("inf"))
    shifts = tl.load(shifts_ptr + row * TILES + tiles, mask=inside, other=-LARGEST)
    num_nan = tl.sum(tl.load(tile_health_ptr + row * TILES + tiles, mask=inside, other=0))
    if temperature > 0:  # tiles were scored from their own peaks: now from the largest
        peaks += (shifts - tl.max(shifts, axis=0)) / temperature
    peak, index = tl.max(peaks, axis=0, return_indices=True)
    tl.store(tokens_ptr + row, tl.load(tile_tokens_ptr + row * TILES + index).to(tl.int64))
    lost = tl.where(peak == -float("inf"), NOTHING, 0)
    tl.store(health_ptr + row, tl.where(num_nan > 0, num_nan, lost).to(tl.int64))


def choose_tokens(
    source: LogitsRows, params: DrawParams, floors: Floors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, int64 ``[num_rows]``, and its health (as in ``SamplerOutput``), int64 ``[num_rows]``.

    Args:
        source: what is chosen from.
        params: how each row is drawn.
        floors: what truncation leaves of the rows; None where no row is truncated.
    """
    logits, edited = source.logits, source.edited
    num_rows, num_tiles, device = params.temperatures.shape[0], source.num_tiles, logits.device
    scores = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_tokens = torch.empty(2, num_rows, num_tiles, dtype=torch.int32, device=device)
    chosen = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    _tile_kernel[(num_tiles, num_rows)](
        *source.pointers(),
        logits if edited is None else edited.num_nan,
        params.temperatures,
        params.seeds,
        params.positions,
        *((logits, logits, logits) if floors is None else floors),
        scores[0],
        scores[1],
        tile_tokens[0],
        tile_tokens[1],
        params.seeds.stride(0),
        **source.constants(),
        HAS_FLOORS=floors is not None,
        TILES=num_tiles,
        BLOCK=TILE,
        CHUNK=CHUNK,
        ROW_CHUNKS=-(-logits.shape[1] // CHUNK),
        PURPOSE=int(NoisePurpose.SAMPLE),
        FAST=logits.is_cuda,
        num_warps=4,
    )
    _choose_kernel[(num_rows,)](
        params.temperatures,
        scores[0],
        scores[1],
        tile_tokens[0],
        tile_tokens[1],
        chosen[0],
        chosen[1],
        TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        NOTHING=NOTHING_LEFT,
        num_warps=1,
    )
    return chosen[0], chosen[1]
