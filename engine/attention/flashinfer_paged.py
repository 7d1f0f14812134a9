"""Paged attention by FlashInfer: planned on the host from lengths alone, over the same cache as every backend's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...stages.attention import AttentionBatch
from ...stages.device import Device
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec, ModelSpec
from ..kernels.store import store_keys
from .flashinfer_buffers import AttentionLimits, HostLengths, PlanMemory, workspace_bytes
from .flashinfer_library import (
    AttentionKernel,
    FlashInfer,
    FlashInferUnsupported,
    KernelChoice,
    default_choice,
    layers_of,
)
from .flashinfer_works import BatchSize, DecodeWork, MixedWork, Work, WorkPlace

ChooseKernels = Callable[[KVCacheGroupSpec], KernelChoice]


class FlashInferBackend:
    """Plans for decode steps (CUDA cores or tensor cores) and for all others (FlashAttention-2 or -3).

    ``choose`` says which kernels a group takes; by default what was best on an H200.
    """

    def __init__(
        self,
        library: FlashInfer,
        spec: ModelSpec,
        limits: AttentionLimits,
        device: Device,
        choose: ChooseKernels | None = None,
    ) -> None:
        """Raises FlashInferUnsupported for a layer that FlashInfer does not serve."""
        for layer in dict.fromkeys(spec.attention_layers):
            library.require(layer, limits.dtype)
        self.library = library
        self.limits = limits
        self._layers = spec.attention_layers
        self._device = device
        self._capability, num_processors = _describe(device.torch_device)
        self._choose = choose or self._default
        num_bytes = max((workspace_bytes(layer, limits, num_processors) for layer in self._layers), default=1)
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._graph_memory: dict[KVCacheGroupSpec, PlanMemory] = {}
        self._choices: dict[KVCacheGroupSpec, KernelChoice] = {}

    def make_plan(self, group: KVCacheGroupSpec) -> FlashInferPlan:
        """An empty plan."""
        if group not in self._choices:
            self._choices[group] = self._choose(group)
        return FlashInferPlan(self, group, self._choices[group])

    def layers(self, group: KVCacheGroupSpec) -> tuple[AttentionLayerSpec, ...]:
        """The kinds of layers of a group."""
        return layers_of(group, self._layers)

    def memory(self, group: KVCacheGroupSpec, *, in_graph: bool) -> PlanMemory:
        """Memory for one more plan of a group."""
        if not in_graph:
            return PlanMemory(self.limits, self._device)
        if group not in self._graph_memory:  # of the backend: it must outlive the plans, as graphs read it
            self._graph_memory[group] = PlanMemory(self.limits, self._device)
        return self._graph_memory[group]

    def place(self, group: KVCacheGroupSpec, layer: AttentionLayerSpec, memory: PlanMemory) -> WorkPlace:
        """What a wrapper for a kind of layer is made for."""
        return WorkPlace(
            library=self.library,
            layer=layer,
            dtype=self.limits.dtype,
            page_size=group.block_size,
            workspace=self._workspace,
            memory=memory,
        )

    def serves_decode(self, kernel: AttentionKernel, layer: AttentionLayerSpec, *, in_graph: bool) -> bool:
        """Whether decode steps have a kernel of their own. Without a graph, tensor cores are those of mixed steps."""
        is_cuda_cores = kernel is AttentionKernel.CUDA_CORES
        return (in_graph or is_cuda_cores) and self.library.serves(kernel, layer, self._capability)

    def _default(self, group: KVCacheGroupSpec) -> KernelChoice:
        return default_choice(self.library, self.layers(group), self.limits.dtype, self._capability)


class FlashInferPlan:
    """The wrappers of one plan, made when a step first needs them, and planned in place from then on."""

    def __init__(self, backend: FlashInferBackend, group: KVCacheGroupSpec, choice: KernelChoice) -> None:
        self._backend = backend
        self._group = group
        self._layers = backend.layers(group)
        self._choice = choice
        self._memory: dict[bool, PlanMemory] = {}
        self._works: dict[tuple[AttentionLayerSpec, AttentionKernel, BatchSize | None, bool], Work] = {}
        self._planned: dict[AttentionLayerSpec, Work] = {}
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Schedule this step's batch. Waits for nothing that the device does.

        Raises:
            FlashInferUnsupported: a kernel that this step needs cannot be loaded or compiled.
        """
        with torch.inference_mode(False):  # or what is made now could not be written outside of inference mode
            if batch.in_graph not in self._memory:
                self._memory[batch.in_graph] = self._backend.memory(self._group, in_graph=batch.in_graph)
            memory = self._memory[batch.in_graph]
            works = {layer: self._work(layer, batch, memory) for layer in self._layers}
        lengths = HostLengths.of(batch.seq_lens_host, self._group.block_size)
        memory.pages.fill(batch, self._group.block_size)
        for work in works.values():
            work.plan(batch, lengths)
        self._planned, self._batch = works, batch

    def _work(self, layer: AttentionLayerSpec, batch: AttentionBatch, memory: PlanMemory) -> Work:
        size = BatchSize(batch.num_reqs, batch.num_tokens) if batch.in_graph else None
        kernel, make = self._choice.mixed(), MixedWork
        if batch.in_graph:  # FlashAttention-3's schedule has no bound that a graph could be captured with
            kernel = AttentionKernel.FA2
        if batch.max_query_len == 1 and batch.num_reqs <= batch.num_tokens:
            decode = self._choice.decode(batch.num_reqs)
            if self._backend.serves_decode(decode, layer, in_graph=batch.in_graph):
                kernel, make = decode, DecodeWork
        key = layer, kernel, size, make is DecodeWork
        if key not in self._works:
            try:
                self._works[key] = make(self._backend.place(self._group, layer, memory), kernel, size)
            except Exception as error:
                raise FlashInferUnsupported(layer, f"{kernel} cannot be made ready ({error!s:.200})") from error
        return self._works[key]

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value, unless the model did, then attend; shapes as in :class:`AttentionPlan`."""
        batch = self._batch
        assert batch is not None, "plan() comes before run()"
        if key is not None and value is not None:
            store_keys(key, value, batch.slot_mapping, kv_cache)
        return self._planned[layer].run(query.contiguous(), kv_cache)


def _describe(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of processors; of no GPU, none."""
    if device.type != "cuda":
        return (0, 0), 1
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
