"""Writing keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import kernel


@kernel()
def _store_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    key_stride,
    value_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    places = tl.arange(0, BLOCK)
    mask = (places < SIZE) & (slot >= 0)
    key = tl.load(key_ptr + token * key_stride + places, mask=mask)
    value = tl.load(value_ptr + token * value_stride + places, mask=mask)
    tl.store(keys_ptr + slot * SIZE + places, key, mask=mask)
    tl.store(values_ptr + slot * SIZE + places, value, mask=mask)


def store_keys(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Write ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_size]`` to their slots; -1 stores nothing.

    Heads of a token are adjacent; tokens may be strided. ``kv_cache`` is
    ``[2, num_blocks, block_size, num_kv_heads, head_size]``.
    """
    size = kv_cache.shape[3] * kv_cache.shape[4]
    _store_kernel[(key.shape[0],)](
        key,
        value,
        slots,
        kv_cache[0],
        kv_cache[1],
        key.stride(0),
        value.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
    )
