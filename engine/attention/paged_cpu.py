"""Paged attention on the CPU, in torch: one implementation for prefill, decode and mixed batches."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from ...stages.attention import AttentionBatch
from ...stages.records import IntArray
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec
from .decode_tiles import DecodeTiles, HostArrays
from .tiles import Tile, Tiling, build_tiles

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

    def gather(self, name: str, pool: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
        """``pool[slots]``: a view where the slots are adjacent, or a copy that the next one of this name overwrites."""
        if isinstance(slots, slice):
            return pool[slots]
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
        self._tilings: dict[int | None, Tiling] = {}
        self._decode: DecodeTiles | None = None
        self._arrays = HostArrays()
        self._slots: slice | torch.Tensor = slice(0, 0)
        self._stored: torch.Tensor | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """Take in this step. Tiles are made for the windows seen so far; a new window's in its first ``run``.

        Those of a step that decodes grow out of those of the step before, if it is that step's continuation.
        """
        self._batch = batch
        slots = self._arrays("slots", batch.slot_mapping)
        real = None if np.minimum.reduce(slots, initial=0) >= 0 else np.flatnonzero(slots >= 0)
        self._stored = None if real is None else torch.from_numpy(real)
        self._slots = _as_slice(slots.copy() if real is None else slots[real])
        decode, self._decode = self._decode, None  # an interrupt on the way leaves nothing that is half grown
        if decode is None or not decode.follow(batch):
            decode = DecodeTiles(batch, self._block_size, self._arrays) if DecodeTiles.decodes(batch) else None
        self._tilings = {window: self._tiling(window, batch, decode) for window in tuple(self._tilings)}
        self._decode = decode

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value in the cache, then attend; shapes as in :class:`AttentionPlan`."""
        keys, values = kv_cache.view(2, -1, layer.num_kv_heads * layer.head_size).unbind()
        if key is not None and value is not None:
            self._store(key, keys)
            self._store(value, values)
        tiling = self._tiling_for(layer.sliding_window)
        tiles = tiling.tiles
        if len(tiles) == 1 and tiles[0].tokens == slice(0, query.shape[0]):
            return self._attend(tiles[0], query, keys, values, layer)
        if tiling.order is None:
            output = query.new_zeros(query.shape)
            for tile, tokens in zip(tiles, tiling.ranges, strict=True):
                output[tokens] = self._attend(tile, query[tokens], keys, values, layer)
            return output
        ordered = query.index_select(0, tiling.order)
        parts = [
            self._attend(tile, ordered[tokens], keys, values, layer)
            for tile, tokens in zip(tiles, tiling.ranges, strict=True)
        ]
        return query.new_zeros(query.shape).index_copy_(0, tiling.order, torch.cat(parts))

    def _store(self, new: torch.Tensor, pool: torch.Tensor) -> None:
        """Write the real tokens of ``new`` to their slots. As an index, a padding slot of -1 would hit the last one."""
        rows = new.flatten(1)
        stored = rows if self._stored is None else rows.index_select(0, self._stored)
        if isinstance(self._slots, slice):
            pool[self._slots] = stored
        else:
            pool.index_copy_(0, self._slots, stored.to(pool.dtype))

    def _tiling_for(self, window: int | None) -> Tiling:
        tiling = self._tilings.get(window)
        if tiling is None:
            assert self._batch is not None, "plan() comes before run()"
            tiling = self._tilings[window] = self._tiling(window, self._batch, self._decode)
        return tiling

    def _tiling(self, window: int | None, batch: AttentionBatch, decode: DecodeTiles | None) -> Tiling:
        """The tiles that kept ones have grown to, or new ones."""
        tiling = None if decode is None else decode.grown(window, batch)
        if tiling is None:
            tiling = Tiling.of(build_tiles(batch, self._block_size, window))
            if decode is not None:
                decode.keep(window, tiling)
        return tiling

    def _attend(
        self, tile: Tile, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayerSpec
    ) -> torch.Tensor:
        """``query`` ``[num_reqs * num_queries, num_heads, head_size]`` in and out; ``keys`` and ``values`` by slot."""
        shape = (tile.num_reqs, tile.num_keys, layer.num_kv_heads, layer.head_size)
        key = self._scratch.gather("key", keys, tile.slots).to(query.dtype).view(shape).transpose(1, 2)
        value = self._scratch.gather("value", values, tile.slots).to(query.dtype).view(shape).transpose(1, 2)
        attend = _attend_fused if layer.soft_cap is None else _attend_capped
        return attend(tile, query, key, value, layer)


def _as_slice(slots: IntArray) -> slice | torch.Tensor:
    """The same slots, as a slice where they are adjacent."""
    first, last = (int(slots[0]), int(slots[-1])) if len(slots) else (0, -1)
    if last - first == len(slots) - 1 and (len(slots) < 3 or bool((slots[1:] - slots[:-1] == 1).all())):
        return slice(first, last + 1)
    return torch.from_numpy(slots)


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
