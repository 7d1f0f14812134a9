"""Root-mean-square norms, fused with what comes before them: a residual addition or the embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent import begin_dependent
from .launching import kernel


@kernel(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    num_rows,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    total = tl.load(residual_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(SPLIT):
        place = (part * num_rows + row) * SIZE + columns
        total += tl.load(parts_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * SIZE + columns, total, mask=inside)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / SIZE + epsilon)
    tl.store(normed_ptr + row * SIZE + columns, values * scale * weight, mask=inside)


def add_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual`` plus the sum of ``parts`` ``[split, num_rows, size]``, and the norm of that; both in new memory.

    The sum is rounded to the residual's type before it is normed, as in the reference implementations.
    """
    split, num_rows, size = parts.shape
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        parts,
        residual,
        weight,
        total,
        normed,
        num_rows,
        epsilon,
        SIZE=size,
        BLOCK=block,
        SPLIT=split,
        PDL=pdl,
        num_warps=min(max(block // 256, 1), 8),
        **({"launch_pdl": True} if pdl else {}),
    )
    return total, normed


@kernel()
def _embed_rms_norm_kernel(
    ids_ptr,
    table_ptr,
    weight_ptr,
    states_ptr,
    normed_ptr,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    begin_dependent(PDL)
    token = tl.load(ids_ptr + row).to(tl.int64)
    states = tl.load(table_ptr + token * SIZE + columns, mask=inside, other=0.0)
    tl.store(states_ptr + row * SIZE + columns, states, mask=inside)
    values = states.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / SIZE + epsilon)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * SIZE + columns, values * scale * weight, mask=inside)


def embed_rms_norm(
    token_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the embedding ``table`` ``[vocab, size]`` for int32 ``token_ids`` ``[num_rows]``, and their norm.

    First of a chain, so it is launched in order.
    """
    num_rows, size = token_ids.shape[0], table.shape[1]
    states = torch.empty(num_rows, size, dtype=table.dtype, device=table.device)
    normed = torch.empty_like(states)
    block = triton.next_power_of_2(size)
    _embed_rms_norm_kernel[(num_rows,)](
        token_ids,
        table,
        weight,
        states,
        normed,
        epsilon,
        SIZE=size,
        BLOCK=block,
        PDL=False,
        num_warps=min(max(block // 256, 1), 8),
    )
    return states, normed


@kernel()
def _silu_mul_kernel(gate_up_ptr, product_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    begin_dependent(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(product_ptr + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` ``[num_rows, 2 * size]`` (gate first), ``[num_rows, size]``."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    product = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(size), 1024)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, block))](
        gate_up, product, SIZE=size, BLOCK=block, PDL=pdl, **({"launch_pdl": True} if pdl else {})
    )
    return product
