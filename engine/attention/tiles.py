"""Tiles: requests of like shape whose attention is one batched call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen

from ...stages.attention import AttentionBatch
from ...stages.records import IntArray

# A call costs about as much as this many keys of one query; padding up to here is cheaper than another tile.
CALL_COST_KEYS = 256

# Most keys that a tile gathers (unless one request has more): bounds the memory they are gathered into.
MAX_TILE_KEYS = 8192


@frozen(eq=False)
class Tile:
    """Requests with the same number of queries, padded to the same number of keys.

    ``tokens`` are the batch's tokens, request after request (a slice where they are adjacent), ``slots`` int64
    ``[num_reqs * num_keys]`` the cache slot of each key. A padded key repeats the last key of its own request, so that
    nothing but its own blocks is ever read. ``mask`` bool ``[num_reqs, 1, num_queries, num_keys]`` is True where a
    query sees a key; None where each sees all, or, with ``is_causal``, query i sees keys 0 to i.
    """

    num_reqs: int
    num_queries: int
    num_keys: int
    tokens: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


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
        num_queries = np.where(seq_lens > 0, np.diff(query_start_loc), 0)
        first_queries = seq_lens - num_queries
        assert (first_queries >= 0).all(), "a request has more queries than tokens"
        first_keys = np.zeros_like(seq_lens) if window is None else np.maximum(first_queries - window + 1, 0)
        return cls(query_start_loc[:-1], num_queries, first_keys, seq_lens - first_keys)


def build_tiles(batch: AttentionBatch, block_size: int, window: int | None) -> tuple[Tile, ...]:
    """Cover every request that has queries by tiles, for layers with this sliding window (None: all keys are seen)."""
    spans = Spans.of(batch, window)
    return tuple(_tile(batch, block_size, window, spans, requests) for requests in _group(spans))


def _group(spans: Spans) -> Iterator[IntArray]:
    """Batch indices of each tile, ascending: equal query counts, like key counts. The loops are over tiles."""
    active = np.flatnonzero(spans.num_queries)
    # Steps of a square root of two: padding within a class is less than 30 %.
    classes = np.ceil(2 * np.log2(np.maximum(spans.num_keys, 1))).astype(np.int64)
    order = active[np.lexsort((classes[active], spans.num_queries[active]))]
    starts = np.flatnonzero(np.diff(spans.num_queries[order], prepend=-1))
    for same_queries in np.split(order, starts[1:]) if len(order) else ():
        class_starts = np.flatnonzero(np.diff(classes[same_queries], prepend=-1))
        for like_keys in _merge(np.split(same_queries, class_starts[1:]), spans):
            most = max(1, MAX_TILE_KEYS // int(spans.num_keys[like_keys].max()))
            parts = -(-len(like_keys) // most)
            yield from np.array_split(np.sort(like_keys), parts)


def _merge(groups: list[IntArray], spans: Spans) -> Iterator[IntArray]:
    """Join neighbouring groups, of ascending key counts, where padding costs less than another call."""
    num_queries = int(spans.num_queries[groups[0][0]])
    pending = groups[0]
    for group in groups[1:]:
        padding = len(pending) * spans.num_keys[group].max() - spans.num_keys[pending].sum()
        if padding * num_queries > CALL_COST_KEYS:
            yield pending
            pending = group
        else:
            pending = np.concatenate((pending, group))
    yield pending


def _tile(batch: AttentionBatch, block_size: int, window: int | None, spans: Spans, requests: IntArray) -> Tile:
    num_queries = int(spans.num_queries[requests[0]])
    counts, first = spans.num_keys[requests, None], spans.first_keys[requests, None]
    num_keys = int(counts.max())
    keys = np.arange(num_keys)
    positions = first + np.minimum(keys, counts - 1)
    blocks = batch.block_table.numpy()[requests[:, None], positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    tokens = (spans.first_tokens[requests, None] + np.arange(num_queries)).reshape(-1)
    adjacent = int(tokens[-1] - tokens[0]) == len(tokens) - 1
    from_start = window is None or num_keys <= window
    is_causal = num_queries > 1 and from_start and bool((counts == num_queries).all())
    mask = None if is_causal else _mask(first + keys, first + counts - num_queries, num_queries, window)
    return Tile(
        num_reqs=len(requests),
        num_queries=num_queries,
        num_keys=num_keys,
        tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if adjacent else torch.from_numpy(tokens),
        slots=torch.from_numpy(slots.reshape(-1)),
        mask=mask,
        is_causal=is_causal,
    )


def _mask(keys: IntArray, first_queries: IntArray, num_queries: int, window: int | None) -> torch.Tensor | None:
    """Which key positions ``[num_reqs, num_keys]`` each query sees, from ``first_queries`` ``[num_reqs, 1]`` on."""
    queries = (first_queries + np.arange(num_queries))[:, :, None]
    seen = keys[:, None] <= queries
    if window is not None:
        seen &= keys[:, None] > queries - window
    return None if seen.all() else torch.from_numpy(seen[:, None])
