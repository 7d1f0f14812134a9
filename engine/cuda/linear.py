"""Products with a weight on a GPU: a split kernel of few rows, or cuBLAS."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..kernels.linear import MOST_PREFETCHED, LinearConfig, skinny_linear
from ..kernels.norm import silu_mul
from ..models.linear import Linear

# Where a split kernel beats cuBLAS on an H200: examples/benchmarks/gpu_sweep.py; figures in GPU_NOTES.md beside it.
FEW_ROWS = 32
MANY_ROWS = 64
MOST_ROWS_OF_NARROW = 128
NARROW = 1024
WIDE = 4096
WIDEST = 32_768  # beyond, which is the head of a model, cuBLAS reads at the speed of memory itself
DEEP = 8192
ENOUGH_PROGRAMS = 256


def product_config(size_in: int, size_out: int, num_rows: int) -> LinearConfig | None:
    """The split kernel for a product of these sizes; None for cuBLAS."""
    if size_out > WIDEST:
        return None
    if size_in * size_out > MOST_PREFETCHED:
        if num_rows > (MANY_ROWS if size_out <= WIDE else FEW_ROWS):
            return None
        return LinearConfig(64, 256 if size_in > DEEP and num_rows <= FEW_ROWS else 128, 2)
    if num_rows > (MOST_ROWS_OF_NARROW if size_out <= NARROW else MANY_ROWS):
        return None
    if num_rows <= FEW_ROWS and size_out <= NARROW and size_in % 1024 == 0:
        return LinearConfig(64, 256, 4, 4, 3)
    block_in, num_blocks = 128 if num_rows <= MANY_ROWS else 64, -(-size_out // 64)
    for split in (8, 4, 2):
        if num_blocks * split <= ENOUGH_PROGRAMS and size_in % (split * block_in) == 0:
            return LinearConfig(64, block_in, split)
    return LinearConfig(64, block_in, 1)


def gated_config(size_in: int, size_out: int, num_rows: int) -> LinearConfig | None:
    """The kernel that multiplies with gate and up projections and activates, ``size_out`` each, or None."""
    if num_rows > FEW_ROWS or 2 * size_in * size_out > MOST_PREFETCHED:
        return None
    return LinearConfig(32, 256, 1)


def stacked_config(size_in: int, size_out: int, num_rows: int) -> LinearConfig | None:
    """The kernel of the same product without the activation, ``size_out`` in all; None for cuBLAS."""
    if size_in * size_out > MOST_PREFETCHED:
        return LinearConfig(64, 256, 1) if num_rows <= FEW_ROWS // 2 else None
    return LinearConfig(64, 128, 1) if FEW_ROWS < num_rows <= MANY_ROWS else None


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
        if config is None:
            return F.linear(rows, self._weight, self._bias)[None]
        return skinny_linear(rows, self._weight, self._bias, config, pdl=self._pdl)

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, where the weight stacks the two, ``[num_rows, out / 2]``."""
        size_out, size_in = self._weight.shape
        config = gated_config(size_in, size_out // 2, rows.shape[0]) if self._has_kernels else None
        if config is not None:
            return skinny_linear(rows, self._weight, self._bias, config, gated=True, pdl=self._pdl)[0]
        config = stacked_config(size_in, size_out, rows.shape[0]) if self._has_kernels else None
        if config is not None:
            return silu_mul(skinny_linear(rows, self._weight, self._bias, config, pdl=self._pdl)[0], pdl=self._pdl)
        return silu_mul(F.linear(rows, self._weight, self._bias), pdl=self._pdl)

    def product_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """The product without its last rounding, float32 ``[num_rows, out]``; for weights without a bias."""
        if self._weight.dtype == torch.float32 or not rows.is_cuda:
            return F.linear(rows, self._weight).float()
        return torch.mm(rows, self._weight.t(), out_dtype=torch.float32)
