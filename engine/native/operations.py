"""What a decoder computes with, by the native kernels: float32 on the CPU, and no copy of a weight.

Where torch has to see what is computed (compilation, gradients), or a tensor is of another kind, torch computes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..models.linear import Linear
from ..models.norm import RMSNorm
from ..models.operations import Activation, Operations
from .library import NativeLibrary, load_native


class NativeOperations(Operations):
    """Operations for weights that are float32, dense and on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, keep_transposed: bool) -> Linear:
        """Products that read the weight as it is, by any number of rows."""
        return NativeLinear(weight, bias, self._library)

    def norm(self, weight: torch.Tensor, epsilon: float) -> RMSNorm:
        """A norm in one pass."""
        return NativeNorm(weight, epsilon, self._library)

    def gate(self, activation: str) -> Activation:
        """One pass for SiLU; torch's for others."""
        by_torch = super().gate(activation)
        if activation not in ("silu", "swish"):
            return by_torch

        def gated(gate_up: torch.Tensor) -> torch.Tensor:
            suits = _is_plain(gate_up) and gate_up.dim() == 2 and gate_up.is_contiguous()
            return self._library.gated_silu(gate_up) if suits else by_torch(gate_up)

        return gated

    def rotate(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """The heads in one pass."""
        is_dense = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
        if not is_dense or not _is_plain(heads) or not (cosines.is_contiguous() and sines.is_contiguous()):
            return super().rotate(heads, cosines, sines)
        return self._library.rotate(heads, cosines, sines)


class NativeLinear(Linear):
    """A :class:`Linear` that keeps no copies."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, library: NativeLibrary) -> None:
        super().__init__(weight, bias)
        self._library = library

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The product ``[num_rows, out]``, in new memory."""
        weight = self.weight
        suits = rows.dim() == 2 and rows.shape[1] == weight.shape[1] > 0 and weight.is_contiguous()
        if not (suits and _is_plain(rows) and _is_plain(weight) and weight.data_ptr()):  # 0: weights are released
            return F.linear(rows, weight, self.bias)
        return self._library.linear(rows if rows.is_contiguous() else rows.contiguous(), weight, self.bias)


class NativeNorm(RMSNorm):
    """The same norm."""

    def __init__(self, weight: torch.Tensor, epsilon: float, library: NativeLibrary) -> None:
        super().__init__(weight, epsilon)
        self._given_epsilon = epsilon
        self._library = library

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The normed states, in new memory."""
        suits = states.is_contiguous() and states.shape[-1:] == self.weight.shape
        if not (suits and _is_plain(states) and _is_plain(self.weight)):
            return super().__call__(states)
        return self._library.norm(states, self.weight, self._given_epsilon)


def native_operations() -> NativeOperations | None:
    """Operations by the native kernels, or None where these can't be had."""
    library = load_native("products")
    return None if library is None else NativeOperations(library)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel may compute with this tensor."""
    return tensor.dtype is torch.float32 and not tensor.requires_grad and not torch.compiler.is_compiling()
