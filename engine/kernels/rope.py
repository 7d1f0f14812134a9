"""Query and key norms, rotary positions and the write to the KV cache, in one pass over the packed projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from attrs import frozen

from .dependent import begin_dependent
from .launching import kernel


@kernel(do_not_specialize=["num_tokens"])
def _rope_store_kernel(
    parts_ptr,
    positions_ptr,
    slots_ptr,
    cosines_ptr,
    sines_ptr,
    query_norm_ptr,
    key_norm_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    num_tokens,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """``HEADS`` heads of one token; queries come first, then keys, then values."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    inside = (heads < ALL)[:, None] & (half < HEAD_SIZE // 2)[None, :]
    low = heads[:, None] * HEAD_SIZE + half[None, :]
    high = low + HEAD_SIZE // 2
    first = tl.zeros([HEADS, HALF], dtype=tl.float32)
    second = tl.zeros([HEADS, HALF], dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        row = parts_ptr + (part * num_tokens + token) * ALL * HEAD_SIZE
        first += tl.load(row + low, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(row + high, mask=inside, other=0.0).to(tl.float32)
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    turned_first, turned_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_SIZE + epsilon)[:, None]
        known = half < HEAD_SIZE // 2
        weight_low = tl.where(
            is_query,
            tl.load(query_norm_ptr + half, mask=known, other=0.0).to(tl.float32)[None, :],
            tl.load(key_norm_ptr + half, mask=known, other=0.0).to(tl.float32)[None, :],
        )
        weight_high = tl.where(
            is_query,
            tl.load(query_norm_ptr + HEAD_SIZE // 2 + half, mask=known, other=0.0).to(tl.float32)[None, :],
            tl.load(key_norm_ptr + HEAD_SIZE // 2 + half, mask=known, other=0.0).to(tl.float32)[None, :],
        )
        turned_first, turned_second = first * scale * weight_low, second * scale * weight_high
    position = tl.load(positions_ptr + token)
    known = half < HEAD_SIZE // 2
    cosine = tl.load(cosines_ptr + position * HEAD_SIZE + half, mask=known, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines_ptr + position * (HEAD_SIZE // 2) + half, mask=known, other=0.0).to(tl.float32)[None, :]
    rotated_first = tl.where(is_value, first, turned_first * cosine - turned_second * sine)
    rotated_second = tl.where(is_value, second, turned_second * cosine + turned_first * sine)
    query = query_ptr + token * NUM_HEADS * HEAD_SIZE
    tl.store(query + low, rotated_first, mask=inside & is_query)
    tl.store(query + high, rotated_second, mask=inside & is_query)
    slot = tl.load(slots_ptr + token)
    stored = inside & (slot >= 0)
    to_keys = stored & (heads >= NUM_HEADS)[:, None] & (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    place = slot * NUM_KV_HEADS * HEAD_SIZE - NUM_HEADS * HEAD_SIZE
    tl.store(keys_ptr + place + low, rotated_first, mask=to_keys)
    tl.store(keys_ptr + place + high, rotated_second, mask=to_keys)
    place -= NUM_KV_HEADS * HEAD_SIZE
    tl.store(values_ptr + place + low, rotated_first, mask=stored & is_value)
    tl.store(values_ptr + place + high, rotated_second, mask=stored & is_value)


@frozen(eq=False)
class HeadNorms:
    """Weights ``[head_size]`` of the norms over each query and key head."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


@frozen(eq=False)
class RopeTables:
    """Cosines ``[num_positions, head_size]`` (halves equal) and sines ``[num_positions, head_size / 2]``."""

    cosines: torch.Tensor
    sines: torch.Tensor


class KeyPlace(NamedTuple):
    """Where keys and values go: ``kv_cache`` ``[2, num_blocks, block_size, num_kv_heads, head_size]`` and ``slots``
    int64 ``[num_tokens]``; -1 stores nothing.
    """

    kv_cache: torch.Tensor
    slots: torch.Tensor


def rope_store(
    parts: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTables,
    place: KeyPlace,
    norms: HeadNorms | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Rotated queries ``[num_tokens, num_heads * head_size]``; keys and values go to their place.

    Args:
        parts: ``[split, num_tokens, (num_heads + 2 * num_kv_heads) * head_size]``, partial sums of queries, keys and
            values.
        positions: int64 ``[num_tokens]``.
        rope: rotation tables.
        place: cache and slots of keys and values.
        norms: of queries and keys before the rotation, or None.
        pdl: whether the kernel is one of a chain.
    """
    kv_cache, slots = place
    split, num_tokens, width = parts.shape
    num_kv_heads, head_size = kv_cache.shape[3:]
    num_heads = width // head_size - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads * head_size, dtype=kv_cache.dtype, device=parts.device)
    heads = 1 if num_tokens <= 64 else 8
    _rope_store_kernel[(num_tokens, triton.cdiv(width // head_size, heads))](
        parts,
        positions,
        slots,
        rope.cosines,
        rope.sines,
        parts if norms is None else norms.query,
        parts if norms is None else norms.key,
        query,
        kv_cache[0],
        kv_cache[1],
        num_tokens,
        0.0 if norms is None else norms.epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=triton.next_power_of_2(head_size // 2),
        HEADS=heads,
        SPLIT=split,
        HAS_NORM=norms is not None,
        PDL=pdl,
        num_warps=1 if heads == 1 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return query
