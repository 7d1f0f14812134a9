"""Paged attention for one query a request: keys split over programs, the last of which merges the parts.

Reads lengths and tables where they lie, so nothing is planned on the host. Splitting keys: Dao et al. 2023,
"Flash-Decoding".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...stages.specs import AttentionLayerSpec
from .dependent import begin_dependent
from .launching import kernel


class DecodeConfig(NamedTuple):
    """How the keys of a request are cut: keys of a tile, most programs a request and head, warps and stages of each.

    Requests of up to ``least_keys`` keys are not split, longer ones into parts of at least as many.
    """

    block_keys: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3
    least_keys: int = 0


def block_head(head_size: int) -> int:
    """Elements of a head as kernels hold it: a power of two, and no less than a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(head_size)))


class DecodeWorkspace:
    """Memory for partial results of up to ``max_reqs`` requests that are cut into ``max_parts`` in all."""

    def __init__(self, max_reqs: int, max_parts: int, num_heads: int, head_size: int, device: torch.device) -> None:
        rows = max_parts * num_heads
        self.sums = torch.empty(rows, block_head(head_size), dtype=torch.float32, device=device)
        self.weights = torch.empty(2, rows, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_reqs * num_heads, dtype=torch.int32, device=device)


@kernel(do_not_specialize=["table_stride", "most_parts"])
def _decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lengths_ptr,
    output_ptr,
    sums_ptr,
    weights_ptr,
    arrived_ptr,
    table_stride,
    most_parts,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    members = tl.arange(0, BLOCK_GROUP)
    places = tl.arange(0, BLOCK_HEAD)
    in_head = places < HEAD_SIZE
    is_member = members < GROUP
    heads = head * GROUP + members
    begin_dependent(PDL)
    length = tl.load(lengths_ptr + request)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    num_tiles = tl.cdiv(length - first, BLOCK_KEYS)
    per_split = tl.maximum(tl.cdiv(num_tiles, SPLITS), LEAST_TILES)
    num_parts = tl.maximum(tl.cdiv(num_tiles, per_split), 1)
    if split >= num_parts:
        return
    start = first + split * per_split * BLOCK_KEYS
    stop = tl.minimum(start + per_split * BLOCK_KEYS, length)
    query_mask = is_member[:, None] & in_head[None, :]
    row = (request * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_SIZE + places[None, :]
    query = tl.load(query_ptr + row, mask=query_mask, other=0.0)
    peak = tl.full([BLOCK_GROUP], -float("inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_HEAD], dtype=tl.float32)
    table = table_ptr + request * table_stride
    for tile in range(start, stop, BLOCK_KEYS):
        keys = tile + tl.arange(0, BLOCK_KEYS)
        inside = keys < stop
        blocks = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        slots = (blocks * PAGE + keys % PAGE) * (NUM_KV_HEADS * HEAD_SIZE) + head * HEAD_SIZE
        key = tl.load(keys_ptr + slots[None, :] + places[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - new_peak)
        chances = tl.exp2(scores - new_peak[:, None])
        weight = weight * shrink + tl.sum(chances, axis=1)
        value = tl.load(
            values_ptr + slots[:, None] + places[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
        )
        total = total * shrink[:, None]
        total = tl.dot(chances.to(query.dtype), value.to(query.dtype), total, input_precision=PRECISION)
        peak = new_peak
    if num_parts == 1:
        mean = total / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(output_ptr + row, mean, mask=query_mask)
    else:
        part_rows = (request * NUM_KV_HEADS * GROUP + heads) * SPLITS
        own = part_rows + split
        tl.store(sums_ptr + own[:, None] * BLOCK_HEAD + places[None, :], total, mask=query_mask)
        tl.store(weights_ptr + own, peak, mask=is_member)
        tl.store(weights_ptr + most_parts + own, weight, mask=is_member)
        tl.debug_barrier()
        counter = arrived_ptr + request * NUM_KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counter, 0)
            others = tl.arange(0, BLOCK_PARTS)
            is_part = others < num_parts
            for member in tl.static_range(GROUP):
                query_head = (request * NUM_KV_HEADS + head) * GROUP + member
                place = query_head * SPLITS + others
                peaks = tl.load(weights_ptr + place, mask=is_part, other=-float("inf"), cache_modifier=".cg")
                weights = tl.load(weights_ptr + most_parts + place, mask=is_part, other=0.0, cache_modifier=".cg")
                totals = tl.load(
                    sums_ptr + place[:, None] * BLOCK_HEAD + places[None, :],
                    mask=is_part[:, None] & in_head[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                shrink = tl.exp2(peaks - tl.max(peaks, axis=0))
                mean = tl.sum(totals * shrink[:, None], axis=0) / tl.sum(weights * shrink, axis=0)
                tl.store(output_ptr + query_head * HEAD_SIZE + places, mean, mask=in_head)


class PagedKeys(NamedTuple):
    """Where the keys of requests lie: ``kv_cache`` ``[2, num_blocks, block_size, num_kv_heads, head_size]``,
    ``block_table`` int32 ``[num_reqs, max_blocks]`` and ``seq_lens`` int32 ``[num_reqs]`` (0 = padding).
    """

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def decode_attention(
    query: torch.Tensor,
    paged: PagedKeys,
    layer: AttentionLayerSpec,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of ``query`` ``[num_reqs, num_heads, head_size]``, token i of request i, to its paged keys.

    Requests of length 0 come out as zeros. The workspace holds ``config.splits`` parts of each request.
    """
    kv_cache, block_table, seq_lens = paged
    num_reqs, num_heads, head_size = query.shape
    output = torch.empty_like(query)
    group = num_heads // layer.num_kv_heads
    _decode_kernel[(layer.num_kv_heads, num_reqs, config.splits)](
        query,
        kv_cache[0],
        kv_cache[1],
        block_table,
        seq_lens,
        output,
        workspace.sums,
        workspace.weights,
        workspace.arrived,
        block_table.stride(0),
        workspace.weights.shape[1],
        layer.scale,
        layer.soft_cap or 1.0,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        BLOCK_HEAD=block_head(head_size),
        PAGE=kv_cache.shape[2],
        BLOCK_KEYS=config.block_keys,
        SPLITS=config.splits,
        BLOCK_PARTS=triton.next_power_of_2(config.splits),
        LEAST_TILES=max(triton.cdiv(config.least_keys, config.block_keys), 1),
        WINDOW=layer.sliding_window or 0,
        HAS_CAP=layer.soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return output
