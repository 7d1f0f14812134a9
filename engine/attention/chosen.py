"""Two attention backends behind one: each step goes to the one whose kernel is the faster for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...stages.attention import AttentionBackend, AttentionBatch, AttentionPlan
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec
from .flashinfer_library import AttentionKernel, KernelChoice


class ChosenBackend:
    """Plans that ask ``choices``, one a KV-cache group, whom to leave a step to."""

    def __init__(
        self,
        triton: AttentionBackend,
        flashinfer: AttentionBackend,
        choices: Mapping[KVCacheGroupSpec, KernelChoice],
    ) -> None:
        self._triton = triton
        self._flashinfer = flashinfer
        self.choices = choices

    def make_plan(self, group: KVCacheGroupSpec) -> ChosenPlan:
        """An empty plan."""
        return ChosenPlan(self._triton.make_plan(group), self._flashinfer.make_plan(group), self.choices[group])


class ChosenPlan:
    """A plan of either backend; what a graph holds is Triton's."""

    def __init__(self, triton: AttentionPlan, flashinfer: AttentionPlan, choice: KernelChoice) -> None:
        self._triton = triton
        self._flashinfer = flashinfer
        self._choice = choice
        self._active = triton

    def plan(self, batch: AttentionBatch) -> None:
        """Have this step planned by the backend it goes to."""
        self._active = self._triton if self._kernel(batch) is AttentionKernel.TRITON else self._flashinfer
        self._active.plan(batch)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """As the backend that planned it does."""
        return self._active.run(query, key, value, kv_cache, layer)

    def _kernel(self, batch: AttentionBatch) -> AttentionKernel:
        if batch.in_graph:
            # FlashInfer's plan is made by the host before each replay, and its kernels do not overlap with their
            # neighbours: that costs a step more than its fastest kernel gains (examples/benchmarks/GPU_NOTES.md).
            return AttentionKernel.TRITON
        if batch.max_query_len == 1 and batch.num_reqs <= batch.num_tokens:
            kernel = self._choice.decode(batch.num_reqs)
            if kernel is not AttentionKernel.TENSOR_CORES:
                return kernel
        return self._choice.mixed()
