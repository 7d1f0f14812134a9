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

TILE = 4096


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


@kernel(
    do_not_specialize=["seeds_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "temperatures_ptr", "seeds_ptr", "positions_ptr"],
)
def _tile_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    peaks_ptr,
    tokens_ptr,
    health_ptr,
    row_stride,
    seeds_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PURPOSE: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(1)
    tile = tl.program_id(0)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < VOCAB
    source = row
    if HAS_ROWS:
        source = tl.load(rows_ptr + row)
    logits = tl.load(logits_ptr + source.to(tl.int64) * row_stride + tokens, mask=inside, other=-float("inf"))
    logits = logits.to(tl.float32)
    num_nan = tl.sum((logits != logits).to(tl.int32))
    temperature = tl.load(temperatures_ptr + row)
    scores = logits
    if temperature > 0:
        low = tl.load(seeds_ptr + row).to(tl.uint32, bitcast=True)
        high = tl.load(seeds_ptr + seeds_stride + row).to(tl.uint32, bitcast=True)
        position = tl.load(positions_ptr + row).to(tl.uint32, bitcast=True)
        first = _key(0x243F6A88, low, high, position, PURPOSE)
        second = _key(0x85A308D3, low, high, position, PURPOSE)
        scores = logits / temperature + gumbel(tokens, first, second, FAST)
    scores = tl.where(inside & (scores == scores), scores, -float("inf"))
    place = row * TILES + tile
    peak, index = tl.max(scores, axis=0, return_indices=True)
    tl.store(peaks_ptr + place, peak)
    tl.store(tokens_ptr + place, tile * BLOCK + index)
    tl.store(health_ptr + place, num_nan)


@kernel()
def _choose_kernel(
    peaks_ptr,
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
    peaks = tl.load(peaks_ptr + row * TILES + tiles, mask=inside, other=-float("inf"))
    num_nan = tl.sum(tl.load(tile_health_ptr + row * TILES + tiles, mask=inside, other=0))
    peak, index = tl.max(peaks, axis=0, return_indices=True)
    tl.store(tokens_ptr + row, tl.load(tile_tokens_ptr + row * TILES + index).to(tl.int64))
    lost = tl.where(peak == -float("inf"), NOTHING, 0)
    tl.store(health_ptr + row, tl.where(num_nan > 0, num_nan, lost).to(tl.int64))


def choose_tokens(
    logits: torch.Tensor, params: DrawParams, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, int64 ``[num_rows]``, and its health (as in ``SamplerOutput``), int64 ``[num_rows]``.

    Args:
        logits: ``[n, vocab]``, rows contiguous.
        params: how each row is drawn.
        rows: int64 ``[num_rows]``, the rows of ``logits`` to sample; None for the first ones in order.
    """
    num_rows, vocab = params.temperatures.shape[0], logits.shape[1]
    num_tiles, device = -(-vocab // TILE), logits.device
    peaks = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_tokens = torch.empty(2, num_rows, num_tiles, dtype=torch.int32, device=device)
    chosen = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    _tile_kernel[(num_tiles, num_rows)](
        logits,
        logits if rows is None else rows,
        params.temperatures,
        params.seeds,
        params.positions,
        peaks,
        tile_tokens[0],
        tile_tokens[1],
        logits.stride(0),
        params.seeds.stride(0),
        VOCAB=vocab,
        TILES=num_tiles,
        BLOCK=TILE,
        HAS_ROWS=rows is not None,
        PURPOSE=int(NoisePurpose.SAMPLE),
        FAST=logits.is_cuda,
        num_warps=4,
    )
    _choose_kernel[(num_rows,)](
        peaks,
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
