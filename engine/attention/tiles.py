"""Tiles: requests of like shape whose attention is one batched call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from attrs import frozen

from ...stages.attention import AttentionBatch
from ...stages.records import IntArray

# A call costs about as much as this many keys of one query; padding up to here is cheaper than another tile.
CALL_COST_KEYS = 192

# Key counts of a tile lie in a class, a quarter of an octave wide: padding within it is less than 20 %.
CLASSES_AN_OCTAVE = 4

# Most keys that a tile gathers (unless one request has more): bounds the memory they are gathered into.
MAX_TILE_KEYS = 8192


class Tile(NamedTuple):
    """Requests with the same number of queries, padded to the same number of keys.

    ``tokens`` are the batch's tokens, request after request, a slice where they are adjacent. ``slots`` int64
    ``[num_reqs * num_keys]`` are the cache slots of the keys, a slice where one request's keys are adjacent. A padded
    key repeats the last key of its own request, so that nothing but its own blocks is ever read. ``mask`` bool
    ``[num_reqs, 1, num_queries, num_keys]`` is True where a query sees a key; None where each sees all, or, with
    ``is_causal``, query i sees keys 0 to i.
    """

    num_reqs: int
    num_queries: int
    num_keys: int
    tokens: slice | torch.Tensor
    slots: slice | torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


class Tiling(NamedTuple):
    """The tiles of a batch, and the tokens of each as a range: of the batch, or, if any are scattered, of ``order``.

    ``order`` int64 ``[num real tokens]`` lists the batch's tokens, tile after tile.
    """

    tiles: tuple[Tile, ...]
    ranges: tuple[slice, ...]
    order: torch.Tensor | None

    @classmethod
    def of(cls, tiles: tuple[Tile, ...]) -> Tiling:
        """Tokens are put in order only where they have to be: it takes a copy of the queries."""
        ranges = tuple(tile.tokens for tile in tiles if isinstance(tile.tokens, slice))
        if len(ranges) == len(tiles):
            return cls(tiles, ranges, None)
        sizes = [tile.num_reqs * tile.num_queries for tile in tiles]
        ends = [0, *accumulate(sizes)]
        parts = [
            torch.arange(tile.tokens.start, tile.tokens.stop) if isinstance(tile.tokens, slice) else tile.tokens
            for tile in tiles
        ]
        return cls(tiles, tuple(slice(start, stop) for start, stop in pairwise(ends)), torch.cat(parts))


@frozen(eq=False)
class Spans:
    """Per request, int64 ``[num_reqs]``: its first token in the batch, its queries, and the keys that these see.

    ``first_keys`` and ``num_keys`` give the range of positions that at least one query of the request sees.
    """

    first_tokens: IntArray
    num_queries: IntArray
    first_keys: IntArray
    num_keys: IntArray

    @classmethod
    def of(cls, batch: AttentionBatch, window: int | None) -> Spans:
        """The spans of a batch for a sliding window; padded requests (``seq_len`` 0) have no queries."""
        query_start_loc = batch.query_start_loc_host.numpy().astype(np.int64)
        seq_lens = batch.seq_lens_host.numpy().astype(np.int64)
        num_queries = query_start_loc[1:] - query_start_loc[:-1]
        num_queries[seq_lens == 0] = 0
        first_queries = seq_lens - num_queries
        assert first_queries.min() >= 0, "a request has more queries than tokens"
        first_keys = np.zeros_like(seq_lens) if window is None else np.maximum(first_queries - window + 1, 0)
        return cls(query_start_loc[:-1], num_queries, first_keys, seq_lens - first_keys)


def build_tiles(batch: AttentionBatch, block_size: int, window: int | None) -> tuple[Tile, ...]:
    """Cover every request that has queries by tiles, for layers with this sliding window (None: all keys are seen)."""
    spans = Spans.of(batch, window)
    return tuple(_tile(batch, block_size, window, spans, requests) for requests in _group(spans))


def _group(spans: Spans) -> Iterator[IntArray]:
    """Batch indices of each tile, ascending: equal query counts, like key counts. The loops are over tiles."""
    active = np.flatnonzero(spans.num_queries)
    if len(active) <= 1:
        yield from (active,) if len(active) else ()
        return
    order = active[np.lexsort((spans.num_keys[active], spans.num_queries[active]))]
    num_queries, num_keys = spans.num_queries[order], spans.num_keys[order]
    classes = np.ceil(CLASSES_AN_OCTAVE * np.log2(num_keys)).astype(np.int64)
    is_border = (num_queries[1:] != num_queries[:-1]) | (classes[1:] != classes[:-1])
    borders = [*(np.flatnonzero(is_border) + 1).tolist(), len(order)]
    for start, stop in _merge(borders, num_queries, num_keys):
        most = max(1, MAX_TILE_KEYS // int(num_keys[stop - 1]))
        num_parts = -(-(stop - start) // most)
        requests = np.sort(order[start:stop])
        yield from np.array_split(requests, num_parts) if num_parts > 1 else (requests,)


def _merge(borders: list[int], num_queries: IntArray, num_keys: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of tiles, of ascending queries and then keys: neighbours are joined where padding costs less than a call.

    ``borders`` are the ends of the groups that need no joining.
    """
    sums = [0, *num_keys.cumsum().tolist()]
    start, stop = 0, borders[0]
    for end in borders[1:]:
        padding = (stop - start) * int(num_keys[end - 1]) - (sums[stop] - sums[start])
        queries = int(num_queries[end - 1])
        if queries != num_queries[start] or padding * queries > CALL_COST_KEYS:
            yield start, stop
            start = stop
        stop = end
    yield start, stop


def _tile(batch: AttentionBatch, block_size: int, window: int | None, spans: Spans, requests: IntArray) -> Tile:
    num_queries = int(spans.num_queries[requests[0]])
    counts, first_keys = spans.num_keys[requests], spans.first_keys[requests]
    num_keys = int(counts.max())
    is_padded = bool((counts != num_keys).any())
    from_start = window is None or num_keys <= window
    is_causal = num_queries > 1 and from_start and not is_padded and num_queries == num_keys
    mask = None
    if not is_causal and (is_padded or num_queries > 1):
        keys = first_keys[:, None] + np.arange(num_keys)
        mask = _mask(keys, first_keys + counts - num_queries, num_queries, window)
    return Tile(
        num_reqs=len(requests),
        num_queries=num_queries,
        num_keys=num_keys,
        tokens=_tokens(spans.first_tokens[requests], num_queries),
        slots=_slots(batch.block_table.numpy()[requests], block_size, first_keys, counts),
        mask=mask,
        is_causal=is_causal,
    )


def _tokens(first_tokens: IntArray, num_queries: int) -> slice | torch.Tensor:
    """The tokens of requests that begin at ``first_tokens``."""
    first, last = int(first_tokens[0]), int(first_tokens[-1])
    if last - first == (len(first_tokens) - 1) * num_queries:
        return slice(first, last + num_queries)
    return torch.from_numpy((first_tokens[:, None] + np.arange(num_queries)).reshape(-1))


def _slots(blocks: IntArray, block_size: int, first_keys: IntArray, counts: IntArray) -> slice | torch.Tensor:
    """Slots of the keys from ``first_keys`` on, ``counts`` of them; ``blocks`` are rows of the block table."""
    if len(blocks) == 1:
        first, last = int(first_keys[0]), int(first_keys[0] + counts[0]) - 1
        used = blocks[0, first // block_size : last // block_size + 1]
        if (used[1:] - used[:-1] == 1).all():
            start = int(used[0]) * block_size + first % block_size
            return slice(start, start + int(counts[0]))
    num_keys = int(counts.max())
    rows, first_offsets = np.arange(len(blocks))[:, None], first_keys[:, None] % block_size
    num_blocks = (num_keys + int(first_offsets.max()) - 1) // block_size + 1
    # Beyond a request's own blocks the table may end; nothing that is read there is used.
    indices = np.minimum(first_keys[:, None] // block_size + np.arange(num_blocks), blocks.shape[1] - 1)
    slots = blocks[rows, indices][:, :, None] * np.int64(block_size) + np.arange(block_size)
    positions = first_offsets + np.minimum(np.arange(num_keys), counts[:, None] - 1)
    return torch.from_numpy(slots.reshape(len(blocks), -1)[rows, positions].reshape(-1))


def _mask(keys: IntArray, first_queries: IntArray, num_queries: int, window: int | None) -> torch.Tensor | None:
    """Which key positions ``[num_reqs, num_keys]`` each query sees, from ``first_queries`` ``[num_reqs]`` on."""
    queries = (first_queries[:, None] + np.arange(num_queries))[:, :, None]
    seen = keys[:, None] <= queries
    if window is not None:
        seen &= keys[:, None] > queries - window
    return None if seen.all() else torch.from_numpy(seen[:, None])
