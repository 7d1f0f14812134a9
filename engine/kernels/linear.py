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
    """How a product is cut: outputs and inputs of a tile, programs that share the inputs, warps and stages of each."""

    block_out: int
    block_in: int
    split: int
    num_warps: int = 4
    num_stages: int = 4


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
    """One tile of the product: the weight is the long side of the dot, the rows are the short one."""
    part = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    known = outs < OUT
    places = tl.where(known, outs, 0).to(tl.int64) * IN
    PER_PART: tl.constexpr = (IN + SPLIT * BLOCK_IN - 1) // (SPLIT * BLOCK_IN) * BLOCK_IN
    start = part * PER_PART
    if PDL:
        gdc_launch_dependents()
        if LINES > 0:
            lines = tl.minimum(start + tl.arange(0, LINES) * 64, IN - 1)
            prefetch(weight_ptr + places[:, None] + lines[None, :])
            if GATED:
                prefetch(weight_ptr + OUT * IN + places[:, None] + lines[None, :])
        gdc_wait()
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ins = start + tl.arange(0, BLOCK_IN)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    if GATED:
        total_up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    for step in range(0, PER_PART, BLOCK_IN):
        here = ins + step
        inside = here < IN
        row = tl.load(
            rows_ptr + rows[None, :] * IN + here[:, None],
            mask=(rows < num_rows)[None, :] & inside[:, None],
            other=0.0,
        )
        weight_places = places[:, None] + here[None, :]
        weight_mask = known[:, None] & inside[None, :]
        weight = tl.load(weight_ptr + weight_places, mask=weight_mask, other=0.0)
        total = tl.dot(weight, row, total, input_precision=PRECISION)
        if GATED:
            weight_up = tl.load(weight_ptr + OUT * IN + weight_places, mask=weight_mask, other=0.0)
            total_up = tl.dot(weight_up, row, total_up, input_precision=PRECISION)
    if HAS_BIAS:
        share = tl.where(part == 0, 1.0, 0.0)
        total += share * tl.load(bias_ptr + outs, mask=known, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += share * tl.load(bias_ptr + OUT + outs, mask=known, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    targets = (part * num_rows + rows)[None, :].to(tl.int64) * OUT + outs[:, None]
    tl.store(product_ptr + targets, total, mask=known[:, None] & (rows < num_rows)[None, :])


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
    block_rows = min(max(16, triton.next_power_of_2(num_rows)), 64)
    per_part = triton.cdiv(size_in, split * config.block_in) * config.block_in
    lines = triton.next_power_of_2(triton.cdiv(per_part, 64))
    grid = (triton.cdiv(size_out, config.block_out), split, triton.cdiv(num_rows, block_rows))
    options = {"launch_pdl": True} if pdl else {}
    _skinny_linear_kernel[grid](
        rows,
        weight,
        weight if bias is None else bias,
        product,
        num_rows,
        IN=size_in,
        OUT=size_out,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=config.block_out,
        BLOCK_IN=config.block_in,
        SPLIT=split,
        LINES=lines if weight.numel() <= MOST_PREFETCHED else 0,
        GATED=gated,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    return product
