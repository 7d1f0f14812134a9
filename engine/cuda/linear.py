"""Products with a weight on a GPU: a split kernel of few rows, or cuBLAS."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.linear import MOST_PREFETCHED, LinearConfig, shared_bytes, skinny_linear
from ..kernels.norm import silu_mul
from ..models.linear import Linear

# Where a split kernel beats cuBLAS on an H200: examples/benchmarks/gpu_sweep.py; figures in GPU_NOTES.md beside it.
FEWEST_ROWS = 8
FEW_ROWS = 32
MANY_ROWS = 64
MOST_ROWS_OF_NARROW = 128
NARROW = 1024
WIDE = 4096
WIDEST = 32_768  # beyond, which is the head of a model, cuBLAS reads at the speed of memory itself
ENOUGH_PROGRAMS = 192
MOST_SHARED_BYTES = 227 * 1024


def product_config(size_in: int, size_out: int, num_rows: int) -> LinearConfig | None:
    """The split kernel for a product of these sizes; None for cuBLAS."""
    if size_out > WIDEST:
        return None
    if size_in * size_out > MOST_PREFETCHED:
        return _large_config(size_out, num_rows)
    if num_rows > (MOST_ROWS_OF_NARROW if size_out <= NARROW else MANY_ROWS):
        return None
    if num_rows > MANY_ROWS:
        block_out, block_in, num_warps, num_stages = 64, 64, 4, 4
    elif size_out > WIDE // 2:
        block_out, block_in, num_warps, num_stages = 128, 256, 8, 3
    else:
        block_in = 512 if num_rows <= FEW_ROWS or size_in <= 2 * size_out else 256
        block_out, num_warps, num_stages = 64, 4, 3
    # As many parts as there are tiles of the inputs, but no more programs than a GPU runs at once.
    num_tiles, most = -(-size_in // block_in), max(ENOUGH_PROGRAMS // -(-size_out // block_out), 1)
    split = -(-num_tiles // -(-num_tiles // most))
    return LinearConfig(block_out, block_in, split, num_warps, num_stages)


def _large_config(size_out: int, num_rows: int) -> LinearConfig | None:
    """For a weight that is read at the speed of memory, if enough of it is on its way."""
    if num_rows > MANY_ROWS:
        return None
    if size_out > WIDE:
        return LinearConfig(64, 128, 1, 4, 5)
    return LinearConfig(64, 128, 4) if num_rows <= FEWEST_ROWS else LinearConfig(64, 128, 2, 4, 6)


def gated_config(size_in: int, size_out: int, num_rows: int) -> LinearConfig | None:
    """The kernel that multiplies with gate and up projections and activates, ``size_out`` each, or None."""
    if 2 * size_in * size_out > MOST_PREFETCHED:
        if num_rows > FEW_ROWS:
            return None
        return LinearConfig(32, 128, 1) if num_rows <= FEWEST_ROWS else LinearConfig(64, 128, 1, 8, 4)
    if num_rows > MANY_ROWS:
        return None
    return LinearConfig(32, 1024, 1, 8, 2) if num_rows <= FEWEST_ROWS else LinearConfig(32, 128, 1)


def fitting(config: LinearConfig | None, size_in: int, num_rows: int, *, gated: bool = False) -> LinearConfig | None:
    """The configuration with as many stages, and as wide tiles, as a processor's shared memory has room for."""
    while config is not None and shared_bytes(config, size_in, num_rows, gated=gated) > MOST_SHARED_BYTES:
        if config.num_stages > 2:
            config = config._replace(num_stages=config.num_stages - 1)
        else:
            config = config._replace(block_in=config.block_in // 2, num_stages=4) if config.block_in > 32 else None
    return config


class CudaLinear:
    """``x @ weight.T + bias``, where the next kernel is one that adds up parts."""

    def __init__(self, linear: Linear, *, pdl: bool) -> None:
        self._weight, self._bias = linear.weight, linear.bias
        self._pdl = pdl
        self._has_kernels = linear.weight.dtype != torch.float32

    def parts(self, rows: torch.Tensor) -> torch.Tensor:
        """Parts ``[split, num_rows, out]`` that add up to the product."""
        size_out, size_in = self._weight.shape
        config = product_config(size_in, size_out, rows.shape[0]) if self._has_kernels else None
        config = fitting(config, size_in, rows.shape[0])
        if config is None:
            return F.linear(rows, self._weight, self._bias)[None]
        return skinny_linear(rows, self._weight, self._bias, config, pdl=self._pdl)

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, where the weight stacks the two, ``[num_rows, out / 2]``."""
        size_out, size_in = self._weight.shape
        config = gated_config(size_in, size_out // 2, rows.shape[0]) if self._has_kernels else None
        config = fitting(config, size_in, rows.shape[0], gated=True)
        if config is not None:
            return skinny_linear(rows, self._weight, self._bias, config, gated=True, pdl=self._pdl)[0]
        return silu_mul(F.linear(rows, self._weight, self._bias), pdl=self._pdl)

    def product_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """The product without its last rounding, float32 ``[num_rows, out]``; for weights without a bias."""
        if self._weight.dtype == torch.float32 or not rows.is_cuda:
            return F.linear(rows, self._weight).float()
        return torch.mm(rows, self._weight.t(), out_dtype=torch.float32)
