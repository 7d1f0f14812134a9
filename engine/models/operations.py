"""What a decoder computes with between its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from .linear import Linear
from .norm import RMSNorm
from .rope import rotate

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Operations:
    """Torch's functions. Kernels of another kind replace some of them and give the same numbers, but for rounding."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, keep_transposed: bool) -> Linear:
        """Products with a weight; ``keep_transposed`` allows a copy of it."""
        return Linear(weight, bias, keep_transposed=keep_transposed)

    def norm(self, weight: torch.Tensor, epsilon: float) -> RMSNorm:
        """A root-mean-square norm."""
        return RMSNorm(weight, epsilon)

    def gate(self, activation: str) -> Activation:
        """What makes ``activation(gate) * up`` ``[num_rows, size]`` of ``[num_rows, 2 * size]``, gate and then up."""
        return partial(_gated, ACTIVATIONS[activation])

    def rotate(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """See :func:`~.rope.rotate`."""
        return rotate(heads, cosines, sines)


def _gated(activate: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate).mul_(up)
