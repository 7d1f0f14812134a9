"""Paged attention for any number of queries a request: prompts, chunks and single tokens in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...stages.specs import AttentionLayerSpec
from .decode_attention import PagedKeys
from .dependent import begin_dependent
from .launching import kernel


@kernel(do_not_specialize=["num_reqs", "table_stride"])
def _mixed_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,
    output_ptr,
    num_reqs,
    table_stride,
    scale,
    soft_cap,
    SEARCH: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of tokens of one request, for the query heads that share a key head."""
    begin_dependent(PDL)
    block = tl.program_id(0)
    head = tl.program_id(1)
    # Request r begins with block starts[r] // BLOCK_TOKENS + r: find the last that begins at or before this one.
    low, high = 0, num_reqs
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) // BLOCK_TOKENS + middle
        is_before = (begins <= block) & (low < high)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    request = tl.maximum(low - 1, 0)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    first_token = (block - (start // BLOCK_TOKENS + request)) * BLOCK_TOKENS
    if first_token >= num_queries:
        return
    lanes = tl.arange(0, BLOCK_QUERIES)
    tokens = first_token + lanes // GROUP
    heads = head * GROUP + lanes % GROUP
    is_query = (tokens < num_queries) & (lanes < BLOCK_TOKENS * GROUP)
    places = tl.arange(0, BLOCK_HEAD)
    in_head = places < HEAD_SIZE
    query_mask = is_query[:, None] & in_head[None, :]
    row = ((start + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_SIZE + places[None, :]
    query = tl.load(query_ptr + row, mask=query_mask, other=0.0)
    length = tl.load(lengths_ptr + request)
    reach = length - num_queries + tokens
    stop = length - num_queries + tl.minimum(first_token + BLOCK_TOKENS, num_queries)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - num_queries + first_token - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    peak = tl.full([BLOCK_QUERIES], -float("inf"), dtype=tl.float32)
    weight = tl.zeros([BLOCK_QUERIES], dtype=tl.float32)
    total = tl.zeros([BLOCK_QUERIES, BLOCK_HEAD], dtype=tl.float32)
    table = table_ptr + request.to(tl.int64) * table_stride
    for tile in range(begin, stop, BLOCK_KEYS):
        keys = tile + tl.arange(0, BLOCK_KEYS)
        inside = keys < stop
        blocks = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        slots = (blocks * PAGE + keys % PAGE) * (NUM_KV_HEADS * HEAD_SIZE) + head * HEAD_SIZE
        key = tl.load(keys_ptr + slots[None, :] + places[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        seen = keys[None, :] <= reach[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > reach[:, None] - WINDOW)
        scores = tl.where(seen & is_query[:, None], scores * 1.4426950408889634, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(new_peak > -float("inf"), new_peak, 0.0)
        shrink = tl.exp2(peak - anchor)
        chances = tl.exp2(scores - anchor[:, None])
        weight = weight * shrink + tl.sum(chances, axis=1)
        value = tl.load(
            values_ptr + slots[:, None] + places[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
        )
        total = total * shrink[:, None]
        total = tl.dot(chances.to(query.dtype), value.to(query.dtype), total, input_precision=PRECISION)
        peak = new_peak
    mean = total / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(output_ptr + row, mean, mask=query_mask)


def mixed_attention(
    query: torch.Tensor,
    paged: PagedKeys,
    query_start_loc: torch.Tensor,
    layer: AttentionLayerSpec,
    max_query_len: int,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal attention of ``query`` ``[num_tokens, num_heads, head_size]`` to the paged keys of its requests.

    ``query_start_loc`` int32 ``[num_reqs + 1]`` says whose token each is: the last ones of its request. Tokens behind
    the last request, which are padding, come out as zeros. No request has more than ``max_query_len`` tokens.
    """
    kv_cache, block_table, seq_lens = paged
    num_tokens, num_heads, head_size = query.shape
    num_reqs = seq_lens.shape[0]
    group = num_heads // layer.num_kv_heads
    block_queries = 128 if max_query_len * group > 16 else 16
    block_tokens = max(block_queries // group, 1)
    output = torch.zeros_like(query)
    grid = (num_tokens // block_tokens + num_reqs, layer.num_kv_heads)
    _mixed_kernel[grid](
        query,
        kv_cache[0],
        kv_cache[1],
        block_table,
        seq_lens,
        query_start_loc,
        output,
        num_reqs,
        block_table.stride(0),
        layer.scale,
        layer.soft_cap or 1.0,
        SEARCH=16,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        BLOCK_TOKENS=block_tokens,
        BLOCK_QUERIES=max(block_queries, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        BLOCK_HEAD=max(16, triton.next_power_of_2(head_size)),
        PAGE=kv_cache.shape[2],
        BLOCK_KEYS=64,
        WINDOW=layer.sliding_window or 0,
        HAS_CAP=layer.soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=8 if block_queries >= 128 else 4,
        num_stages=2 if query.dtype == torch.float32 else 3,
        **({"launch_pdl": True} if pdl else {}),
    )
    return output
