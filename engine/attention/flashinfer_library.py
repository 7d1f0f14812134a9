"""FlashInfer as an optional library: finding it, which of its kernels there are, and which layers they serve.

Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving". Written against
release 0.6.13.
"""

from __future__ import annotations

import enum
import importlib
import logging
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Protocol

import torch
from attrs import frozen

from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec
from ..config import InvalidConfig

_LOG = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads a key head that FlashInfer compiles CUDA-core kernels for."""
BEST_CUDA_CORE_GROUP = 2
"""On an H200 CUDA cores reach 93 % of the memory's bandwidth at 2, tensor cores 88 % at 4 (batch 256, context 640)."""
FA3_CAPABILITY = 9
"""The major compute capability that FlashAttention-3's kernels are for."""


class FlashInferMissing(InvalidConfig):
    """FlashInfer was asked for and cannot be imported; the cause says why."""

    def __init__(self) -> None:
        super().__init__(
            "attention_backend 'flashinfer' needs FlashInfer, which cannot be imported; "
            "pip install 'twostroke[cuda]', or use attention_backend='triton' or 'auto'"
        )


class FlashInferUnsupported(InvalidConfig):
    """A layer that FlashInfer has no kernel for; the message names what is in the way."""

    def __init__(self, layer: AttentionLayerSpec, what: str) -> None:
        self.layer = layer
        super().__init__(
            f"FlashInfer cannot compute attention with {layer.num_heads} query heads, {layer.num_kv_heads} KV heads of "
            f"{layer.head_size}: {what}; use attention_backend='triton' or 'auto'"
        )


class AttentionKernel(enum.StrEnum):
    """What can compute attention on a GPU: a kernel for decode steps or for all others. Triton's does both."""

    TRITON = "triton"
    CUDA_CORES = "flashinfer-cuda-cores"
    TENSOR_CORES = "flashinfer-tensor-cores"
    FA2 = "flashinfer-fa2"
    FA3 = "flashinfer-fa3"


DECODE_KERNELS = (AttentionKernel.CUDA_CORES, AttentionKernel.TENSOR_CORES)
MIXED_KERNELS = (AttentionKernel.FA3, AttentionKernel.FA2)


class KernelChoice(Protocol):
    """Which kernel a step of one KV-cache group takes."""

    def decode(self, num_reqs: int) -> AttentionKernel:
        """For one token of each of ``num_reqs`` requests; the same answer whenever it is asked."""
        ...

    def mixed(self) -> AttentionKernel:
        """For a step with a request of several tokens."""
        ...


@frozen
class FixedChoice:
    """The same kernels whatever the step."""

    decode_kernel: AttentionKernel
    mixed_kernel: AttentionKernel

    def decode(self, num_reqs: int) -> AttentionKernel:
        """The one for decode steps."""
        return self.decode_kernel

    def mixed(self) -> AttentionKernel:
        """The one for all others."""
        return self.mixed_kernel


def layers_of(group: KVCacheGroupSpec, layers: tuple[AttentionLayerSpec, ...]) -> tuple[AttentionLayerSpec, ...]:
    """The layers of a group that differ, in order."""
    return tuple(dict.fromkeys(layers[index] for index in group.layers))


def group_size(layer: AttentionLayerSpec) -> int:
    """Query heads that share a key head."""
    return layer.num_heads // layer.num_kv_heads


class FlashInfer:
    """The imported library."""

    def __init__(self, module: ModuleType | Any) -> None:
        self.module: Any = module
        self.version = str(getattr(module, "__version__", "unknown"))

    @classmethod
    def load(cls) -> FlashInfer:
        """Import it.

        Raises:
            FlashInferMissing: it is not installed, or does not work here.
        """
        try:
            return cls(importlib.import_module("flashinfer"))
        except Exception as error:  # its import runs a good deal of code: any failure means that it is not there
            raise FlashInferMissing from error

    def require(self, layer: AttentionLayerSpec, dtype: torch.dtype) -> None:
        """Whether there can be kernels for a layer whose query, keys and values are of ``dtype``.

        Raises:
            FlashInferUnsupported: there are none.
        """
        if dtype not in DTYPES:
            raise FlashInferUnsupported(layer, f"it has kernels for float16 and bfloat16, not for {dtype}")
        if layer.head_size not in HEAD_SIZES:
            raise FlashInferUnsupported(layer, f"it has kernels for heads of {', '.join(map(str, HEAD_SIZES))}")

    def serves(self, kernel: AttentionKernel, layer: AttentionLayerSpec, capability: tuple[int, int]) -> bool:
        """Whether a kernel takes the layer's heads on a device of this compute capability."""
        if kernel is AttentionKernel.CUDA_CORES:
            return group_size(layer) in CUDA_CORE_GROUPS
        return kernel is not AttentionKernel.FA3 or capability[0] == FA3_CAPABILITY

    def is_built(self, kernel: AttentionKernel, layer: AttentionLayerSpec, dtype: torch.dtype) -> bool:
        """Whether the kernel's binary is there. Otherwise its first use compiles it: minutes, and only with nvcc."""
        size, options = layer.head_size, (0, layer.sliding_window is not None, layer.soft_cap is not None)
        types = (dtype, dtype, dtype, torch.int32)
        try:
            modules = importlib.import_module(f"{self.module.__name__}.jit.attention")
            if kernel is AttentionKernel.CUDA_CORES:
                return bool(modules.gen_batch_decode_module(*types, size, size, *options).is_compiled)
            name = "fa3" if kernel is AttentionKernel.FA3 else "fa2"
            return bool(modules.gen_batch_prefill_module(name, *types, size, size, *options, False).is_compiled)
        except Exception as error:  # internals of another release, or a folder that it cannot write
            _LOG.warning("FlashInfer does not say whether %s is built: %s", kernel, error)
            return False


def default_choice(
    library: FlashInfer, layers: Iterable[AttentionLayerSpec], dtype: torch.dtype, capability: tuple[int, int]
) -> FixedChoice:
    """Kernels by what was measured elsewhere: CUDA cores while few heads share a key, FA3 where it is built."""
    layers = tuple(layers)
    takes_cuda_cores = all(
        group_size(layer) <= BEST_CUDA_CORE_GROUP and library.serves(AttentionKernel.CUDA_CORES, layer, capability)
        for layer in layers
    )
    takes_fa3 = all(
        library.serves(AttentionKernel.FA3, layer, capability) and library.is_built(AttentionKernel.FA3, layer, dtype)
        for layer in layers
    )
    return FixedChoice(
        AttentionKernel.CUDA_CORES if takes_cuda_cores else AttentionKernel.TENSOR_CORES,
        AttentionKernel.FA3 if takes_fa3 else AttentionKernel.FA2,
    )
