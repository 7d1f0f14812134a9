"""Paged attention on the CPU whose every output depends on the request's own tokens and nothing else, bit for bit.

Positions of a request are cut into tiles of a few queries each, and a tile always sees the same number of keys: its own
and all before it, rounded up. So the shape of every product, and with it the order of its sums, is a function of the
position alone: not of the batch, nor of how a prompt is cut into chunks.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from attrs import frozen

from ...stages.attention import AttentionBatch
from ...stages.records import IntArray
from ...stages.specs import AttentionLayerSpec, KVCacheGroupSpec

QUERIES = 4
"""Positions of a tile. A decode computes all of them for one; fewer would gather each key more often in a prefill."""

KEYS = 64
"""Keys of a tile are a multiple of this, and begin at one."""


class InvariantCPUBackend:
    """Makes plans for one KV-cache group."""

    def make_plan(self, group: KVCacheGroupSpec) -> InvariantCPUPlan:
        """An empty plan."""
        return InvariantCPUPlan(group.block_size)


@frozen(eq=False)
class _Tile:
    """``slots`` int64 ``[num_keys]``: those of its keys; ``hidden`` bool ``[QUERIES, num_keys]``: what is not seen."""

    slots: torch.Tensor
    hidden: torch.Tensor


@frozen(eq=False)
class _Tiles:
    """The tiles of a step for one window.

    ``queries`` int64 ``[len(tiles) * QUERIES]``: the token in each place, any one where a place is empty. ``places``
    int64 ``[num_real]``: where each of the real ``tokens`` int64 ``[num_real]`` is.
    """

    tiles: tuple[_Tile, ...]
    queries: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor


class InvariantCPUPlan:
    """One call a tile and product; padded tokens are written nowhere and come out as zeros."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int | None, _Tiles] = {}
        self._real = self._slots = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        """Take in this step. Tiles are built anew for the windows seen so far; a new window's in its first ``run``."""
        self._batch = batch
        slots = batch.slot_mapping.numpy()
        real = np.flatnonzero(slots >= 0)
        self._real, self._slots = torch.from_numpy(real), torch.from_numpy(slots[real])
        self._tiles = {window: _build_tiles(batch, self._block_size, window) for window in self._tiles}

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value in the cache, if given, then attend, in float32; shapes as in :class:`AttentionPlan`."""
        keys, values = kv_cache.flatten(1, 2).unbind()
        for new, pool in ((key, keys), (value, values)):
            if new is not None:
                pool.index_copy_(0, self._slots, new.index_select(0, self._real).to(pool.dtype))
        tiles = self._tiles_for(layer.sliding_window)
        output = query.new_zeros(query.shape)
        if not tiles.tiles:
            return output
        # Query heads that share a key are rows of one product: [tiles, kv_heads, QUERIES * heads of one, head_size].
        num_kv_heads = layer.num_kv_heads
        shape = (len(tiles.tiles), QUERIES, num_kv_heads, -1, layer.head_size)
        placed = query.index_select(0, tiles.queries).float().view(shape).transpose(1, 2).flatten(2, 3)
        attended = torch.empty_like(placed)
        for tile, rows, result in zip(tiles.tiles, placed.unbind(), attended.unbind(), strict=True):
            gathered = keys.index_select(0, tile.slots).float()
            scores = torch.bmm(rows, gathered.permute(1, 2, 0)).mul_(layer.scale)
            if layer.soft_cap is not None:
                scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
            scores.view(num_kv_heads, QUERIES, -1, len(tile.slots)).masked_fill_(tile.hidden[:, None], -math.inf)
            gathered = values.index_select(0, tile.slots).float()
            torch.bmm(scores.softmax(-1), gathered.transpose(0, 1), out=result)
        rows = attended.unflatten(2, (QUERIES, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        return output.index_copy_(0, tiles.tokens, rows.index_select(0, tiles.places).to(query.dtype))

    def _tiles_for(self, window: int | None) -> _Tiles:
        tiles = self._tiles.get(window)
        if tiles is None:
            assert self._batch is not None, "plan() comes before run()"
            tiles = self._tiles[window] = _build_tiles(self._batch, self._block_size, window)
        return tiles


def _build_tiles(batch: AttentionBatch, block_size: int, window: int | None) -> _Tiles:
    starts = batch.query_start_loc_host.numpy().astype(np.int64)
    tiles: list[_Tile] = []
    queries: list[IntArray] = []
    places: list[IntArray] = []
    tokens: list[IntArray] = []
    blocks = batch.block_table.numpy()
    for request, seq_len in enumerate(batch.seq_lens_host.tolist()):
        first_token, num_tokens = starts[request], starts[request + 1] - starts[request]
        if not seq_len or not num_tokens:
            continue
        first = seq_len - num_tokens
        for tile_start in range(int(first) // QUERIES * QUERIES, seq_len, QUERIES):
            positions = np.arange(tile_start, tile_start + QUERIES)
            is_real = (positions >= first) & (positions < seq_len)
            places.append(np.flatnonzero(is_real) + len(tiles) * QUERIES)
            own_tokens = first_token + np.clip(positions, first, seq_len - 1) - first
            queries.append(own_tokens)
            tokens.append(own_tokens[is_real])
            tiles.append(_tile(blocks[request], block_size, positions, seq_len, window))
    return _Tiles(tuple(tiles), *(torch.from_numpy(_joined(parts)) for parts in (queries, places, tokens)))


def _tile(blocks: IntArray, block_size: int, positions: IntArray, seq_len: int, window: int | None) -> _Tile:
    """Keys beyond the request's last one, which none of its queries sees, repeat that one: no other block is read."""
    first = 0 if window is None else max(0, int(positions[0]) - window + 1) // KEYS * KEYS
    stop = -(-(int(positions[-1]) + 1) // KEYS) * KEYS
    keys = np.arange(first, stop)
    indices, offsets = np.divmod(np.minimum(keys, seq_len - 1), block_size)
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    slots = blocks[indices] * np.int64(block_size) + offsets
    return _Tile(torch.from_numpy(slots), torch.from_numpy(hidden))


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
