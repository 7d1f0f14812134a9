"""Writing sampled tokens where the next step looks for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import kernel


@kernel(do_not_specialize=["num_tokens", "vocab_size"])
def _store_tokens_kernel(sampled_ptr, index_ptr, table_ptr, num_tokens, vocab_size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_tokens
    token = tl.load(sampled_ptr + places, mask=mask, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(table_ptr + tl.load(index_ptr + places, mask=mask, other=0), token, mask=mask)


def store_tokens(table: torch.Tensor, index: torch.Tensor, sampled: torch.Tensor, vocab_size: int) -> None:
    """``table[index] = sampled``, ids kept inside the vocabulary.

    Args:
        table: int32, flat.
        index: int64 ``[n]``, distinct places.
        sampled: int64 ``[n]``.
        vocab_size: one more than the largest id.
    """
    num_tokens = sampled.shape[0]
    if num_tokens:
        _store_tokens_kernel[(triton.cdiv(num_tokens, 256),)](
            sampled, index, table, num_tokens, vocab_size, BLOCK=256, num_warps=1
        )
