"""Paged attention on the CPU, in torch: one implementation for prefill, decode and mixed batches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...stages.attention import AttentionBatch
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec
from .tiles import Tile, build_tiles

# Scores of capped attention that exist at a time.
MAX_SCORES = 2**24


class PagedCPUBackend:
    """Makes plans that gather keys and values from the pages, then attend in a few batched calls.

    Its plans share the memory that they gather into, so only one of them may run at a time.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def make_plan(self, group: KVCacheGroupSpec) -> PagedCPUPlan:
        """An empty plan for the layers of ``group``."""
        return PagedCPUPlan(group.block_size, self._scratch)


class Scratch:
    """Memory for gathered keys and values, kept because getting fresh pages takes longer than filling them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def gather(self, name: str, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``pool[slots]``; overwritten by the next gather of this name."""
        shape = (slots.shape[0], *pool.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get((name, pool.dtype))
        if buffer is None or buffer.shape[0] < size:
            with torch.inference_mode(False):  # or it could not be written outside of inference mode
                buffer = self._buffers[name, pool.dtype] = torch.empty(size, dtype=pool.dtype)
        return torch.index_select(pool, 0, slots, out=buffer[:size].view(shape))


class PagedCPUPlan:
    """Requests grouped into tiles of like shape; gather indices and masks serve all layers with the same window.

    Padded tokens are written nowhere and come out as zeros; blocks that are not a request's own are never read.
    """

    def __init__(self, block_size: int, scratch: Scratch) -> None:
        self._block_size = block_size
        self._scratch = scratch
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._slots = torch.empty(0, dtype=torch.int64)
        self._stored: torch.Tensor | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Take in this step. Tiles are built anew for the windows seen so far; a new window's in its first ``run``."""
        self._batch = batch
        is_real = batch.slot_mapping >= 0
        self._stored = None if bool(is_real.all()) else is_real.nonzero().flatten()
        self._slots = batch.slot_mapping.clone() if self._stored is None else batch.slot_mapping[self._stored]
        self._tiles = {window: build_tiles(batch, self._block_size, window) for window in self._tiles}

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value in the cache, then attend; shapes as in :class:`AttentionPlan`."""
        keys, values = kv_cache.flatten(1, 2).unbind()
        self._store(key, keys)
        self._store(value, values)
        tiles = self._tiles_for(layer.sliding_window)
        if len(tiles) == 1 and tiles[0].tokens == slice(0, query.shape[0]):
            return self._attend(tiles[0], query, keys, values, layer)
        output = query.new_zeros(query.shape)
        for tile in tiles:
            output[tile.tokens] = self._attend(tile, query[tile.tokens], keys, values, layer)
        return output

    def _store(self, new: torch.Tensor, pool: torch.Tensor) -> None:
        """Write the real tokens of ``new`` to their slots. As an index, a padding slot of -1 would hit the last one."""
        stored = new if self._stored is None else new.index_select(0, self._stored)
        pool.index_copy_(0, self._slots, stored.to(pool.dtype))

    def _tiles_for(self, window: int | None) -> tuple[Tile, ...]:
        tiles = self._tiles.get(window)
        if tiles is None:
            assert self._batch is not None, "plan() comes before run()"
            tiles = self._tiles[window] = build_tiles(self._batch, self._block_size, window)
        return tiles

    def _attend(
        self, tile: Tile, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayerSpec
    ) -> torch.Tensor:
        """``query`` ``[num_reqs * num_queries, num_heads, head_size]`` in and out; ``keys`` and ``values`` by slot."""
        shape = (tile.num_reqs, tile.num_keys, layer.num_kv_heads, layer.head_size)
        key = self._scratch.gather("key", keys, tile.slots).to(query.dtype).view(shape).transpose(1, 2)
        value = self._scratch.gather("value", values, tile.slots).to(query.dtype).view(shape).transpose(1, 2)
        attend = _attend_fused if layer.soft_cap is None else _attend_capped
        return attend(tile, query, key, value, layer)


def _attend_fused(
    tile: Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayerSpec
) -> torch.Tensor:
    """Attention of one tile; ``key`` and ``value`` ``[num_reqs, num_kv_heads, num_keys, head_size]``."""
    if tile.num_queries == 1:
        # The heads that share a key become its queries: no copy of the keys, and one larger product.
        grouped = query.view(tile.num_reqs, layer.num_kv_heads, -1, layer.head_size)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=tile.mask, scale=layer.scale)
        return output.reshape(query.shape)
    output = F.scaled_dot_product_attention(
        query.view(tile.num_reqs, tile.num_queries, layer.num_heads, layer.head_size).transpose(1, 2),
        key,
        value,
        attn_mask=tile.mask,
        is_causal=tile.is_causal,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return output.transpose(1, 2).reshape(query.shape)


def _attend_capped(
    tile: Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayerSpec
) -> torch.Tensor:
    """The same with bent scores, which the fused kernel does not know: in float32, some queries at a time."""
    assert layer.soft_cap is not None, "only capped layers come here"
    num_reqs, num_kv_heads, num_keys, head_size = key.shape
    grouped = query.view(num_reqs, tile.num_queries, num_kv_heads, -1, head_size).permute(0, 2, 3, 1, 4)
    key, value = key.float().transpose(2, 3).contiguous(), value.float()
    hidden = None if tile.mask is None else ~tile.mask[:, :, None]
    if tile.is_causal:
        hidden = torch.ones(tile.num_queries, num_keys, dtype=torch.bool).triu_(1)
    piece = max(1, MAX_SCORES // (num_reqs * layer.num_heads * num_keys))
    outputs: list[torch.Tensor] = []
    for start in range(0, tile.num_queries, piece):
        queries = grouped[:, :, :, start : start + piece]
        scores = queries.float().flatten(2, 3) @ key * (layer.scale / layer.soft_cap)
        scores = scores.tanh_().mul_(layer.soft_cap).unflatten(2, queries.shape[2:4])
        if hidden is not None:
            scores = scores.masked_fill_(hidden[..., start : start + piece, :], -torch.inf)
        output = scores.softmax(-1).flatten(2, 3) @ value
        outputs.append(output.view(queries.shape))
    return torch.cat(outputs, dim=3).permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)
