"""Paged attention by the Triton kernels of this package: nothing is planned on the host."""

from __future__ import annotations

import torch

from ...stages.attention import AttentionBatch
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec, ModelSpec
from ..kernels.decode_attention import DecodeConfig, DecodeWorkspace, PagedKeys, decode_attention
from ..kernels.mixed_attention import mixed_attention
from ..kernels.store import store_keys

# Programs of a decode step that fill a GPU, and the most that share the keys of one request and head.
ENOUGH_PROGRAMS = 640
MOST_SPLITS = 16


def decode_config(num_reqs: int, num_kv_heads: int) -> DecodeConfig:
    """How the keys are cut for a batch of this size; from examples/benchmarks/gpu_sweep.py on an H200."""
    programs = num_reqs * num_kv_heads
    if programs >= 512:
        return DecodeConfig(64, 2, 2, 3, 1024)
    if programs >= 256:
        return DecodeConfig(128, 3, 4, 2, 768)
    return DecodeConfig(64, min(ENOUGH_PROGRAMS // programs, MOST_SPLITS), 2, 2)


class TritonPagedBackend:
    """Plans for decode steps (one token a request) and for all others."""

    def __init__(self, spec: ModelSpec, max_num_seqs: int, device: torch.device, *, pdl: bool) -> None:
        self._pdl = pdl
        heads = max((layer.num_heads for layer in spec.attention_layers), default=1)
        size = max((layer.head_size for layer in spec.attention_layers), default=1)
        kv_heads = {layer.num_kv_heads for layer in spec.attention_layers}
        most_parts = max(
            (
                num_reqs * decode_config(num_reqs, count).splits
                for num_reqs in range(1, max_num_seqs + 1)
                for count in kv_heads
            ),
            default=1,
        )
        self._workspace = DecodeWorkspace(max_num_seqs, most_parts, heads, size, device)

    def make_plan(self, group: KVCacheGroupSpec) -> TritonPagedPlan:
        """An empty plan."""
        return TritonPagedPlan(self._workspace, pdl=self._pdl)


class TritonPagedPlan:
    """Remembers where lengths and tables lie; kernels read them there. Padded tokens come out as zeros."""

    def __init__(self, workspace: DecodeWorkspace, *, pdl: bool) -> None:
        self._workspace = workspace
        self._pdl = pdl
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Take in this step."""
        self._batch = batch

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
        paged = PagedKeys(kv_cache, batch.block_table, batch.seq_lens)
        query = query.contiguous()
        if batch.max_query_len == 1 and batch.num_tokens == batch.num_reqs:
            config = decode_config(batch.num_reqs, layer.num_kv_heads)
            return decode_attention(query, paged, layer, self._workspace, config, pdl=self._pdl)
        return mixed_attention(query, paged, batch.query_start_loc, layer, batch.max_query_len, pdl=self._pdl)
