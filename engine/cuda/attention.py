"""The attention backend of a GPU, as the configuration wants it."""

from __future__ import annotations

import logging

import torch

from ...stages.attention import AttentionBackend
from ...stages.device import Device
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec, ModelSpec
from ..attention.chosen import ChosenBackend
from ..attention.flashinfer_buffers import AttentionLimits
from ..attention.flashinfer_library import (
    DECODE_KERNELS,
    MIXED_KERNELS,
    AttentionKernel,
    FlashInfer,
    FlashInferMissing,
    FlashInferUnsupported,
    KernelChoice,
    layers_of,
)
from ..attention.flashinfer_paged import FlashInferBackend
from ..attention.triton_paged import TritonPagedBackend
from ..config import DTYPES, EngineConfig
from ..kv_cache import kv_cache_groups
from .attention_choice import AttentionTimes, TimesFile, measured_choice, times_key, times_path
from .attention_timing import POOL_BYTES, TimedShape, measure_attention

_LOG = logging.getLogger(__name__)


def cuda_attention(spec: ModelSpec, config: EngineConfig, device: Device, *, pdl: bool) -> AttentionBackend:
    """The backend of a resolved configuration. "auto" takes the faster kernel for each step, as measured on this GPU.

    Raises:
        FlashInferMissing, FlashInferUnsupported: FlashInfer was asked for by name.
    """
    triton = TritonPagedBackend(spec, config.max_num_seqs, device.torch_device, pdl=pdl)
    if config.attention_backend == "triton":
        return triton
    assert not isinstance(config.max_model_len, str), "an unresolved configuration reached the attention backend"
    limits = AttentionLimits(
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-config.max_model_len // config.block_size),
        dtype=DTYPES[config.dtype],
    )
    if config.attention_backend == "flashinfer":
        return FlashInferBackend(FlashInfer.load(), spec, limits, device)
    try:
        library = FlashInfer.load()
        for layer in dict.fromkeys(spec.attention_layers):
            library.require(layer, limits.dtype)
    except (FlashInferMissing, FlashInferUnsupported) as error:
        _LOG.info("attention by Triton: %s", error)
        return triton
    chooser = _Chooser(library, limits.dtype, device, pdl=pdl)
    choices: dict[KVCacheGroupSpec, KernelChoice] = {}
    for group in kv_cache_groups(spec, config.block_size):
        choice = chooser.choice(layers_of(group, spec.attention_layers), config.block_size)
        if choice is None:
            return triton
        choices[group] = choice
    return ChosenBackend(triton, FlashInferBackend(library, spec, limits, device, choices.__getitem__), choices)


class _Chooser:
    """Chooses among the kernels that need no compiling."""

    def __init__(self, library: FlashInfer, dtype: torch.dtype, device: Device, *, pdl: bool) -> None:
        self._library = library
        self._dtype = dtype
        self._device = device
        self._pdl = pdl
        self._file = TimesFile(times_path(device.torch_device, library))

    def choice(self, layers: tuple[AttentionLayerSpec, ...], block_size: int) -> KernelChoice | None:
        """For a group of these kinds of layers, the first of which is measured; None: Triton for everything."""
        kernels = self._usable(layers)
        if not kernels:
            _LOG.info("attention by Triton: no kernel of FlashInfer is built for %s", layers)
            return None
        device = self._device.torch_device
        key = times_key(layers, self._dtype, block_size, kernels)
        shape = TimedShape(
            layer=layers[0], dtype=self._dtype, block_size=block_size, device=self._device, pdl=self._pdl
        )
        if device.type == "cuda" and self._file.read(key) is None and _free_bytes(device) < 4 * POOL_BYTES:
            _LOG.warning("attention by Triton: no memory to measure other kernels")
            return None

        def measure() -> AttentionTimes:
            times = measure_attention(shape, self._library, kernels)
            if device.type == "cuda":  # what the measurement took is no part of what a runner needs
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            return times

        choice = measured_choice(self._file, key, measure)
        return None if choice.kernels() == {AttentionKernel.TRITON} else choice

    def _usable(self, layers: tuple[AttentionLayerSpec, ...]) -> tuple[AttentionKernel, ...]:
        device = self._device.torch_device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return tuple(
            kernel
            for kernel in (*DECODE_KERNELS, *MIXED_KERNELS)
            if all(
                self._library.serves(kernel, layer, capability) and self._library.is_built(kernel, layer, self._dtype)
                for layer in layers
            )
        )


def _free_bytes(device: torch.device) -> int:
    """Memory that a new tensor can have: the driver's and what the allocator holds unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
