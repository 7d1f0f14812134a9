"""Products of a few rows with a large weight, bound by how fast the weight comes in."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dependent import prefetch
from .launching import kernel

MOST_PREFETCHED = 2**23
"""Elements up to which a weight is fetched into L2 ahead: what is larger would push out what it has fetched itself."""


class LinearConfig(NamedTuple):
    """How a product is cut: outputs and inputs of a tile, programs that share the inputs, warps and stages of each.

    Of a gated product, a tile has ``block_out`` outputs of either half.
    """

    block_out: int
    block_in: int
    split: int
    num_warps: int = 4
    num_stages: int = 4


def block_rows(num_rows: int) -> int:
    """Rows of a tile."""
    return min(max(16, int(triton.next_power_of_2(num_rows))), 256)


def shared_bytes(config: LinearConfig, size_in: int, num_rows: int, *, gated: bool = False) -> int:
    """Shared memory of a program, for rows of two bytes an element: the tile held, and those of each stage after it."""
    tile = (config.block_out * (2 if gated else 1) + block_rows(num_rows)) * config.block_in * 2
    return tile * (1 if config.split * config.block_in >= size_in else 1 + config.num_stages)


@kernel(do_not_specialize=["num_rows"])
def _skinny_linear_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    product_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    LINES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of the product: the weight is the long side of the dot, the rows are the short one.

    The tile of a gated product has the same outputs of gate and up projection, the one below the other. The first part
    of the weight is loaded, and more of it fetched into L2, before the kernel waits for the one that makes the rows.
    """
    part = tl.program_id(1)
    TILE: tl.constexpr = 2 * BLOCK_OUT if GATED else BLOCK_OUT
    lanes = tl.arange(0, TILE)
    outs = tl.program_id(0) * BLOCK_OUT + lanes % BLOCK_OUT
    known = outs < OUT
    places = (tl.where(known, outs, 0) + lanes // BLOCK_OUT * OUT).to(tl.int64) * IN
    PER_PART: tl.constexpr = (IN + SPLIT * BLOCK_IN - 1) // (SPLIT * BLOCK_IN) * BLOCK_IN
    start = part * PER_PART
    if PDL:
        gdc_launch_dependents()
    here = start + tl.arange(0, BLOCK_IN)
    inside = here < IN
    weight = tl.load(weight_ptr + places[:, None] + here[None, :], mask=known[:, None] & inside[None, :], other=0.0)
    if PDL:
        if LINES > 0:
            lines = tl.minimum(start + BLOCK_IN + tl.arange(0, LINES) * 64, IN - 1)
            prefetch(weight_ptr + places[:, None] + lines[None, :])
        gdc_wait()
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    row_places = rows[None, :] * IN + here[:, None]
    row_mask = is_row[None, :] & inside[:, None]
    row = tl.load(rows_ptr + row_places, mask=row_mask, other=0.0)
    total = tl.dot(weight, row, input_precision=PRECISION)
    for step in range(start + BLOCK_IN, start + PER_PART, BLOCK_IN):
        here = step + tl.arange(0, BLOCK_IN)
        inside = here < IN
        row_places = rows[None, :] * IN + here[:, None]
        row_mask = is_row[None, :] & inside[:, None]
        row = tl.load(rows_ptr + row_places, mask=row_mask, other=0.0)
        weight = tl.load(weight_ptr + places[:, None] + here[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        total = tl.dot(weight, row, total, input_precision=PRECISION)
    if HAS_BIAS:
        share = tl.where(part == 0, 1.0, 0.0)
        bias = tl.load(bias_ptr + outs + lanes // BLOCK_OUT * OUT, mask=known, other=0.0)
        total += share * bias.to(tl.float32)[:, None]
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if GATED:
        halves = tl.permute(tl.reshape(total, [2, BLOCK_OUT, BLOCK_ROWS]), (1, 2, 0))
        gate, up = tl.split(halves)
        total = gate / (1.0 + tl.exp(-gate)) * up
    targets = (part * num_rows + rows)[None, :].to(tl.int64) * OUT + outs[:, None]
    tl.store(product_ptr + targets, total, mask=(outs < OUT)[:, None] & is_row[None, :])


def skinny_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: LinearConfig,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """``rows`` ``[num_rows, in]`` times ``weight`` ``[out, in]``, transposed, as parts ``[split, num_rows, out]``.

    The parts add up to the product; they are float32 where there are several, else of the rows' type. ``gated``: the
    weight stacks gate and up projections, and ``silu(gate) * up`` comes out, ``[1, num_rows, out / 2]``.
    """
    num_rows, size_in = rows.shape
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    split = 1 if gated else config.split
    dtype = rows.dtype if split == 1 else torch.float32
    product = torch.empty(split, num_rows, size_out, dtype=dtype, device=rows.device)
    rows_of_tile = block_rows(num_rows)
    per_part = triton.cdiv(size_in, split * config.block_in) * config.block_in
    ahead = per_part - config.block_in if weight.numel() <= MOST_PREFETCHED else 0
    _skinny_linear_kernel[triton.cdiv(size_out, config.block_out), split, triton.cdiv(num_rows, rows_of_tile)](
        rows,
        weight,
        weight if bias is None else bias,
        product,
        num_rows,
        IN=size_in,
        OUT=size_out,
        BLOCK_ROWS=rows_of_tile,
        BLOCK_OUT=config.block_out,
        BLOCK_IN=config.block_in,
        SPLIT=split,
        LINES=triton.next_power_of_2(triton.cdiv(ahead, 64)) if ahead > 0 else 0,
        GATED=gated,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return product
