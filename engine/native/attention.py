"""Paged attention on the CPU by the native kernel, which reads keys and values where they lie."""

from __future__ import annotations

import torch

from ...stages.attention import AttentionBatch
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec
from ..attention.paged_cpu import PagedCPUBackend, PagedCPUPlan
from .library import Layer, NativeLibrary, Step, Tokens

FEW_QUERIES = 8
FEW_KEYS = 256
"""The kernel reads the keys anew for each query. With more new tokens of a request than the one and more tokens in all
than the other, that is more than the caches hold, and torch's tiles are faster."""

MOST_SHARED = 16
"""Query heads that may share a key-value head."""

_LANES = 8


class NativeCPUBackend:
    """Makes plans that hand steps and layers that suit the kernel to it, and all others to :class:`PagedCPUBackend`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._other = PagedCPUBackend()

    def make_plan(self, group: KVCacheGroupSpec) -> NativeCPUPlan:
        """An empty plan for the layers of ``group``."""
        return NativeCPUPlan(group.block_size, self._library, self._other.make_plan(group))


class NativeCPUPlan:
    """Padded tokens are written nowhere and come out as zeros; blocks that are not a request's own are never read."""

    def __init__(self, block_size: int, library: NativeLibrary, other: PagedCPUPlan) -> None:
        self._library = library
        self._other = other
        self._other_is_planned = False
        self._is_short = False
        self._batch: AttentionBatch | None = None
        self._step = Step(block_size=block_size)
        self._layers: dict[AttentionLayerSpec, Layer] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """Take in this step: where its lengths and tables lie. Torch's plan is made when a layer needs it."""
        self._batch = batch
        self._other_is_planned = False
        self._is_short = batch.max_query_len <= FEW_QUERIES or batch.max_seq_len <= FEW_KEYS
        step = self._step
        step.num_tokens, step.num_reqs = batch.num_tokens, batch.num_reqs
        step.starts, step.lengths = batch.query_start_loc_host.data_ptr(), batch.seq_lens_host.data_ptr()
        step.blocks, step.blocks_stride = batch.block_table.data_ptr(), batch.block_table.stride(0)
        step.slots = batch.slot_mapping.data_ptr()

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value in the cache, then attend; shapes as in :class:`AttentionPlan`."""
        batch = self._batch
        assert batch is not None, "plan() comes before run()"
        if not self._is_short or not _suits(batch, query, kv_cache, layer):
            if not self._other_is_planned:
                self._other.plan(batch)
                self._other_is_planned = True
            return self._other.run(query, key, value, kv_cache, layer)
        query = _dense_heads(query)
        tokens = Tokens(query=query.data_ptr(), query_stride=query.stride(0))
        if key is not None and value is not None:
            key, value = _dense_heads(key), _dense_heads(value)
            tokens.key, tokens.key_stride = key.data_ptr(), key.stride(0)
            tokens.value, tokens.value_stride = value.data_ptr(), value.stride(0)
        output = query.new_empty(query.shape)
        self._library.attend(self._layer(layer), self._step, tokens, kv_cache, output)
        return output

    def _layer(self, layer: AttentionLayerSpec) -> Layer:
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = Layer(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                window=layer.sliding_window or 0,
                scale=layer.scale,
                soft_cap=layer.soft_cap or 0,
            )
        return known


def _suits(batch: AttentionBatch, query: torch.Tensor, kv_cache: torch.Tensor, layer: AttentionLayerSpec) -> bool:
    """Whether the kernel can do this."""
    return (
        query.dtype is kv_cache.dtype is torch.float32
        and not query.requires_grad
        and query.shape[0] == batch.num_tokens
        and layer.head_size % _LANES == 0
        and layer.num_heads <= layer.num_kv_heads * MOST_SHARED
        and kv_cache.is_contiguous()
    )


def _dense_heads(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` ``[num_tokens, heads, head_size]``, copied unless the heads of each token are adjacent."""
    if tokens.dtype is torch.float32 and tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]:
        return tokens
    return tokens.float().contiguous()
